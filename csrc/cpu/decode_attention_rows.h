// What decode_attention.cpp calls once per row and cache head; compiled per instruction set from
// decode_attention_kernel.inc.h.
#pragma once

#include <cstdint>

#include "cpu/decode_attention.h"
#include "cpu/isa.h"

namespace rlhf::cpu {

// The query heads that share one cache head, in one row of the batch.
struct HeadGroup {
    const void* q;  // [group, D], `q_head` and `q_inner` elements apart
    int64_t q_head, q_inner;
    const void *k, *v;  // of this cache head, at position 0 of block 0
    const int64_t* table;  // of this row
    int64_t first, length;  // positions [first, length) are used
    void* out;  // [group, D] dense
    const float* sinks = nullptr;  // [group]; null: none
};

// Everything that all groups share.
struct DecodeCall {
    CacheType type;
    int64_t group, features, padded_features;  // padded to a multiple of kFeatureTile
    int64_t block, k_block, k_position, k_inner, v_block, v_position, v_inner;
    ScoreOptions options;
};

constexpr int64_t kFeatureTile = 16;
constexpr int64_t kCopied = 16;  // positions at a time where features are not neighbours or not whole tiles

// Floats that a thread needs: queries and sums [group, padded], copies of positions, totals [group], and scores of tiles
// that `longest` positions have a part in.
inline int64_t decode_scratch(const DecodeCall& call, int64_t longest) {
    return 2 * call.group * call.padded_features + kCopied * call.padded_features +
           call.group * (1 + (longest + 2 * (kCopied - 1)) / kCopied * kCopied);
}

RLHF_IN_EVERY_SET(void decode_group(const DecodeCall& call, const HeadGroup& group, float* scratch);)
// The one of the current set.
using DecodeGroup = void (*)(const DecodeCall&, const HeadGroup&, float*);
DecodeGroup current_decode_group();

}  // namespace rlhf::cpu
