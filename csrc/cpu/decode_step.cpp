// One new token per row through all layers of a decoder of the Llama kind.
//
// Contract. Equations: kernels/rlhf_kernels/decode_step. Weights, norms, biases, angles, caches and the result have one
// type, adapters float or bfloat16 of their own; rows of matrices have any stride, columns are dense. Weights are read
// once per call, where they lie, adapters too. Sums are float; results are rounded to the type where the modules of
// transformers round them: norms, linears (base with bias, then with the adapter's part), rotary products, the logistic
// and the gated product, attention, residual sums. The keys and values of all rows are written into their entries of the
// cache before attention of a layer reads the entries of each row's window, so that a row may look at what rows of the
// same call have before it; no other entry is written or read.
// A row is a lane of vectors and one thread's work in attention, each in an order that its own position alone decides:
// its bits depend neither on the rows beside it, nor on their slots, nor on where its blocks lie or the number of threads.
// Everything of a call is checked before anything is written.

#include "cpu/decode_step.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "common/check.h"

namespace rlhf::cpu::step {
namespace {

constexpr int64_t kSerialProducts = 1 << 24;  // of less than a millisecond: too few to wait for a second core
constexpr int64_t kLine = 64;
constexpr int64_t kSharedRanks = 8;  // of a shrink that one thread takes: enough to hide the latency of an addition

constexpr Group kGroupOf[kNames] = {QKV, QKV, QKV, ATTENDED, GATED, GATED, INNER};
constexpr const char* kNamed[kNames] = {"q", "k", "v", "o", "gate", "up", "down"};

int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

int64_t first_position(int64_t length, int64_t window) { return window ? std::max<int64_t>(0, length - window) : 0; }

void check_linear(const Linear& linear, Name name, int64_t out, int64_t in) {
    RLHF_CHECK(linear.out == out, kNamed[name], "another number of output features", linear.out);
    RLHF_CHECK(linear.in == in, kNamed[name], "another number of input features", linear.in);
    RLHF_CHECK(linear.weight != nullptr, kNamed[name], "an address", "a null pointer");
}

// Every index of a row must be one of its table's.
void check_range(const int64_t* index, int64_t n, int64_t low, int64_t high, const char* name, const char* what) {
    for (int64_t i = 0; i < n; ++i) {
        if (index[i] >= low && index[i] < high) continue;
        std::ostringstream expected;
        expected << what << " from " << low << " to " << high - 1;
        refuse(name, expected.str().c_str(), index[i]);
    }
}

// Where the next piece of memory goes, in bytes; pieces begin at whole lines.
struct Layout {
    int64_t bytes = 0;

    int64_t take(int64_t count, int64_t size) {
        const int64_t at = bytes;
        bytes += round_up(count * size, kLine);
        return at;
    }
};

}  // namespace

DecodeStep::DecodeStep(const Decoder& decoder, std::vector<Layer> layers, const std::vector<Adapter>& adapters)
    : decoder_(decoder), layers_(std::move(layers)) {
    const Decoder& d = decoder_;
    RLHF_CHECK(d.hidden >= 1, "hidden", "at least 1", d.hidden);
    RLHF_CHECK(d.head_dim >= 2 && d.head_dim % 2 == 0, "head_dim", "an even number of at least 2", d.head_dim);
    RLHF_CHECK(d.cache_heads >= 1, "cache_heads", "at least 1", d.cache_heads);
    RLHF_CHECK(d.query_heads >= 1 && d.query_heads % d.cache_heads == 0, "query_heads", "a multiple of cache_heads",
               d.query_heads);
    RLHF_CHECK(!layers_.empty(), "layers", "at least 1", 0);
    RLHF_CHECK_POINTER(d.embedding, 1);
    RLHF_CHECK_POINTER(d.final_norm, 1);
    const int64_t queries = RLHF_PRODUCT(d.query_heads, d.head_dim), keys = RLHF_PRODUCT(d.cache_heads, d.head_dim);
    const int64_t H = d.hidden;
    const int64_t mlp = layers_[0].linears[GATE].out;
    RLHF_CHECK(mlp >= 1, "gate", "at least 1 output feature", mlp);
    window_ = layers_[0].window;
    for (const Layer& layer : layers_) {
        const int64_t outs[kNames] = {queries, keys, keys, H, mlp, mlp, H}, ins[kNames] = {H, H, H, queries, H, H, mlp};
        for (int name = 0; name < kNames; ++name) {
            check_linear(layer.linears[name], Name(name), outs[name], ins[name]);
            weights_ += RLHF_PRODUCT(outs[name], ins[name]);
        }
        RLHF_CHECK_POINTER(layer.input_norm, 1);
        RLHF_CHECK_POINTER(layer.mlp_norm, 1);
        RLHF_CHECK(layer.window >= 0, "window", "at least 0", layer.window);
        window_ = window_ && layer.window ? std::max(window_, layer.window) : 0;
    }
    make_plans(adapters);
}

void DecodeStep::make_plans(const std::vector<Adapter>& adapters) {
    for (const Adapter& adapter : adapters) {
        RLHF_CHECK(adapter.pairs.size() == layers_.size() * kNames, "adapters", "a pair for every linear",
                   adapter.pairs.size());
        slot_scales_.push_back(adapter.scale);
    }
    const size_t n_slots = adapters.size();
    plans_.resize(layers_.size());
    shrinks_.reserve(layers_.size() * kGroups * (n_slots + 1));  // no address of what plans point to may change
    expands_.resize(layers_.size() * kNames * n_slots);
    for (size_t layer = 0; layer < layers_.size(); ++layer) {
        LayerPlan& plan = plans_[layer];
        ExpandPart* expands[kNames];
        for (int name = 0; name < kNames; ++name) {
            plan.expands[name] = expands[name] = expands_.data() + (layer * kNames + name) * n_slots;
        }
        for (int group = 0; group < kGroups; ++group) {
            plan.shrinks[group] = shrinks_.data() + shrinks_.size();
            for (size_t slot = 0; slot < n_slots; ++slot) {
                const int64_t first = parts_.size();
                int64_t h = 0;
                for (int name = 0; name < kNames; ++name) {
                    const Pair& pair = adapters[slot].pairs[layer * kNames + name];
                    if (kGroupOf[name] != group) continue;
                    RLHF_CHECK(pair.rank >= 0, "rank", "at least 0", pair.rank);
                    RLHF_CHECK_POINTER(pair.A.data, pair.rank);
                    RLHF_CHECK_POINTER(pair.B.data, pair.rank);
                    expands[name][slot] = {pair.B, pair.rank, h};
                    const int64_t size = pair.A.type == Type::float32 ? 4 : 2;
                    for (int64_t r = 0; r < pair.rank; r += kSharedRanks) {
                        Matrix A = pair.A;
                        A.data = static_cast<char*>(A.data) + r * A.stride * size;
                        parts_.push_back({A, std::min(kSharedRanks, pair.rank - r), h + r});
                    }
                    h += pair.rank;
                }
                shrinks_.push_back(first);
                plan.most[group] = std::max<int64_t>(plan.most[group], parts_.size() - first);
                ranks_ = std::max(ranks_, h);
            }
            shrinks_.push_back(parts_.size());
        }
    }
}

// Which rows of every sixteen carry which slot.
void DecodeStep::find_slot_rows(StepCall& call) {
    slot_rows_.clear();
    firsts_.assign(1, 0);
    for (int64_t n = 0; n < call.rows.n; ++n) {
        if (n % 16 == 0 && n > 0) firsts_.push_back(slot_rows_.size());
        const int64_t slot = call.rows.slots[n];
        if (slot < 0) continue;
        const auto known = std::find_if(slot_rows_.begin() + firsts_.back(), slot_rows_.end(),
                                        [slot](const SlotRows& some) { return some.slot == slot; });
        SlotRows& mine = known == slot_rows_.end() ? slot_rows_.emplace_back(SlotRows{{}, n / 16, slot}) : *known;
        mine.carries[n % 16] = 1.0f;
    }
    firsts_.push_back(slot_rows_.size());
    call.slot_rows = slot_rows_.data();
    call.n_slot_rows = slot_rows_.size();
    call.firsts = firsts_.data();
}

void DecodeStep::bind(int64_t blocks, int64_t block, std::vector<LayerCache> keys, std::vector<LayerCache> values) {
    RLHF_CHECK_SIZE(blocks);
    RLHF_CHECK(block >= 1, "block", "at least 1", block);
    RLHF_CHECK(keys.size() == layers_.size(), "keys", "one cache per layer", keys.size());
    RLHF_CHECK(values.size() == layers_.size(), "values", "one cache per layer", values.size());
    for (size_t layer = 0; layer < layers_.size(); ++layer) {
        RLHF_CHECK(blocks == 0 || keys[layer].data != nullptr, "keys", "an address", "a null pointer");
        RLHF_CHECK(blocks == 0 || values[layer].data != nullptr, "values", "an address", "a null pointer");
    }
    blocks_ = blocks;
    block_ = block;
    keys_ = std::move(keys);
    values_ = std::move(values);
}

void DecodeStep::check(const Rows& rows) const {
    RLHF_CHECK_SIZE(rows.n);
    RLHF_CHECK_SIZE(rows.angles);
    RLHF_CHECK_SIZE(rows.table_blocks);
    RLHF_CHECK_POINTER(rows.tokens, rows.n);
    RLHF_CHECK_POINTER(rows.positions, rows.n);
    RLHF_CHECK_POINTER(rows.slots, rows.n);
    RLHF_CHECK_POINTER(rows.cos, rows.n);
    RLHF_CHECK_POINTER(rows.sin, rows.n);
    RLHF_CHECK_POINTER(rows.table, rows.n);
    RLHF_CHECK(rows.n == 0 || block_ > 0, "keys", "caches, which bind() takes", "none");
    check_range(rows.tokens, rows.n, 0, decoder_.vocabulary, "tokens", "words of the embedding,");
    check_range(rows.slots, rows.n, -1, slot_scales_.size(), "slots", "numbers of adapters or -1,");
    check_range(rows.positions, rows.n, 0, rows.angles, "positions", "positions that cos and sin have,");
    check_range(rows.positions, rows.n, 0, RLHF_PRODUCT(rows.table_blocks, block_), "positions", "positions that table has,");
    for (int64_t n = 0; n < rows.n; ++n) {
        const int64_t first = first_position(rows.positions[n] + 1, window_) / block_;
        const int64_t last = rows.positions[n] / block_;
        check_range(rows.table + n * rows.table_blocks + first, last - first + 1, 0, blocks_, "table", "blocks");
    }
}

// Points the call into memory, which grows with what calls need and stays for the next one.
void DecodeStep::lay_out(StepCall& call, int64_t longest) {
    const Decoder& d = decoder_;
    const int64_t stored = d.type == Type::float32 ? 4 : 2, halves = call.halves;
    const int64_t element = multiplies_bf16() ? stored : 4, depth = kLine / element;  // of operands of products
    const int64_t queries = d.query_heads * d.head_dim, keys = d.cache_heads * d.head_dim;
    const int64_t mlp = layers_[0].linears[DOWN].in, group = d.query_heads / d.cache_heads;
    const int64_t input = round_up(std::max({d.hidden, queries, d.head_dim}), depth);
    const int64_t staged = 32 * std::max(input, round_up(mlp, depth));  // a strip of W
    const int64_t number = sizeof(float);
    Layout own;
    call.columns = own.take(halves * input * 16, element);
    call.staged = own.take(staged, stored);
    call.other_staged = own.take(staged, stored);
    call.turned = own.take((group + 1) * d.head_dim * 16, number);
    DecodeCall attention{};
    attention.group = group;
    attention.padded_features = round_up(d.head_dim, kFeatureTile);
    call.scores = own.take(decode_scratch(attention, longest), number);
    call.own_bytes = own.bytes;

    Layout all;
    const int64_t x = all.take(halves * d.hidden * 16, number);
    const int64_t qkv = all.take(halves * (queries + 2 * keys) * 16, number);
    const int64_t cos = all.take(halves * d.head_dim * 16, number), sin = all.take(halves * d.head_dim * 16, number);
    const int64_t h = all.take(call.n_slot_rows * call.ranks * 16, number);
    const int64_t attended = all.take(call.rows.n * queries, stored);
    const int64_t inner = all.take(halves * round_up(mlp, depth) * 16, element);
    const int64_t threads = all.take(call.threads, call.own_bytes);

    const size_t needed = all.bytes + kLine;
    if (memory_.size() < needed) memory_ = std::vector<char>(needed + needed / 4);
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    char* memory = memory_.data() + (kLine - address % kLine) % kLine;
    const auto floats = [memory](int64_t at) { return reinterpret_cast<float*>(memory + at); };
    call.x = floats(x);
    call.qkv = floats(qkv);
    call.cos = floats(cos);
    call.sin = floats(sin);
    call.h = floats(h);
    call.attended = memory + attended;
    call.inner = memory + inner;
    call.own = memory + threads;
}

void DecodeStep::run(const Rows& rows, void* out, int threads) {
    RLHF_CHECK_THREADS(threads);
    check(rows);
    RLHF_CHECK_POINTER(out, rows.n);
    if (rows.n == 0) return;
    StepCall call{};
    call.decoder = &decoder_;
    call.layers = layers_.data();
    call.plans = plans_.data();
    call.keys = keys_.data();
    call.values = values_.data();
    call.parts = parts_.data();
    call.slot_scales = slot_scales_.data();
    call.rows = rows;
    call.n_layers = layers_.size();
    call.ranks = ranks_;
    call.block = block_;
    call.halves = (rows.n + 15) / 16;
    call.out = out;
    find_slot_rows(call);
    call.attend = current_decode_group();
    int64_t longest = 0, used = 0;
    for (int64_t n = 0; n < rows.n; ++n) longest = std::max(longest, rows.positions[n] + 1);
    for (const Layer& layer : layers_) {
        for (int64_t n = 0; n < rows.n; ++n) {
            const int64_t length = rows.positions[n] + 1;
            used += length - first_position(length, layer.window);
        }
    }
    const int64_t attended = used * decoder_.query_heads * decoder_.head_dim * 2;
    call.threads = call.halves * 16 * weights_ + attended < kSerialProducts ? 1 : threads;
    call.shares = 1;
    while (call.shares < 16 && call.halves * decoder_.cache_heads * call.shares < 4 * call.threads) call.shares *= 2;
    if (call.threads == 1) call.shares = 1;
    lay_out(call, longest);
    void (*function)(const StepCall&);
    if (decoder_.type == Type::bfloat16) RLHF_PICK(function, step_bfloat16);
    else RLHF_PICK(function, step_float32);
    function(call);
}

}  // namespace rlhf::cpu::step
