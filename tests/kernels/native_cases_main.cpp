// native_cases_main FILE: every op on the cases of native_cases.py, with every instruction set of this CPU.
//
// Prints the sets, then for each op and set the largest error as a part of what its tier allows, and where it stood.
// Ends with 1 if one is above 1. Each function below calls one op through its header in csrc/cpu.

#include <algorithm>
#include <utility>

#include "cpu/llama_ops.h"
#include "cpu/attention.h"
#include "cpu/decode_attention.h"
#include "cpu/decode_step.h"
#include "cpu/gae.h"
#include "cpu/gather_logprob.h"
#include "cpu/head.h"
#include "cpu/isa.h"
#include "cpu/linear.h"
#include "cpu/lora.h"
#include "cpu/lora_decode.h"
#include "cpu/ppo_loss.h"
#include "cpu/whiten.h"
#include "native_cases.h"

namespace {

using namespace rlhf::cpu;

constexpr int kThreads = 2;

// A matrix of head.h, whose rows may be longer than what is read of them.
Matrix head_matrix(Case& c, const std::string& name) {
    const std::string& type = c.array(name).type;
    return {c.data(name), c.size(name, 1),
            type == "bfloat16" ? Type::bfloat16 : type == "float16" ? Type::float16 : Type::float32};
}

void head(Case& c) {
    const int64_t H = c.size("hidden", 1), extra = c.size("extra_hidden", 1), V = c.size("weight", 0);
    const Head head{head_matrix(c, "weight"), c.data<float>("bias"), H, V, float(c.number("softcap")),
                    float(c.number("scale"))};
    const auto own = [&](const char* name) { return extra > 0 ? c.floats(name) : nullptr; };
    HeadRun run{c.size("rows", 0), extra, head_matrix(c, "extra_weight"), extra, head_matrix(c, "extra_hidden"),
                own("expected_own"), own("expected_kl_own"), nullptr};
    const Batch batch{head_matrix(c, "hidden"), c.data<int64_t>("rows"), run.end, c.data<float>("temperature"),
                      c.data<int64_t>("target"), &run, 1};
    const Matrix other = head_matrix(c, "other");
    float *lse = c.floats("lse"), *entropy = c.floats("entropy"), *square = c.floats("log_sum_sq_prob");
    float *pair_lse = c.floats("pair_lse"), *kl = c.floats("kl");
    const Pair pair{other, c.floats("pair_logprob"), pair_lse, kl};
    head_forward(head, batch,
                 {c.floats("logprob"), lse, entropy, c.floats("is_top1"), c.floats("mean_logit"), square}, &pair,
                 {c.floats("expected"), c.floats("expected_kl")}, kThreads);
    const LogitGradients gradients{
        lse,    c.data<float>("g_logprob"),         c.data<float>("g_lse"), c.data<float>("g_entropy"),
        entropy, c.data<float>("g_mean_logit"),      c.data<float>("g_log_sum_sq_prob"),
        square, c.data<float>("g_kl"),              kl,                     pair_lse,
        other.data, other.stride};
    run.sums = own("d_hidden_own");
    run.d_weight = own("d_weight_own");
    head_backward(head, batch, gradients,
                  {c.floats("d_hidden"), c.floats("d_weight"), Type::float32, c.floats("d_bias")}, kThreads);
}

void sample(Case& c) {
    const int64_t n = c.size("hidden", 0);
    std::vector<int64_t> rows(n);
    for (int64_t i = 0; i < n; ++i) rows[i] = i;
    const Head head{head_matrix(c, "weight"), c.data<float>("bias"), c.size("hidden", 1), c.size("weight", 0),
                    float(c.number("softcap")), float(c.number("scale"))};
    const HeadRun run{n, 0, {}, 0, {}, nullptr, nullptr, nullptr};
    const Batch batch{head_matrix(c, "hidden"), rows.data(), n, c.data<float>("temperature"), nullptr, &run, 1};
    head_sample(head, batch,
                {c.data<int64_t>("seed"), c.data<int64_t>("position"), c.data<uint8_t>("greedy"),
                 c.data<int64_t>("forbidden"), c.size("forbidden", 0), c.data<uint8_t>("forbids"),
                 uint32_t(c.number("stream")), c.integers("token"), c.floats("logprob"), c.floats("entropy")},
                kThreads);
}

template <typename S>
void gather_logprob_of(Case& c) {
    const int64_t n = c.size("logits", 0), V = c.size("logits", 1);
    const LogitRows<const S> logits{c.data<const S>("logits"), nullptr, V, 1};
    const RowOptions<float> options{c.data<int64_t>("target"), c.data<float>("temperature"), 1.0, -100};
    float *lse = c.floats("lse"), *entropy = c.floats("entropy"), *square = c.floats("log_sum_sq_prob");
    gather_logprob_forward<S>(
        logits, options, n, V, kThreads,
        {c.floats("logprob"), entropy, lse, c.floats("is_top1"), c.floats("mean_logit"), square});
    auto* d_logits = static_cast<S*>(c.out("d_logits", c.array("logits").type));
    gather_logprob_backward<S>(logits, options,
                               {c.data<float>("g_logprob"), c.data<float>("g_entropy"), c.data<float>("g_lse"),
                                c.data<float>("g_mean_logit"), c.data<float>("g_log_sum_sq_prob"), lse, entropy, square},
                               n, V, kThreads, {d_logits, nullptr, V, 1});
}

void gather_logprob(Case& c) {
    if (c.bf16("logits")) gather_logprob_of<Bfloat16>(c);
    else gather_logprob_of<float>(c);
}

// Rows of the inputs end in columns that do not count.
void linear(Case& c) {
    const Matrix x = head_matrix(c, "x"), weight = head_matrix(c, "weight"), dy = head_matrix(c, "dy");
    const int64_t N = c.size("x", 0), M = c.size("weight", 0), K = int64_t(c.number("K"));
    const auto result = [&](const char* name, int64_t columns) {
        return Matrix{c.out(name, c.array("x").type), columns, x.type};
    };
    linear_forward(x, weight, c.data("bias"), result("y", M), N, K, M, kThreads);
    linear_forward(x, weight, nullptr, result("y_without_bias", M), N, K, M, kThreads);
    linear_input_gradient(dy, weight, nullptr, nullptr, result("dx", K), N, K, M, kThreads);
    linear_weight_gradient(dy, x, result("dW", K), N, K, M, kThreads);
}

// ---- adapters -------------------------------------------------------------------------------------------------------

lora::Type type_of(const Case& c, const std::string& name) {
    return c.bf16(name) ? lora::Type::bfloat16 : lora::Type::float32;
}

lora::Matrix matrix(Case& c, const std::string& name) { return {c.data(name), c.size(name, 1), type_of(c, name)}; }

// A result as a matrix like the input `like`, with this many columns.
lora::Matrix result(Case& c, const std::string& name, const std::string& like, int64_t columns) {
    return {c.out(name, c.array(like).type), columns, type_of(c, like)};
}

std::vector<lora::Slot> slots_of(Case& c) {
    std::vector<lora::Slot> slots;
    for (int i = 0; c.has("A" + std::to_string(i)); ++i) {
        const std::string s = std::to_string(i);
        slots.push_back({matrix(c, "A" + s), matrix(c, "B" + s), c.size("A" + s, 0), c.number("scale" + s),
                         c.number("p" + s), {}, {}});
    }
    return slots;
}

// Runs of (start, end, slot); y is compact, or has the rows of x.
std::vector<lora::Run> runs_of(const Case& c, bool compact) {
    std::vector<lora::Run> runs;
    const Array& given = c.array("runs");
    int64_t at = 0;
    for (int64_t i = 0; i < given.shape[0]; ++i) {
        const int64_t start = given.as<int64_t>(3 * i), end = given.as<int64_t>(3 * i + 1);
        runs.push_back({start, compact ? at : start, end - start, given.as<int64_t>(3 * i + 2)});
        at += end - start;
    }
    return runs;
}

void lora_training(Case& c) {
    const int64_t K = c.size("x", 1), M = c.size("dy", 1);
    const lora::Dropout dropout{int64_t(c.number("seed")), c.data<int64_t>("row_ids"), uint32_t(c.number("stream"))};
    auto slots = slots_of(c);
    lora::forward(matrix(c, "x"), {c.floats("delta"), M, lora::Type::float32}, false, K, M, slots, runs_of(c, true),
                  dropout, kThreads);
    const lora::Matrix y = result(c, "y", "y0", M), dx = result(c, "dx", "x", K);
    std::memcpy(y.data, c.data("y0"), c.array("y0").bytes.size());
    std::memset(dx.data, 0, c.array("x").bytes.size());
    lora::forward(matrix(c, "x"), y, true, K, M, slots, runs_of(c, false), dropout, kThreads);
    for (size_t i = 0; i < slots.size(); ++i) {
        const std::string s = std::to_string(i);
        slots[i].dA = result(c, "dA" + s, "A" + s, K);
        slots[i].dB = result(c, "dB" + s, "B" + s, slots[i].rank);
    }
    lora::backward(matrix(c, "dy"), matrix(c, "x"), dx, K, M, slots, runs_of(c, true), dropout, kThreads);
}

void lora_decode(Case& c) {
    const int64_t M = c.size("weight", 0);
    lora::decode(matrix(c, "x"), matrix(c, "weight"), c.data("bias"), result(c, "y", "x", M), c.size("x", 0),
                 c.size("x", 1), M, slots_of(c), runs_of(c, false), kThreads);
}

// ---- decoding -------------------------------------------------------------------------------------------------------

Cache cache_of(Case& c, const std::string& name) {
    const int64_t D = c.size(name, 3), heads = c.size(name, 2), block = c.size(name, 1);
    return {c.data(name), block * heads * D, heads * D, D, 1};
}

void decode_attention_of(Case& c) {
    const int64_t heads = c.size("q", 1), D = c.size("q", 2);
    decode_attention(c.bf16("q") ? CacheType::bfloat16 : CacheType::float32,
                     {c.size("q", 0), heads, c.size("k", 2), D}, {c.data("q"), heads * D, D, 1}, cache_of(c, "k"),
                     cache_of(c, "v"),
                     {c.data<int64_t>("lengths"), c.data<int64_t>("table"), c.size("table", 1), c.size("k", 0),
                      c.size("k", 1)},
                     {float(c.number("scale")), int64_t(c.number("window")), float(c.number("softcap")),
                      c.data<float>("sinks")},
                     c.out("out", c.array("q").type), kThreads);
}

Heads heads_of(Case& c, const std::string& name) {
    return {c.data(name), c.size(name, 1) * c.size(name, 2), c.size(name, 2)};
}

void packed_attention(Case& c) {
    const CacheType type = c.bf16("q") ? CacheType::bfloat16 : CacheType::float32;
    const AttentionSizes sizes{c.size("q", 0), c.size("lengths", 0), c.size("q", 1), c.size("k", 1), c.size("q", 2)};
    const Heads q = heads_of(c, "q"), k = heads_of(c, "k"), v = heads_of(c, "v");
    const Packing packing{c.data<int64_t>("lengths"), c.data<int64_t>("parents")};
    const ScoreOptions options{float(c.number("scale")), int64_t(c.number("window")), float(c.number("softcap")),
                               c.data<float>("sinks")};
    std::vector<float> totals(2 * sizes.tokens * sizes.query_heads);
    const std::string& stored = c.array("q").type;
    void* out = c.out("out", stored);
    attention(type, sizes, q, k, v, packing, options, out, totals.data(), kThreads);
    attention_gradient(type, sizes, heads_of(c, "d_out"), q, k, v, packing, options, out, totals.data(),
                       {c.out("d_q", stored), c.out("d_k", stored), c.out("d_v", stored), c.floats("d_sinks")}, kThreads);
}

const char* const kLinears[] = {"q", "k", "v", "o", "gate", "up", "down"};

std::vector<step::Layer> layers_of(Case& c) {
    std::vector<step::Layer> layers;
    for (int64_t i = 0; i < int64_t(c.number("layers")); ++i) {
        const std::string l = std::to_string(i) + ".";
        step::Layer layer{c.data(l + "input_norm"), c.data(l + "mlp_norm"), c.data(l + "q_norm"), c.data(l + "k_norm"),
                          {}, int64_t(c.number(l + "window"))};
        for (int name = 0; name < step::kNames; ++name) {
            const std::string linear = l + kLinears[name];
            const int64_t out = c.size(linear + ".weight", 0), in = c.size(linear + ".weight", 1);
            layer.linears[name] = {c.data(linear + ".weight"), in, c.data(linear + ".bias"), out, in};
        }
        layers.push_back(layer);
    }
    return layers;
}

std::vector<step::Adapter> adapters_of(Case& c) {
    std::vector<step::Adapter> adapters;
    for (int64_t slot = 0; slot < int64_t(c.number("n_slots")); ++slot) {
        step::Adapter adapter{float(c.number("scale" + std::to_string(slot))), {}};
        for (int64_t i = 0; i < int64_t(c.number("layers")); ++i) {
            for (const char* name : kLinears) {
                const std::string pair = std::to_string(slot) + "." + std::to_string(i) + "." + name;
                if (c.has(pair + ".A")) {
                    adapter.pairs.push_back({matrix(c, pair + ".A"), matrix(c, pair + ".B"), c.size(pair + ".A", 0)});
                } else {
                    adapter.pairs.push_back({});
                }
            }
        }
        adapters.push_back(std::move(adapter));
    }
    return adapters;
}

// The case's caches stay as they are: a copy of each is written to.
void decode_step(Case& c) {
    const int64_t n = c.size("tokens", 0), layers = int64_t(c.number("layers")), D = int64_t(c.number("dim"));
    const int64_t blocks = c.size("0.keys", 0), block = c.size("0.keys", 1), heads = c.size("0.keys", 2);
    const int64_t H = c.size("embedding", 1), pages = c.size("table", 1), entry = heads * D;
    const step::Decoder decoder{type_of(c, "embedding"), c.data("embedding"), c.data("final_norm"), H,
                                c.size("embedding", 0), H, int64_t(c.number("heads")), heads, D,
                                float(c.number("eps")), float(c.number("scale"))};
    step::DecodeStep step(decoder, layers_of(c), adapters_of(c));
    std::vector<Array> copies[2];
    std::vector<step::LayerCache> caches[2];
    for (int side = 0; side < 2; ++side) {
        for (int64_t i = 0; i < layers; ++i) {
            copies[side].push_back(c.array(std::to_string(i) + (side ? ".values" : ".keys")));
        }
        for (Array& copy : copies[side]) caches[side].push_back({copy.bytes.data(), block * entry, entry, D});
    }
    step.bind(blocks, block, caches[0], caches[1]);
    const std::string type = c.array("embedding").type;
    step.run({n, c.data<int64_t>("tokens"), c.data<int64_t>("positions"), c.data<int64_t>("slots"),
              c.data<int64_t>("table"), pages, c.data("cos"), c.data("sin"), c.size("cos", 0)},
             c.out("hidden", type), kThreads);
    for (int side = 0; side < 2; ++side) {  // what every row has added, [n, layers, heads, D]
        auto* to = static_cast<char*>(c.out(side ? "values" : "keys", type));
        const int64_t bytes = entry * copies[0][0].element();
        for (int64_t row = 0; row < n; ++row) {
            const int64_t position = c.data<int64_t>("positions")[row];
            const int64_t page = c.data<int64_t>("table")[row * pages + position / block];
            for (int64_t i = 0; i < layers; ++i, to += bytes) {
                std::memcpy(to, copies[side][i].bytes.data() + (page * block + position % block) * bytes, bytes);
            }
        }
    }
}

// ---- elements -------------------------------------------------------------------------------------------------------

template <typename T>
void rms_norm(Case& c) {
    const int64_t rows = c.size("x", 0), width = c.size("x", 1);
    const std::string type = c.array("x").type;
    const bool plus_one = c.number("plus_one") != 0;
    float* rstd = c.floats("rstd");
    rms_norm_apply<T>(c.data<T>("x"), c.data<T>("weight"), plus_one, c.number("eps"), rows, width, kThreads,
                      static_cast<T*>(c.out("y", type)), rstd);
    rms_norm_gradient<T>(c.data<T>("dy"), c.data<T>("x"), c.data<T>("weight"), plus_one, rstd, rows, width, kThreads,
                         static_cast<T*>(c.out("dx", type)));
}

template <typename T>
void rotary(Case& c) {
    const int64_t batch = c.size("x", 0), tokens = c.size("x", 1), heads = c.size("x", 2), D = c.size("x", 3);
    const std::string type = c.array("x").type;
    const HeadStrides strides{tokens * heads * D, D, heads * D};
    rotary_apply<T>(c.data<T>("x"), strides, c.data<T>("cos"), c.data<T>("sin"), tokens * D, batch, heads, tokens, D,
                    kThreads, static_cast<T*>(c.out("y", type)));
    rotary_gradient<T>(c.data<T>("dy"), strides, c.data<T>("cos"), c.data<T>("sin"), tokens * D, batch, heads, tokens,
                       D, kThreads, static_cast<T*>(c.out("dx", type)));
}

template <typename T>
void swiglu(Case& c) {
    const std::string type = c.array("gate").type;
    swiglu_apply<T>(c.data<T>("gate"), c.data<T>("up"), c.array("gate").count(), kThreads,
                    static_cast<T*>(c.out("y", type)));
    auto *d_gate = static_cast<T*>(c.out("d_gate", type)), *d_up = static_cast<T*>(c.out("d_up", type));
    swiglu_gradient<T>(c.data<T>("dy"), c.data<T>("gate"), c.data<T>("up"), c.array("gate").count(), kThreads, d_gate,
                       d_up);
}

template <typename T>
void activation(Case& c) {
    const std::string type = c.array("x").type;
    const int kind = int(c.number("kind"));
    const int64_t count = c.array("x").count();
    activation_apply<T>(c.data<T>("x"), kind, count, kThreads, static_cast<T*>(c.out("y", type)));
    activation_gradient<T>(c.data<T>("dy"), c.data<T>("x"), kind, count, kThreads, static_cast<T*>(c.out("dx", type)));
}

void policy_loss(Case& c) {
    const int64_t count = c.array("new_logprob").count();
    const TokenMask mask{c.data("mask"), false};
    const PpoInputs inputs{{c.data("new_logprob"), false}, {c.data("old_logprob"), false}, {c.data("advantage"), false},
                           {c.data("ref_logprob"), false}, {c.data("entropy"), false},     mask};
    const PpoKnobs knobs{1 - c.number("clip_low"), 1 + c.number("clip_high"), c.number("dual_clip"), kK3,
                         c.number("kl_coef"), c.number("entropy_coef")};
    ppo_loss_forward<float>(inputs, knobs, c.number("denom"), count, kThreads, c.floats("loss"),
                            c.floats("statistics"), c.floats("dloss"));
    ppo_loss_entropy_gradient<float>(1, mask, c.number("denom"), c.number("entropy_coef"), count, kThreads,
                                     c.floats("d_entropy"));
}

void value_loss(Case& c) {
    const ValueInputs inputs{{c.data("value"), false}, {c.data("old_value"), false}, {c.data("ret"), false},
                             {c.data("mask"), false}};
    value_loss_forward<float>(inputs, c.number("clip"), c.number("denom"), c.array("value").count(), kThreads,
                              c.floats("loss"), c.floats("statistics"), c.floats("dloss"));
}

void gae(Case& c) {
    const int64_t rows = c.size("reward", 0), T = c.size("reward", 1);
    const auto at = [&](const char* name) { return Rows<float>{c.data<float>(name), T}; };
    const Rows<uint8_t> mask{c.data<uint8_t>("mask"), T};
    const double gamma = c.number("gamma"), lam = c.number("lam");
    gae_forward<float>(at("reward"), at("value"), mask, c.data<float>("bootstrap"), rows, T, gamma, lam, kThreads,
                       c.floats("advantage"), c.floats("ret"));
    gae_backward<float>(at("d_advantage"), at("d_ret"), mask, rows, T, gamma, lam, kThreads, c.floats("d_reward"),
                        c.floats("d_value"), c.floats("d_bootstrap"));
}

void whiten(Case& c) {
    const int64_t count = c.array("x").count();
    const auto *x = c.data<float>("x"), *grad = c.data<float>("grad");
    const auto* mask = c.data<uint8_t>("mask");
    masked_moments<float>(x, mask, count, kThreads, c.doubles("moments"));
    double* stats = c.doubles("stats");
    whiten_forward<float>(x, mask, nullptr, count, true, c.number("eps"), kThreads, c.floats("y"), stats);
    whiten_backward<float>(grad, x, mask, stats, count, true, false, kThreads, c.floats("d_x"));
}

template <void (*narrow)(Case&), void (*wide)(Case&)>
void by_type(Case& c) {
    const bool bf16 = c.has("x") ? c.bf16("x") : c.bf16("gate");
    (bf16 ? narrow : wide)(c);
}

const std::map<std::string, void (*)(Case&)> kOps = {
    {"head", head},
    {"sample", sample},
    {"gather_logprob", gather_logprob},
    {"linear", linear},
    {"lora", lora_training},
    {"lora_decode", lora_decode},
    {"attention", packed_attention},
    {"decode_attention", decode_attention_of},
    {"decode_step", decode_step},
    {"rms_norm", by_type<rms_norm<uint16_t>, rms_norm<float>>},
    {"rotary", by_type<rotary<uint16_t>, rotary<float>>},
    {"swiglu", by_type<swiglu<uint16_t>, swiglu<float>>},
    {"activation", by_type<activation<uint16_t>, activation<float>>},
    {"ppo_loss", policy_loss},
    {"value_loss", value_loss},
    {"gae", gae},
    {"whiten", whiten},
};

struct Worst {
    double share = 0;
    std::string where;
};

}  // namespace

int main(int count, char** arguments) {
    if (count != 2) {
        std::fprintf(stderr, "usage: %s FILE\n", arguments[0]);
        return 2;
    }
    std::vector<Case> cases = read_cases(arguments[1]);
    std::printf("sets");
    for (const std::string& set : available_isas()) std::printf(" %s", set.c_str());
    std::printf("\n");
    bool good = true;
    for (const std::string& set : available_isas()) {
        set_isa(set);
        std::map<std::string, Worst> worst;
        for (Case& c : cases) {
            std::string whose;
            kOps.at(c.op)(c);
            const double share = c.compare(whose);
            if (share > 1) std::printf("FAILED %s %s %s: %s, %.3g of the limit\n", set.c_str(), c.op.c_str(),
                                       c.label.c_str(), whose.c_str(), share);
            good = good && share <= 1;
            if (share >= worst[c.op].share) worst[c.op] = {share, whose + " of " + c.label};
        }
        for (const auto& [op, found] : worst) {
            std::printf("%-13s %-17s %.2f %s\n", set.c_str(), op.c_str(), found.share, found.where.c_str());
        }
        if (worst.size() != kOps.size()) {
            std::printf("FAILED %s: %zu ops of %zu had cases\n", set.c_str(), worst.size(), kOps.size());
            good = false;
        }
    }
    return good ? 0 : 1;
}
