// Causal attention of packed sequences to themselves and to a shared prompt, and its gradients.
//
// Contract. Equations: kernels/rlhf_kernels/attention. q, k, v, d_out and what comes out are float or bfloat16; scores,
// softmax and sums float, rounded once. Heads have any strides, features are neighbours; outputs are dense. Positions
// count from the first row of the parent, or of the sequence where there is none. A row has the bits that
// decode_attention gives for its query over the same keys: a block of queries is one thread's work, and the arithmetic of
// a row has one order (attention_lanes.inc.h), whatever the block. Keys outside of a row's window are read, but only of
// its own sequence and its parent, and they change no bit.
// The gradients of a family, which is a parent and its children, are one thread's work per cache head in an order of
// its own; those of the sinks add rows up in their order. So no bit depends on the number of threads.
// Scratch per thread: forward block_scratch, at most kScores scores or those of one position; backward family_scratch,
// which holds the gradients of a family's queries for one cache head.

#include "cpu/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "common/check.h"
#include "cpu/attention_rows.h"
#include "cpu/team.h"

namespace rlhf::cpu {
namespace {

constexpr int64_t kSerialProducts = 1 << 19;  // as in decode_attention.cpp

const char* const kLengths = "numbers of at least 0 that add up to the rows of q";

struct Sequence {
    int64_t row, length, parent, shared;  // shared: the parent's length
    int64_t end() const { return shared + length; }
};

std::vector<Sequence> sequences_of(const AttentionSizes& sizes, const Packing& packing, const ScoreOptions& options,
                                   int threads) {
    RLHF_CHECK_SIZE(sizes.tokens);
    RLHF_CHECK_SIZE(sizes.sequences);
    RLHF_CHECK_SIZE(sizes.features);
    RLHF_CHECK(sizes.cache_heads >= 1, "cache_heads", "at least 1", sizes.cache_heads);
    RLHF_CHECK(sizes.query_heads >= 0 && sizes.query_heads % sizes.cache_heads == 0, "query_heads",
               "a multiple of cache_heads", sizes.query_heads);
    RLHF_CHECK(options.window >= 0 && options.window <= kMost, "window", "0 to 2^56", options.window);
    RLHF_CHECK_THREADS(threads);
    RLHF_CHECK_POINTER(packing.lengths, sizes.sequences);
    RLHF_PRODUCT(sizes.tokens, sizes.cache_heads, sizes.features);
    RLHF_PRODUCT(sizes.tokens, sizes.query_heads, sizes.features);
    std::vector<Sequence> all;
    int64_t row = 0;
    for (int64_t i = 0; i < sizes.sequences; ++i) {
        const int64_t length = packing.lengths[i], parent = packing.parents ? packing.parents[i] : -1;
        RLHF_CHECK(length >= 0 && length <= sizes.tokens - row, "lengths", kLengths, length);
        RLHF_CHECK(parent >= -1 && parent < i && (parent < 0 || all[parent].parent < 0), "parents",
                   "-1 or an earlier sequence that has no parent", parent);
        all.push_back({row, length, parent, parent < 0 ? 0 : all[parent].length});
        row += length;
    }
    RLHF_CHECK(row == sizes.tokens, "lengths", kLengths, row);
    return all;
}

AttentionCall call_of(CacheType type, const AttentionSizes& sizes, const Heads& q, const Heads& k, const Heads& v,
                      const ScoreOptions& options, const void* out, const float* totals) {
    AttentionCall call{};
    call.type = type;
    call.query_heads = sizes.query_heads;
    call.cache_heads = sizes.cache_heads;
    call.group = sizes.query_heads / sizes.cache_heads;
    call.features = sizes.features;
    call.padded_features = (sizes.features + kFeatureTile - 1) / kFeatureTile * kFeatureTile;
    call.q = q;
    call.k = k;
    call.v = v;
    call.options = options;
    call.out = const_cast<void*>(out);
    call.totals = const_cast<float*>(totals);
    return call;
}

void check_pointers(const AttentionSizes& sizes, const Heads& q, const Heads& k, const Heads& v, const void* out,
                    const float* totals) {
    const int64_t n_out = RLHF_PRODUCT(sizes.tokens, sizes.query_heads, sizes.features);
    RLHF_CHECK_POINTER(q.data, n_out);
    RLHF_CHECK_POINTER(k.data, n_out);
    RLHF_CHECK_POINTER(v.data, n_out);
    RLHF_CHECK_POINTER(out, n_out);
    RLHF_CHECK_POINTER(totals, RLHF_PRODUCT(sizes.tokens, sizes.query_heads));
}

// One thread's work, and what it costs: the products of queries and keys.
template <typename Item>
struct Task {
    Item item;
    int64_t cost;
};

// work(item, scratch) for all items, the longest first.
template <typename Item, typename Work>
void run(std::vector<Task<Item>>& tasks, int64_t features, int64_t floats, int threads, const Work& work) {
    int64_t cost = 0;
    for (const Task<Item>& task : tasks) cost += task.cost;
    if (cost * features < kSerialProducts) threads = 1;
    std::stable_sort(tasks.begin(), tasks.end(), [](const auto& a, const auto& b) { return a.cost > b.cost; });
    const std::unique_ptr<float[]> scratch(new float[threads * floats]);
    const int64_t count = tasks.size();
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < count; ++i) work(tasks[i].item, scratch.get() + thread_number() * floats);
}

}  // namespace

void attention(CacheType type, const AttentionSizes& sizes, const Heads& q, const Heads& k, const Heads& v,
               const Packing& packing, const ScoreOptions& options, void* out, float* totals, int threads) {
    const std::vector<Sequence> sequences = sequences_of(sizes, packing, options, threads);
    check_pointers(sizes, q, k, v, out, totals);
    if (RLHF_PRODUCT(sizes.tokens, sizes.query_heads, sizes.features) == 0) return;
    const AttentionCall call = call_of(type, sizes, q, k, v, options, out, totals);
    int64_t longest = 0;
    for (const Sequence& s : sequences) longest = std::max(longest, s.end());
    const auto seen = [&](int64_t end) { return options.window ? std::min(end, options.window + kQueryRows) : end; };
    const int64_t most = block_positions(call.group, seen(longest));
    std::vector<Task<QueryBlock>> tasks;
    for (const Sequence& s : sequences) {
        const SequenceKeys keys{s.shared, s.parent < 0 ? 0 : sequences[s.parent].row, s.row};
        for (int64_t begin = s.shared, end; begin < s.end(); begin = end) {
            end = std::min(s.end(), (begin / most + 1) * most);
            for (int64_t head = 0; head < sizes.cache_heads; ++head) {
                tasks.push_back({{keys, head, begin, end}, (end - begin) * call.group * seen(end)});
            }
        }
    }
    void (*attend)(const AttentionCall&, const QueryBlock&, float*);
    RLHF_PICK(attend, attend_block);
    run(tasks, sizes.features, block_scratch(call, most, seen(longest)), threads,
        [&](const QueryBlock& block, float* scratch) { attend(call, block, scratch); });
}

void attention_gradient(CacheType type, const AttentionSizes& sizes, const Heads& d_out, const Heads& q, const Heads& k,
                        const Heads& v, const Packing& packing, const ScoreOptions& options, const void* out,
                        const float* totals, const AttentionGradients& gradients, int threads) {
    const std::vector<Sequence> sequences = sequences_of(sizes, packing, options, threads);
    check_pointers(sizes, q, k, v, out, totals);
    const int64_t n_out = RLHF_PRODUCT(sizes.tokens, sizes.query_heads, sizes.features);
    RLHF_CHECK_POINTER(d_out.data, n_out);
    RLHF_CHECK_POINTER(gradients.q, n_out);
    RLHF_CHECK_POINTER(gradients.k, n_out);
    RLHF_CHECK_POINTER(gradients.v, n_out);
    RLHF_CHECK_POINTER(gradients.sinks, options.sinks ? sizes.query_heads : 0);
    if (n_out == 0) {  // no query has a say
        const int64_t n_keys = RLHF_PRODUCT(sizes.tokens, sizes.cache_heads, sizes.features);
        RLHF_CHECK_POINTER(gradients.k, n_keys);
        RLHF_CHECK_POINTER(gradients.v, n_keys);
        const int64_t bytes = n_keys * (type == CacheType::bfloat16 ? 2 : 4);
        if (bytes > 0) std::memset(gradients.k, 0, bytes);
        if (bytes > 0) std::memset(gradients.v, 0, bytes);
        if (options.sinks) std::fill_n(gradients.sinks, sizes.query_heads, 0.0f);
        return;
    }
    const std::unique_ptr<float[]> slopes(new float[sizes.tokens * sizes.query_heads]);
    AttentionGradientCall call{call_of(type, sizes, q, k, v, options, out, totals),
                               d_out, gradients.q, gradients.k, gradients.v, slopes.get()};
    std::vector<std::vector<MemberRows>> families;
    std::vector<int64_t> costs, rows, number(sequences.size());
    for (size_t i = 0; i < sequences.size(); ++i) {
        const Sequence& s = sequences[i];
        if (s.parent < 0) {
            families.emplace_back();
            costs.push_back(0);
            rows.push_back(0);
        }
        const size_t to = number[i] = s.parent < 0 ? families.size() - 1 : number[s.parent];
        families[to].push_back({s.row, s.length});
        costs[to] += s.length * (s.shared + s.end());
        rows[to] += s.length;
    }
    std::vector<Task<Family>> tasks;
    int64_t most = 0;
    for (size_t i = 0; i < families.size(); ++i) {
        most = std::max(most, rows[i]);
        if (rows[i] == 0) continue;
        for (int64_t head = 0; head < sizes.cache_heads; ++head) {
            tasks.push_back({{families[i].data(), int64_t(families[i].size()), head}, costs[i] * call.group});
        }
    }
    void (*back)(const AttentionGradientCall&, const Family&, float*);
    RLHF_PICK(back, attend_back);
    run(tasks, sizes.features, family_scratch(call, most), threads,
        [&](const Family& family, float* scratch) { back(call, family, scratch); });
    for (int64_t h = 0; options.sinks && h < sizes.query_heads; ++h) {
        double sum = 0;
        for (int64_t t = 0; t < sizes.tokens; ++t) {
            const int64_t row = t * sizes.query_heads + h;
            sum -= double(std::exp(options.sinks[h] - totals[2 * row])) / totals[2 * row + 1] * slopes[row];
        }
        gradients.sinks[h] = float(sum);
    }
}

}  // namespace rlhf::cpu
