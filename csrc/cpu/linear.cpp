// The products of a linear layer.
//
// Contract. Matrices are float, bfloat16 or float16, all of one call of one type, with rows of any stride and dense
// columns. Every element is a sum over the whole depth in one order, kept in float and rounded once, bias included:
// its bits depend on its row and its column alone, not on how many rows there are, what stands beside it or the number of
// threads. bfloat16 and float16 become floats on the way, which is exact; where the CPU has products of bfloat16, these
// serve, two of the depth at a time. Without depth the sums are 0.
//
// One side of a product is read as it lies, row by row along the depth; the other is packed so that sixteen of its items
// lie side by side, the lanes of a vector. Forward reads W as it lies and packs x, so that a frozen weight has no second
// copy. dx reads dy and packs W; dW packs both.

#include "cpu/linear.h"

#include <cstring>

#include "common/check.h"

namespace rlhf::cpu {
namespace {

void check(const Matrix& m, const char* name, Type type, int64_t elements) {
    RLHF_CHECK(m.type == type, name, "the type of the other matrices", int(m.type));
    RLHF_CHECK(elements == 0 || m.data != nullptr, name, "an address", "a null pointer");
}

void multiply(const Product& product) {
    RLHF_CHECK(product.threads >= 1, "threads", "at least 1", product.threads);
    if (product.n_strip_rows == 0 || product.n_lanes == 0) return;
    void (*function)(const Product&);
    if (product.c.type == Type::bfloat16) RLHF_PICK(function, multiply_bfloat16);
    else RLHF_PICK(function, multiply_float32);
    function(product);
}

int64_t tile_depth(Type type) { return type == Type::float32 ? 16 : 32; }

void check_sizes(int64_t N, int64_t K, int64_t M) {
    RLHF_CHECK_SIZE(N);
    RLHF_CHECK_SIZE(K);
    RLHF_CHECK_SIZE(M);
}

}  // namespace

void linear_forward(const Matrix& x, const Matrix& weight, const void* bias, const Matrix& y, int64_t N, int64_t K,
                    int64_t M, int threads) {
    check_sizes(N, K, M);
    check(x, "x", y.type, N * K);
    check(weight, "weight", y.type, K * M);
    check(y, "y", y.type, N * M);
    multiply({weight, x, y, false, false, true, bias, nullptr, M, N, K, threads});
}

void linear_input_gradient(const Matrix& dy, const Matrix& weight, const void* packed, const Matrix& dx, int64_t N,
                           int64_t K, int64_t M, int threads) {
    check_sizes(N, K, M);
    check(dy, "dy", dx.type, N * M);
    check(weight, "weight", dx.type, K * M);
    check(dx, "dx", dx.type, N * K);
    RLHF_CHECK(packed == nullptr || linear_packed_bytes(dx.type, K, M) > 0, "packed",
               "null, where this instruction set keeps no packed weight of this type", int(dx.type));
    multiply({dy, weight, dx, false, true, false, nullptr, packed, N, K, M, threads});
}

int64_t linear_packed_bytes(Type type, int64_t K, int64_t M) {
    check_sizes(0, K, M);
    const bool as_is = type == Type::float32 || (type == Type::bfloat16 && multiplies_bf16());
    return as_is ? (K + 15) / 16 * ((M + tile_depth(type) - 1) / tile_depth(type)) * 1024 : 0;
}

void linear_pack(const Matrix& weight, void* packed, int64_t K, int64_t M, int threads) {
    check(weight, "weight", weight.type, K * M);
    RLHF_CHECK(linear_packed_bytes(weight.type, K, M) > 0, "weight", "a type that is kept packed, and elements",
               int(weight.type));
    RLHF_CHECK(packed != nullptr, "packed", "an address", "a null pointer");
    RLHF_CHECK(threads >= 1, "threads", "at least 1", threads);
    void (*function)(const Product&, void*);
    if (weight.type == Type::bfloat16) RLHF_PICK(function, pack_bfloat16);
    else RLHF_PICK(function, pack_float32);
    function({weight, weight, weight, false, true, false, nullptr, nullptr, 0, K, M, threads}, packed);
}

bool linear_is_packed(const Matrix& weight, const void* packed, int64_t K, int64_t M) {
    constexpr int64_t kSamples = 64;
    const int64_t size = weight.type == Type::float32 ? 4 : 2, depth = tile_depth(weight.type), per_word = 4 / size;
    const char *w = static_cast<const char*>(weight.data), *tiles = static_cast<const char*>(packed);
    for (int64_t i = 0; i < kSamples && K > 0 && M > 0; ++i) {
        const int64_t m = i * M / kSamples, k = i * 37 % kSamples * K / kSamples;  // rows and columns in different orders
        const int64_t tile = k / 16 * ((M + depth - 1) / depth) + m / depth;
        const int64_t in_tile = (m % depth / per_word * 16 + k % 16) * per_word + m % per_word;
        if (std::memcmp(w + (m * weight.stride + k) * size, tiles + tile * 1024 + in_tile * size, size) != 0) return false;
    }
    return true;
}

void linear_weight_gradient(const Matrix& dy, const Matrix& x, const Matrix& dw, int64_t N, int64_t K, int64_t M,
                            int threads) {
    check_sizes(N, K, M);
    check(dy, "dy", dw.type, N * M);
    check(x, "x", dw.type, N * K);
    check(dw, "dw", dw.type, K * M);
    multiply({dy, x, dw, true, true, false, nullptr, nullptr, M, K, N, threads});
}

}  // namespace rlhf::cpu
