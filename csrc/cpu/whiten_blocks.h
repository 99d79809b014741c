// What whiten.cpp calls once per block; compiled per instruction set from whiten_kernel.inc.h. Every sum is double, and
// an element with mask 0 counts as if it were not there.
#pragma once

#include <cstdint>

#include "cpu/isa.h"

namespace rlhf::cpu {

#define RLHF_DECLARE_BLOCKS(T)                                                                                       \
    void moments_block(const T* x, const uint8_t* mask, int64_t n, double* sums); /* n, sum x, sum x^2 */            \
    void squares_block(const T* x, const uint8_t* mask, double mean, int64_t n, double* sums);                       \
    void whiten_block(const T* x, const uint8_t* mask, double mean, double rstd, double shift, int64_t n, T* y);     \
    /* sum g, sum g (x - mean) */                                                                                    \
    void gradient_sums_block(const T* grad, const T* x, const uint8_t* mask, double mean, int64_t n, double* sums);  \
    /* rstd g - shift - slope (x - mean) */                                                                          \
    void gradient_block(const T* grad, const T* x, const uint8_t* mask, double mean, double rstd, double shift,      \
                        double slope, int64_t n, T* d_x);

RLHF_IN_EVERY_SET(RLHF_DECLARE_BLOCKS(float) RLHF_DECLARE_BLOCKS(double))
#undef RLHF_DECLARE_BLOCKS

}  // namespace rlhf::cpu
