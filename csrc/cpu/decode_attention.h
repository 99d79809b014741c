// Attention of one query token per row over a paged cache. The contract stands in decode_attention.cpp.
#pragma once

#include <cstdint>

namespace rlhf::cpu {

enum class CacheType : int { float32 = 0, bfloat16 = 1 };

// Strides are in elements. Element d of a head is `inner` further on for each d.
struct Queries {
    const void* data;  // [N, Hq, D]
    int64_t row, head, inner;
};

struct Cache {
    const void* data;  // [blocks, block, Hkv, D]
    int64_t block, position, head, inner;
};

struct Paging {
    const int64_t* lengths;  // [N]
    const int64_t* table;    // [N, table_blocks] dense
    int64_t table_blocks, blocks, block;
};

struct DecodeSizes {
    int64_t n, query_heads, cache_heads, features;
};

struct ScoreOptions {
    float scale;
    int64_t window;  // 0: none
    float softcap;   // 0: none
    const float* sinks = nullptr;  // [Hq]; null: none
};

// out [N, Hq, D] dense, of the caches' type.
void decode_attention(CacheType type, const DecodeSizes& sizes, const Queries& q, const Cache& k, const Cache& v,
                      const Paging& paging, const ScoreOptions& options, void* out, int threads);

}  // namespace rlhf::cpu
