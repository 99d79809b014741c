// Causal attention of packed sequences to themselves and to a shared prompt. The contract stands in attention.cpp.
#pragma once

#include <cstdint>

#include "cpu/decode_attention.h"

namespace rlhf::cpu {

// Heads [T, heads, D]; strides in elements, features are neighbours.
struct Heads {
    const void* data;
    int64_t row, head;
};

struct AttentionSizes {
    int64_t tokens, sequences, query_heads, cache_heads, features;
};

// Sequences lie one after the other. A parent is the number of an earlier sequence without a parent, or -1.
struct Packing {
    const int64_t *lengths, *parents;  // [sequences]; parents may be null: none
};

// out [T, Hq, D] dense, of q's type; totals [T, Hq, 2] dense: the largest score and the sum of the exponentials.
void attention(CacheType type, const AttentionSizes& sizes, const Heads& q, const Heads& k, const Heads& v,
               const Packing& packing, const ScoreOptions& options, void* out, float* totals, int threads);

// Gradients [T, heads, D] dense, of q's type; d_sinks [Hq], or null without sinks. out is the forward's, dense.
struct AttentionGradients {
    void *q, *k, *v;
    float* sinks;
};
void attention_gradient(CacheType type, const AttentionSizes& sizes, const Heads& d_out, const Heads& q, const Heads& k,
                        const Heads& v, const Packing& packing, const ScoreOptions& options, const void* out,
                        const float* totals, const AttentionGradients& gradients, int threads);

}  // namespace rlhf::cpu
