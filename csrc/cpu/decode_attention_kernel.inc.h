// decode_attention.cpp's work on one row and cache head; namespace RLHF_SET. Sixteen positions at a time, so that a key
// or a value comes from memory once for all query heads that share it: scores first, then their softmax, then the
// values.

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

// x with `other` in lanes from `count` on.
RLHF_INLINE f32x16 first_lanes(f32x16 x, int64_t count, float other) {
    return select(lane_numbers() < static_cast<uint32_t>(count > 0 ? count : 0), x, splat(other));
}

RLHF_INLINE float lane_max(f32x16 x) {
    float lanes[16];
    store16(lanes, x);
    for (int step = 8; step > 0; step /= 2) {
        for (int i = 0; i < step; ++i) lanes[i] = lanes[i + step] > lanes[i] ? lanes[i + step] : lanes[i];
    }
    return lanes[0];
}

RLHF_INLINE float lane_sum(f32x16 x) {
    float lanes[16];
    store16(lanes, x);
    for (int step = 8; step > 0; step /= 2) {
        for (int i = 0; i < step; ++i) lanes[i] += lanes[i + step];
    }
    return lanes[0];
}

RLHF_INLINE float to_float(float x) { return x; }
RLHF_INLINE float to_float(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

// sums[i] = the sum of x[i]'s lanes.
RLHF_INLINE f32x16 lane_sums(const f32x16 x[16]) {
#if defined(RLHF_AVX512)
    __m512 pairs[8], fours[4];
    for (int i = 0; i < 8; ++i) {
        const __m512 a = (__m512)x[2 * i], b = (__m512)x[2 * i + 1];
        pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    }
    for (int i = 0; i < 4; ++i) {
        const __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
        const __m512d low = _mm512_unpacklo_pd(a, b), high = _mm512_unpackhi_pd(a, b);
        fours[i] = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    }
    const auto halve = [](__m512 a, __m512 b) __attribute__((always_inline)) {
        return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    };
    return (f32x16)halve(halve(fours[0], fours[1]), halve(fours[2], fours[3]));
#elif defined(RLHF_AVX2)
    f32x16 sums;
    for (int half = 0; half < 2; ++half) {
        __m256 eights[8];
        for (int i = 0; i < 8; ++i) eights[i] = (__m256)(x[8 * half + i].part[0] + x[8 * half + i].part[1]);
        const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(eights[0], eights[1]), _mm256_hadd_ps(eights[2], eights[3]));
        const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(eights[4], eights[5]), _mm256_hadd_ps(eights[6], eights[7]));
        const __m256 low = _mm256_permute2f128_ps(a, b, 0x20), high = _mm256_permute2f128_ps(a, b, 0x31);
        sums.part[half] = (f32v)_mm256_add_ps(low, high);
    }
    return sums;
#else
    f32x16 sums;
    for (int i = 0; i < 16; ++i) {
        const f32v four = (x[i].part[0] + x[i].part[1]) + (x[i].part[2] + x[i].part[3]);
        sums[i] = (four[0] + four[1]) + (four[2] + four[3]);
    }
    return sums;
#endif
}

// Keys or values of one cache head.
struct Pages {
    const void* data;
    int64_t block_stride, position_stride, inner;
};

// Where up to kTile positions from `position` on start. Places past `count` repeat the last one.
template <typename T>
RLHF_INLINE void find_rows(const DecodeCall& call, const int64_t* table, const Pages& pages, int64_t position,
                           int64_t count, const T** rows) {
    for (int64_t i = 0, page = position / call.block, at = position % call.block; i < count; ++page, at = 0) {
        const T* from = static_cast<const T*>(pages.data) + table[page] * pages.block_stride + at * pages.position_stride;
        const int64_t here = call.block - at < count - i ? i + call.block - at : count;
        for (; i < here; ++i, from += pages.position_stride) rows[i] = from;
    }
    for (int64_t i = count; i < kTile; ++i) rows[i] = rows[count - 1];
}

// A position's row is a few lines, and the next one may lie behind those of all other heads: too short for the processor
// to foresee, so the next tile is asked for here.
template <typename T>
RLHF_INLINE void prefetch([[maybe_unused]] const T* const* rows, [[maybe_unused]] int64_t count,
                          [[maybe_unused]] int64_t features) {
#if defined(RLHF_AVX512) || defined(RLHF_AVX2)
    for (int64_t i = 0; i < count; ++i) {
        for (int64_t d = 0; d < features; d += 64 / int64_t(sizeof(T))) {
            _mm_prefetch(reinterpret_cast<const char*>(rows[i] + d), _MM_HINT_T0);
        }
    }
#endif
}

// body(rows, position, count, features) for every tile of [first, length): rows of as many features where they lie, or
// padded copies of them.
template <typename T, typename Body>
RLHF_INLINE void for_tiles(const DecodeCall& call, const HeadGroup& group, const Pages& pages, float* copies,
                           const Body& body) {
    const bool in_place = pages.inner == 1;
    const T* both[2][kTile];
    int64_t count = group.length - group.first < kTile ? group.length - group.first : kTile, next = 0;
    find_rows(call, group.table, pages, group.first, count, both[0]);
    int side = 0;
    for (int64_t position = group.first; position < group.length; position += kTile, count = next, side ^= 1) {
        const T** rows = both[side];
        const int64_t left = group.length - position - kTile;
        next = left < kTile ? left : kTile;
        if (next > 0) {
            find_rows(call, group.table, pages, position + kTile, next, both[side ^ 1]);
            prefetch(both[side ^ 1], next, call.features);
        }
        if (in_place) {
            body(rows, position - group.first, count, call.features);
            continue;
        }
        const float* copied[kTile];
        for (int64_t i = 0; i < kTile; ++i) {
            float* to = copies + i * call.padded_features;
            copied[i] = to;
            if (i >= count) continue;
            for (int64_t d = 0; d < call.features; ++d) to[d] = to_float(rows[i][d * pages.inner]);
            for (int64_t d = call.features; d < call.padded_features; ++d) to[d] = 0.0f;
        }
        for (int64_t i = count; i < kTile; ++i) copied[i] = copied[count - 1];
        body(copied, position - group.first, count, call.padded_features);
    }
}

// Scores of kTile positions for one query, padded with zeros to whole vectors.
template <typename T>
RLHF_INLINE f32x16 score(const T* const* rows, const float* q, int64_t features) {
    f32x16 products[kTile];
    // As many rows at a time as the registers hold.
    constexpr int kRows = power_below(kSums16);
#pragma GCC unroll 4
    for (int i0 = 0; i0 < kTile; i0 += kRows) {
        f32x16 sums[kRows];
        const f32x16 first = load16(q);
#pragma GCC unroll 16
        for (int i = 0; i < kRows; ++i) sums[i] = load(rows[i0 + i], features) * first;
        int64_t d = 16;
        for (; d + 16 <= features; d += 16) {
            const f32x16 x = load16(q + d);
#pragma GCC unroll 16
            for (int i = 0; i < kRows; ++i) sums[i] = muladd(load(rows[i0 + i] + d), x, sums[i]);
        }
        if (d < features) {
            const f32x16 x = load16(q + d);
#pragma GCC unroll 16
            for (int i = 0; i < kRows; ++i) sums[i] = muladd(load(rows[i0 + i] + d, features - d), x, sums[i]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < kRows; ++i) products[i0 + i] = sums[i];
    }
    return lane_sums(products);
}

// out [HEADS, `padded` apart] += weights [HEADS, `step` apart] times VECTORS vectors of `count` rows, the last of which has
// `last` elements.
template <int HEADS, int VECTORS, typename T>
RLHF_INLINE void add_values(const T* const* rows, int64_t count, int64_t last, const float* weights, int64_t step,
                            int64_t d, float* out, int64_t padded) {
    f32x16 sum[HEADS][VECTORS];
    for (int h = 0; h < HEADS; ++h) {
        for (int j = 0; j < VECTORS; ++j) sum[h][j] = load16(out + h * padded + d + 16 * j);
    }
    for (int64_t i = 0; i < count; ++i) {
        f32x16 x[VECTORS];
        for (int j = 0; j + 1 < VECTORS; ++j) x[j] = load(rows[i] + d + 16 * j);
        x[VECTORS - 1] = load(rows[i] + d + 16 * (VECTORS - 1), last);
        for (int h = 0; h < HEADS; ++h) {
            const f32x16 weight = splat(weights[h * step + i]);
            for (int j = 0; j < VECTORS; ++j) sum[h][j] = muladd(weight, x[j], sum[h][j]);
        }
    }
    for (int h = 0; h < HEADS; ++h) {
        for (int j = 0; j < VECTORS; ++j) store16(out + h * padded + d + 16 * j, sum[h][j]);
    }
}

template <int HEADS, typename T>
RLHF_INLINE void add_values(const T* const* rows, int64_t count, int64_t features, const float* weights, int64_t step,
                            float* out, int64_t padded) {
    constexpr int kTogether = power_below(kSums16 / HEADS) < 4 ? power_below(kSums16 / HEADS) : 4;
    int64_t d = 0;
    for (; kTogether > 1 && d + 16 * kTogether <= features; d += 16 * kTogether) {
        add_values<HEADS, kTogether>(rows, count, 16, weights, step, d, out, padded);
    }
    for (; d < features; d += 16) add_values<HEADS, 1>(rows, count, features - d, weights, step, d, out, padded);
}

// The first `used` of scores become their softmax, the last vector's others (-inf) 0: not by way of their exponentials,
// because a result that underflows costs a hundred cycles. Their sum begins with e^sink, which is 0 for -inf.
RLHF_INLINE void softmax(float* scores, int64_t used, float sink) {
    f32x16 top = splat(sink);
    for (int64_t i = 0; i < used; i += 16) top = max16(load16(scores + i), top);
    const float largest = lane_max(top);
    f32x16 sum = splat(0.0f);
    for (int64_t i = 0; i < used; i += 16) {
        const f32x16 z = first_lanes(load16(scores + i), used - i, largest);
        const f32x16 e = first_lanes(exp16(z - largest), used - i, 0.0f);
        sum += e;
        store16(scores + i, e);
    }
    const float start = sink == -__builtin_inff() ? 0.0f : exp16(splat(sink - largest))[0];
    const float total = lane_sum(sum) + start;
    for (int64_t i = 0; i < used; i += 16) store16(scores + i, load16(scores + i) / total);
}

template <typename T>
RLHF_INLINE void attend(const DecodeCall& call, const HeadGroup& group, float* scratch) {
    const int64_t padded = call.padded_features, used = group.length - group.first, step = (used + 15) / 16 * 16;
    float *q = scratch, *out = q + call.group * padded, *copies = out + call.group * padded;
    float* scores = copies + kCopied * padded;
    for (int64_t h = 0; h < call.group; ++h) {
        const T* from = static_cast<const T*>(group.q) + h * group.q_head;
        for (int64_t d = 0; d < padded; d += 16) {
            const int64_t left = call.features - d;
            store16(out + h * padded + d, splat(0.0f));
            if (group.q_inner == 1) {
                store16(q + h * padded + d, load(from + d, left) * call.options.scale);
                continue;
            }
            for (int64_t i = 0; i < 16; ++i) {
                q[h * padded + d + i] = i < left ? to_float(from[(d + i) * group.q_inner]) * call.options.scale : 0.0f;
            }
        }
    }
    const Pages keys{group.k, call.k_block, call.k_position, call.k_inner};
    const float softcap = call.options.softcap;
    const auto score_tile = [&](const auto* rows, int64_t at, int64_t count, int64_t features)
        __attribute__((always_inline)) {
            for (int64_t h = 0; h < call.group; ++h) {
                f32x16 z = score(rows, q + h * padded, features);
                if (softcap != 0.0f) z = tanh16(z / softcap) * softcap;
                store16(scores + h * step + at, first_lanes(z, count, -__builtin_inff()));
            }
        };
    for_tiles<T>(call, group, keys, copies, score_tile);
    for (int64_t h = 0; h < call.group; ++h) {
        softmax(scores + h * step, used, group.sinks ? group.sinks[h] : -__builtin_inff());
    }
    const Pages values{group.v, call.v_block, call.v_position, call.v_inner};
    const auto add_tile = [&](const auto* rows, int64_t at, int64_t count, int64_t features)
        __attribute__((always_inline)) {
            const float* weights = scores + at;
            int64_t h = 0;
            for (; h + 4 <= call.group; h += 4) {
                add_values<4>(rows, count, features, weights + h * step, step, out + h * padded, padded);
            }
            for (; h + 2 <= call.group; h += 2) {
                add_values<2>(rows, count, features, weights + h * step, step, out + h * padded, padded);
            }
            if (h < call.group) add_values<1>(rows, count, features, weights + h * step, step, out + h * padded, padded);
        };
    for_tiles<T>(call, group, values, copies, add_tile);
    T* to = static_cast<T*>(group.out);
    for (int64_t h = 0; h < call.group; ++h) {
        for (int64_t d = 0; d < call.features; d += 16) {
            const int64_t count = call.features - d < 16 ? call.features - d : 16;
            const f32x16 x = load16(out + h * padded + d);
            if constexpr (sizeof(T) == 2) {
                const u16x16 rounded = to_bf16(x);
                std::memcpy(to + h * call.features + d, &rounded, 2 * count);
            } else {
                std::memcpy(to + h * call.features + d, &x, 4 * count);
            }
        }
    }
}

}  // namespace attention_rows

void decode_group(const DecodeCall& call, const HeadGroup& group, float* scratch) {
    if (call.type == CacheType::bfloat16) {
        attention_rows::attend<uint16_t>(call, group, scratch);
    } else {
        attention_rows::attend<float>(call, group, scratch);
    }
}

}  // namespace rlhf::cpu::RLHF_SET
