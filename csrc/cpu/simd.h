// Sixteen floats at once, written once for every instruction set: one vector of AVX-512, two of AVX2, four of SSE2 or NEON.
// A lane keeps its place whatever the set, so code above this file knows lanes only.
//
// Included by the files of variants/ alone, which choose the target and say what it has (RLHF_AVX512, RLHF_AVX512_BF16,
// RLHF_AVX2, RLHF_NEON, RLHF_NEON_BF16). Everything here is `static inline`, so nothing compiled for one target is linked
// into another.
#pragma once

#include <cstdint>
#include <cstring>

// The vectors never cross from a file into another, so their calling convention does not matter.
#pragma GCC diagnostic ignored "-Wpsabi"
#if !defined(__clang__)
// GCC 12 warns of the undefined operand that its own intrinsics take on purpose.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#define RLHF_INLINE static inline __attribute__((always_inline))

// GCC's tile loads do not say that they read memory: what was written before them is in memory from here on.
RLHF_INLINE void memory_is_read() { __asm__ volatile("" ::: "memory"); }

#if defined(RLHF_AVX512)
constexpr int kLanes = 16;  // of one vector of the target
#elif defined(RLHF_AVX2)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kVectors = 16 / kLanes;

// Vectors of sums that a loop may keep in registers, beside two or three operands of a multiply-add.
#if defined(RLHF_AVX512)
constexpr int kSums = 16;
#elif defined(RLHF_NEON)
constexpr int kSums = 24;
#elif defined(RLHF_AVX2)
constexpr int kSums = 12;
#else
constexpr int kSums = 8;
#endif
constexpr int kSums16 = kSums / kVectors;  // of sixteen lanes each

constexpr int at_least_one(int x) { return x > 1 ? x : 1; }
constexpr int power_below(int x) { return x >= 16 ? 16 : x >= 8 ? 8 : x >= 4 ? 4 : x >= 2 ? 2 : 1; }

// One vector of the target.
typedef float f32v __attribute__((vector_size(4 * kLanes)));
typedef int32_t i32v __attribute__((vector_size(4 * kLanes)));
typedef uint32_t u32v __attribute__((vector_size(4 * kLanes)));
typedef uint16_t u16v __attribute__((vector_size(2 * kLanes)));

RLHF_INLINE f32v splatv(float x) {
#if defined(RLHF_AVX512)
    return (f32v)_mm512_set1_ps(x);
#elif defined(RLHF_AVX2)
    return (f32v)_mm256_set1_ps(x);
#else
    return f32v{x, x, x, x};
#endif
}

RLHF_INLINE f32v loadv(const float* p) {
    f32v x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

RLHF_INLINE void storev(float* p, f32v x) { std::memcpy(p, &x, sizeof x); }

// a b + c, with one rounding where there is an instruction for it.
RLHF_INLINE f32v muladdv(f32v a, f32v b, f32v c) {
#if defined(RLHF_AVX512)
    return (f32v)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(RLHF_AVX2)
    return (f32v)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(RLHF_NEON)
    return (f32v)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

RLHF_INLINE f32v selectv(i32v mask, f32v a, f32v b) {
#if defined(RLHF_AVX2)
    return (f32v)_mm256_blendv_ps((__m256)b, (__m256)a, (__m256)mask);
#else
    return (f32v)((mask & (i32v)a) | (~mask & (i32v)b));
#endif
}

// bf16 -> fp32 is exact.
RLHF_INLINE f32v loadv(const uint16_t* p) {
#if defined(RLHF_AVX512)
    return (f32v)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(RLHF_AVX2)
    return (f32v)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
    u16v raw;
    std::memcpy(&raw, p, sizeof raw);
    return (f32v)(__builtin_convertvector(raw, u32v) << 16);
#endif
}

// fp32 -> bf16 in the low half of every lane: to nearest even, NaN stays NaN.
RLHF_INLINE u32v bf16_bits(f32v x) {
    const u32v bits = (u32v)x;
    const u32v rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (u32v)selectv((i32v)(x == x), (f32v)rounded, (f32v)((bits >> 16) | 0x40));
}

// ---- sixteen lanes --------------------------------------------------------------------------------------------------

#if defined(RLHF_AVX512)
typedef f32v f32x16;
typedef i32v i32x16;
typedef u32v u32x16;

RLHF_INLINE f32v& part(f32x16& x, int) { return x; }
RLHF_INLINE i32v& part(i32x16& x, int) { return x; }
RLHF_INLINE u32v& part(u32x16& x, int) { return x; }
RLHF_INLINE const f32v& part(const f32x16& x, int) { return x; }
RLHF_INLINE const i32v& part(const i32x16& x, int) { return x; }
RLHF_INLINE const u32v& part(const u32x16& x, int) { return x; }
RLHF_INLINE f32x16 as_float(u32x16 x) { return (f32x16)x; }
RLHF_INLINE f32x16 as_float(i32x16 x) { return (f32x16)x; }
RLHF_INLINE u32x16 as_words(f32x16 x) { return (u32x16)x; }
RLHF_INLINE i32x16 as_ints(f32x16 x) { return (i32x16)x; }
RLHF_INLINE f32x16 select(i32x16 mask, f32x16 a, f32x16 b) { return mask ? a : b; }
RLHF_INLINE i32x16 select(i32x16 mask, i32x16 a, i32x16 b) { return mask ? a : b; }
#else
// Lanes of type T in as many vectors V as they take.
template <typename T, typename V>
struct Sixteen {
    V part[kVectors];
    __attribute__((always_inline)) T& operator[](int64_t lane) { return reinterpret_cast<T*>(part)[lane]; }
    __attribute__((always_inline)) T operator[](int64_t lane) const { return reinterpret_cast<const T*>(part)[lane]; }
};
typedef Sixteen<float, f32v> f32x16;
typedef Sixteen<int32_t, i32v> i32x16;
typedef Sixteen<uint32_t, u32v> u32x16;

template <typename T, typename V>
RLHF_INLINE V& part(Sixteen<T, V>& x, int i) { return x.part[i]; }
template <typename T, typename V>
RLHF_INLINE const V& part(const Sixteen<T, V>& x, int i) { return x.part[i]; }

#define RLHF_EACH _Pragma("GCC unroll 4") for (int i = 0; i < kVectors; ++i)

// x op y of equal types, and of a vector with a number on either side.
#define RLHF_BINARY(op)                                                                                       \
    template <typename T, typename V>                                                                         \
    RLHF_INLINE Sixteen<T, V> operator op(Sixteen<T, V> x, Sixteen<T, V> y) {                                 \
        RLHF_EACH x.part[i] = x.part[i] op y.part[i];                                                         \
        return x;                                                                                             \
    }                                                                                                         \
    template <typename T, typename V>                                                                         \
    RLHF_INLINE Sixteen<T, V> operator op(Sixteen<T, V> x, T y) {                                             \
        RLHF_EACH x.part[i] = x.part[i] op y;                                                                 \
        return x;                                                                                             \
    }                                                                                                         \
    template <typename T, typename V>                                                                         \
    RLHF_INLINE Sixteen<T, V> operator op(T x, Sixteen<T, V> y) {                                             \
        RLHF_EACH y.part[i] = x op y.part[i];                                                                 \
        return y;                                                                                             \
    }
#define RLHF_ASSIGN(op)                                                                                       \
    template <typename T, typename V, typename Y>                                                             \
    RLHF_INLINE Sixteen<T, V>& operator op##=(Sixteen<T, V>& x, Y y) {                                        \
        return x = x op y;                                                                                    \
    }
#define RLHF_COMPARE(op)                                                                                      \
    template <typename T, typename V>                                                                         \
    RLHF_INLINE i32x16 operator op(Sixteen<T, V> x, Sixteen<T, V> y) {                                        \
        i32x16 mask;                                                                                          \
        RLHF_EACH mask.part[i] = (i32v)(x.part[i] op y.part[i]);                                              \
        return mask;                                                                                          \
    }                                                                                                         \
    template <typename T, typename V>                                                                         \
    RLHF_INLINE i32x16 operator op(Sixteen<T, V> x, T y) {                                                    \
        i32x16 mask;                                                                                          \
        RLHF_EACH mask.part[i] = (i32v)(x.part[i] op y);                                                      \
        return mask;                                                                                          \
    }
RLHF_BINARY(+) RLHF_BINARY(-) RLHF_BINARY(*) RLHF_BINARY(/) RLHF_BINARY(&) RLHF_BINARY(|) RLHF_BINARY(^)
RLHF_ASSIGN(+) RLHF_ASSIGN(-) RLHF_ASSIGN(*) RLHF_ASSIGN(/) RLHF_ASSIGN(|)
RLHF_COMPARE(<) RLHF_COMPARE(<=) RLHF_COMPARE(>) RLHF_COMPARE(>=) RLHF_COMPARE(==) RLHF_COMPARE(!=)
#undef RLHF_BINARY
#undef RLHF_ASSIGN
#undef RLHF_COMPARE

template <typename T, typename V>
RLHF_INLINE Sixteen<T, V> operator-(Sixteen<T, V> x) {
    RLHF_EACH x.part[i] = -x.part[i];
    return x;
}
template <typename T, typename V>
RLHF_INLINE Sixteen<T, V> operator~(Sixteen<T, V> x) {
    RLHF_EACH x.part[i] = ~x.part[i];
    return x;
}
template <typename T, typename V>
RLHF_INLINE Sixteen<T, V> operator<<(Sixteen<T, V> x, int n) {
    RLHF_EACH x.part[i] = x.part[i] << n;
    return x;
}
template <typename T, typename V>
RLHF_INLINE Sixteen<T, V> operator>>(Sixteen<T, V> x, int n) {
    RLHF_EACH x.part[i] = x.part[i] >> n;
    return x;
}

template <typename T, typename V>
RLHF_INLINE f32x16 as_float(Sixteen<T, V> x) {
    f32x16 y;
    RLHF_EACH y.part[i] = (f32v)x.part[i];
    return y;
}
RLHF_INLINE u32x16 as_words(f32x16 x) {
    u32x16 y;
    RLHF_EACH y.part[i] = (u32v)x.part[i];
    return y;
}
RLHF_INLINE i32x16 as_ints(f32x16 x) {
    i32x16 y;
    RLHF_EACH y.part[i] = (i32v)x.part[i];
    return y;
}
template <typename T, typename V>
RLHF_INLINE Sixteen<T, V> select(i32x16 mask, Sixteen<T, V> a, Sixteen<T, V> b) {
    RLHF_EACH a.part[i] = (V)selectv(mask.part[i], (f32v)a.part[i], (f32v)b.part[i]);
    return a;
}
#endif

RLHF_INLINE f32x16 splat(float x) {
    f32x16 y;
    for (int i = 0; i < kVectors; ++i) part(y, i) = splatv(x);
    return y;
}

// Vector by vector: a copy of all 64 bytes goes through memory in smaller pieces, and then the load of a vector waits for
// the stores of its parts.
RLHF_INLINE f32x16 load16(const float* p) {
    f32x16 x;
    for (int i = 0; i < kVectors; ++i) part(x, i) = loadv(p + i * kLanes);
    return x;
}

RLHF_INLINE void store16(float* p, f32x16 x) {
    for (int i = 0; i < kVectors; ++i) storev(p + i * kLanes, part(x, i));
}

// Sixteen 32-bit words from any address, and to one.
RLHF_INLINE u32x16 load_words16(const void* p) {
    u32x16 x;
    for (int i = 0; i < kVectors; ++i) std::memcpy(&part(x, i), static_cast<const char*>(p) + 4 * kLanes * i, 4 * kLanes);
    return x;
}

RLHF_INLINE void store_words16(void* p, u32x16 x) {
    for (int i = 0; i < kVectors; ++i) std::memcpy(static_cast<char*>(p) + 4 * kLanes * i, &part(x, i), 4 * kLanes);
}

RLHF_INLINE f32x16 muladd(f32x16 a, f32x16 b, f32x16 c) {
    for (int i = 0; i < kVectors; ++i) part(c, i) = muladdv(part(a, i), part(b, i), part(c, i));
    return c;
}

RLHF_INLINE f32x16 sqrt16(f32x16 x) {
    for (int i = 0; i < kVectors; ++i) {
        f32v& v = part(x, i);
#if defined(RLHF_AVX512)
        v = (f32v)_mm512_sqrt_ps((__m512)v);
#elif defined(RLHF_AVX2)
        v = (f32v)_mm256_sqrt_ps((__m256)v);
#else
        for (int j = 0; j < kLanes; ++j) v[j] = __builtin_sqrtf(v[j]);
#endif
    }
    return x;
}

// The larger lane; b's where a's is not larger, NaN included.
RLHF_INLINE f32x16 max16(f32x16 a, f32x16 b) {
#if defined(RLHF_AVX2)
    for (int i = 0; i < kVectors; ++i) part(a, i) = (f32v)_mm256_max_ps((__m256)part(a, i), (__m256)part(b, i));
    return a;
#else
    return select(a > b, a, b);
#endif
}

RLHF_INLINE f32x16 load16_bf16(const uint16_t* p) {
    f32x16 x;
    for (int i = 0; i < kVectors; ++i) part(x, i) = loadv(p + i * kLanes);
    return x;
}

// fp16 -> fp32 is exact; fp32 -> fp16 rounds to nearest even.
RLHF_INLINE f32x16 load16_f16(const uint16_t* p) {
    f32x16 x;
#if defined(RLHF_AVX512)
    x = (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(RLHF_AVX2)
    for (int i = 0; i < 2; ++i) x.part[i] = (f32v)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8 * i)));
#else
    for (int i = 0; i < 16; ++i) x[i] = rlhf::to_float(rlhf::Float16{p[i]});
#endif
    return x;
}

// Sixteen bf16 or fp16 as they lie in memory.
struct u16x16 {
    uint16_t lane[16];
};

// Rounds to nearest even; NaN stays NaN, and subnormal numbers stay too.
RLHF_INLINE u16x16 to_bf16(f32x16 x) {
    u16x16 out;
#if defined(RLHF_AVX512)
    _mm256_storeu_si256((__m256i*)out.lane, _mm512_cvtepi32_epi16((__m512i)bf16_bits(x)));
#elif defined(RLHF_AVX2)
    const __m256i mixed = _mm256_packus_epi32((__m256i)bf16_bits(x.part[0]), (__m256i)bf16_bits(x.part[1]));
    _mm256_storeu_si256((__m256i*)out.lane, _mm256_permute4x64_epi64(mixed, 0xd8));
#else
    for (int i = 0; i < kVectors; ++i) {
        const u16v narrow = __builtin_convertvector(bf16_bits(x.part[i]), u16v);
        std::memcpy(out.lane + i * kLanes, &narrow, sizeof narrow);
    }
#endif
    return out;
}

// What a product of bf16 makes of x: the CPU's own products take subnormal numbers for 0.
RLHF_INLINE u16x16 bf16_operand(f32x16 x) {
#if defined(RLHF_AVX512_BF16)
    u16x16 out;
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)x);
    std::memcpy(&out, &rounded, sizeof out);
    return out;
#else
    return to_bf16(x);
#endif
}

RLHF_INLINE u16x16 to_f16(f32x16 x) {
    u16x16 out;
#if defined(RLHF_AVX512)
    _mm256_storeu_si256((__m256i*)out.lane, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(RLHF_AVX2)
    for (int i = 0; i < 2; ++i) {
        const __m128i half = _mm256_cvtps_ph((__m256)x.part[i], _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128((__m128i*)(out.lane + 8 * i), half);
    }
#else
    for (int i = 0; i < 16; ++i) out.lane[i] = rlhf::Rounded<rlhf::Float16>::from(x[i]).bits;
#endif
    return out;
}

// Each of sixteen 16-bit words in a lane of its own.
RLHF_INLINE u32x16 widen(u16x16 x) {
    u32x16 wide;
    for (int i = 0; i < kVectors; ++i) {
        u16v raw;
        std::memcpy(&raw, x.lane + i * kLanes, sizeof raw);
        part(wide, i) = __builtin_convertvector(raw, u32v);
    }
    return wide;
}

// What x is as bf16, as a float again.
RLHF_INLINE f32x16 round_bf16(f32x16 x) {
    for (int i = 0; i < kVectors; ++i) part(x, i) = (f32v)(bf16_bits(part(x, i)) << 16);
    return x;
}

RLHF_INLINE bool any_lane(i32x16 mask) {
#if defined(RLHF_AVX512)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(RLHF_AVX2)
    return _mm256_movemask_ps((__m256)(mask.part[0] | mask.part[1])) != 0;
#else
    int32_t any = 0;
    for (int i = 0; i < 16; ++i) any |= mask[i];
    return any != 0;
#endif
}

// Lanes whose mask is set, as bits.
RLHF_INLINE uint32_t lane_bits(i32x16 mask) {
#if defined(RLHF_AVX512)
    return _mm512_movepi32_mask((__m512i)mask);
#elif defined(RLHF_AVX2)
    return uint32_t(_mm256_movemask_ps((__m256)mask.part[0])) | uint32_t(_mm256_movemask_ps((__m256)mask.part[1])) << 8;
#else
    uint32_t bits = 0;
    for (int i = 0; i < 16; ++i) bits |= mask[i] ? 1u << i : 0u;
    return bits;
#endif
}

// x 2^n for whole n from -250 to 250, in two steps so that results near and below the smallest normal number come out right
// (or as 0). A NaN in x stays, whatever n is.
RLHF_INLINE f32x16 times_power(f32x16 x, f32x16 n) {
#if defined(RLHF_AVX512)
    return (f32x16)_mm512_scalef_ps((__m512)x, (__m512)n);
#else
    // The bits of 1.5 * 2^23 + n are those of 1.5 * 2^23 plus n.
    const i32x16 whole = as_ints(n + 12582912.0f) - int32_t(0x4b400000);
    const i32x16 half = whole >> 1;
    return x * as_float((half + int32_t(127)) << 23) * as_float((whole - half + int32_t(127)) << 23);
#endif
}

// 2^n p(r), where p is a polynomial of degree 6 for e^r, of a vector y and n with y = n ln2 + r: relative error about 1e-7.
// n: y log2(e) rounded. `power`: what is taken off n, which scales the result exactly.
RLHF_INLINE f32x16 exp_by_parts(f32x16 y, f32x16 power) {
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
    return times_power(p, n - power);  // NaN comes through r
}

// exp(x), relative error about 1e-7 (2 ulp). -inf gives 0, NaN NaN.
RLHF_INLINE f32x16 exp16(f32x16 x) {
    const f32x16 low = max16(splat(-104.0f), x);  // NaN stays: the second operand wins
#if defined(RLHF_AVX512)
    const f32x16 y = (f32x16)_mm512_min_ps(_mm512_set1_ps(89.0f), (__m512)low);
#elif defined(RLHF_AVX2)
    f32x16 y = low;
    for (int i = 0; i < kVectors; ++i) y.part[i] = (f32v)_mm256_min_ps(_mm256_set1_ps(89.0f), (__m256)low.part[i]);
#else
    const f32x16 y = select(low > 89.0f, splat(89.0f), low);
#endif
    return exp_by_parts(y, splat(0.0f));
}

// tanh(x), relative error about 2e-7; a series near 0, where 1 - exp(-2|x|) would cancel.
RLHF_INLINE f32x16 tanh16(f32x16 x) {
    const f32x16 size = select(x < 0.0f, -x, x);
    const f32x16 e = exp16(-2.0f * size);
    const f32x16 far = (1.0f - e) / (1.0f + e);
    const f32x16 square = x * x;
    f32x16 series = splat(-1382.0f / 155925);
    series = muladd(series, square, splat(62.0f / 2835));
    series = muladd(series, square, splat(-17.0f / 315));
    series = muladd(series, square, splat(2.0f / 15));
    series = muladd(series, square, splat(-1.0f / 3));
    series = muladd(series * square, x, x);
    return select(size < 0.35f, series, select(x < 0.0f, -far, far));
}

#if !defined(RLHF_AVX512)
// The kLanes columns of x become rows, for one square of vectors.
RLHF_INLINE void transpose_square(const u32v* x, u32v* out) {
#if defined(RLHF_AVX2)
    __m256i a[8], b[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        a[2 * i] = _mm256_unpacklo_epi32((__m256i)x[2 * i], (__m256i)x[2 * i + 1]);
        a[2 * i + 1] = _mm256_unpackhi_epi32((__m256i)x[2 * i], (__m256i)x[2 * i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
        b[4 * i + 0] = _mm256_unpacklo_epi64(a[4 * i + 0], a[4 * i + 2]);
        b[4 * i + 1] = _mm256_unpackhi_epi64(a[4 * i + 0], a[4 * i + 2]);
        b[4 * i + 2] = _mm256_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
        b[4 * i + 3] = _mm256_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        out[i] = (u32v)_mm256_permute2x128_si256(b[i], b[4 + i], 0x20);
        out[4 + i] = (u32v)_mm256_permute2x128_si256(b[i], b[4 + i], 0x31);
    }
#else
#if defined(__clang__)
#define RLHF_SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define RLHF_SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, u32v{i, j, k, l})
#endif
    const u32v low01 = RLHF_SHUFFLE(x[0], x[1], 0, 4, 1, 5), high01 = RLHF_SHUFFLE(x[0], x[1], 2, 6, 3, 7);
    const u32v low23 = RLHF_SHUFFLE(x[2], x[3], 0, 4, 1, 5), high23 = RLHF_SHUFFLE(x[2], x[3], 2, 6, 3, 7);
    out[0] = RLHF_SHUFFLE(low01, low23, 0, 1, 4, 5);
    out[1] = RLHF_SHUFFLE(low01, low23, 2, 3, 6, 7);
    out[2] = RLHF_SHUFFLE(high01, high23, 0, 1, 4, 5);
    out[3] = RLHF_SHUFFLE(high01, high23, 2, 3, 6, 7);
#undef RLHF_SHUFFLE
#endif
}
#endif

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
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 4
        for (int w = 0; w < kVectors; ++w) {
            u32v square[kLanes], turned[kLanes];
#pragma GCC unroll 8
            for (int i = 0; i < kLanes; ++i) square[i] = x[w * kLanes + i].part[v];
            transpose_square(square, turned);
#pragma GCC unroll 8
            for (int i = 0; i < kLanes; ++i) {
                std::memcpy(out + (v * kLanes + i) * out_stride + w * kLanes, &turned[i], sizeof turned[i]);
            }
        }
    }
#endif
}
