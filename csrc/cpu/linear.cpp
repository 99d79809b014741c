// The products of a linear layer.
//
// Contract. Matrices are float, bfloat16 or float16, all of one call of one type, with rows of any stride and dense
// columns. Every element is a sum over the whole depth in one order, kept in float and rounded once, bias included:
// its bits depend on its row and its column alone, not on how many rows there are, what stands beside it or the number of
// threads. bfloat16 and float16 become floats on the way, which is exact; where the CPU has products of bfloat16, these
// serve, two of the depth at a time; on x86 they take numbers below 2^-126 for 0. Without depth the sums are 0.
//
// One side of a product is read as it lies, row by row along the depth; the other is packed so that sixteen of its items
// lie side by side, the lanes of a vector. Forward reads W as it lies and packs x, so that a frozen weight has no second
// copy. dx reads dy and packs W; dW packs both.

#include "cpu/linear.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "common/check.h"

namespace rlhf::cpu {
namespace {

void check(const Matrix& m, const char* name, Type type, int64_t elements) {
    RLHF_CHECK(m.type == type, name, "the type of the other matrices", int(m.type));
    RLHF_CHECK(elements == 0 || m.data != nullptr, name, "an address", "a null pointer");
}

void multiply(const Product& product) {
    RLHF_CHECK_THREADS(product.threads);
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
    check(x, "x", y.type, RLHF_PRODUCT(N, K));
    check(weight, "weight", y.type, RLHF_PRODUCT(K, M));
    check(y, "y", y.type, RLHF_PRODUCT(N, M));
    multiply({weight, x, y, false, false, true, bias, nullptr, M, N, K, threads});
}

void linear_input_gradient(const Matrix& dy, const Matrix& weight, const void* packed, const void* bias, const Matrix& dx,
                           int64_t N, int64_t K, int64_t M, int threads) {
    check_sizes(N, K, M);
    check(dy, "dy", dx.type, RLHF_PRODUCT(N, M));
    check(weight, "weight", dx.type, RLHF_PRODUCT(K, M));
    check(dx, "dx", dx.type, RLHF_PRODUCT(N, K));
    RLHF_CHECK(packed == nullptr || linear_packed_bytes(dx.type, K, M) > 0, "packed",
               "null, where this instruction set keeps no packed weight of this type", int(dx.type));
    multiply({dy, weight, dx, false, true, false, bias, packed, N, K, M, threads});
}

int64_t linear_packed_bytes(Type type, int64_t K, int64_t M) {
    check_sizes(0, K, M);
    RLHF_PRODUCT(K, M, 16);  // a copy is padded
    const bool as_is = type == Type::float32 || (type == Type::bfloat16 && multiplies_bf16());
    return as_is ? (K + 15) / 16 * ((M + tile_depth(type) - 1) / tile_depth(type)) * 1024 : 0;
}

void linear_pack(const Matrix& weight, void* packed, int64_t K, int64_t M, int threads) {
    check_sizes(0, K, M);
    check(weight, "weight", weight.type, RLHF_PRODUCT(K, M));
    RLHF_CHECK(linear_packed_bytes(weight.type, K, M) > 0, "weight", "a type that is kept packed, and elements",
               int(weight.type));
    RLHF_CHECK(packed != nullptr, "packed", "an address", "a null pointer");
    RLHF_CHECK_THREADS(threads);
    void (*function)(const Product&, void*);
    if (weight.type == Type::bfloat16) RLHF_PICK(function, pack_bfloat16);
    else RLHF_PICK(function, pack_float32);
    function({weight, weight, weight, false, true, false, nullptr, nullptr, 0, K, M, threads}, packed);
}

bool linear_is_packed(const Matrix& weight, const void* packed, int64_t K, int64_t M, int64_t turn) {
    constexpr int64_t kPieces = 4096;
    check_sizes(0, K, M);
    check(weight, "weight", weight.type, RLHF_PRODUCT(K, M));
    RLHF_CHECK(linear_packed_bytes(weight.type, K, M) == 0 || packed != nullptr, "packed", "an address", "a null pointer");
    RLHF_CHECK(turn >= 0, "turn", "at least 0", turn);
    const int64_t size = weight.type == Type::float32 ? 4 : 2, depth = tile_depth(weight.type), per_word = 4 / size;
    const int64_t across = (K + 15) / 16, tiles_down = (M + depth - 1) / depth, pieces = M * across;
    int64_t step = std::max<int64_t>(1, pieces / kPieces);
    while (std::gcd(step, across) > 1) ++step;  // or a turn would leave columns out
    for (int64_t i = turn % step; i < pieces; i += step) {
        const int64_t m = i / across, k = i % across * 16, count = std::min<int64_t>(16, K - k);
        const char* w = static_cast<const char*>(weight.data) + (m * weight.stride + k) * size;
        const char* tile = static_cast<const char*>(packed) + (k / 16 * tiles_down + m / depth) * 1024;
        const char* words = tile + m % depth / per_word * 64 + m % per_word * size;
        if (per_word == 1) {
            if (std::memcmp(w, words, count * 4) != 0) return false;
            continue;
        }
        for (int64_t j = 0; j < count; ++j) {
            if (std::memcmp(w + j * 2, words + j * 4, 2) != 0) return false;
        }
    }
    return true;
}

void linear_weight_gradient(const Matrix& dy, const Matrix& x, const Matrix& dw, int64_t N, int64_t K, int64_t M,
                            int threads) {
    check_sizes(N, K, M);
    check(dy, "dy", dw.type, RLHF_PRODUCT(N, M));
    check(x, "x", dw.type, RLHF_PRODUCT(N, K));
    check(dw, "dw", dw.type, RLHF_PRODUCT(K, M));
    multiply({dy, x, dw, true, true, false, nullptr, nullptr, M, K, N, threads});
}

}  // namespace rlhf::cpu
