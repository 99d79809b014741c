// Generalised advantage estimation on the CPU. The contract stands in gae.cpp.
#pragma once

#include <cstdint>

namespace rlhf::cpu {

// Where row b of a [rows, columns] array starts: data + b * row_stride, in elements. The inner stride is 1.
template <typename T>
struct Rows {
    const T* data;
    int64_t row_stride;

    const T* row(int64_t b) const { return data + b * row_stride; }
};

template <typename T>
void gae_forward(Rows<T> reward, Rows<T> value, Rows<uint8_t> mask, const T* bootstrap, int64_t rows, int64_t columns,
                 double gamma, double lam, int threads, T* advantage, T* ret);

template <typename T>
void gae_backward(Rows<T> grad_advantage, Rows<T> grad_ret, Rows<uint8_t> mask, int64_t rows, int64_t columns,
                  double gamma, double lam, int threads, T* d_reward, T* d_value, T* d_bootstrap);

}  // namespace rlhf::cpu
