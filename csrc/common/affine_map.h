// x -> scale x + offset: what one position of a linear recurrence does to the state that arrives.
//
// Composition is associative, so a chain of T such steps can be computed as a scan in log T levels. Both directions of
// gae are such chains: A_t = decay A_t+ + delta_t, and G_t = decay G_t- + g_t. A masked position is the identity.
#pragma once

#include "common/host_device.h"

namespace rlhf {

template <typename T>
struct AffineMap {
    T scale = T(1);
    T offset = T(0);

    RLHF_HOST_DEVICE T operator()(T x) const { return offset + scale * x; }
};

// The map of one position: the identity where it is masked, whatever its offset then holds.
template <typename T>
RLHF_HOST_DEVICE AffineMap<T> affine_step(bool keep, T decay, T offset) {
    AffineMap<T> step;
    step.scale = keep ? decay : T(1);
    step.offset = keep ? offset : T(0);
    return step;
}

// `first`, then `second`. A long product of decays underflows to 0, and 0 inf is NaN where the recurrence has inf;
// `floor` (see scale_floor) keeps the product positive.
template <typename T>
RLHF_HOST_DEVICE AffineMap<T> then(const AffineMap<T>& first, const AffineMap<T>& second, T floor) {
    AffineMap<T> both;
    const T scale = second.scale * first.scale;
    both.scale = scale < floor ? floor : scale;
    both.offset = second.offset + second.scale * first.offset;
    return both;
}

template <typename T>
struct SmallestPositive;
template <>
struct SmallestPositive<float> {
    static constexpr float value = 1.40129846432481707e-45f;
};
template <>
struct SmallestPositive<double> {
    static constexpr double value = 4.94065645841246544e-324;
};

// The smallest positive number, or 0 where the decay itself is 0: times any finite number it is nothing.
template <typename T>
RLHF_HOST_DEVICE T scale_floor(T decay) {
    return decay > T(0) ? SmallestPositive<T>::value : T(0);
}

}  // namespace rlhf
