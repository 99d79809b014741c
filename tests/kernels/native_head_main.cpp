// csrc/cpu/head*.cpp under ASan and UBSan: test_native.py builds and runs this, for every instruction set of the machine.
// Every array is a heap block of exactly its size, so one element too far ends the process. Results are compared with
// the definition in double, written here as plainly as possible.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/head.h"
#include "native_driver.h"

namespace {

using namespace driver;
using namespace rlhf::cpu;

std::unique_ptr<float[]> random_floats(int64_t count) {
    auto x = heap<float>(count);
    for (int64_t i = 0; i < count; ++i) x[i] = float(random_number());
    return x;
}

// x to bf16, ties to even.
uint16_t nearest_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// A random matrix with `stride` and nothing behind its last element; its values as double, dense.
struct RandomMatrix {
    std::unique_ptr<float[]> as_float;
    std::unique_ptr<uint16_t[]> as_bf16;
    Matrix matrix;
    std::vector<double> values;

    RandomMatrix(int64_t rows, int64_t columns, int64_t stride, Type type, float scale) {
        const int64_t count = rows && columns ? (rows - 1) * stride + columns : 0;
        if (type == Type::float32) {
            as_float = heap<float>(count);
        } else {
            as_bf16 = heap<uint16_t>(count);
        }
        for (int64_t i = 0; i < count; ++i) {
            float x = scale * float(random_number());
            uint32_t bits;
            std::memcpy(&bits, &x, 4);
            if (type == Type::bfloat16) {
                as_bf16[i] = uint16_t(bits >> 16);
            } else {
                as_float[i] = x;
            }
        }
        for (int64_t r = 0; r < rows; ++r) {
            for (int64_t c = 0; c < columns; ++c) {
                float x;
                if (type == Type::bfloat16) {
                    const uint32_t bits = uint32_t(as_bf16[r * stride + c]) << 16;
                    std::memcpy(&x, &bits, 4);
                } else {
                    x = as_float[r * stride + c];
                }
                values.push_back(x);
            }
        }
        const void* data = type == Type::float32 ? static_cast<void*>(as_float.get()) : as_bf16.get();
        matrix = {data, stride, type};
    }
};

// Three runs of n rows: with `extra` columns of their own, without any, and with two more; and what is made for these.
struct RandomRuns {
    struct Run {
        int64_t first;
        RandomMatrix hidden, weight;
        std::unique_ptr<float[]> sums, sums_kl, d_hidden, d_weight;
    };
    std::vector<Run> all;
    std::vector<HeadRun> runs;

    RandomRuns(int64_t n, int64_t extra, int64_t V, Type type) {
        const int64_t ends[] = {n / 3, n / 2, n}, extras[] = {extra, 0, extra ? extra + 2 : 0};
        for (int64_t i = 0, first = 0; i < 3; first = ends[i++]) {
            const int64_t k = extras[i], rows = ends[i] - first;
            all.push_back({first, RandomMatrix(rows, k, k, type, 1.0f), RandomMatrix(V, k, k, type, 1.0f),
                           heap<float>(rows * k), heap<float>(rows * k), heap<float>(rows * k), heap<float>(V * k)});
            const Run& run = all.back();
            runs.push_back({ends[i], k, run.weight.matrix, k, run.hidden.matrix, run.sums.get(), run.sums_kl.get(), nullptr});
        }
    }
    // The same runs, with what the backward makes.
    std::vector<HeadRun> backward(bool hidden) const {
        std::vector<HeadRun> out = runs;
        for (size_t i = 0; i < out.size(); ++i) {
            out[i].sums = hidden ? all[i].d_hidden.get() : nullptr;
            out[i].d_weight = all[i].d_weight.get();
        }
        return out;
    }
    size_t of(int64_t row) const { return row < runs[0].end ? 0 : row < runs[1].end ? 1 : 2; }
    // Of a row: column k of its own in `weight` at v, in hidden, and where it stands in what was made.
    int64_t extra(int64_t row) const { return runs[of(row)].extra; }
    double weight(int64_t row, int64_t v, int64_t k) const { return all[of(row)].weight.values[v * extra(row) + k]; }
    int64_t place(int64_t row, int64_t k) const { return (row - all[of(row)].first) * extra(row) + k; }
    double hidden(int64_t row, int64_t k) const { return all[of(row)].hidden.values[place(row, k)]; }
};

void head_case(int64_t n, int64_t H, int64_t extra, int64_t V, Type type, bool options, int threads) {
    const int64_t N = n + 3;  // three rows that do not count
    const std::string name = std::string(rlhf::cpu::name(current_isa())) + " n=" + std::to_string(n) + " H=" +
                             std::to_string(H) + "+" + std::to_string(extra) + " V=" + std::to_string(V);
    RandomMatrix hidden(N, H, H + 5, type, 1.5f), other(N, H, H + 1, type, 1.5f), weight(V, H, H + 3, type, 0.7f);
    const RandomRuns own(n, extra, V, type);
    auto bias = random_floats(V), temperature = random_floats(n);
    auto rows = heap<int64_t>(n), target = heap<int64_t>(n);
    for (int64_t i = 0; i < n; ++i) {
        rows[i] = i + (i >= 1) + 2 * (i >= n / 2);
        target[i] = i == 0 ? V - 1 : int64_t((float(random_number()) + 1) / 2 * float(V)) % V;
        temperature[i] = options ? 1.0f + 0.5f * temperature[i] : 1.0f;
    }
    const Head head{weight.matrix, options ? bias.get() : nullptr, H, V, options ? 2.0f : 0.0f, options ? 1.2f : 1.0f};
    const Batch batch{hidden.matrix, rows.get(), n, temperature.get(), target.get(), own.runs.data(), 3};

    std::unique_ptr<float[]> out[6], pair_out[3];
    for (auto& x : out) x = heap<float>(n);
    for (auto& x : pair_out) x = heap<float>(n);
    auto expected = heap<float>(n * H), expected_kl = heap<float>(n * H);
    const Pair pair{other.matrix, pair_out[0].get(), pair_out[1].get(), pair_out[2].get()};
    head_forward(head, batch, {out[0].get(), out[1].get(), out[2].get(), out[3].get(), out[4].get(), out[5].get()},
                 &pair, {expected.get(), expected_kl.get()}, threads);
    auto alone = heap<float>(n);  // without what is not wanted
    head_forward(head, batch, {alone.get(), nullptr, nullptr, nullptr, nullptr, nullptr}, nullptr, {nullptr, nullptr},
                 threads);

    std::unique_ptr<float[]> g[6];  // of logprob, lse, entropy, mean_logit, log_sum_sq_prob, kl
    for (auto& x : g) x = random_floats(n);
    auto d_hidden = heap<float>(n * H), d_weight = heap<float>(V * H), d_bias = heap<float>(V);
    const LogitGradients gradients{out[1].get(), g[0].get(),  g[1].get(),      g[2].get(),      out[2].get(),
                                 g[3].get(),   g[4].get(),  out[5].get(),    g[5].get(),      pair_out[2].get(),
                                 pair_out[1].get(), other.matrix.data, other.matrix.stride};
    Batch back = batch;
    auto of_backward = own.backward(true);
    back.runs = of_backward.data();
    head_backward(head, back, gradients, {d_hidden.get(), d_weight.get(), Type::float32, d_bias.get()}, threads);
    std::vector<std::vector<float>> d_own;
    for (size_t r = 0; r < 3; ++r) {
        const float* made = own.all[r].d_weight.get();
        d_own.emplace_back(made, made + V * own.runs[r].extra);
    }
    of_backward = own.backward(false);  // the runs' columns alone, nothing else asked for
    back.runs = of_backward.data();
    head_backward(head, back, gradients, {nullptr, nullptr, Type::float32, nullptr}, threads);
    auto rounded = heap<uint16_t>(V * H);
    head_backward(head, batch, gradients, {nullptr, rounded.get(), Type::bfloat16, nullptr}, threads);

    std::vector<double> want_d_weight(V * H, 0.0), want_d_bias(V, 0.0);
    std::vector<std::vector<double>> want_d_own;
    for (const HeadRun& run : own.runs) want_d_own.emplace_back(V * run.extra, 0.0);
    const double tolerance = type == Type::bfloat16 ? 2e-2 : 2e-4;
    const auto near = [&](double got, double want, double scale, double tol, const char* what) {
        require(std::abs(got - want) <= tol * (scale + std::abs(want)), name + ": " + what + " " +
                std::to_string(got) + " instead of " + std::to_string(want));
    };
    for (int64_t i = 0; i < n; ++i) {
        std::vector<double> z[2], u(V);
        double lse[2];
        for (int side = 0; side < 2; ++side) {
            double total = 0;
            for (int64_t v = 0; v < V; ++v) {
                double y = options ? bias[v] : 0.0;
                for (int64_t k = 0; k < H; ++k) {
                    y += weight.values[v * H + k] * (side ? other : hidden).values[rows[i] * H + k];
                }
                for (int64_t k = 0; k < own.extra(i) && side == 0; ++k) y += own.weight(i, v, k) * own.hidden(i, k);
                double c = head.scale * y, slope = head.scale;
                if (options) {
                    c = head.softcap * std::tanh(c / head.softcap);
                    slope *= 1 - c * c / (head.softcap * head.softcap);
                }
                z[side].push_back(c / temperature[i]);
                if (side == 0) u[v] = slope / temperature[i];
                total += std::exp(z[side][v]);
            }
            lse[side] = std::log(total);
        }
        double p_z = 0, mean = 0, square = 0, kl = 0;
        int64_t best = 0;
        for (int64_t v = 0; v < V; ++v) {
            const double p = std::exp(z[0][v] - lse[0]);
            p_z += p * z[0][v];
            mean += z[0][v] / double(V);
            square += p * p;
            kl += p * (z[0][v] - lse[0] - z[1][v] + lse[1]);
            if (z[0][v] > z[0][best]) best = v;
        }
        const double entropy = lse[0] - p_z;
        near(out[0][i], z[0][target[i]] - lse[0], 1, 1e-4, "logprob");
        near(out[1][i], lse[0], 1, 1e-4, "lse");
        near(out[2][i], entropy, 1, 1e-4, "entropy");
        near(out[4][i], mean, 1, 1e-4, "mean_logit");
        near(out[5][i], std::log(square), 1, 1e-4, "log_sum_sq_prob");
        near(pair_out[0][i], z[1][target[i]] - lse[1], 1, 1e-4, "the second logprob");
        near(pair_out[1][i], lse[1], 1, 1e-4, "the second lse");
        near(pair_out[2][i], kl, 1, 1e-4, "kl");
        require(out[3][i] == (best == target[i] ? 1.0f : 0.0f) || V > 1, name + ": is_top1");
        require(alone[i] == out[0][i], name + ": the log-prob alone has the same bits");
        const int64_t K = H + own.extra(i);
        std::vector<double> e(K, 0.0), e_kl(K, 0.0), d(K, 0.0);
        for (int64_t v = 0; v < V; ++v) {
            const double log_p = z[0][v] - lse[0], p = std::exp(log_p), gap = log_p - (z[1][v] - lse[1]) - kl;
            double dz = p * (g[1][i] - g[0][i]) - g[2][i] * p * (log_p + entropy) + g[3][i] / double(V) +
                        g[4][i] * (2 * p * p / square - 2 * p) + g[5][i] * p * gap + (v == target[i] ? g[0][i] : 0.0);
            dz *= u[v];
            want_d_bias[v] += dz;
            for (int64_t k = 0; k < K; ++k) {
                const double w = k < H ? weight.values[v * H + k] : own.weight(i, v, k - H);
                const double h = k < H ? hidden.values[rows[i] * H + k] : own.hidden(i, k - H);
                if (v != target[i]) {
                    e[k] += p * u[v] * w;
                    e_kl[k] += p * u[v] * gap * w;
                }
                d[k] += dz * w;
                (k < H ? want_d_weight[v * H + k] : want_d_own[own.of(i)][v * own.extra(i) + k - H]) += dz * h;
            }
        }
        for (int64_t k = 0; k < K; ++k) {
            const auto& its = own.all[own.of(i)];
            const auto at = [&](const std::unique_ptr<float[]>& shared, const std::unique_ptr<float[]>& mine) {
                return k < H ? shared[i * H + k] : mine[own.place(i, k - H)];
            };
            near(at(expected, its.sums), e[k], 1, tolerance, "expected");
            near(at(expected_kl, its.sums_kl), e_kl[k], 1, tolerance, "expected_kl");
            near(at(d_hidden, its.d_hidden), d[k], 1, tolerance, "d_hidden");
        }
    }
    for (int64_t i = 0; i < V * H; ++i) near(d_weight[i], want_d_weight[i], 1, tolerance, "d_weight");
    for (int64_t i = 0; i < V * H; ++i) {
        require(rounded[i] == nearest_bf16(d_weight[i]), name + ": d_weight in bf16 is the fp32 sum rounded once");
    }
    for (int64_t v = 0; v < V; ++v) near(d_bias[v], want_d_bias[v], 1, tolerance, "d_bias");
    for (size_t r = 0; r < 3; ++r) {
        for (int64_t i = 0; i < V * own.runs[r].extra; ++i) {
            near(d_own[r][i], want_d_own[r][i], 1, tolerance, "d_weight of a run's own columns");
            require(own.all[r].d_weight[i] == d_own[r][i], name + ": some columns alone");
        }
    }
}

// The words of the noise, one counter at a time (Salmon et al. 2011).
uint32_t philox_word(int64_t seed, int64_t row_id, uint32_t stream, int64_t column) {
    uint32_t c[4] = {uint32_t(column / 4), stream, uint32_t(row_id), uint32_t(uint64_t(row_id) >> 32)};
    uint32_t k[2] = {uint32_t(seed), uint32_t(uint64_t(seed) >> 32)};
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = uint64_t(0xD2511F53u) * c[0], b = uint64_t(0xCD9E8D57u) * c[2];
        const uint32_t next[4] = {uint32_t(b >> 32) ^ c[1] ^ k[0], uint32_t(b), uint32_t(a >> 32) ^ c[3] ^ k[1],
                                  uint32_t(a)};
        std::memcpy(c, next, sizeof c);
        k[0] += 0x9E3779B9u;
        k[1] += 0xBB67AE85u;
    }
    return c[column % 4];
}

void sample_case(int64_t n, int64_t H, int64_t extra, int64_t V, Type type, bool options, int threads) {
    const std::string name = std::string(rlhf::cpu::name(current_isa())) + " sample n=" + std::to_string(n) +
                             " H=" + std::to_string(H) + "+" + std::to_string(extra) + " V=" + std::to_string(V);
    RandomMatrix hidden(n, H, H + 5, type, 1.5f), weight(V, H, H % 32 ? H + 3 : H, type, 0.7f);
    const RandomRuns own(n, extra, V, type);
    auto bias = random_floats(V), temperature = random_floats(n), logprob = heap<float>(n), entropy = heap<float>(n);
    auto rows = heap<int64_t>(n), seed = heap<int64_t>(n), position = heap<int64_t>(n), token = heap<int64_t>(n);
    auto greedy = heap<uint8_t>(n), forbids = heap<uint8_t>(n);
    auto forbidden = heap<int64_t>(2);
    forbidden[0] = V - 1;
    forbidden[1] = V / 3;
    const bool bans = options && V > 2;
    for (int64_t i = 0; i < n; ++i) {
        forbids[i] = i % 4 != 1;
        rows[i] = i;
        temperature[i] = options ? 1.0f + 0.5f * temperature[i] : 1.0f;
        seed[i] = -i * 0x123456789abcdefLL;
        position[i] = (i << 33) + 7;
        greedy[i] = i % 3 == 2;
    }
    const Head head{weight.matrix, options ? bias.get() : nullptr, H, V, options ? 2.0f : 0.0f, options ? 1.2f : 1.0f};
    const Batch batch{hidden.matrix, rows.get(), n, temperature.get(), nullptr, own.runs.data(), 3};
    head_sample(head, batch, {seed.get(), position.get(), options ? greedy.get() : nullptr,
                              bans ? forbidden.get() : nullptr, bans ? 2 : 0, bans ? forbids.get() : nullptr, 9,
                              token.get(), logprob.get(), entropy.get()}, threads);
    for (int64_t i = 0; i < n; ++i) {
        std::vector<double> z(V), score(V);
        double total = 0, p_z = 0;
        for (int64_t v = 0; v < V; ++v) {
            double y = options ? bias[v] : 0.0;
            for (int64_t k = 0; k < H; ++k) y += weight.values[v * H + k] * hidden.values[i * H + k];
            for (int64_t k = 0; k < own.extra(i); ++k) y += own.weight(i, v, k) * own.hidden(i, k);
            double c = options ? head.softcap * std::tanh(head.scale * y / head.softcap) : y;
            if (bans && forbids[i] && (v == forbidden[0] || v == forbidden[1])) c = -HUGE_VAL;
            z[v] = c / temperature[i];
            const double u = std::min((philox_word(seed[i], position[i], 9, v) + 0.5) / 4294967296.0, 1 - 1.0 / (1 << 24));
            score[v] = options && greedy[i] ? c : z[v] - std::log(-std::log1p(-u));
            total += std::exp(z[v]);
        }
        double best = score[0];
        for (int64_t v = 0; v < V; ++v) {
            if (z[v] > -HUGE_VAL) p_z += std::exp(z[v]) / total * z[v];
            best = std::max(best, score[v]);
        }
        require(token[i] >= 0 && token[i] < V, name + ": a token of the vocabulary");
        require(score[token[i]] > best - 1e-4, name + ": the token with the largest score");
        require(std::abs(logprob[i] - (z[token[i]] - std::log(total))) < 1e-4, name + ": logprob");
        require(std::abs(entropy[i] - (std::log(total) - p_z)) < 1e-3, name + ": entropy");
    }
}

}  // namespace

int main() {
    for (const std::string& isa : available_isas()) {
        set_isa(isa);
        for (Type type : {Type::float32, Type::bfloat16}) {
            for (int threads : {1, 2}) {
                head_case(1, 1, 0, 1, type, false, threads);
                head_case(2, 17, 3, 17, type, true, threads);
                head_case(33, 31, 0, 511, type, false, threads);
                head_case(65, 32, 6, 513, type, true, threads);
                head_case(32, 64, 0, 1030, type, true, threads);
                sample_case(1, 1, 0, 1, type, false, threads);
                sample_case(2, 17, 3, 17, type, true, threads);
                sample_case(16, 32, 0, 515, type, false, threads);
                sample_case(17, 64, 0, 1030, type, true, threads);
                sample_case(33, 96, 5, 1500, type, true, threads);
                sample_case(49, 128, 0, 4100, type, false, threads);  // enough for the parallel loop
            }
        }
        bool refused = false;
        try {
            Head head{};
            Batch batch{};
            head_forward(head, batch, {}, nullptr, {}, 1);
        } catch (const std::invalid_argument&) {
            refused = true;
        }
        require(refused, "a head without rows is refused");
    }
    return is_clean();
}
