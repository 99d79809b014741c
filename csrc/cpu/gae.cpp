// Generalised advantage estimation over [rows, columns] = [B, T], and its gradient.
//
// Contract. Reads reward, value, mask (one byte each, 0 = not part of the trajectory) and bootstrap [B] or null (zeros);
// writes every element of the dense outputs advantage and ret, accumulating nothing that was there before. Masked
// positions are skipped as if they did not exist: whatever they hold (NaN too) reaches no output, and their outputs
// are 0. With t+ the next unmasked position of the row, V and A after the last one being bootstrap and 0:
//     delta_t = (r_t + gamma V_t+) - V_t        A_t = delta_t + gamma lam A_t+        ret_t = A_t + V_t
// Backward, with g = grad_advantage + grad_ret, t- the previous unmasked position and G before the first one 0:
//     G_t = g_t + gamma lam G_t-     d_reward_t = G_t     d_value_t = (gamma G_t- - G_t) + grad_ret_t
//     d_bootstrap = gamma G of the last unmasked position, 0 for a row without one
// Arithmetic is in T, in exactly this order and without fused multiply-add (setup.py passes -ffp-contract=off), so the
// result is the reference's, bit for bit, on every machine and for every number of threads.
//
// A row is a chain of dependent steps. Four rows advance together so that their chains hide each other's latency; with
// eight, the streams of rows whose length is a power of two no longer fit into the few cache ways they compete for.

#include "cpu/gae.h"

#include <algorithm>

#include "common/check.h"

namespace rlhf::cpu {
namespace {

constexpr int kTogether = 4;
// Below this many elements the work takes less than half a millisecond: too little to wait for a second core.
constexpr int64_t kSerialElements = 1 << 18;

template <typename T, int R>
void forward_rows(Rows<T> reward, Rows<T> value, Rows<uint8_t> mask, const T* bootstrap, int64_t first, int64_t columns,
                  T gamma, T decay, T* advantage, T* ret) {
    T next_value[R], next_advantage[R];
    for (int i = 0; i < R; ++i) {
        next_value[i] = bootstrap ? bootstrap[first + i] : T(0);
        next_advantage[i] = T(0);
    }
    for (int64_t t = columns - 1; t >= 0; --t) {
        for (int i = 0; i < R; ++i) {
            const int64_t b = first + i;
            const bool keep = mask.row(b)[t] != 0;
            const T v = value.row(b)[t];
            const T delta = (reward.row(b)[t] + gamma * next_value[i]) - v;
            const T a = delta + decay * next_advantage[i];
            next_value[i] = keep ? v : next_value[i];
            next_advantage[i] = keep ? a : next_advantage[i];
            advantage[b * columns + t] = keep ? a : T(0);
            ret[b * columns + t] = keep ? a + v : T(0);
        }
    }
}

template <typename T, int R>
void backward_rows(Rows<T> grad_advantage, Rows<T> grad_ret, Rows<uint8_t> mask, int64_t first, int64_t columns,
                   T gamma, T decay, T* d_reward, T* d_value, T* d_bootstrap) {
    T previous[R] = {};
    for (int64_t t = 0; t < columns; ++t) {
        for (int i = 0; i < R; ++i) {
            const int64_t b = first + i;
            const bool keep = mask.row(b)[t] != 0;
            const T from_ret = grad_ret.row(b)[t];
            const T total = (grad_advantage.row(b)[t] + from_ret) + decay * previous[i];
            d_reward[b * columns + t] = keep ? total : T(0);
            d_value[b * columns + t] = keep ? (gamma * previous[i] - total) + from_ret : T(0);
            previous[i] = keep ? total : previous[i];
        }
    }
    for (int i = 0; i < R; ++i) d_bootstrap[first + i] = gamma * previous[i];
}

// Calls group_at(b) for whole groups of kTogether rows and one(b) for the rows left over.
template <typename Group, typename One>
void for_rows(int64_t rows, int64_t columns, int threads, Group group_at, One one) {
    const int64_t groups = (rows + kTogether - 1) / kTogether;
    [[maybe_unused]] const bool parallel = threads > 1 && rows * columns >= kSerialElements;
#pragma omp parallel for schedule(static) num_threads(threads) if (parallel)
    for (int64_t group = 0; group < groups; ++group) {
        const int64_t first = group * kTogether;
        if (first + kTogether <= rows) {
            group_at(first);
        } else {
            for (int64_t b = first; b < rows; ++b) one(b);
        }
    }
}

// Number of elements.
int64_t check_call(int64_t rows, int64_t columns, int threads) {
    RLHF_CHECK_SIZE(rows);
    RLHF_CHECK_SIZE(columns);
    RLHF_CHECK_THREADS(threads);
    return RLHF_PRODUCT(rows, columns);
}

}  // namespace

template <typename T>
void gae_forward(Rows<T> reward, Rows<T> value, Rows<uint8_t> mask, const T* bootstrap, int64_t rows, int64_t columns,
                 double gamma, double lam, int threads, T* advantage, T* ret) {
    const int64_t count = check_call(rows, columns, threads);
    RLHF_CHECK_POINTER(reward.data, count);
    RLHF_CHECK_POINTER(value.data, count);
    RLHF_CHECK_POINTER(mask.data, count);
    RLHF_CHECK_POINTER(advantage, count);
    RLHF_CHECK_POINTER(ret, count);
    const T g = T(gamma), decay = T(gamma * lam);
    for_rows(
        rows, columns, threads,
        [&](int64_t b) {
            forward_rows<T, kTogether>(reward, value, mask, bootstrap, b, columns, g, decay, advantage, ret);
        },
        [&](int64_t b) { forward_rows<T, 1>(reward, value, mask, bootstrap, b, columns, g, decay, advantage, ret); });
}

template <typename T>
void gae_backward(Rows<T> grad_advantage, Rows<T> grad_ret, Rows<uint8_t> mask, int64_t rows, int64_t columns,
                  double gamma, double lam, int threads, T* d_reward, T* d_value, T* d_bootstrap) {
    const int64_t count = check_call(rows, columns, threads);
    RLHF_CHECK_POINTER(grad_advantage.data, count);
    RLHF_CHECK_POINTER(grad_ret.data, count);
    RLHF_CHECK_POINTER(mask.data, count);
    RLHF_CHECK_POINTER(d_reward, count);
    RLHF_CHECK_POINTER(d_value, count);
    RLHF_CHECK_POINTER(d_bootstrap, rows);
    const T g = T(gamma), decay = T(gamma * lam);
    for_rows(
        rows, columns, threads,
        [&](int64_t b) {
            backward_rows<T, kTogether>(grad_advantage, grad_ret, mask, b, columns, g, decay, d_reward, d_value,
                                        d_bootstrap);
        },
        [&](int64_t b) {
            backward_rows<T, 1>(grad_advantage, grad_ret, mask, b, columns, g, decay, d_reward, d_value, d_bootstrap);
        });
}

#define INSTANTIATE(T)                                                                                              \
    template void gae_forward<T>(Rows<T>, Rows<T>, Rows<uint8_t>, const T*, int64_t, int64_t, double, double, int,  \
                                 T*, T*);                                                                           \
    template void gae_backward<T>(Rows<T>, Rows<T>, Rows<uint8_t>, int64_t, int64_t, double, double, int, T*, T*, T*);
INSTANTIATE(float)
INSTANTIATE(double)
#undef INSTANTIATE

}  // namespace rlhf::cpu
