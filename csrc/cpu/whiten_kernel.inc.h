// The loops of whiten.cpp over one block, in double; namespace RLHF_SET.

#include "cpu/lanes.h"
#include "cpu/whiten_blocks.h"

namespace rlhf::cpu::RLHF_SET {
namespace whiten_blocks {

using L = Lanes<double>;
using V = L::V;
constexpr int kPair = 2 * L::count;

// step(side, a, b, mask, out) with the places of one vector of each array; b and out may be null. Two vectors go side
// by side, each with sums of its own, so that no addition waits for the one before. What is left at the end runs on
// copies, padded with masked elements.
template <typename T, typename Step>
RLHF_INLINE void for_vectors(const T* a, const T* b, const uint8_t* mask, T* out, int64_t n, Step step) {
    int64_t i = 0;
    for (; i + kPair <= n; i += kPair) {
        for (int side = 0; side < 2; ++side) {
            const int64_t at = i + side * L::count;
            step(side, a + at, b ? b + at : nullptr, mask + at, out ? out + at : nullptr);
        }
    }
    if (i == n) return;
    T rest_a[kPair] = {}, rest_b[kPair] = {}, rest_out[kPair];
    uint8_t rest_mask[kPair] = {};
    std::memcpy(rest_a, a + i, sizeof(T) * (n - i));
    if (b) std::memcpy(rest_b, b + i, sizeof(T) * (n - i));
    std::memcpy(rest_mask, mask + i, n - i);
    for (int side = 0; side < 2; ++side) {
        const int at = side * L::count;
        step(side, rest_a + at, rest_b + at, rest_mask + at, rest_out + at);
    }
    if (out) std::memcpy(out + i, rest_out, sizeof(T) * (n - i));
}

#define RLHF_STEP [&](int side, const T* a, const T* b, const uint8_t* keep, T* out) __attribute__((always_inline))

template <typename T>
RLHF_INLINE void moments(const T* x, const uint8_t* mask, int64_t n, double* sums) {
    V count[2] = {}, sum[2] = {}, squares[2] = {};
    for_vectors<T>(x, nullptr, mask, nullptr, n, RLHF_STEP {
        (void)b, (void)out;
        const L::Mask live = L::nonzero(keep);
        const V v = L::select(live, L::load(a), V{});
        count[side] += L::select(live, L::splat(1), V{});
        sum[side] += v;
        squares[side] = L::fma(v, v, squares[side]);
    });
    sums[0] = lane_sum<double>(count[0] + count[1]);
    sums[1] = lane_sum<double>(sum[0] + sum[1]);
    sums[2] = lane_sum<double>(squares[0] + squares[1]);
}

template <typename T>
RLHF_INLINE void squares(const T* x, const uint8_t* mask, double mean, int64_t n, double* sums) {
    const V center = L::splat(mean);
    V squares[2] = {};
    for_vectors<T>(x, nullptr, mask, nullptr, n, RLHF_STEP {
        (void)b, (void)out;
        const V d = L::select(L::nonzero(keep), L::load(a) - center, V{});
        squares[side] = L::fma(d, d, squares[side]);
    });
    sums[0] = lane_sum<double>(squares[0] + squares[1]);
}

template <typename T>
RLHF_INLINE void whiten(const T* x, const uint8_t* mask, double mean, double rstd, double shift, int64_t n, T* y) {
    const V center = L::splat(mean), scale = L::splat(rstd), offset = L::splat(shift);
    for_vectors<T>(x, nullptr, mask, y, n, RLHF_STEP {
        (void)side, (void)b;
        L::store(out, L::select(L::nonzero(keep), L::fma(L::load(a) - center, scale, offset), V{}));
    });
}

template <typename T>
RLHF_INLINE void gradient_sums(const T* grad, const T* x, const uint8_t* mask, double mean, int64_t n, double* sums) {
    const V center = L::splat(mean);
    V sum[2] = {}, product[2] = {};
    for_vectors<T>(grad, x, mask, nullptr, n, RLHF_STEP {
        (void)out;
        const L::Mask live = L::nonzero(keep);
        const V g = L::select(live, L::load(a), V{});
        sum[side] += g;
        product[side] = L::fma(g, L::select(live, L::load(b) - center, V{}), product[side]);
    });
    sums[0] = lane_sum<double>(sum[0] + sum[1]);
    sums[1] = lane_sum<double>(product[0] + product[1]);
}

template <typename T>
RLHF_INLINE void gradient(const T* grad, const T* x, const uint8_t* mask, double mean, double rstd, double shift,
                          double slope, int64_t n, T* d_x) {
    const V center = L::splat(mean), scale = L::splat(rstd), offset = L::splat(-shift), bend = L::splat(-slope);
    for_vectors<T>(grad, x, mask, d_x, n, RLHF_STEP {
        (void)side;
        const V d = L::fma(bend, L::load(b) - center, L::fma(scale, L::load(a), offset));
        L::store(out, L::select(L::nonzero(keep), d, V{}));
    });
}

#undef RLHF_STEP

}  // namespace whiten_blocks

#define RLHF_DEFINE_BLOCKS(T)                                                                                        \
    void moments_block(const T* x, const uint8_t* mask, int64_t n, double* sums) { whiten_blocks::moments(x, mask, n, sums); }      \
    void squares_block(const T* x, const uint8_t* mask, double mean, int64_t n, double* sums) {                      \
        whiten_blocks::squares(x, mask, mean, n, sums);                                                                             \
    }                                                                                                                \
    void whiten_block(const T* x, const uint8_t* mask, double mean, double rstd, double shift, int64_t n, T* y) {    \
        whiten_blocks::whiten(x, mask, mean, rstd, shift, n, y);                                                                    \
    }                                                                                                                \
    void gradient_sums_block(const T* grad, const T* x, const uint8_t* mask, double mean, int64_t n, double* sums) { \
        whiten_blocks::gradient_sums(grad, x, mask, mean, n, sums);                                                                 \
    }                                                                                                                \
    void gradient_block(const T* grad, const T* x, const uint8_t* mask, double mean, double rstd, double shift,      \
                        double slope, int64_t n, T* d_x) {                                                           \
        whiten_blocks::gradient(grad, x, mask, mean, rstd, shift, slope, n, d_x);                                                   \
    }
RLHF_DEFINE_BLOCKS(float)
RLHF_DEFINE_BLOCKS(double)
#undef RLHF_DEFINE_BLOCKS

}  // namespace rlhf::cpu::RLHF_SET
