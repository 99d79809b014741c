// The products of a linear layer: y = x Wᵀ + b, dx = dy W and dW = dyᵀ x. The contract stands in linear.cpp.
#pragma once

#include <cstdint>

#include "cpu/head.h"
#include "cpu/isa.h"

namespace rlhf::cpu {

// y [N, M] = x [N, K] Wᵀ + bias; all of one type, bias [M] dense or null.
void linear_forward(const Matrix& x, const Matrix& weight, const void* bias, const Matrix& y, int64_t N, int64_t K,
                    int64_t M, int threads);

// dx [N, K] = dy [N, M] W + bias. packed: what linear_pack made of W, or null. bias [K] dense, or null, as in a gradient:
// with it this is the layer whose weight lies as [in, out].
void linear_input_gradient(const Matrix& dy, const Matrix& weight, const void* packed, const void* bias, const Matrix& dx,
                           int64_t N, int64_t K, int64_t M, int threads);

// dW [M, K] = dyᵀ x.
void linear_weight_gradient(const Matrix& dy, const Matrix& x, const Matrix& dw, int64_t N, int64_t K, int64_t M,
                            int threads);

// Bytes of a frozen W [M, K] as dx takes it, or 0 where W would have to be converted besides. The instruction set decides.
int64_t linear_packed_bytes(Type type, int64_t K, int64_t M);

// packed: linear_packed_bytes at a multiple of 64.
void linear_pack(const Matrix& weight, void* packed, int64_t K, int64_t M, int threads);

// Has W the bits that are in `packed`? Of W's pieces of sixteen elements about 4096 are compared, others at the next turn;
// all of them if there are no more.
bool linear_is_packed(const Matrix& weight, const void* packed, int64_t K, int64_t M, int64_t turn);

// The same as compiled for each instruction set, after the checks: sums over the depth of products of every strip row with
// every lane, plus bias. A side that is not turned lies as [its items, depth], a turned one as [depth, its items]; c lies as
// [strip rows, lanes], or turned.
struct Product {
    Matrix strips, lanes, c;
    bool strips_turned, lanes_turned, c_turned;
    const void* bias;    // [columns of c] of c's type, or null
    const void* packed;  // all lanes as tiles, or null
    int64_t n_strip_rows, n_lanes, depth;
    int threads;
};
#define RLHF_DECLARE_LINEAR                         \
    void multiply_float32(const Product& product);  \
    void multiply_bfloat16(const Product& product); \
    void pack_float32(const Product& product, void* packed);  \
    void pack_bfloat16(const Product& product, void* packed);
RLHF_IN_EVERY_SET(RLHF_DECLARE_LINEAR)
#undef RLHF_DECLARE_LINEAR

}  // namespace rlhf::cpu
