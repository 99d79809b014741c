// attention.cpp's backward pass for one family and cache head; namespace RLHF_SET. Sixteen keys at a time, and for each
// such tile the queries that see a part of it, sixteen rows at a time: the parent's, then those of its children in order.
// A row is a position and a query head of the group. Every sum has this one order, in float.

#include "cpu/attention_rows.h"

namespace rlhf::cpu::RLHF_SET {
namespace attention_rows {

// One member's keys: a tile of them, and the gradients that they collect.
struct KeyTile {
    const float *keys[kTile], *values[kTile];
    float *d_keys, *d_values;  // [kTile, padded]
    int64_t position, count;   // of the first key in the family
};

struct FamilyBack {
    const AttentionGradientCall& call;
    const Family& family;
    float *d_queries;          // [rows of the family, group, padded]
    float *q, *d_out;          // [kTile, padded]
    float *weights, *slopes;   // [kTile rows, kTile keys]
};

// p and dz of up to sixteen rows of a member from `first` on, whose first position is `start`, for one tile; then what
// they give to the tile's gradients and take from its keys.
template <typename T>
RLHF_INLINE void add_tile(const FamilyBack& back, const KeyTile& tile, const MemberRows& member, int64_t member_row,
                          int64_t start, int64_t first, int64_t count) {
    const AttentionGradientCall& call = back.call;
    const ScoreOptions& options = call.options;
    const int64_t padded = call.padded_features, group = call.group, h0 = back.family.head * group;
    float *q = back.q, *weights = back.weights, *slopes = back.slopes;
    const float *queries[kTile], *d_outs[kTile];
    const auto at = [&](const Heads& heads, int64_t i) __attribute__((always_inline)) {
        return head_row<T>(heads, member.row + (first + i) / group, h0 + (first + i) % group);
    };
    for (int64_t i = 0; i < count; ++i) scaled(at(call.q, i), 1, call.features, options.scale, q + i * padded);
    for (int64_t i = 0; i < kTile; ++i) queries[i] = q + i * padded;
    find_floats<T>(count, call.features, padded, back.d_out, d_outs, [&](int64_t i) __attribute__((always_inline)) {
        return at(call.d_out, i);
    });
    const int64_t last = start + (first + count - 1) / group;
    const bool whole = tile.count == kTile && tile.position + kTile <= start + first / group + 1 &&
                       first_seen(options, last) <= tile.position;
    together<kScored>(0, count, [&](auto n, int64_t i) __attribute__((always_inline)) {
        f32x16 z[n], slope[n];
        score<n>(tile.keys, q + i * padded, padded, padded, z);
        const auto d_out = [&](int r) __attribute__((always_inline)) { return d_outs[i + r]; };
        score_of<n>(tile.values, d_out, padded, slope);
        for (int j = 0; j < n; ++j) {
            const int64_t position = start + (first + i + j) / group;
            const int64_t r = first + i + j, row = (member.row + r / group) * call.query_heads + h0 + r % group;
            const float* total = call.totals + 2 * row;
            f32x16 bend = splat(1.0f);
            if (options.softcap != 0.0f) {
                const f32x16 t = tanh16(z[j] / options.softcap);
                bend = 1.0f - t * t;
                z[j] = t * options.softcap;
            }
            int64_t begin = 0, end = kTile;
            if (!whole) {
                begin = first_seen(options, position) - tile.position;
                end = position + 1 - tile.position < tile.count ? position + 1 - tile.position : tile.count;
                z[j] = between(z[j], begin, end, total[0]);
            }
            f32x16 p = exp16(z[j] - total[0]) / total[1];
            f32x16 dz = p * (slope[j] - call.slopes[row]) * bend;
            if (!whole) {
                p = between(p, begin, end, 0.0f);
                dz = between(dz, begin, end, 0.0f);
            }
            store16(weights + (i + j) * kTile, p);
            store16(slopes + (i + j) * kTile, dz);
        }
    });
    together<kAdded>(0, tile.count, [&](auto n, int64_t j) __attribute__((always_inline)) {
        float *d_values = tile.d_values + j * padded, *d_keys = tile.d_keys + j * padded;
        add_rows<Joining::together, n>(d_outs, 0, count, padded, {weights + j, 1, kTile}, d_values, padded);
        add_rows<Joining::together, n>(queries, 0, count, padded, {slopes + j, 1, kTile}, d_keys, padded);
    });
    float* to = back.d_queries + (member_row * group + first) * padded;
    together<kAdded>(0, count, [&](auto n, int64_t i) __attribute__((always_inline)) {
        const Weights row_slopes{slopes + i * kTile, kTile, 1};
        add_rows<Joining::together, n>(tile.keys, 0, tile.count, padded, row_slopes, to + i * padded, padded);
    });
}
template <typename T>
RLHF_INLINE void attend_back(const AttentionGradientCall& call, const Family& family, float* scratch) {
    const ScoreOptions& options = call.options;
    const int64_t padded = call.padded_features, features = call.features, group = call.group, h0 = family.head * group;
    const int64_t tile_floats = kTile * padded, shared = family.members[0].length;
    const auto take = [&](int64_t count) {
        float* taken = scratch;
        scratch += count;
        return taken;
    };
    float *key_copies = take(tile_floats), *value_copies = take(tile_floats);
    float *d_keys = take(tile_floats), *d_values = take(tile_floats);
    float *q = take(tile_floats), *d_out = take(tile_floats);
    float *weights = take(kTile * kTile), *slopes = take(kTile * kTile);
    FamilyBack back{call, family, nullptr, q, d_out, weights, slopes};
    back.d_queries = scratch;
    int64_t family_row = 0;
    for (int64_t m = 0; m < family.count; family_row += family.members[m++].length) {
        const MemberRows& member = family.members[m];
        for (int64_t t = 0; t < member.length; ++t) {
            for (int64_t h = h0; h < h0 + group; ++h) {
                const int64_t row = (member.row + t) * call.query_heads + h;
                const T* from = head_row<T>(call.d_out, member.row + t, h);
                const T* out = static_cast<const T*>(call.out) + row * features;
                f32x16 sum = splat(0.0f);
                for (int64_t d = 0; d < features; d += 16) {
                    sum = muladd(load(from + d, features - d), load(out + d, features - d), sum);
                }
                call.slopes[row] = lane_sum(sum);
                float* to = back.d_queries + ((family_row + t) * group + h - h0) * padded;
                for (int64_t d = 0; d < padded; d += 16) store16(to + d, splat(0.0f));
            }
        }
    }
    for (int64_t m = 0; m < family.count; ++m) {
        const MemberRows& member = family.members[m];
        const int64_t start = m == 0 ? 0 : shared;
        for (int64_t key = 0; key < member.length; key += kTile) {
            KeyTile tile;
            tile.d_keys = d_keys;
            tile.d_values = d_values;
            tile.position = start + key;
            tile.count = member.length - key < kTile ? member.length - key : kTile;
            const auto find = [&](const Heads& heads, float* copies, const float** rows) __attribute__((always_inline)) {
                find_floats<T>(tile.count, features, padded, copies, rows, [&](int64_t i) __attribute__((always_inline)) {
                    return head_row<T>(heads, member.row + key + i, family.head);
                });
            };
            find(call.k, key_copies, tile.keys);
            find(call.v, value_copies, tile.values);
            for (int64_t i = 0; i < 2 * tile_floats; i += 16) store16(d_keys + i, splat(0.0f));
            int64_t row = 0;
            for (int64_t x = 0; x < family.count; row += family.members[x++].length) {
                if (x != m && m != 0) continue;  // a child's keys are for itself
                const MemberRows& other = family.members[x];
                const int64_t other_start = x == 0 ? 0 : shared;
                int64_t from = tile.position - other_start, to = other.length;
                if (from < 0) from = 0;
                if (options.window && tile.position + tile.count - 1 + options.window < other_start + to) {
                    to = tile.position + tile.count - 1 + options.window - other_start;
                }
                for (int64_t i = from * group; i < to * group; i += kTile) {
                    add_tile<T>(back, tile, other, row, other_start, i, to * group - i < kTile ? to * group - i : kTile);
                }
            }
            for (int64_t i = 0; i < tile.count; ++i) {
                const int64_t at = ((member.row + key + i) * call.cache_heads + family.head) * features;
                for (int64_t d = 0; d < features; d += 16) {
                    store(static_cast<T*>(call.d_k) + at + d, load16(d_keys + i * padded + d), features - d);
                    store(static_cast<T*>(call.d_v) + at + d, load16(d_values + i * padded + d), features - d);
                }
            }
        }
    }
    family_row = 0;
    for (int64_t m = 0; m < family.count; family_row += family.members[m++].length) {
        const MemberRows& member = family.members[m];
        for (int64_t r = 0; r < member.length * group; ++r) {
            const float* from = back.d_queries + (family_row * group + r) * padded;
            T* to = static_cast<T*>(call.d_q) + ((member.row + r / group) * call.query_heads + h0 + r % group) * features;
            for (int64_t d = 0; d < features; d += 16) store(to + d, load16(from + d) * options.scale, features - d);
        }
    }
}

}  // namespace attention_rows

void attend_back(const AttentionGradientCall& call, const Family& family, float* scratch) {
    if (call.type == CacheType::bfloat16) {
        attention_rows::attend_back<uint16_t>(call, family, scratch);
    } else {
        attention_rows::attend_back<float>(call, family, scratch);
    }
}

}  // namespace rlhf::cpu::RLHF_SET
