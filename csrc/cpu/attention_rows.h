// What attention.cpp calls once per block of queries, and once per family, and cache head; compiled per instruction set
// from attention_kernel.inc.h and attention_gradient_kernel.inc.h.
#pragma once

#include <cstdint>

#include "cpu/attention.h"
#include "cpu/decode_attention_rows.h"
#include "cpu/isa.h"

namespace rlhf::cpu {

// Everything that all blocks share.
struct AttentionCall {
    CacheType type;
    int64_t query_heads, cache_heads, group, features, padded_features;  // padded to a multiple of kFeatureTile
    Heads q, k, v;
    ScoreOptions options;
    void* out;
    float* totals;
};

// Keys of a sequence: those of its parent first, then its own.
struct SequenceKeys {
    int64_t shared, shared_row, row;  // how many are the parent's, and the first rows of parent and sequence
};

// Queries at positions [begin, end) of one sequence, and one cache head.
struct QueryBlock {
    SequenceKeys keys;
    int64_t head, begin, end;
};

constexpr int64_t kQueryRows = 32;            // positions times heads of a block, or the heads of one position
constexpr int64_t kScores = int64_t(1) << 18;  // floats of scores of a block, or those of one position

// Positions of a block whose last one may be `longest`.
inline int64_t block_positions(int64_t group, int64_t longest) {
    int64_t positions = kQueryRows / group;
    if (positions * group * longest > kScores) positions = kScores / (group * longest);
    return positions >= 16 ? positions / 16 * 16 : positions >= 1 ? positions : 1;
}

// Floats that a thread needs for blocks: queries and sums [rows, padded], copies of a tile, scores [rows, longest].
inline int64_t block_scratch(const AttentionCall& call, int64_t positions, int64_t longest) {
    return 2 * positions * call.group * call.padded_features + kCopied * call.padded_features +
           positions * call.group * (longest + 2 * kCopied);
}

RLHF_IN_EVERY_SET(void attend_block(const AttentionCall& call, const QueryBlock& block, float* scratch);)

struct MemberRows {
    int64_t row, length;
};

// A parent and its children in order, or a sequence alone; one cache head.
struct Family {
    const MemberRows* members;
    int64_t count, head;
};

struct AttentionGradientCall : AttentionCall {
    Heads d_out;
    void *d_q, *d_k, *d_v;
    float* slopes;  // [T, Hq]: d_out · out
};

// Floats that a thread needs for a family of `rows` rows and its largest member: gradients of the queries of one cache
// head [rows * group, padded]; of a tile keys, values and their gradients, of sixteen queries q, d_out, p and dz.
inline int64_t family_scratch(const AttentionCall& call, int64_t rows) {
    return (rows * call.group + 6 * kCopied) * call.padded_features + 2 * kCopied * kCopied;
}

RLHF_IN_EVERY_SET(void attend_back(const AttentionGradientCall& call, const Family& family, float* scratch);)

}  // namespace rlhf::cpu
