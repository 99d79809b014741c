// The products of a linear layer.
//
// Contract. Matrices are float, bfloat16 or float16, all of one call of one type, with rows of any stride and dense
// columns. Every element is one sum over the whole depth in rising order, kept in float and rounded once, bias included:
// its bits depend on its row and its column alone, not on how many rows there are, what stands beside it or the number of
// threads. bfloat16 and float16 become floats on the way, which is exact; where the CPU has products of bfloat16, these
// serve, two of the depth at a time. Without depth the sums are 0.
//
// A few rows go through W where it lies, as in decoding: it is read once, and nothing is packed. More rows take blocks of
// W that are packed per call, at a cost that many rows share. Both add in the same order.

#include "cpu/linear.h"

#include "common/check.h"

namespace rlhf::cpu {
namespace {

void check(const Matrix& m, const char* name, Type type, int64_t elements) {
    RLHF_CHECK(m.type == type, name, "the type of the other matrices", int(m.type));
    RLHF_CHECK(elements == 0 || m.data != nullptr, name, "an address", "a null pointer");
}

void multiply(const Product& product) {
    RLHF_CHECK(product.threads >= 1, "threads", "at least 1", product.threads);
    if (product.rows == 0 || product.columns == 0) return;
    void (*function)(const Product&);
    if (product.c.type == Type::bfloat16) RLHF_PICK(function, multiply_bfloat16);
    else RLHF_PICK(function, multiply_float32);
    function(product);
}

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
    multiply({x, weight, y, false, true, bias, N, M, K, threads});
}

void linear_input_gradient(const Matrix& dy, const Matrix& weight, const Matrix& dx, int64_t N, int64_t K, int64_t M,
                           int threads) {
    check_sizes(N, K, M);
    check(dy, "dy", dx.type, N * M);
    check(weight, "weight", dx.type, K * M);
    check(dx, "dx", dx.type, N * K);
    multiply({dy, weight, dx, false, false, nullptr, N, K, M, threads});
}

void linear_weight_gradient(const Matrix& dy, const Matrix& x, const Matrix& dw, int64_t N, int64_t K, int64_t M,
                            int threads) {
    check_sizes(N, K, M);
    check(dy, "dy", dw.type, N * M);
    check(x, "x", dw.type, N * K);
    check(dw, "dw", dw.type, K * M);
    multiply({dy, x, dw, true, false, nullptr, M, K, N, threads});
}

}  // namespace rlhf::cpu
