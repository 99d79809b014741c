// Masked moments and whitening on the CPU. The contract stands in whiten.cpp.
#pragma once

#include <cstdint>

namespace rlhf::cpu {

template <typename T>
void masked_moments(const T* x, const uint8_t* mask, int64_t count, int threads, double* moments);

template <typename T>
void whiten_forward(const T* x, const uint8_t* mask, const double* moments, int64_t count, bool shift_mean, double eps,
                    int threads, T* y, double* stats);

template <typename T>
void whiten_backward(const T* grad, const T* x, const uint8_t* mask, const double* stats, int64_t count,
                     bool shift_mean, bool constant_moments, int threads, T* d_x);

}  // namespace rlhf::cpu
