// bf16 and fp16 as they lie in memory, and their way to float and back: to nearest, ties to even, NaN stays NaN.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/host_device.h"

namespace rlhf {

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

RLHF_HOST_DEVICE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

RLHF_HOST_DEVICE float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

RLHF_HOST_DEVICE float to_float(float x) { return x; }
RLHF_HOST_DEVICE float to_float(BFloat16 x) { return float_of(uint32_t(x.bits) << 16); }
RLHF_HOST_DEVICE float to_float(Float16 x) {
#ifdef __CUDA_ARCH__
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
    return wide;
#else
    const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16, exponent = x.bits >> 10 & 31u, mantissa = x.bits & 1023u;
    if (exponent == 0) return float_of(sign | bits_of(float(mantissa) * 5.9604644775390625e-8f));  // 2^-24
    return float_of(sign | (exponent == 31 ? 255u : exponent + 112u) << 23 | mantissa << 13);
#endif
}

template <typename T>
struct Rounded;

template <>
struct Rounded<float> {
    RLHF_HOST_DEVICE static float from(float x) { return x; }
};

template <>
struct Rounded<BFloat16> {
    RLHF_HOST_DEVICE static BFloat16 from(float x) {
        const uint32_t bits = bits_of(x);
        if (x != x) return {uint16_t(bits >> 16 | 64u)};
        return {uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
    }
};

template <>
struct Rounded<Float16> {
    RLHF_HOST_DEVICE static Float16 from(float x) {
#ifdef __CUDA_ARCH__
        uint16_t bits;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
        return {bits};
#else
        const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
        if (x != x) return {uint16_t(sign | 0x7fffu)};
        if (size >= 0x477ff000u) return {uint16_t(sign | 0x7c00u)};  // from 65520 on
        if (size < 0x38800000u) {                                    // below 2^-14: multiples of 2^-24
            return {uint16_t(sign | (bits_of(float_of(size) + 0.5f) - bits_of(0.5f)))};
        }
        const uint32_t rounded = (size + 0xfffu + (size >> 13 & 1u)) >> 13;
        return {uint16_t(sign | (rounded - (112u << 10)))};
#endif
    }
};

}  // namespace rlhf
