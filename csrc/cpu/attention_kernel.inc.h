// attention.cpp's work on a block of queries of one sequence and cache head; namespace RLHF_SET. A tile of keys or values
// is loaded once for all rows of the block, a row being a position and a query head of the group. The arithmetic of a row
// is that of attention_lanes.inc.h, and so are its bits.

#include "cpu/attention_rows.h"

namespace rlhf::cpu::RLHF_SET {
namespace attention_rows {

// Where `count` rows of floats stand, which `row(i)` gives: in place if they are whole vectors of floats, else in copies
// that are padded with zeros. Places up to kTile past them repeat the last one.
template <typename T, typename Row>
RLHF_INLINE void find_floats(int64_t count, int64_t features, int64_t padded, float* copies, const float** rows,
                             const Row& row) {
    for (int64_t i = 0; i < count; ++i) {
        const T* from = row(i);
        if constexpr (sizeof(T) == 4) {
            if (features == padded) {
                rows[i] = from;
                continue;
            }
        }
        float* to = copies + i * padded;
        for (int64_t d = 0; d < features; d += 16) store16(to + d, load(from + d, features - d));
        rows[i] = to;
    }
    for (int64_t i = count; i < kTile; ++i) rows[i] = rows[count - 1];
}

template <typename T>
RLHF_INLINE const T* head_row(const Heads& heads, int64_t row, int64_t head) {
    return static_cast<const T*>(heads.data) + row * heads.row + head * heads.head;
}

// The row of a position.
RLHF_INLINE int64_t row_of(const SequenceKeys& keys, int64_t position) {
    return position < keys.shared ? keys.shared_row + position : keys.row + (position - keys.shared);
}

// The first position that the query at `position` sees.
RLHF_INLINE int64_t first_seen(const ScoreOptions& options, int64_t position) {
    return options.window && position >= options.window ? position + 1 - options.window : 0;
}

template <typename T>
RLHF_INLINE void attend_positions(const AttentionCall& call, const QueryBlock& block, float* scratch) {
    const ScoreOptions& options = call.options;
    const int64_t padded = call.padded_features, features = call.features, group = call.group;
    const int64_t begin = block.begin, end = block.end, rows = (end - begin) * group, h0 = block.head * group;
    const int64_t base = first_seen(options, begin) / kTile * kTile, step = (end - base + 15) / 16 * 16;
    float *q = scratch, *out = q + rows * padded, *copies = out + rows * padded, *scores = copies + kTile * padded;
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t row = row_of(block.keys, begin + r / group);
        scaled(head_row<T>(call.q, row, h0 + r % group), 1, features, options.scale, q + r * padded);
        for (int64_t d = 0; d < padded; d += 16) store16(out + r * padded + d, splat(0.0f));
    }
    // body(rows of the tile, tile, from, to) for every tile, which positions [from, to) see a part of.
    const auto for_tiles = [&](const Heads& heads, const auto& body) __attribute__((always_inline)) {
        for (int64_t tile = base; tile < end; tile += kTile) {
            const float* found[kTile];
            find_floats<T>(end - tile < kTile ? end - tile : kTile, features, padded, copies, found, [&](int64_t i)
                __attribute__((always_inline)) { return head_row<T>(heads, row_of(block.keys, tile + i), block.head); });
            const int64_t after = tile + kTile - 1 + options.window;  // the first position whose window is behind the tile
            body(found, tile, begin > tile ? begin : tile, options.window && after < end ? after : end);
        }
    };
    for_tiles(call.k, [&](const float* const* keys, int64_t tile, int64_t from, int64_t to)
        __attribute__((always_inline)) {
            const bool whole = tile + kTile <= from + 1 && first_seen(options, to - 1) <= tile;
            together<kScored>((from - begin) * group, (to - begin) * group, [&](auto count, int64_t r)
                __attribute__((always_inline)) {
                    f32x16 z[count];
                    score<count>(keys, q + r * padded, padded, padded, z);
                    for (int i = 0; i < count; ++i) {
                        f32x16 seen = capped(z[i], options.softcap);
                        if (!whole) {
                            const int64_t position = begin + (r + i) / group;
                            const int64_t first = first_seen(options, position);
                            seen = between(seen, first - tile, position + 1 - tile, -__builtin_inff());
                        }
                        store16(scores + (r + i) * step + tile - base, seen);
                    }
                });
        });
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t position = begin + r / group, first = first_seen(options, position), tile = first / kTile * kTile;
        const float sink = options.sinks ? options.sinks[h0 + r % group] : -__builtin_inff();
        const Total total = exponentials(scores + r * step + tile - base, first - tile, position + 1 - tile, sink);
        float* to = call.totals + 2 * (row_of(block.keys, position) * call.query_heads + h0 + r % group);
        to[0] = total.largest;
        to[1] = total.sum;
    }
    for_tiles(call.v, [&](const float* const* values, int64_t tile, int64_t from, int64_t to)
        __attribute__((always_inline)) {
            const auto add = [&](auto count, int64_t r, int64_t first, int64_t after) __attribute__((always_inline)) {
                const Weights weights{scores + r * step + tile - base, step, 1};
                add_rows<Joining::row_by_row, count>(values, first, after, padded, weights, out + r * padded, padded);
            };
            // Positions that see a part of the tile, before and after those that see all of it.
            int64_t whole = from > tile + kTile - 1 ? from : tile + kTile - 1;
            int64_t part = options.window && tile + options.window < to ? tile + options.window : to;
            if (whole >= part) whole = part = to;
            const auto add_part = [&](int64_t position) __attribute__((always_inline)) {
                const int64_t first = first_seen(options, position) - tile, after = position + 1 - tile;
                const int64_t row = (position - begin) * group;
                together<kAdded>(row, row + group, [&](auto count, int64_t r) __attribute__((always_inline)) {
                    add(count, r, first > 0 ? first : 0, after < kTile ? after : kTile);
                });
            };
            for (int64_t position = from; position < whole; ++position) add_part(position);
            together<kAdded>((whole - begin) * group, (part - begin) * group, [&](auto count, int64_t r)
                __attribute__((always_inline)) { add(count, r, 0, kTile); });
            for (int64_t position = part; position < to; ++position) add_part(position);
        });
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t at = row_of(block.keys, begin + r / group) * call.query_heads + h0 + r % group;
        divided(out + r * padded, features, call.totals[2 * at + 1], static_cast<T*>(call.out) + at * features);
    }
}

}  // namespace attention_rows

void attend_block(const AttentionCall& call, const QueryBlock& block, float* scratch) {
    if (call.type == CacheType::bfloat16) {
        attention_rows::attend_positions<uint16_t>(call, block, scratch);
    } else {
        attention_rows::attend_positions<float>(call, block, scratch);
    }
}

}  // namespace rlhf::cpu::RLHF_SET
