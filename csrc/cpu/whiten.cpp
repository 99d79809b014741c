// Masked moments, whitening and its gradient over `count` dense elements.
//
// Contract. Reads x, mask (one byte each, 0 = left out), and moments [3] = (n, sum, sum of squares) or null; writes every
// element of y and stats [3] = (n, mean, rstd), accumulating nothing that was there before. Masked inputs (NaN too)
// reach no output, masked outputs are 0. With c = max(n - 1, 1):
//     mean = sum / max(n, 1)     var = sum (x - mean)^2 / c, or max(sum of squares - sum mean, 0) / c from moments
//     rstd = 1 / sqrt(var + eps)     y = (x - mean) rstd (+ mean unless shift_mean)
// Backward, with d = x - mean and sums over unmasked positions; moments that were given are constants:
//     d_x = rstd (g - sum(g) / n) - rstd^3 d sum(g d) / c (+ sum(g) / n unless shift_mean);  constant: d_x = rstd g
// Sums and arithmetic are in double, outputs are rounded once to T. Sums are made per block of a fixed size and the
// blocks' sums are added in order, so the bits do not depend on the number of threads.

#include "cpu/whiten.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "common/check.h"
#include "cpu/whiten_blocks.h"

namespace rlhf::cpu {
namespace {

constexpr int64_t kBlock = 4096;
// Fewer elements take at most a few tens of microseconds: too little to wake a second core. It is torch's own grain size.
constexpr int64_t kSerialElements = 1 << 15;

template <typename Body>
void for_blocks(int64_t count, int threads, Body body) {
    const int64_t blocks = (count + kBlock - 1) / kBlock;
    [[maybe_unused]] const bool parallel = threads > 1 && count >= kSerialElements;
#pragma omp parallel for schedule(static) num_threads(threads) if (parallel)
    for (int64_t block = 0; block < blocks; ++block) {
        body(block, block * kBlock, std::min(count, (block + 1) * kBlock));
    }
}

// Sums of S quantities, S per block from sums(begin, n, out). The order of additions depends on count alone.
template <int S, typename Sums>
std::array<double, S> ordered_sums(int64_t count, int threads, Sums sums) {
    std::vector<std::array<double, S>> partial((count + kBlock - 1) / kBlock);
    for_blocks(count, threads,
               [&](int64_t block, int64_t begin, int64_t end) { sums(begin, end - begin, partial[block].data()); });
    std::array<double, S> total{};
    for (const auto& of_block : partial) {
        for (int s = 0; s < S; ++s) total[s] += of_block[s];
    }
    return total;
}

// Number, sum and sum of squares of the unmasked elements.
template <typename T>
std::array<double, 3> all_moments(const T* x, const uint8_t* mask, int64_t count, int threads) {
    void (*block)(const T*, const uint8_t*, int64_t, double*);
    RLHF_PICK(block, moments_block);
    return ordered_sums<3>(count, threads,
                           [&](int64_t begin, int64_t n, double* out) { block(x + begin, mask + begin, n, out); });
}

void check_call(int64_t count, int threads) {
    RLHF_CHECK_SIZE(count);
    RLHF_CHECK_THREADS(threads);
}

}  // namespace

template <typename T>
void masked_moments(const T* x, const uint8_t* mask, int64_t count, int threads, double* moments) {
    check_call(count, threads);
    RLHF_CHECK_POINTER(x, count);
    RLHF_CHECK_POINTER(mask, count);
    RLHF_CHECK_POINTER(moments, 3);
    const auto sums = all_moments(x, mask, count, threads);
    std::copy(sums.begin(), sums.end(), moments);
}

template <typename T>
void whiten_forward(const T* x, const uint8_t* mask, const double* moments, int64_t count, bool shift_mean, double eps,
                    int threads, T* y, double* stats) {
    check_call(count, threads);
    RLHF_CHECK_POINTER(x, count);
    RLHF_CHECK_POINTER(mask, count);
    RLHF_CHECK_POINTER(y, count);
    RLHF_CHECK_POINTER(stats, 3);
    double n, mean, squares;
    if (moments) {
        n = moments[0];
        mean = moments[1] / std::max(n, 1.0);
        squares = std::max(moments[2] - moments[1] * mean, 0.0);
    } else {
        const auto sums = all_moments(x, mask, count, threads);
        n = sums[0];
        mean = sums[1] / std::max(n, 1.0);
        // From the sum of squares it would lose the digits that mean and spread differ by.
        void (*block)(const T*, const uint8_t*, double, int64_t, double*);
        RLHF_PICK(block, squares_block);
        squares = ordered_sums<1>(count, threads, [&](int64_t begin, int64_t n_block, double* out) {
            block(x + begin, mask + begin, mean, n_block, out);
        })[0];
    }
    const double rstd = 1.0 / std::sqrt(squares / std::max(n - 1.0, 1.0) + eps);
    const double shift = shift_mean ? 0.0 : mean;
    void (*block)(const T*, const uint8_t*, double, double, double, int64_t, T*);
    RLHF_PICK(block, whiten_block);
    for_blocks(count, threads, [&](int64_t, int64_t begin, int64_t end) {
        block(x + begin, mask + begin, mean, rstd, shift, end - begin, y + begin);
    });
    stats[0] = n;
    stats[1] = mean;
    stats[2] = rstd;
}

template <typename T>
void whiten_backward(const T* grad, const T* x, const uint8_t* mask, const double* stats, int64_t count,
                     bool shift_mean, bool constant_moments, int threads, T* d_x) {
    check_call(count, threads);
    RLHF_CHECK_POINTER(grad, count);
    RLHF_CHECK_POINTER(x, count);
    RLHF_CHECK_POINTER(mask, count);
    RLHF_CHECK_POINTER(stats, 3);
    RLHF_CHECK_POINTER(d_x, count);
    const double n = stats[0], mean = stats[1], rstd = stats[2];
    double shift = 0, slope = 0;  // d_x = rstd g - shift - slope d
    if (!constant_moments) {
        void (*block)(const T*, const T*, const uint8_t*, double, int64_t, double*);
        RLHF_PICK(block, gradient_sums_block);
        const auto sums = ordered_sums<2>(count, threads, [&](int64_t begin, int64_t n_block, double* out) {
            block(grad + begin, x + begin, mask + begin, mean, n_block, out);
        });
        shift = (shift_mean ? rstd : rstd - 1.0) * sums[0] / std::max(n, 1.0);
        slope = rstd * rstd * rstd * sums[1] / std::max(n - 1.0, 1.0);
    }
    void (*block)(const T*, const T*, const uint8_t*, double, double, double, double, int64_t, T*);
    RLHF_PICK(block, gradient_block);
    for_blocks(count, threads, [&](int64_t, int64_t begin, int64_t end) {
        block(grad + begin, x + begin, mask + begin, mean, rstd, shift, slope, end - begin, d_x + begin);
    });
}

#define INSTANTIATE(T)                                                                                       \
    template void masked_moments<T>(const T*, const uint8_t*, int64_t, int, double*);                        \
    template void whiten_forward<T>(const T*, const uint8_t*, const double*, int64_t, bool, double, int, T*, \
                                    double*);                                                                \
    template void whiten_backward<T>(const T*, const T*, const uint8_t*, const double*, int64_t, bool, bool, int, T*);
INSTANTIATE(float)
INSTANTIATE(double)
#undef INSTANTIATE

}  // namespace rlhf::cpu
