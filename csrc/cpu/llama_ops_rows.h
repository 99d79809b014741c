// What llama_ops.cpp calls once per row, head or stretch; compiled per instruction set from llama_ops_kernel.inc.h.
#pragma once

#include <cstdint>

#include "cpu/isa.h"

namespace rlhf::cpu {

// The share of x that an activation passes on: that of a normal distribution below x, or 1 / (1 + e^-z) with
// z = x (a + b x^2).
struct Share {
    bool is_normal;
    float a, b;
};

#define RLHF_DECLARE_ROWS(T)                                                                                         \
    float norm_row(const T* x, const T* weight, bool plus_one, float eps, int64_t width, T* y);                      \
    void norm_gradient_row(const T* dy, const T* x, const T* weight, bool plus_one, float rstd, int64_t width, T* dx); \
    void rotate_head(const T* x, const T* cos, const T* sin, int64_t half, T* y);                                    \
    void rotate_back_head(const T* dy, const T* cos, const T* sin, int64_t half, T* dx);                             \
    void swiglu_stretch(const T* gate, const T* up, int64_t n, T* y);                                                \
    void swiglu_gradient_stretch(const T* dy, const T* gate, const T* up, int64_t n, T* d_gate, T* d_up);          \
    void activation_stretch(const T* x, Share share, int64_t n, T* y);                                               \
    void activation_gradient_stretch(const T* dy, const T* x, Share share, int64_t n, T* dx);

RLHF_IN_EVERY_SET(RLHF_DECLARE_ROWS(float) RLHF_DECLARE_ROWS(uint16_t))
#undef RLHF_DECLARE_ROWS

}  // namespace rlhf::cpu
