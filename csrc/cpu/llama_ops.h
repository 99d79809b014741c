// What a transformer block does between its matmuls, on the CPU. The contract stands in llama_ops.cpp.
#pragma once

#include <cstdint>

namespace rlhf::cpu {

// T is float, or uint16_t for the bits of bfloat16.

// plus_one: the factors are 1 + weight.
template <typename T>
void rms_norm_apply(const T* x, const T* weight, bool plus_one, float eps, int64_t rows, int64_t width, int threads, T* y,
                    float* rstd);

template <typename T>
void rms_norm_gradient(const T* dy, const T* x, const T* weight, bool plus_one, const float* rstd, int64_t rows,
                       int64_t width, int threads, T* dx);

// Elements of one head are dense; `batch`, `head` and `token` are the steps to the next one of each, in elements.
struct HeadStrides {
    int64_t batch, head, token;
};

template <typename T>
void rotary_apply(const T* x, HeadStrides strides, const T* cos, const T* sin, int64_t angle_batch_stride,
                  int64_t batch, int64_t heads, int64_t tokens, int64_t dim, int threads, T* y);

template <typename T>
void rotary_gradient(const T* dy, HeadStrides strides, const T* cos, const T* sin, int64_t angle_batch_stride,
                     int64_t batch, int64_t heads, int64_t tokens, int64_t dim, int threads, T* dx);

template <typename T>
void swiglu_apply(const T* gate, const T* up, int64_t count, int threads, T* y);

template <typename T>
void swiglu_gradient(const T* dy, const T* gate, const T* up, int64_t count, int threads, T* d_gate, T* d_up);

enum Activation : int { kSilu, kGelu, kGeluTanh, kQuickGelu };

template <typename T>
void activation_apply(const T* x, int kind, int64_t count, int threads, T* y);

template <typename T>
void activation_gradient(const T* dy, const T* x, int kind, int64_t count, int threads, T* dx);

}  // namespace rlhf::cpu
