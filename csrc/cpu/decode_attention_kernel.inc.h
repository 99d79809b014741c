// decode_attention.cpp's work on one row and cache head; namespace RLHF_SET. Sixteen positions at a time, so that a key
// or a value comes from memory once for all query heads that share it: scores first, then their softmax, then the
// values. The arithmetic is that of attention_lanes.inc.h.

#include "cpu/decode_attention_rows.h"

namespace rlhf::cpu::RLHF_SET {
namespace attention_rows {

// Keys or values of one cache head.
struct Pages {
    const void* data;
    int64_t block_stride, position_stride, inner;
};

// Where positions begin to end - 1 of the tile from `tile` on stand. Places outside of them repeat the nearest one.
template <typename T>
RLHF_INLINE void find_rows(const DecodeCall& call, const int64_t* table, const Pages& pages, int64_t tile,
                           int64_t begin, int64_t end, const T** rows) {
    const int64_t position = tile + begin;
    for (int64_t i = begin, page = position / call.block, at = position % call.block; i < end; ++page, at = 0) {
        const T* from = static_cast<const T*>(pages.data) + table[page] * pages.block_stride + at * pages.position_stride;
        const int64_t here = call.block - at < end - i ? i + call.block - at : end;
        for (; i < here; ++i, from += pages.position_stride) rows[i] = from;
    }
    for (int64_t i = 0; i < begin; ++i) rows[i] = rows[begin];
    for (int64_t i = end; i < kTile; ++i) rows[i] = rows[end - 1];
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

// The group's first tile: tiles begin at multiples of kTile, whatever the window.
RLHF_INLINE int64_t first_tile(const HeadGroup& group) { return group.first / kTile * kTile; }

// body(rows, at, begin, end, features) for every tile that has positions of [first, length), `at` from the first tile on:
// rows [begin, end) of as many features where they lie, or padded copies of them.
template <typename T, typename Body>
RLHF_INLINE void for_tiles(const DecodeCall& call, const HeadGroup& group, const Pages& pages, float* copies,
                           const Body& body) {
    const bool in_place = pages.inner == 1;
    const T* both[2][kTile];
    const int64_t base = first_tile(group);
    int64_t begin = group.first - base, end = group.length - base < kTile ? group.length - base : kTile, next = 0;
    find_rows(call, group.table, pages, base, begin, end, both[0]);
    int side = 0;
    for (int64_t tile = base; tile < group.length; tile += kTile, begin = 0, end = next, side ^= 1) {
        const T** rows = both[side];
        const int64_t left = group.length - tile - kTile;
        next = left < kTile ? left : kTile;
        if (next > 0) {
            find_rows(call, group.table, pages, tile + kTile, 0, next, both[side ^ 1]);
            prefetch(both[side ^ 1], next, call.features);
        }
        if (in_place) {
            body(rows, tile - base, begin, end, call.features);
            continue;
        }
        const float* copied[kTile];
        for (int64_t i = begin; i < end; ++i) {
            float* to = copies + i * call.padded_features;
            copied[i] = to;
            for (int64_t d = 0; d < call.features; ++d) to[d] = to_float(rows[i][d * pages.inner]);
            for (int64_t d = call.features; d < call.padded_features; ++d) to[d] = 0.0f;
        }
        for (int64_t i = 0; i < begin; ++i) copied[i] = copied[begin];
        for (int64_t i = end; i < kTile; ++i) copied[i] = copied[end - 1];
        body(copied, tile - base, begin, end, call.padded_features);
    }
}

template <typename T>
RLHF_INLINE void attend(const DecodeCall& call, const HeadGroup& group, float* scratch) {
    const int64_t padded = call.padded_features, base = first_tile(group);
    const int64_t used = group.length - base, step = (used + 15) / 16 * 16;
    float *q = scratch, *out = q + call.group * padded, *copies = out + call.group * padded;
    float *scores = copies + kCopied * padded, *totals = scores + call.group * step;
    for (int64_t h = 0; h < call.group; ++h) {
        const T* from = static_cast<const T*>(group.q) + h * group.q_head;
        scaled(from, group.q_inner, call.features, call.options.scale, q + h * padded);
        for (int64_t d = 0; d < padded; d += 16) store16(out + h * padded + d, splat(0.0f));
    }
    const Pages keys{group.k, call.k_block, call.k_position, call.k_inner};
    const auto score_tile = [&](const auto* rows, int64_t at, int64_t begin, int64_t end, int64_t features)
        __attribute__((always_inline)) {
            together<kScored>(0, call.group, [&](auto heads, int64_t h) __attribute__((always_inline)) {
                f32x16 z[heads];
                score<heads>(rows, q + h * padded, padded, features, z);
                for (int i = 0; i < heads; ++i) {
                    const f32x16 seen = between(capped(z[i], call.options.softcap), begin, end, -__builtin_inff());
                    store16(scores + (h + i) * step + at, seen);
                }
            });
        };
    for_tiles<T>(call, group, keys, copies, score_tile);
    const Pages values{group.v, call.v_block, call.v_position, call.v_inner};
    for (int64_t h = 0; h < call.group; ++h) {
        const float sink = group.sinks ? group.sinks[h] : -__builtin_inff();
        totals[h] = exponentials(scores + h * step, group.first - base, used, sink).sum;
    }
    const auto add_tile = [&](const auto* rows, int64_t at, int64_t begin, int64_t end, int64_t features)
        __attribute__((always_inline)) {
            together<kAdded>(0, call.group, [&](auto heads, int64_t h) __attribute__((always_inline)) {
                const Weights weights{scores + h * step + at, step, 1};
                add_rows<Joining::row_by_row, heads>(rows, begin, end, features, weights, out + h * padded, padded);
            });
        };
    for_tiles<T>(call, group, values, copies, add_tile);
    T* to = static_cast<T*>(group.out);
    for (int64_t h = 0; h < call.group; ++h) {
        divided(out + h * padded, call.features, totals[h], to + h * call.features);
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
