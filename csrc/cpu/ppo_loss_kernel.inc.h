// The per-token maths of ppo_loss.cpp for one block, over whole vectors; namespace RLHF_SET.
// Inputs are staged per block: bf16 becomes fp32, and a block that is not whole is padded with dead elements, so the
// loops below know neither dtypes nor a remainder.

#include "cpu/lanes.h"
#include "cpu/ppo_loss_blocks.h"

namespace rlhf::cpu::RLHF_SET {
namespace loss_blocks {

// Elements whose terms are added up before they join the block's sums: eight vectors. With 16 lanes that makes eight sums
// of eight terms of a block, which rounds less than one sum of 64.
template <typename T>
constexpr int kChunk = 8 * Lanes<T>::count;

template <typename T>
RLHF_INLINE int whole_vectors(int n) {
    constexpr int lanes = Lanes<T>::count;
    return (n + lanes - 1) / lanes * lanes;
}

// The block's elements as T, readable for whole vectors; `buffer` holds them where the input itself does not serve.
template <typename T>
RLHF_INLINE const T* stage(TokenInput input, int64_t begin, int n, T* buffer) {
    if (input.data == nullptr) return nullptr;
    const int padded = whole_vectors<T>(n);
    if constexpr (sizeof(T) == sizeof(float)) {
        if (input.bfloat16) {
            const uint16_t* from = static_cast<const uint16_t*>(input.data) + begin;
            using L = Lanes<float>;
            int i = 0;
            for (; i + L::count <= n; i += L::count) L::store(buffer + i, L::load(from + i));
            if (i < n) {
                uint16_t rest[L::count] = {};
                std::memcpy(rest, from + i, sizeof(uint16_t) * (n - i));
                L::store(buffer + i, L::load(rest));
            }
            return buffer;
        }
    }
    const T* from = static_cast<const T*>(input.data) + begin;
    if (padded == n) return from;
    std::memcpy(buffer, from, sizeof(T) * n);
    std::memset(buffer + n, 0, sizeof(T) * (padded - n));
    return buffer;
}

// The mask of a block: bytes, or weights where `bytes` is null.
template <typename T>
struct StagedMask {
    const uint8_t* bytes;
    const T* weights;
    uint8_t byte_buffer[kTokenBlock];
    T weight_buffer[kTokenBlock];
};

template <typename T>
RLHF_INLINE void stage_mask(TokenMask mask, int64_t begin, int n, StagedMask<T>& staged) {
    staged.bytes = nullptr;
    if (mask.weights) {
        staged.weights = stage<T>({mask.data, false}, begin, n, staged.weight_buffer);
        return;
    }
    staged.bytes = static_cast<const uint8_t*>(mask.data) + begin;
    const int padded = whole_vectors<T>(n);
    if (padded == n) return;
    std::memcpy(staged.byte_buffer, staged.bytes, n);
    std::memset(staged.byte_buffer + n, 0, padded - n);
    staged.bytes = staged.byte_buffer;
}

// Which lanes live, and their weights.
template <typename T>
RLHF_INLINE typename Lanes<T>::Mask live_lanes(const StagedMask<T>& staged, int i, typename Lanes<T>::V& weight) {
    using L = Lanes<T>;
    if (staged.bytes) {
        const typename L::Mask live = L::nonzero(staged.bytes + i);
        weight = L::select(live, L::splat(1), L::splat(0));
        return live;
    }
    weight = L::load(staged.weights + i);
    return L::ne(weight, L::splat(0));
}

template <typename T>
RLHF_INLINE void ppo(const PpoInputs& in, const PpoKnobs& knobs, T inverse_denom, int64_t begin, int n, T* dloss,
                     double* sums) {
    using L = Lanes<T>;
    using V = typename L::V;
    using Mask = typename L::Mask;
    alignas(64) T buffers[5][kTokenBlock];
    alignas(64) T dloss_buffer[kTokenBlock];
    StagedMask<T> mask;
    stage_mask(in.mask, begin, n, mask);
    const T* new_logprob = stage<T>(in.new_logprob, begin, n, buffers[0]);
    const T* old_logprob = stage<T>(in.old_logprob, begin, n, buffers[1]);
    const T* advantage = stage<T>(in.advantage, begin, n, buffers[2]);
    const T* ref_logprob = stage<T>(in.ref_logprob, begin, n, buffers[3]);
    const T* entropy = stage<T>(in.entropy, begin, n, buffers[4]);
    const int padded = whole_vectors<T>(n);
    T* out = padded == n ? dloss + begin : dloss_buffer;

    const V zero = L::splat(0), one = L::splat(1);
    const V low_bound = L::splat(T(knobs.ratio_low)), high_bound = L::splat(T(knobs.ratio_high));
    const V dual_bound = L::splat(T(knobs.dual_clip)), kl_coef = L::splat(T(knobs.kl_coef));
    const V scale = L::splat(inverse_denom);
    V totals[kPpoSums] = {};
    V ratio_max = zero;
    for (int begin_chunk = 0; begin_chunk < padded; begin_chunk += kChunk<T>) {
        const int end_chunk = begin_chunk + kChunk<T> < padded ? begin_chunk + kChunk<T> : padded;
        V policy_sum = zero, kl_sum = zero, entropy_sum = zero, low_sum = zero, high_sum = zero, approx_sum = zero;
        V ratio_sum = zero;
        for (int i = begin_chunk; i < end_chunk; i += L::count) {
            V weight;
            const Mask live = live_lanes(mask, i, weight);
            // Dead lanes compute on zeros: what they held is dropped here, before any arithmetic.
            const V now = L::select(live, L::load(new_logprob + i), zero);
            const V log_ratio = now - L::select(live, L::load(old_logprob + i), zero);
            const V gain = L::select(live, L::load(advantage + i), zero);
            const ExpParts<V> r = L::exp_parts(log_ratio);
            const V unclipped = -gain * r.exp;
            const Mask under = L::lt(r.exp, low_bound), over = L::lt(high_bound, r.exp);
            const V bounded = L::select(under, low_bound, L::select(over, high_bound, r.exp));
            const V clipped = -gain * bounded;
            V loss = L::select(L::le(unclipped, clipped), clipped, unclipped);  // NaN stays
            const Mask bad = L::lt(gain, zero);
            const Mask beyond = bad & L::lt(dual_bound, r.exp);
            const Mask low = bad & under;
            const Mask high = (L::lt(zero, gain) & over) | beyond;
            loss = L::select(beyond, -gain * dual_bound, loss);
            V slope = L::select(low | high, zero, unclipped);
            policy_sum = L::fma(weight, loss, policy_sum);
            low_sum += L::select(low, weight, zero);
            high_sum += L::select(high, weight, zero);
            approx_sum = L::fma(weight, r.excess, approx_sum);
            ratio_sum = L::fma(weight, r.exp, ratio_sum);
            ratio_max = L::max_of_nonnegative(ratio_max, L::select(live, r.exp, zero));
            if (ref_logprob) {
                const V d = L::select(live, L::load(ref_logprob + i), zero) - now;
                V kl, dkl;
                if (knobs.kl == kK1) {
                    kl = -d;
                    dkl = one;
                } else if (knobs.kl == kK2) {
                    kl = T(0.5) * d * d;
                    dkl = -d;
                } else {
                    const ExpParts<V> e = L::exp_parts(d);
                    kl = e.excess;
                    dkl = -e.expm1;
                }
                kl_sum = L::fma(weight, kl, kl_sum);
                if (knobs.kl_coef != 0) slope = L::fma(kl_coef, dkl, slope);  // 0 * inf would poison it
            }
            if (entropy) entropy_sum = L::fma(weight, L::select(live, L::load(entropy + i), zero), entropy_sum);
            L::store(out + i, weight * slope * scale);
        }
        totals[kPolicy] += policy_sum;
        totals[kKl] += kl_sum;
        totals[kEntropy] += entropy_sum;
        totals[kLow] += low_sum;
        totals[kHigh] += high_sum;
        totals[kApproxKl] += approx_sum;
        totals[kRatio] += ratio_sum;
    }
    if (out == dloss_buffer) std::memcpy(dloss + begin, dloss_buffer, sizeof(T) * n);
    for (int s = 0; s < kPpoSums; ++s) sums[s] = lane_sum<T>(totals[s]);
    sums[kRatioMax] = lane_max<T>(ratio_max);
}

template <typename T>
RLHF_INLINE void value(const ValueInputs& in, double clip, T inverse_denom, int64_t begin, int n, T* dloss,
                       double* sums) {
    using L = Lanes<T>;
    using V = typename L::V;
    using Mask = typename L::Mask;
    alignas(64) T buffers[3][kTokenBlock];
    alignas(64) T dloss_buffer[kTokenBlock];
    StagedMask<T> mask;
    stage_mask(in.mask, begin, n, mask);
    const T* values = stage<T>(in.value, begin, n, buffers[0]);
    const T* old_value = stage<T>(in.old_value, begin, n, buffers[1]);
    const T* ret = stage<T>(in.ret, begin, n, buffers[2]);
    const int padded = whole_vectors<T>(n);
    T* out = padded == n ? dloss + begin : dloss_buffer;

    const V zero = L::splat(0), bound = L::splat(T(clip)), scale = L::splat(inverse_denom);
    V totals[kValueSums] = {};
    for (int begin_chunk = 0; begin_chunk < padded; begin_chunk += kChunk<T>) {
        const int end_chunk = begin_chunk + kChunk<T> < padded ? begin_chunk + kChunk<T> : padded;
        V square_sum = zero, clipped_sum = zero, count_sum = zero, error_sum = zero, error_sq_sum = zero, ret_sum = zero;
        V ret_sq_sum = zero;
        for (int i = begin_chunk; i < end_chunk; i += L::count) {
            V weight;
            const Mask live = live_lanes(mask, i, weight);
            const V v = L::select(live, L::load(values + i), zero);
            const V target = L::select(live, L::load(ret + i), zero);
            const V error = v - target;
            const V square = error * error;
            V worst = square, slope = error;
            if (old_value) {
                const V old = L::select(live, L::load(old_value + i), zero);
                const V moved = v - old;
                const Mask under = L::lt(moved, -bound), over = L::lt(bound, moved);
                const V held = L::select(under, -bound, L::select(over, bound, moved));
                const V clipped_error = (old + held) - target;
                const V clipped_square = clipped_error * clipped_error;
                // Inside the range old + (v - old) may round away from v; only a real clip may cut a gradient.
                const Mask clipped = (under | over) & L::lt(square, clipped_square);
                worst = L::select(clipped, clipped_square, square);
                slope = L::select(clipped, zero, error);
                clipped_sum += L::select(clipped, weight, zero);
            }
            square_sum = L::fma(weight, worst, square_sum);
            count_sum += weight;
            error_sum = L::fma(weight, -error, error_sum);
            error_sq_sum = L::fma(weight, square, error_sq_sum);
            ret_sum = L::fma(weight, target, ret_sum);
            ret_sq_sum = L::fma(weight, target * target, ret_sq_sum);
            L::store(out + i, weight * slope * scale);
        }
        totals[kSquare] += square_sum;
        totals[kClipped] += clipped_sum;
        totals[kCount] += count_sum;
        totals[kError] += error_sum;
        totals[kErrorSq] += error_sq_sum;
        totals[kRet] += ret_sum;
        totals[kRetSq] += ret_sq_sum;
    }
    if (out == dloss_buffer) std::memcpy(dloss + begin, dloss_buffer, sizeof(T) * n);
    for (int s = 0; s < kValueSums; ++s) sums[s] = lane_sum<T>(totals[s]);
}

template <typename T>
RLHF_INLINE void weight(TokenMask mask, T factor, int64_t begin, int n, T* out) {
    using L = Lanes<T>;
    alignas(64) T buffer[kTokenBlock];
    StagedMask<T> staged;
    stage_mask(mask, begin, n, staged);
    T* to = whole_vectors<T>(n) == n ? out + begin : buffer;
    for (int i = 0; i < n; i += L::count) {
        typename L::V w;
        live_lanes(staged, i, w);
        L::store(to + i, w * factor);
    }
    if (to == buffer) std::memcpy(out + begin, buffer, sizeof(T) * n);
}

}  // namespace loss_blocks

#define RLHF_DEFINE_BLOCKS(T)                                                                                  \
    void ppo_block(const PpoInputs& in, const PpoKnobs& knobs, T inverse_denom, int64_t begin, int n,          \
                   T* dloss, double* sums) {                                                                        \
        loss_blocks::ppo<T>(in, knobs, inverse_denom, begin, n, dloss, sums);                                               \
    }                                                                                                          \
    void value_block(const ValueInputs& in, double clip, T inverse_denom, int64_t begin, int n, T* dloss,      \
                     double* sums) {                                                                                \
        loss_blocks::value<T>(in, clip, inverse_denom, begin, n, dloss, sums);                                              \
    }                                                                                                          \
    void weight_block(TokenMask mask, T factor, int64_t begin, int n, T* out) { loss_blocks::weight<T>(mask, factor, begin, n, out); }
RLHF_DEFINE_BLOCKS(float)
RLHF_DEFINE_BLOCKS(double)
#undef RLHF_DEFINE_BLOCKS

}  // namespace rlhf::cpu::RLHF_SET
