// Attention of one query token per row over a paged cache, for decoding.
//
// Contract. Equations: kernels/rlhf_kernels/decode_attention. q, caches and out are float or bfloat16; scores, softmax
// and sums float, rounded once into out. Only used positions are read, and only their entries of the table; lengths and
// used entries are checked before anything is computed. A row of length 0 gives zeros. A sink is a logit of a query head
// that the softmax's maximum and sum begin with. Query heads h G .. h G + G - 1
// share cache head h, G = Hq / Hkv, and read its keys and values together.
// A row and cache head is one thread's work in a fixed order: the bits do not depend on the other rows or on the number
// of threads.

#include "cpu/decode_attention.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <sstream>

#include "common/check.h"
#include "cpu/decode_attention_rows.h"
#include "cpu/team.h"

namespace rlhf::cpu {
namespace {

constexpr int64_t kSerialProducts = 1 << 19;  // of a tenth of a millisecond: too few to wait for a second core

int64_t first_position(int64_t length, int64_t window) { return window ? std::max<int64_t>(0, length - window) : 0; }

void check(const DecodeSizes& sizes, const Paging& paging, const ScoreOptions& options, int threads) {
    RLHF_CHECK_SIZE(sizes.n);
    RLHF_CHECK_SIZE(sizes.features);
    RLHF_CHECK(sizes.cache_heads >= 1, "cache_heads", "at least 1", sizes.cache_heads);
    RLHF_CHECK(sizes.query_heads >= 0 && sizes.query_heads % sizes.cache_heads == 0, "query_heads",
               "a multiple of cache_heads", sizes.query_heads);
    RLHF_CHECK_SIZE(paging.block);
    RLHF_CHECK_SIZE(paging.blocks);
    RLHF_CHECK_SIZE(paging.table_blocks);
    RLHF_CHECK(options.window >= 0, "window", "at least 0", options.window);
    RLHF_CHECK_THREADS(threads);
    RLHF_CHECK_POINTER(paging.lengths, sizes.n);
    const int64_t capacity = RLHF_PRODUCT(paging.table_blocks, paging.block);
    RLHF_PRODUCT(sizes.n, paging.table_blocks);
    int64_t shortest = 0, longest = 0;
    for (int64_t n = 0; n < sizes.n; ++n) {
        shortest = std::min(shortest, paging.lengths[n]);
        longest = std::max(longest, paging.lengths[n]);
    }
    std::ostringstream range;
    range << "0 to " << capacity << " (what block_table can hold)";
    RLHF_CHECK(shortest >= 0, "lengths", range.str().c_str(), shortest);
    RLHF_CHECK(longest <= capacity, "lengths", range.str().c_str(), longest);
    RLHF_CHECK_POINTER(paging.table, longest);
    std::ostringstream indices;
    indices << "block indices below " << paging.blocks;
    for (int64_t n = 0; n < sizes.n; ++n) {
        const int64_t length = paging.lengths[n];
        if (length == 0) continue;
        const int64_t* table = paging.table + n * paging.table_blocks;
        const int64_t last = (length - 1) / paging.block;
        for (int64_t i = first_position(length, options.window) / paging.block; i <= last; ++i) {
            RLHF_CHECK(table[i] >= 0 && table[i] < paging.blocks, "block_table", indices.str().c_str(), table[i]);
        }
    }
}

}  // namespace

DecodeGroup current_decode_group() {
    DecodeGroup function;
    RLHF_PICK(function, decode_group);
    return function;
}

void decode_attention(CacheType type, const DecodeSizes& sizes, const Queries& q, const Cache& k, const Cache& v,
                      const Paging& paging, const ScoreOptions& options, void* out, int threads) {
    check(sizes, paging, options, threads);
    const int64_t n_out = RLHF_PRODUCT(sizes.n, sizes.query_heads, sizes.features), size = type == CacheType::bfloat16 ? 2 : 4;
    RLHF_CHECK_POINTER(out, n_out);
    if (n_out == 0) return;
    RLHF_CHECK_POINTER(q.data, n_out);
    DecodeCall call{};
    call.type = type;
    call.group = sizes.query_heads / sizes.cache_heads;
    call.features = sizes.features;
    call.padded_features = (sizes.features + kFeatureTile - 1) / kFeatureTile * kFeatureTile;
    call.block = paging.block;
    call.k_block = k.block;
    call.k_position = k.position;
    call.k_inner = k.inner;
    call.v_block = v.block;
    call.v_position = v.position;
    call.v_inner = v.inner;
    call.options = options;
    int64_t longest = 0, used = 0;
    for (int64_t n = 0; n < sizes.n; ++n) {
        const int64_t mine = paging.lengths[n] - first_position(paging.lengths[n], options.window);
        longest = std::max(longest, mine);
        used += mine;
    }
    RLHF_CHECK_POINTER(k.data, longest);
    RLHF_CHECK_POINTER(v.data, longest);
    const DecodeGroup run = current_decode_group();
    if (used * sizes.query_heads * sizes.features < kSerialProducts) threads = 1;
    const int64_t floats = decode_scratch(call, longest), count = sizes.n * sizes.cache_heads;
    const std::unique_ptr<float[]> scratch(new float[threads * floats]);
    const auto from = [size](const void* data, int64_t elements) {
        return static_cast<const char*>(data) + elements * size;
    };
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < count; ++i) {
        const int64_t n = i / sizes.cache_heads, c = i % sizes.cache_heads, h = c * call.group;
        char* to = static_cast<char*>(out) + (n * sizes.query_heads + h) * sizes.features * size;
        const int64_t length = paging.lengths[n], first = first_position(length, options.window);
        if (length == 0) {
            std::memset(to, 0, call.group * sizes.features * size);
            continue;
        }
        const HeadGroup group{from(q.data, n * q.row + h * q.head), q.head, q.inner, from(k.data, c * k.head),
                              from(v.data, c * v.head), paging.table + n * paging.table_blocks, first, length, to,
                              options.sinks ? options.sinks + h : nullptr};
        run(call, group, scratch.get() + thread_number() * floats);
    }
}

}  // namespace rlhf::cpu
