// Float and double under one name: a kernel written once as a template over Lanes<T> runs on vectors of the target's
// natural width, 64 bytes with AVX-512, 32 with AVX2 and 16 elsewhere. Arithmetic is that of the compiler's vector types; comparisons
// give a Mask (a mask register with AVX-512, all bits or none per lane elsewhere) that knows &, | and select. at_least and
// at_most keep a NaN of x; max_of_nonnegative lets NaN win, as torch.amax does, and wants no lane below 0.
//
// Included by the files of variants/ alone, which choose the target and define RLHF_SET, its namespace: everything here
// that could be emitted as a function lives in that namespace, so no two targets share a symbol.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/simd.h"

namespace rlhf::cpu::RLHF_SET {

#if defined(RLHF_AVX512)
constexpr int kVectorBytes = 64;
constexpr bool kFused = true;  // fma rounds once
#elif defined(RLHF_AVX2)
constexpr int kVectorBytes = 32;
constexpr bool kFused = true;
#elif defined(RLHF_NEON)
constexpr int kVectorBytes = 16;
constexpr bool kFused = true;
#else
constexpr int kVectorBytes = 16;
constexpr bool kFused = false;
#endif

// e^x, e^x - 1 and e^x - 1 - x, each without the cancellation of making it from the one before.
template <typename V>
struct ExpParts {
    V exp, expm1, excess;
};

template <typename T>
struct Lanes;

template <>
struct Lanes<float> {
    static constexpr int count = kVectorBytes / sizeof(float);
    typedef float V __attribute__((vector_size(kVectorBytes)));
    typedef int32_t Ints __attribute__((vector_size(kVectorBytes)));
    typedef uint8_t Bytes __attribute__((vector_size(count)));
    typedef uint16_t Halves __attribute__((vector_size(2 * count)));

#if defined(RLHF_AVX512)
    using Mask = __mmask16;
    RLHF_INLINE Mask lt(V a, V b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LT_OQ); }
    RLHF_INLINE Mask le(V a, V b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LE_OQ); }
    RLHF_INLINE Mask eq(V a, V b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_EQ_OQ); }
    RLHF_INLINE Mask ne(V a, V b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_NEQ_UQ); }
    RLHF_INLINE V select(Mask m, V a, V b) { return (V)_mm512_mask_blend_ps(m, (__m512)b, (__m512)a); }
    RLHF_INLINE V fma(V a, V b, V c) { return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
    RLHF_INLINE V at_least(V x, V bound) { return (V)_mm512_max_ps((__m512)bound, (__m512)x); }
    RLHF_INLINE V at_most(V x, V bound) { return (V)_mm512_min_ps((__m512)bound, (__m512)x); }
    RLHF_INLINE V max_of_nonnegative(V a, V b) { return (V)_mm512_max_epu32((__m512i)a, (__m512i)b); }
    RLHF_INLINE V scale_by_power(V x, V n) { return (V)_mm512_scalef_ps((__m512)x, (__m512)n); }
    RLHF_INLINE Mask nonzero(const uint8_t* p) {
        const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        return _mm_test_epi8_mask(raw, raw);
    }
#else
    using Mask = Ints;
    RLHF_INLINE Mask lt(V a, V b) { return a < b; }
    RLHF_INLINE Mask le(V a, V b) { return a <= b; }
    RLHF_INLINE Mask eq(V a, V b) { return a == b; }
    RLHF_INLINE Mask ne(V a, V b) { return a != b; }
    RLHF_INLINE V select(Mask m, V a, V b) { return selectv(m, a, b); }
    RLHF_INLINE V fma(V a, V b, V c) { return muladdv(a, b, c); }
#if defined(RLHF_AVX2)
    RLHF_INLINE V at_least(V x, V bound) { return (V)_mm256_max_ps((__m256)bound, (__m256)x); }
    RLHF_INLINE V at_most(V x, V bound) { return (V)_mm256_min_ps((__m256)bound, (__m256)x); }
#else
    RLHF_INLINE V at_least(V x, V bound) { return select(lt(x, bound), bound, x); }
    RLHF_INLINE V at_most(V x, V bound) { return select(lt(bound, x), bound, x); }
#endif
    RLHF_INLINE V max_of_nonnegative(V a, V b) { return select(le(b, a) | ne(a, a), a, b); }
    // x 2^n for whole n, in two factors because one may leave the range where the product does not.
    RLHF_INLINE V scale_by_power(V x, V n) {
        const Ints whole = __builtin_convertvector(n, Ints);
        const Ints half = whole >> 1;
        return x * (V)((half + 127) << 23) * (V)((whole - half + 127) << 23);
    }
    RLHF_INLINE Mask nonzero(const uint8_t* p) {
        Bytes raw;
        std::memcpy(&raw, p, sizeof raw);
        return __builtin_convertvector(raw, Ints) != 0;
    }
#endif

    RLHF_INLINE V splat(float x) { return splatv(x); }

    RLHF_INLINE V load(const float* p) {
        V x;
        std::memcpy(&x, p, sizeof x);
        return x;
    }

    RLHF_INLINE V load(const uint16_t* p) { return loadv(p); }  // bits of bfloat16

    RLHF_INLINE void store(float* p, V x) { std::memcpy(p, &x, sizeof x); }

#if defined(RLHF_AVX2)
    // The low halves of a's lanes, then of b's.
    RLHF_INLINE __m256i low_halves(u32v a, u32v b) {
        return _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)a, (__m256i)b), 0xd8);
    }
#endif

    // Rounds to nearest even and keeps NaN and subnormal numbers, which the CPU's own instruction takes for 0.
    RLHF_INLINE void store(uint16_t* p, V x) {
        const u32v narrow = bf16_bits(x);
#if defined(RLHF_AVX512)
        _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)narrow));
#elif defined(RLHF_AVX2)
        _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(low_halves(narrow, narrow)));
#else
        const Halves raw = __builtin_convertvector(narrow, Halves);
        std::memcpy(p, &raw, sizeof raw);
#endif
    }

    // a, then b; with AVX2 words of 16 bits are put in order once for both.
    RLHF_INLINE void store_two(float* p, V a, V b) {
        store(p, a);
        store(p + count, b);
    }
    RLHF_INLINE void store_two(uint16_t* p, V a, V b) {
#if defined(RLHF_AVX2)
        _mm256_storeu_si256((__m256i*)p, low_halves(bf16_bits(a), bf16_bits(b)));
#else
        store(p, a);
        store(p + count, b);
#endif
    }

    // x = n ln2 + r, m = e^r - 1 = r + r^2 q(r), e^x = 2^n (1 + m). Where n = 0, e^x - 1 = m and e^x - 1 - x = r^2 q(r);
    // elsewhere |e^x - 1| > 0.29, so that subtracting costs no digits. Relative error of each about 2e-7.
    RLHF_INLINE ExpParts<V> exp_parts(V x) {
        V n;
        const V r = reduce(x, n);
        V q = splat(1.0f / 5040);
        q = fma(q, r, splat(1.0f / 720));
        q = fma(q, r, splat(1.0f / 120));
        q = fma(q, r, splat(1.0f / 24));
        q = fma(q, r, splat(1.0f / 6));
        q = fma(q, r, splat(0.5f));
        const V bend = r * r * q;
        const V m = r + bend;
        const Mask near = eq(n, splat(0.0f));
        ExpParts<V> out;
        out.exp = scale_by_power(m + 1.0f, n);
        out.expm1 = select(near, m, out.exp - 1.0f);
        out.excess = select(near, bend, out.expm1 - x);
        return out;
    }

    // Relative error about 1e-7; underflows gradually, -inf gives 0, NaN stays.
    RLHF_INLINE V exp(V x) {
        V n;
        const V r = reduce(x, n);
        V p = splat(1.0f / 720);
        p = fma(p, r, splat(1.0f / 120));
        p = fma(p, r, splat(1.0f / 24));
        p = fma(p, r, splat(1.0f / 6));
        p = fma(p, r, splat(0.5f));
        p = fma(p, r, splat(1.0f));
        p = fma(p, r, splat(1.0f));
        return scale_by_power(p, n);
    }

    // 2^y for y of at most 0, as a term of a sum beside 1: relative error 1e-7 of the polynomial, beside that of y. 1 at 0;
    // 0 below 2^-126 and of -inf; NaN stays. It has no second constant, which keeps the digits of large |y| in `exp`.
    RLHF_INLINE V exp2_of_negative(V y) {
#if defined(RLHF_AVX512)
        const V r = (V)_mm512_reduce_ps((__m512)y, 0x09);  // y - floor(y); of -inf 0
        V p = splat(1.865033758804202e-3f);
        p = fma(p, r, splat(9.022697806358337e-3f));
        p = fma(p, r, splat(5.579448491334915e-2f));
        p = fma(p, r, splat(0.24016660451889038f));
        p = fma(p, r, splat(0.69315105676651f));
        p = fma(p, r, splat(1.0f));
        return (V)_mm512_scalef_ps((__m512)p, (__m512)y);  // times 2^floor(y)
#else
        const float magic = 12582912.0f, least = -126.0f;  // 1.5 * 2^23: adding it rounds to a whole number
        const V held = at_least(y, splat(least));
        const V rounded = held + magic;
        const V r = held - (rounded - magic);  // in [-1/2, 1/2]
        V p = splat(1.3202981790527701e-3f);
        p = fma(p, r, splat(9.674952365458012e-3f));
        p = fma(p, r, splat(5.5510472506284714e-2f));
        p = fma(p, r, splat(0.24022166430950165f));
        p = fma(p, r, splat(0.6931465864181519f));
        p = fma(p, r, splat(1.0f));
        Ints bits;
        std::memcpy(&bits, &rounded, sizeof bits);
        bits = (bits << 23) + (127 << 23);  // the low bits of `rounded` are the whole number
        V power;
        std::memcpy(&power, &bits, sizeof power);
        return select(lt(y, splat(least)), splat(0.0f), p * power);
#endif
    }

    // r in [-ln2 / 2, ln2 / 2] and whole n with x = n ln2 + r, for x cut to where e^x is neither 0 nor infinite; NaN
    // stays in r.
    RLHF_INLINE V reduce(V x, V& n) {
        const V y = at_most(at_least(x, splat(-104.0f)), splat(89.0f));
        const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
        n = fma(y, splat(1.44269504088896341f), splat(magic)) - magic;
        return fma(n, splat(-1.42860682030941723e-6f), fma(n, splat(-0.693145751953125f), y));
    }
};

template <>
struct Lanes<double> {
    static constexpr int count = kVectorBytes / sizeof(double);
    typedef double V __attribute__((vector_size(kVectorBytes)));
    typedef int64_t Ints __attribute__((vector_size(kVectorBytes)));
    typedef float Floats __attribute__((vector_size(kVectorBytes / 2)));
    typedef uint8_t Bytes __attribute__((vector_size(count)));

#if defined(RLHF_AVX512)
    using Mask = __mmask8;
    RLHF_INLINE Mask lt(V a, V b) { return _mm512_cmp_pd_mask((__m512d)a, (__m512d)b, _CMP_LT_OQ); }
    RLHF_INLINE Mask le(V a, V b) { return _mm512_cmp_pd_mask((__m512d)a, (__m512d)b, _CMP_LE_OQ); }
    RLHF_INLINE Mask eq(V a, V b) { return _mm512_cmp_pd_mask((__m512d)a, (__m512d)b, _CMP_EQ_OQ); }
    RLHF_INLINE Mask ne(V a, V b) { return _mm512_cmp_pd_mask((__m512d)a, (__m512d)b, _CMP_NEQ_UQ); }
    RLHF_INLINE V select(Mask m, V a, V b) { return (V)_mm512_mask_blend_pd(m, (__m512d)b, (__m512d)a); }
    RLHF_INLINE V fma(V a, V b, V c) { return (V)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c); }
    RLHF_INLINE V at_least(V x, V bound) { return (V)_mm512_max_pd((__m512d)bound, (__m512d)x); }
    RLHF_INLINE V max_of_nonnegative(V a, V b) { return (V)_mm512_max_epu64((__m512i)a, (__m512i)b); }
    RLHF_INLINE Mask nonzero(const uint8_t* p) {
        const __m128i raw = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
        return __mmask8(_mm_test_epi8_mask(raw, raw));
    }
#else
    using Mask = Ints;
    RLHF_INLINE Mask lt(V a, V b) { return a < b; }
    RLHF_INLINE Mask le(V a, V b) { return a <= b; }
    RLHF_INLINE Mask eq(V a, V b) { return a == b; }
    RLHF_INLINE Mask ne(V a, V b) { return a != b; }
    RLHF_INLINE V select(Mask m, V a, V b) { return (V)((m & (Ints)a) | (~m & (Ints)b)); }
    RLHF_INLINE V fma(V a, V b, V c) {
#if defined(RLHF_AVX2)
        return (V)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#elif defined(RLHF_NEON)
        return (V)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
#else
        return a * b + c;
#endif
    }
    RLHF_INLINE V at_least(V x, V bound) { return select(lt(x, bound), bound, x); }
    RLHF_INLINE V max_of_nonnegative(V a, V b) { return select(le(b, a) | ne(a, a), a, b); }
    RLHF_INLINE Mask nonzero(const uint8_t* p) {
        Mask mask;
        for (int i = 0; i < count; ++i) mask[i] = -int64_t(p[i] != 0);
        return mask;
    }
#endif

    RLHF_INLINE V splat(double x) {
#if defined(RLHF_AVX512)
        return (V)_mm512_set1_pd(x);
#elif defined(RLHF_AVX2)
        return (V)_mm256_set1_pd(x);
#else
        return V{x, x};
#endif
    }

    RLHF_INLINE V load(const double* p) {
        V x;
        std::memcpy(&x, p, sizeof x);
        return x;
    }

    RLHF_INLINE V load(const float* p) {
        Floats x;
        std::memcpy(&x, p, sizeof x);
        return __builtin_convertvector(x, V);
    }

    RLHF_INLINE void store(double* p, V x) { std::memcpy(p, &x, sizeof x); }

    RLHF_INLINE void store(float* p, V x) {
        const Floats rounded = __builtin_convertvector(x, Floats);
        std::memcpy(p, &rounded, sizeof rounded);
    }

    // Double serves derivative checks and other proofs, where the library's accuracy counts and its speed does not.
    RLHF_INLINE ExpParts<V> exp_parts(V x) {
        ExpParts<V> out;
        for (int i = 0; i < count; ++i) {
            out.exp[i] = __builtin_exp(x[i]);
            out.expm1[i] = __builtin_expm1(x[i]);
        }
        out.excess = out.expm1 - x;
        return out;
    }

    RLHF_INLINE V exp(V x) {
        for (int i = 0; i < count; ++i) x[i] = __builtin_exp(x[i]);
        return x;
    }

    RLHF_INLINE V exp2_of_negative(V y) {
        for (int i = 0; i < count; ++i) y[i] = __builtin_exp2(y[i]);
        return y;
    }
};

// Sum of the lanes, in a fixed order.
template <typename T>
RLHF_INLINE double lane_sum(typename Lanes<T>::V x) {
    T lanes[Lanes<T>::count];
    double total = 0;
    Lanes<T>::store(lanes, x);
    for (T lane : lanes) total += lane;
    return total;
}

// The largest lane; NaN if there is one.
template <typename T>
RLHF_INLINE T lane_max(typename Lanes<T>::V x) {
    T lanes[Lanes<T>::count];
    Lanes<T>::store(lanes, x);
    T largest = lanes[0];
    for (T lane : lanes) {
        if (!(lane <= largest) && largest == largest) largest = lane;
    }
    return largest;
}

}  // namespace rlhf::cpu::RLHF_SET
