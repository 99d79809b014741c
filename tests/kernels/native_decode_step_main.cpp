// csrc/cpu/decode_step*.cpp under ASan and UBSan: test_native.py builds and runs this. Every array is a heap block of
// exactly its size, so one element too far ends the process; unused cache holds NaN and unused table entries are wild.
// Results are compared with the definition, in double.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cpu/decode_step.h"
#include "native_driver.h"

namespace {

using namespace driver;
using namespace rlhf::cpu;
using namespace rlhf::cpu::step;

// Numbers of either type, in memory of their size, and as doubles.
struct Numbers {
    std::vector<double> wide;
    std::unique_ptr<char[]> memory;
    Type type;

    Numbers(int64_t count, Type type, double scale, double shift = 0)
        : wide(count), memory(new char[count * size(type)]), type(type) {
        for (int64_t i = 0; i < count; ++i) set(i, shift + scale * random_number());
    }
    static int64_t size(Type type) { return type == Type::float32 ? 4 : 2; }
    void set(int64_t i, double x) {
        float narrow = float(x);
        uint32_t bits;
        std::memcpy(&bits, &narrow, 4);
        if (type == Type::bfloat16) bits &= 0xffff0000u;
        std::memcpy(&narrow, &bits, 4);
        wide[i] = narrow;
        std::memcpy(memory.get() + i * size(type), reinterpret_cast<char*>(&bits) + 4 - size(type), size(type));
    }
    double read(int64_t i) const {
        uint32_t bits = 0;
        std::memcpy(reinterpret_cast<char*>(&bits) + 4 - size(type), memory.get() + i * size(type), size(type));
        float x;
        std::memcpy(&x, &bits, 4);
        return x;
    }
    void* data() const { return memory.get(); }
};

struct Sizes {
    int64_t hidden, heads, cache_heads, dim, mlp, window, rank;
    bool options;  // biases and norms of q and k
};

constexpr int64_t kLayers = 2, kWords = 7, kAngles = 12, kBlock = 3;

// A decoder of random numbers with one slot.
struct Model {
    Sizes s;
    Type type;
    Numbers embedding, final_norm, cos, sin;
    std::vector<Numbers> weights, biases, norms, head_norms, As, Bs;
    std::vector<Layer> layers;
    Adapter adapter{0.5f, {}};
    int64_t outs[kNames], ins[kNames];

    Model(const Sizes& s, Type type)
        : s(s), type(type), embedding(kWords * s.hidden, type, 1), final_norm(s.hidden, type, 0.5, 1),
          cos(kAngles * s.dim, type, 1), sin(kAngles * s.dim, type, 1) {
        const int64_t q = s.heads * s.dim, kv = s.cache_heads * s.dim, H = s.hidden, m = s.mlp;
        const int64_t out[kNames] = {q, kv, kv, H, m, m, H}, in[kNames] = {H, H, H, q, H, H, m};
        std::copy(out, out + kNames, outs);
        std::copy(in, in + kNames, ins);
        for (int64_t layer = 0; layer < kLayers; ++layer) {
            Layer l{};
            for (int i = 0; i < 2; ++i) norms.emplace_back(H, type, 0.5, 1);
            for (int i = 0; i < 2; ++i) head_norms.emplace_back(s.dim, type, 0.5, 1);
            l.input_norm = norms[2 * layer].data();
            l.mlp_norm = norms[2 * layer + 1].data();
            if (s.options) {
                l.q_norm = head_norms[2 * layer].data();
                l.k_norm = head_norms[2 * layer + 1].data();
            }
            l.window = s.window;
            for (int name = 0; name < kNames; ++name) {
                const double scale = 1 / std::sqrt(double(ins[name]));
                weights.emplace_back(outs[name] * ins[name], type, scale);
                biases.emplace_back(outs[name], type, s.options ? 0.2 : 0.0);
                l.linears[name] = {weights.back().data(), ins[name], s.options ? biases.back().data() : nullptr,
                                   outs[name], ins[name]};
                const Type mine = name % 2 ? type : Type::float32;
                As.emplace_back(s.rank * ins[name], mine, scale);
                Bs.emplace_back(outs[name] * s.rank, mine, 0.5);
                adapter.pairs.push_back({{As.back().data(), ins[name], mine}, {Bs.back().data(), s.rank, mine}, s.rank});
            }
            layers.push_back(l);
        }
    }
    Decoder decoder() const {
        return {type, embedding.data(), final_norm.data(), s.hidden, kWords, s.hidden, s.heads, s.cache_heads, s.dim,
                1e-5f, 0.3f};
    }
    std::vector<double> linear(const std::vector<double>& x, int64_t layer, Name name, bool on) const {
        const int64_t at = layer * kNames + name, in = ins[name];
        std::vector<double> y(outs[name]), h(s.rank);
        for (int64_t r = 0; r < s.rank && on; ++r) {
            for (int64_t k = 0; k < in; ++k) h[r] += adapter.scale * As[at].wide[r * in + k] * x[k];
        }
        for (int64_t m = 0; m < outs[name]; ++m) {
            y[m] = biases[at].wide[m];
            for (int64_t k = 0; k < in; ++k) y[m] += weights[at].wide[m * in + k] * x[k];
            for (int64_t r = 0; r < s.rank; ++r) y[m] += Bs[at].wide[m * s.rank + r] * h[r];
        }
        return y;
    }
};

void norm(double* x, int64_t count, const std::vector<double>& weight) {
    double mean = 0;
    for (int64_t i = 0; i < count; ++i) mean += x[i] * x[i] / double(count);
    for (int64_t i = 0; i < count; ++i) x[i] *= weight[i] / std::sqrt(mean + 1e-5);
}

void turn(double* x, int64_t dim, const double* cos, const double* sin) {
    for (int64_t i = 0; i < dim / 2; ++i) {
        const double a = x[i], b = x[dim / 2 + i];
        x[i] = a * cos[i] - b * sin[i];
        x[dim / 2 + i] = b * cos[dim / 2 + i] + a * sin[dim / 2 + i];
    }
}

// Caches of one row in double: [layers][positions][cache heads, dim].
using History = std::vector<std::vector<std::vector<double>>>;

std::vector<double> step_of_row(const Model& m, int64_t token, int64_t position, bool on, History& keys,
                                History& values) {
    const Sizes& s = m.s;
    const int64_t H = s.hidden, D = s.dim, group = s.heads / s.cache_heads;
    const auto add = [](std::vector<double>& x, const std::vector<double>& y) {
        for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
    };
    std::vector<double> x(m.embedding.wide.begin() + token * H, m.embedding.wide.begin() + (token + 1) * H);
    for (int64_t layer = 0; layer < kLayers; ++layer) {
        std::vector<double> u = x;
        norm(u.data(), H, m.norms[2 * layer].wide);
        auto q = m.linear(u, layer, Q, on), k = m.linear(u, layer, K, on);
        const double *cos = m.cos.wide.data() + position * D, *sin = m.sin.wide.data() + position * D;
        for (int64_t h = 0; h < s.heads + s.cache_heads; ++h) {
            double* head = h < s.heads ? q.data() + h * D : k.data() + (h - s.heads) * D;
            if (s.options) norm(head, D, m.head_norms[2 * layer + (h >= s.heads)].wide);
            turn(head, D, cos, sin);
        }
        keys[layer][position] = k;
        values[layer][position] = m.linear(u, layer, V, on);
        std::vector<double> attended(s.heads * D);
        const int64_t first = s.window ? std::max<int64_t>(0, position + 1 - s.window) : 0;
        for (int64_t h = 0; h < s.heads; ++h) {
            std::vector<double> p;
            double total = 0;
            for (int64_t at = first; at <= position; ++at) {
                double z = 0;
                for (int64_t d = 0; d < D; ++d) z += 0.3 * q[h * D + d] * keys[layer][at][h / group * D + d];
                p.push_back(std::exp(z));
                total += p.back();
            }
            for (int64_t at = first; at <= position; ++at) {
                for (int64_t d = 0; d < D; ++d) {
                    attended[h * D + d] += p[at - first] / total * values[layer][at][h / group * D + d];
                }
            }
        }
        add(x, m.linear(attended, layer, O, on));
        u = x;
        norm(u.data(), H, m.norms[2 * layer + 1].wide);
        auto gate = m.linear(u, layer, GATE, on);
        const auto up = m.linear(u, layer, UP, on);
        for (int64_t i = 0; i < s.mlp; ++i) gate[i] *= up[i] / (1 + std::exp(-gate[i]));
        add(x, m.linear(gate, layer, DOWN, on));
    }
    norm(x.data(), H, m.final_norm.wide);
    return x;
}

void step_case(const Sizes& s, int64_t n, Type type, int threads) {
    const Model m(s, type);
    const std::string what = std::string(rlhf::cpu::name(current_isa())) + " H=" + std::to_string(s.hidden) +
                             " D=" + std::to_string(s.dim) + " n=" + std::to_string(n);
    const int64_t pages = kAngles / kBlock, blocks = n * pages, row = s.cache_heads * s.dim;
    std::unique_ptr<int64_t[]> tokens(new int64_t[n]), positions(new int64_t[n]), slots(new int64_t[n]);
    std::unique_ptr<int64_t[]> table(new int64_t[n * pages]);
    std::vector<Numbers> memory;
    std::vector<LayerCache> keys, values;
    for (int i = 0; i < 2 * kLayers; ++i) {
        memory.emplace_back(blocks * kBlock * row, type, std::numeric_limits<double>::quiet_NaN());
        auto& caches = i % 2 ? values : keys;  // keys by heads, values by positions first
        caches.push_back(i % 2 ? LayerCache{memory.back().data(), kBlock * row, row, s.dim}
                               : LayerCache{memory.back().data(), kBlock * row, s.dim, kBlock * s.dim});
    }
    std::vector<History> histories[2];
    for (int64_t i = 0; i < n; ++i) {
        tokens[i] = i % kWords;
        positions[i] = (5 * i + 3) % kAngles;
        slots[i] = i % 3 == 1 ? -1 : 0;
        const int64_t first = s.window ? std::max<int64_t>(0, positions[i] + 1 - s.window) : 0;
        for (int64_t j = 0; j < pages; ++j) {
            const bool used = j >= first / kBlock && j <= positions[i] / kBlock;
            table[i * pages + j] = used ? blocks - 1 - (i * pages + j) : int64_t(1) << 40;
        }
        for (int side = 0; side < 2; ++side) {
            histories[side].emplace_back(kLayers, std::vector<std::vector<double>>(kAngles, std::vector<double>(row)));
            for (int64_t layer = 0; layer < kLayers; ++layer) {
                const LayerCache& cache = (side ? values : keys)[layer];
                for (int64_t p = first; p < positions[i]; ++p) {
                    for (int64_t j = 0; j < row; ++j) {
                        const int64_t at = table[i * pages + p / kBlock] * cache.block + p % kBlock * cache.position +
                                           j / s.dim * cache.head + j % s.dim;
                        memory[2 * layer + side].set(at, random_number());
                        histories[side][i][layer][p][j] = memory[2 * layer + side].wide[at];
                    }
                }
            }
        }
    }
    DecodeStep step(m.decoder(), m.layers, {m.adapter});
    step.bind(blocks, kBlock, keys, values);
    Numbers out(n * s.hidden, type, 0);
    const Rows rows{n, tokens.get(), positions.get(), slots.get(), table.get(), pages, m.cos.data(), m.sin.data(), kAngles};
    for (int repeat = 0; repeat < 2; ++repeat) step.run(rows, out.data(), threads);
    const double tolerance = type == Type::float32 ? 2e-4 : 0.15;
    for (int64_t i = 0; i < n; ++i) {
        const auto want = step_of_row(m, tokens[i], positions[i], slots[i] == 0, histories[0][i], histories[1][i]);
        for (int64_t j = 0; j < s.hidden; ++j) {
            require(std::abs(out.read(i * s.hidden + j) - want[j]) <= tolerance * (1 + std::abs(want[j])), what);
        }
    }
}

void refusals() {
    const Model m({6, 2, 1, 4, 5, 0, 2, true}, Type::float32);
    refuses_as("head_dim", [&] {
        Decoder d = m.decoder();
        d.head_dim = 3;
        DecodeStep(d, m.layers, {});
    });
    refuses_as("layers", [&] { DecodeStep(m.decoder(), {}, {}); });
    refuses_as("down", [&] {
        auto layers = m.layers;
        layers[1].linears[DOWN].in = 4;
        DecodeStep(m.decoder(), layers, {});
    });
    refuses_as("adapters", [&] { DecodeStep(m.decoder(), m.layers, {Adapter{1, {}}}); });
    DecodeStep step(m.decoder(), m.layers, {});
    refuses_as("keys", [&] { step.bind(1, 1, {}, {}); });
    Numbers cache(12 * 4, Type::float32, 0), out(6, Type::float32, 0);
    int64_t token = 0, position = 0, slot = -1, block = 0;
    Rows rows{1, &token, &position, &slot, &block, 1, m.cos.data(), m.sin.data(), kAngles};
    refuses_as("keys", [&] { step.run(rows, out.data(), 1); });
    const std::vector<LayerCache> caches(kLayers, {cache.data(), 12, 4, 4});
    step.bind(4, 3, caches, caches);
    step.run(rows, out.data(), 1);
    const auto refused = [&](const char* argument, int64_t& index, int64_t wrong) {
        const int64_t right = index;
        index = wrong;
        refuses_as(argument, [&] { step.run(rows, out.data(), 1); });
        index = right;
    };
    refused("tokens", token, kWords);
    refused("positions", position, 3);
    refused("positions", position, -1);
    refused("slots", slot, 0);
    refused("table", block, 4);
    refuses_as("threads", [&] { step.run(rows, out.data(), 0); });
    rows.n = -1;
    refuses_as("rows.n", [&] { step.run(rows, out.data(), 1); });
}

}  // namespace

int main() {
    for (const std::string& isa : available_isas()) {
        set_isa(isa);
        for (const Type type : {Type::float32, Type::bfloat16}) {
            for (const int64_t n : {1, 16, 17, 35}) {
                step_case({64, 8, 4, 8, 40, 0, 4, false}, n, type, 2);
                step_case({33, 3, 1, 10, 7, 4, 5, true}, n, type, 1);
            }
            step_case({160, 4, 2, 64, 320, 5, 3, true}, 40, type, 2);  // enough for threads to share
        }
    }
    refusals();
    return is_clean();
}
