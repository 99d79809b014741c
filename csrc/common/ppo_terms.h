// PPO losses of one token and their derivatives, as in kernels/rlhf_kernels/ppo_loss: names and equations stand there.
//
// Masks, denominators and sums are the caller's. Comparisons are written so that a NaN ends up where the reference has
// it: max and clamp hand a NaN on.
#pragma once

#include <cmath>

#include "common/host_device.h"

namespace rlhf {

RLHF_HOST_DEVICE float exp_of(float x) { return expf(x); }
RLHF_HOST_DEVICE double exp_of(double x) { return exp(x); }
RLHF_HOST_DEVICE float expm1_of(float x) { return expm1f(x); }
RLHF_HOST_DEVICE double expm1_of(double x) { return expm1(x); }

enum class KlEstimator : int { none = 0, k1 = 1, k2 = 2, k3 = 3 };

// Bounds on the ratio: low = 1 - clip_low, high = 1 + clip_high.
template <typename T>
struct ClipRange {
    T low;
    T high;
    T dual;  // dual_clip
    bool has_dual;
};

template <typename T>
struct PolicyTerms {
    T loss;
    T slope;  // d loss / d new_logprob
    T ratio;
    T approx_kl;
    bool clipped_low;
    bool clipped_high;
};

template <typename T>
RLHF_HOST_DEVICE PolicyTerms<T> policy_terms(T new_logprob, T old_logprob, T advantage, const ClipRange<T>& clip) {
    PolicyTerms<T> out;
    const T log_ratio = new_logprob - old_logprob;
    const T ratio = exp_of(log_ratio);
    const T clamped = ratio < clip.low ? clip.low : (ratio > clip.high ? clip.high : ratio);
    const T unclipped = -advantage * ratio, bounded = -advantage * clamped;
    const bool beyond = clip.has_dual && advantage < T(0) && ratio > clip.dual;
    out.ratio = ratio;
    out.loss = unclipped > bounded || unclipped != unclipped ? unclipped : bounded;
    if (beyond) out.loss = -advantage * clip.dual;
    out.clipped_low = advantage < T(0) && ratio < clip.low;
    out.clipped_high = (advantage > T(0) && ratio > clip.high) || beyond;
    out.slope = out.clipped_low || out.clipped_high ? T(0) : unclipped;
    out.approx_kl = expm1_of(log_ratio) - log_ratio;
    return out;
}

template <typename T>
struct KlTerms {
    T value;
    T slope;  // d value / d new_logprob
};

template <typename T>
RLHF_HOST_DEVICE KlTerms<T> kl_terms(T new_logprob, T ref_logprob, KlEstimator estimator) {
    const T d = ref_logprob - new_logprob;
    if (estimator == KlEstimator::k1) return {-d, T(1)};
    if (estimator == KlEstimator::k2) return {T(0.5) * (d * d), -d};
    const T change = expm1_of(d);
    return {change - d, -change};
}

template <typename T>
struct ValueTerms {
    T error;  // value - ret
    T worst;  // the larger of the squared errors
    T slope;  // d (worst / 2) / d value
    bool clipped;
};

template <typename T>
RLHF_HOST_DEVICE ValueTerms<T> value_terms(T value, T old_value, T ret, T clip, bool has_clip) {
    ValueTerms<T> out;
    out.error = value - ret;
    out.worst = out.error * out.error;
    out.slope = out.error;
    out.clipped = false;
    if (has_clip) {
        const T moved = value - old_value;
        const T within = moved < -clip ? -clip : (moved > clip ? clip : moved);
        const T clipped_error = (old_value + within) - ret;
        const T clipped_square = clipped_error * clipped_error;
        // Inside the range old + (v - old) may round away from v; only a real clip may cut a gradient.
        out.clipped = (moved < -clip || moved > clip) && clipped_square > out.worst;
        if (out.clipped) {
            out.worst = clipped_square;
            out.slope = T(0);
        }
    }
    return out;
}

}  // namespace rlhf
