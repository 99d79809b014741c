// Sixteen floats at once, written once: GCC's vector extension becomes AVX-512 where a file is compiled for it and
// whatever the baseline has elsewhere. Include it only inside a file that has chosen its target (see isa.h): everything
// here is `static inline`, so no function compiled for one target is linked into another. Such a file says what its
// target has by defining RLHF_AVX512 and RLHF_AVX512_BF16 (g++ reads all of a file before it acts on `#pragma GCC target`, so
// __AVX512F__ is not to be relied on).
#pragma once

#include <cstdint>
#include <cstring>
#if defined(RLHF_AVX512)
#include <immintrin.h>
#endif

// The vectors never cross from a file into another, so their calling convention does not matter.
#pragma GCC diagnostic ignored "-Wpsabi"
// GCC 12 warns of the undefined operand that its own intrinsics take on purpose.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

#define RLHF_INLINE static inline __attribute__((always_inline))

RLHF_INLINE f32x16 splat(float x) { return f32x16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

RLHF_INLINE f32x16 load16(const float* p) {
    f32x16 x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

RLHF_INLINE void store16(float* p, f32x16 x) { std::memcpy(p, &x, sizeof x); }

// a b + c, with one rounding where there is an instruction for it.
RLHF_INLINE f32x16 muladd(f32x16 a, f32x16 b, f32x16 c) {
#if defined(RLHF_AVX512)
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}

RLHF_INLINE f32x16 sqrt16(f32x16 x) {
#if defined(RLHF_AVX512)
    return (f32x16)_mm512_sqrt_ps((__m512)x);
#else
    for (int i = 0; i < 16; ++i) x[i] = __builtin_sqrtf(x[i]);
    return x;
#endif
}

RLHF_INLINE f32x16 max16(f32x16 a, f32x16 b) { return a > b ? a : b; }

// bf16 -> fp32 is exact; fp32 -> bf16 rounds to nearest even and keeps NaN.
RLHF_INLINE f32x16 load16_bf16(const uint16_t* p) {
    u16x16 raw;
    std::memcpy(&raw, p, sizeof raw);
    return (f32x16)(__builtin_convertvector(raw, u32x16) << 16);
}

RLHF_INLINE u16x16 to_bf16(f32x16 x) {
#if defined(RLHF_AVX512_BF16)
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)x);
    u16x16 raw;
    std::memcpy(&raw, &rounded, sizeof raw);
    return raw;
#else
    const u32x16 bits = (u32x16)x;
    const u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const u32x16 nan = (bits >> 16) | 0x40;
    return __builtin_convertvector(x == x ? rounded : nan, u16x16);
#endif
}

// exp(x), relative error about 1e-7 (2 ulp): x = n ln2 + r, a polynomial of degree 6 for e^r, and n added to the exponent
// in two steps so that results near and below the smallest normal number come out right (or as 0). -inf gives 0, NaN NaN.
RLHF_INLINE f32x16 exp16(f32x16 x) {
    const f32x16 clamped_low = x < -104.0f ? splat(-104.0f) : x;
    const f32x16 y = clamped_low > 89.0f ? splat(89.0f) : clamped_low;
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const f32x16 n = muladd(y, splat(1.44269504088896341f), splat(magic)) - magic;
    f32x16 r = muladd(n, splat(-0.693145751953125f), y);
    r = muladd(n, splat(-1.42860682030941723e-6f), r);
    f32x16 p = splat(1.0f / 720);
    p = muladd(p, r, splat(1.0f / 120));
    p = muladd(p, r, splat(1.0f / 24));
    p = muladd(p, r, splat(1.0f / 6));
    p = muladd(p, r, splat(0.5f));
    p = muladd(p, r, splat(1.0f));
    p = muladd(p, r, splat(1.0f));
#if defined(RLHF_AVX512)
    const f32x16 scaled = (f32x16)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    const i32x16 whole = __builtin_convertvector(n, i32x16);
    const i32x16 half = whole >> 1;
    const f32x16 scaled = p * (f32x16)((half + 127) << 23) * (f32x16)((whole - half + 127) << 23);
#endif
    return x == x ? scaled : x;
}

// tanh(x), relative error about 2e-7; a series near 0, where 1 - exp(-2|x|) would cancel.
RLHF_INLINE f32x16 tanh16(f32x16 x) {
    const f32x16 size = x < 0.0f ? -x : x;
    const f32x16 e = exp16(-2.0f * size);
    const f32x16 far = (1.0f - e) / (1.0f + e);
    const f32x16 square = x * x;
    f32x16 series = splat(-1382.0f / 155925);
    series = muladd(series, square, splat(62.0f / 2835));
    series = muladd(series, square, splat(-17.0f / 315));
    series = muladd(series, square, splat(2.0f / 15));
    series = muladd(series, square, splat(-1.0f / 3));
    series = muladd(series * square, x, x);
    const f32x16 signed_far = x < 0.0f ? -far : far;
    return size < 0.35f ? series : signed_far;
}

// The sixteen 32-bit columns of x become rows: out[i][j] = x[j][i].
RLHF_INLINE void transpose16(const u32x16 x[16], uint32_t* out, int64_t out_stride) {
#if defined(RLHF_AVX512)
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 8; ++i) {
        a[2 * i] = _mm512_unpacklo_epi32((__m512i)x[2 * i], (__m512i)x[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_epi32((__m512i)x[2 * i], (__m512i)x[2 * i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; ++i) {
        b[4 * i + 0] = _mm512_unpacklo_epi64(a[4 * i + 0], a[4 * i + 2]);
        b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i + 0], a[4 * i + 2]);
        b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
        b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
    }
    // b[4 g + c], 128-bit lane l, holds column 4 l + c of rows 4 g .. 4 g + 3
#pragma GCC unroll 16
    for (int c = 0; c < 4; ++c) {
        const __m512i low01 = _mm512_shuffle_i32x4(b[c], b[4 + c], 0x44);
        const __m512i high01 = _mm512_shuffle_i32x4(b[c], b[4 + c], 0xee);
        const __m512i low23 = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0x44);
        const __m512i high23 = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0xee);
        _mm512_storeu_si512(out + (0 + c) * out_stride, _mm512_shuffle_i32x4(low01, low23, 0x88));
        _mm512_storeu_si512(out + (4 + c) * out_stride, _mm512_shuffle_i32x4(low01, low23, 0xdd));
        _mm512_storeu_si512(out + (8 + c) * out_stride, _mm512_shuffle_i32x4(high01, high23, 0x88));
        _mm512_storeu_si512(out + (12 + c) * out_stride, _mm512_shuffle_i32x4(high01, high23, 0xdd));
    }
#else
    for (int i = 0; i < 16; ++i) {
        for (int j = 0; j < 16; ++j) out[i * out_stride + j] = x[j][i];
    }
#endif
}
