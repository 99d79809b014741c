// Attention of queries over keys, sixteen positions at a time, in one order of arithmetic; namespace RLHF_SET.
// decode_attention_kernel.inc.h and attention_kernel.inc.h share it, so that a row has the same bits in both.
//
// A tile begins at a multiple of sixteen positions. A score sums its features in sixteen lanes and then the lanes; the
// exponentials' sum has a lane for each place in a tile; values are added position by position, and their sum is divided
// by the total at the end. What a query does not see is masked or left out, which changes no bit of the rest.

#include <cstddef>

#include "cpu/decode_attention_rows.h"
#include "cpu/simd.h"

namespace rlhf::cpu::RLHF_SET {
namespace attention_rows {

constexpr int64_t kTile = kCopied;  // positions

RLHF_INLINE f32x16 load(const float* p) { return load16(p); }
RLHF_INLINE f32x16 load(const uint16_t* p) { return load16_bf16(p); }

// The first `count` of sixteen elements, at most all, and zeros.
template <typename T>
RLHF_INLINE f32x16 load(const T* p, int64_t count) {
    if (count >= 16) return load(p);
#if defined(RLHF_AVX512)
    const __mmask16 some = static_cast<__mmask16>((1u << count) - 1);
    if constexpr (sizeof(T) == 4) return (f32x16)_mm512_maskz_loadu_ps(some, p);
    const __m512i raw = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, p));
    return (f32x16)_mm512_slli_epi32(raw, 16);
#else
    T padded[16] = {};
    std::memcpy(padded, p, sizeof(T) * count);
    return load(padded);
#endif
}

// The first `count` lanes, at most all, rounded to T.
RLHF_INLINE void store(float* p, f32x16 x, int64_t count) {
    if (count >= 16) return store16(p, x);
    std::memcpy(p, &x, 4 * count);
}
RLHF_INLINE void store(uint16_t* p, f32x16 x, int64_t count) {
    const u16x16 rounded = to_bf16(x);
    if (count >= 16) {
        std::memcpy(p, &rounded, sizeof rounded);
    } else {
        std::memcpy(p, &rounded, 2 * count);
    }
}

RLHF_INLINE float to_float(float x) { return x; }
RLHF_INLINE float to_float(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

// x in lanes [begin, end), which may reach beyond the sixteen, and `other` elsewhere.
RLHF_INLINE f32x16 between(f32x16 x, int64_t begin, int64_t end, float other) {
    const uint32_t from = begin > 0 ? uint32_t(begin) : 0, to = end < 16 ? uint32_t(end > 0 ? end : 0) : 16;
    return select(lane_numbers() - from < (to > from ? to - from : 0), x, splat(other));
}

// ---- sums over lanes ------------------------------------------------------------------------------------------------

typedef float f32x4 __attribute__((vector_size(16)));

RLHF_INLINE f32x4 quarter_of(f32x16 x, int i) {
    f32x4 four;
#if defined(RLHF_AVX512)
    four = (f32x4)(i == 0   ? _mm512_extractf32x4_ps((__m512)x, 0)
                   : i == 1 ? _mm512_extractf32x4_ps((__m512)x, 1)
                   : i == 2 ? _mm512_extractf32x4_ps((__m512)x, 2)
                            : _mm512_extractf32x4_ps((__m512)x, 3));
#elif defined(RLHF_AVX2)
    four = (f32x4)(i % 2 == 0 ? _mm256_extractf128_ps((__m256)x.part[i / 2], 0)
                              : _mm256_extractf128_ps((__m256)x.part[i / 2], 1));
#else
    four = x.part[i];
#endif
    return four;
}

RLHF_INLINE float lane_max(f32x16 x) {
    const auto larger = [](auto a, auto b) __attribute__((always_inline)) { return b > a ? b : a; };
    const f32x4 low = larger(quarter_of(x, 0), quarter_of(x, 2)), high = larger(quarter_of(x, 1), quarter_of(x, 3));
    const f32x4 four = larger(low, high);
    return larger(larger(float(four[0]), float(four[2])), larger(float(four[1]), float(four[3])));
}

RLHF_INLINE float lane_sum(f32x16 x) {
    const f32x4 four = (quarter_of(x, 0) + quarter_of(x, 2)) + (quarter_of(x, 1) + quarter_of(x, 3));
    return (four[0] + four[2]) + (four[1] + four[3]);
}

// The way of four vectors towards the sums of their lanes, as far as it goes within one vector of the target.
RLHF_INLINE f32v sums_of_four(const f32x16 x[4]) {
#if defined(RLHF_AVX512)
    __m512 pairs[2];
    for (int i = 0; i < 2; ++i) {
        const __m512 a = (__m512)x[2 * i], b = (__m512)x[2 * i + 1];
        pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    }
    const __m512d a = _mm512_castps_pd(pairs[0]), b = _mm512_castps_pd(pairs[1]);
    const __m512d low = _mm512_unpacklo_pd(a, b), high = _mm512_unpackhi_pd(a, b);
    return (f32v)_mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
#elif defined(RLHF_AVX2)
    __m256 eights[4];
    for (int i = 0; i < 4; ++i) eights[i] = (__m256)(x[i].part[0] + x[i].part[1]);
    return (f32v)_mm256_hadd_ps(_mm256_hadd_ps(eights[0], eights[1]), _mm256_hadd_ps(eights[2], eights[3]));
#else
    f32v sums;
    for (int i = 0; i < 4; ++i) {
        const f32v four = (x[i].part[0] + x[i].part[1]) + (x[i].part[2] + x[i].part[3]);
        sums[i] = (four[0] + four[1]) + (four[2] + four[3]);
    }
    return sums;
#endif
}

// The sums of all sixteen vectors' lanes, from those of four each.
RLHF_INLINE f32x16 all_sums(const f32v fours[4]) {
#if defined(RLHF_AVX512)
    const auto halve = [](__m512 a, __m512 b) __attribute__((always_inline)) {
        return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    };
    return (f32x16)halve(halve((__m512)fours[0], (__m512)fours[1]), halve((__m512)fours[2], (__m512)fours[3]));
#elif defined(RLHF_AVX2)
    f32x16 sums;
    for (int half = 0; half < 2; ++half) {
        const __m256 a = (__m256)fours[2 * half], b = (__m256)fours[2 * half + 1];
        const __m256 low = _mm256_permute2f128_ps(a, b, 0x20), high = _mm256_permute2f128_ps(a, b, 0x31);
        sums.part[half] = (f32v)_mm256_add_ps(low, high);
    }
    return sums;
#else
    f32x16 sums;
    for (int i = 0; i < 4; ++i) sums.part[i] = fours[i];
    return sums;
#endif
}

// ---- products -------------------------------------------------------------------------------------------------------

// body(number of rows, first row) for all of `count` rows, MOST or a smaller power of two of them together.
template <int MOST, typename Body>
RLHF_INLINE void together(int64_t first, int64_t end, const Body& body) {
    for (; first + MOST <= end; first += MOST) body(std::integral_constant<int, MOST>(), first);
    if constexpr (MOST > 1) together<MOST / 2>(first, end, body);
}

// sums[r][i] = the sixteen lanes of x(r) · row i over `features`, where x(r) is padded with zeros.
template <int ROWS, int KEYS, typename T, typename X>
RLHF_INLINE void multiply(const T* const* rows, const X& x, int64_t features, f32x16 (*sums)[KEYS]) {
    const auto add = [&](int64_t d, const auto& read, auto first) __attribute__((always_inline)) {
        f32x16 query[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) query[r] = load16(x(r) + d);
#pragma GCC unroll 16
        for (int i = 0; i < KEYS; ++i) {
            const f32x16 row = read(rows[i] + d);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) {
                if constexpr (first) {
                    sums[r][i] = row * query[r];
                } else {
                    sums[r][i] = muladd(row, query[r], sums[r][i]);
                }
            }
        }
    };
    const auto whole = [](const T* p) __attribute__((always_inline)) { return load(p); };
    add(0, [=](const T* p) __attribute__((always_inline)) { return load(p, features); }, std::true_type());
    int64_t d = 16;
    for (; d + 16 <= features; d += 16) add(d, whole, std::false_type());
    const int64_t left = features - d;
    if (left > 0) add(d, [=](const T* p) __attribute__((always_inline)) { return load(p, left); }, std::false_type());
}

constexpr int kScored = kSums16 >= 16 ? 4 : kSums16 >= 4 ? 2 : 1;  // queries that share what is loaded of a tile

// z[r] = x(r) · row i in lane i, for sixteen rows.
template <int ROWS, typename T, typename X>
RLHF_INLINE void score_of(const T* const* rows, const X& x, int64_t features, f32x16* z) {
    // As many rows at a time as the registers hold.
    constexpr int kKeys = power_below(at_least_one(kSums16 / ROWS)), kStretch = kKeys < 4 ? 4 : kKeys;
    f32v fours[ROWS][4];
#pragma GCC unroll 4
    for (int i0 = 0; i0 < kTile; i0 += kStretch) {
        f32x16 products[ROWS][kStretch];
#pragma GCC unroll 4
        for (int j = 0; j < kStretch; j += kKeys) {
            f32x16 sums[ROWS][kKeys];
            multiply<ROWS, kKeys>(rows + i0 + j, x, features, sums);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 16
                for (int i = 0; i < kKeys; ++i) products[r][j + i] = sums[r][i];
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
            for (int i = 0; i < kStretch; i += 4) fours[r][(i0 + i) / 4] = sums_of_four(products[r] + i);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) z[r] = all_sums(fours[r]);
}

// The same for queries that are `step` apart.
template <int ROWS, typename T>
RLHF_INLINE void score(const T* const* rows, const float* x, int64_t step, int64_t features, f32x16* z) {
    score_of<ROWS>(rows, [=](int r) __attribute__((always_inline)) { return x + r * step; }, features, z);
}

// Where the weights of an `add_rows` stand: of sum s and row i at[s * sum + i * row].
struct Weights {
    const float* at;
    int64_t sum, row;
};

// How products of rows join the sums there are: one after the other, or once they are summed up themselves.
enum class Joining { row_by_row, together };

// out [SUMS, `padded` apart] += weights times VECTORS vectors of rows [begin, end), the last of which has `last` elements.
template <Joining JOINING, int SUMS, int VECTORS, typename T>
RLHF_INLINE void add_vectors(const T* const* rows, int64_t begin, int64_t end, int64_t last, const Weights& weights,
                             int64_t d, float* out, int64_t padded) {
    f32x16 sum[SUMS][VECTORS];
#pragma GCC unroll 4
    for (int s = 0; s < SUMS; ++s) {
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; ++j) {
            sum[s][j] = JOINING == Joining::row_by_row ? load16(out + s * padded + d + 16 * j) : splat(0.0f);
        }
    }
    for (int64_t i = begin; i < end; ++i) {
        f32x16 x[VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j + 1 < VECTORS; ++j) x[j] = load(rows[i] + d + 16 * j);
        x[VECTORS - 1] = load(rows[i] + d + 16 * (VECTORS - 1), last);
#pragma GCC unroll 4
        for (int s = 0; s < SUMS; ++s) {
            const f32x16 weight = splat(weights.at[s * weights.sum + i * weights.row]);
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; ++j) sum[s][j] = muladd(weight, x[j], sum[s][j]);
        }
    }
#pragma GCC unroll 4
    for (int s = 0; s < SUMS; ++s) {
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; ++j) {
            float* to = out + s * padded + d + 16 * j;
            store16(to, JOINING == Joining::row_by_row ? sum[s][j] : load16(to) + sum[s][j]);
        }
    }
}

constexpr int kAdded = 4;  // sums that share what is loaded of a row

// out [SUMS, `padded` apart] += weights times rows [begin, end) of `features`.
template <Joining JOINING, int SUMS, typename T>
RLHF_INLINE void add_rows(const T* const* rows, int64_t begin, int64_t end, int64_t features, const Weights& weights,
                          float* out, int64_t padded) {
    constexpr int kVectors16 = power_below(at_least_one(kSums16 / SUMS));
    constexpr int kTogether = kVectors16 < 4 ? kVectors16 : 4;
    int64_t d = 0;
    for (; kTogether > 1 && d + 16 * kTogether <= features; d += 16 * kTogether) {
        add_vectors<JOINING, SUMS, kTogether>(rows, begin, end, 16, weights, d, out, padded);
    }
    for (; d < features; d += 16) add_vectors<JOINING, SUMS, 1>(rows, begin, end, features - d, weights, d, out, padded);
}

// ---- softmax --------------------------------------------------------------------------------------------------------

RLHF_INLINE f32x16 capped(f32x16 z, float softcap) { return softcap != 0.0f ? tanh16(z / softcap) * softcap : z; }

struct Total {
    float largest, sum;
};

// The scores become exponentials of their distance from the largest one: those of positions [begin, end) of the tiles
// from `scores` on, begin < 16. Others of these tiles are -inf and become 0, but not by way of their exponentials: a
// result that underflows costs a hundred cycles. The sum has e^sink too, which is 0 for -inf.
RLHF_INLINE Total exponentials(float* scores, int64_t begin, int64_t end, float sink) {
    f32x16 top = splat(sink);
    for (int64_t i = 0; i < end; i += 16) top = max16(load16(scores + i), top);
    const float largest = lane_max(top);
    f32x16 sum = splat(0.0f);
    for (int64_t i = 0; i < end; i += 16) {
        const bool edge = i < begin || i + 16 > end;
        f32x16 z = load16(scores + i);
        if (edge) z = between(z, begin - i, end - i, largest);
        f32x16 e = exp16(z - largest);
        if (edge) e = between(e, begin - i, end - i, 0.0f);
        sum += e;
        store16(scores + i, e);
    }
    const float start = sink == -__builtin_inff() ? 0.0f : exp16(splat(sink - largest))[0];
    return {largest, lane_sum(sum) + start};
}

// A row of queries as floats, times the scale, padded with zeros to whole vectors.
template <typename T>
RLHF_INLINE void scaled(const T* from, int64_t inner, int64_t features, float scale, float* to) {
    for (int64_t d = 0; d < features; d += 16) {
        const int64_t left = features - d;
        if (inner == 1) {
            store16(to + d, load(from + d, left) * scale);
            continue;
        }
        for (int64_t i = 0; i < 16; ++i) to[d + i] = i < left ? to_float(from[(d + i) * inner]) * scale : 0.0f;
    }
}

// A row of sums over the softmax's total, as T.
template <typename T>
RLHF_INLINE void divided(const float* sums, int64_t features, float total, T* to) {
    for (int64_t d = 0; d < features; d += 16) store(to + d, load16(sums + d) / total, features - d);
}

}  // namespace attention_rows
}  // namespace rlhf::cpu::RLHF_SET
