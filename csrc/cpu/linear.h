// The products of a linear layer: y = x Wᵀ + b, dx = dy W and dW = dyᵀ x. The contract stands in linear.cpp.
#pragma once

#include <cstdint>

#include "cpu/head.h"
#include "cpu/isa.h"

namespace rlhf::cpu {

// y [N, M] = x [N, K] Wᵀ + bias; all of one type, bias [M] dense or null.
void linear_forward(const Matrix& x, const Matrix& weight, const void* bias, const Matrix& y, int64_t N, int64_t K,
                    int64_t M, int threads);

// dx [N, K] = dy [N, M] W.
void linear_input_gradient(const Matrix& dy, const Matrix& weight, const Matrix& dx, int64_t N, int64_t K, int64_t M,
                           int threads);

// dW [M, K] = dyᵀ x.
void linear_weight_gradient(const Matrix& dy, const Matrix& x, const Matrix& dw, int64_t N, int64_t K, int64_t M,
                            int threads);

// The same as compiled for each instruction set, after the checks. C [rows, columns] = A [rows, depth] B [depth,
// columns] + bias, where A and B are as they lie in memory or turned.
struct Product {
    Matrix a, b, c;
    bool a_turned, b_turned;  // a lies as [depth, rows], b as [columns, depth]
    const void* bias;         // [columns] of c's type, or null
    int64_t rows, columns, depth;
    int threads;
};
#define RLHF_DECLARE_LINEAR                         \
    void multiply_float32(const Product& product);  \
    void multiply_bfloat16(const Product& product);
RLHF_IN_EVERY_SET(RLHF_DECLARE_LINEAR)
#undef RLHF_DECLARE_LINEAR

}  // namespace rlhf::cpu
