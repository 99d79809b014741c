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

void head_case(int64_t n, int64_t H, int64_t extra, int64_t V, Type type, bool options, int threads) {
    const int64_t K = H + extra, N = n + 3;  // three rows that do not count
    const std::string name = std::string(rlhf::cpu::name(current_isa())) + " n=" + std::to_string(n) + " H=" +
                             std::to_string(H) + "+" + std::to_string(extra) + " V=" + std::to_string(V);
    RandomMatrix hidden(N, H, H + 5, type, 1.5f), other(N, H, H + 1, type, 1.5f), weight(V, H, H + 3, type, 0.7f);
    RandomMatrix extra_hidden(n, extra, extra, type, 1.0f), extra_weight(V, extra, extra, type, 1.0f);
    auto bias = random_floats(V), temperature = random_floats(n);
    auto rows = heap<int64_t>(n), target = heap<int64_t>(n);
    for (int64_t i = 0; i < n; ++i) {
        rows[i] = i + (i >= 1) + 2 * (i >= n / 2);
        target[i] = i == 0 ? V - 1 : int64_t((float(random_number()) + 1) / 2 * float(V)) % V;
        temperature[i] = options ? 1.0f + 0.5f * temperature[i] : 1.0f;
    }
    const Head head{weight.matrix, extra_weight.matrix, options ? bias.get() : nullptr, H, extra, V,
                    options ? 2.0f : 0.0f, options ? 1.2f : 1.0f};
    const Batch batch{hidden.matrix, extra_hidden.matrix, rows.get(), n, temperature.get(), target.get()};

    std::unique_ptr<float[]> out[6], pair_out[3];
    for (auto& x : out) x = heap<float>(n);
    for (auto& x : pair_out) x = heap<float>(n);
    auto expected = heap<float>(n * K), expected_kl = heap<float>(n * K);
    const Pair pair{other.matrix, pair_out[0].get(), pair_out[1].get(), pair_out[2].get()};
    head_forward(head, batch, {out[0].get(), out[1].get(), out[2].get(), out[3].get(), out[4].get(), out[5].get()},
                 &pair, {expected.get(), expected_kl.get()}, threads);
    auto alone = heap<float>(n);  // without what is not wanted
    head_forward(head, batch, {alone.get(), nullptr, nullptr, nullptr, nullptr, nullptr}, nullptr, {nullptr, nullptr},
                 threads);

    std::unique_ptr<float[]> g[6];  // of logprob, lse, entropy, mean_logit, log_sum_sq_prob, kl
    for (auto& x : g) x = random_floats(n);
    auto d_hidden = heap<float>(n * K), d_weight = heap<float>(V * K), d_bias = heap<float>(V);
    const LogitGradients gradients{out[1].get(), g[0].get(),  g[1].get(),      g[2].get(),      out[2].get(),
                                 g[3].get(),   g[4].get(),  out[5].get(),    g[5].get(),      pair_out[2].get(),
                                 pair_out[1].get(), other.matrix.data, other.matrix.stride};
    head_backward(head, batch, gradients, {d_hidden.get(), d_weight.get(), 0, Type::float32, d_bias.get()}, threads);
    auto part = heap<float>(V * K);  // the last columns alone, nothing else asked for
    if (extra > 0) head_backward(head, batch, gradients, {nullptr, part.get(), H, Type::float32, nullptr}, threads);
    auto rounded = heap<uint16_t>(V * K);
    head_backward(head, batch, gradients, {nullptr, rounded.get(), 0, Type::bfloat16, nullptr}, threads);

    std::vector<double> want_d_weight(V * K, 0.0), want_d_bias(V, 0.0);
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
                for (int64_t k = 0; k < extra && side == 0; ++k) {
                    y += extra_weight.values[v * extra + k] * extra_hidden.values[i * extra + k];
                }
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
        std::vector<double> e(K, 0.0), e_kl(K, 0.0), d(K, 0.0);
        for (int64_t v = 0; v < V; ++v) {
            const double log_p = z[0][v] - lse[0], p = std::exp(log_p), gap = log_p - (z[1][v] - lse[1]) - kl;
            double dz = p * (g[1][i] - g[0][i]) - g[2][i] * p * (log_p + entropy) + g[3][i] / double(V) +
                        g[4][i] * (2 * p * p / square - 2 * p) + g[5][i] * p * gap + (v == target[i] ? g[0][i] : 0.0);
            dz *= u[v];
            want_d_bias[v] += dz;
            for (int64_t k = 0; k < K; ++k) {
                const double w = k < H ? weight.values[v * H + k] : extra_weight.values[v * extra + k - H];
                const double h = k < H ? hidden.values[rows[i] * H + k] : extra_hidden.values[i * extra + k - H];
                if (v != target[i]) {
                    e[k] += p * u[v] * w;
                    e_kl[k] += p * u[v] * gap * w;
                }
                d[k] += dz * w;
                want_d_weight[v * K + k] += dz * h;
            }
        }
        for (int64_t k = 0; k < K; ++k) {
            near(expected[i * K + k], e[k], 1, tolerance, "expected");
            near(expected_kl[i * K + k], e_kl[k], 1, tolerance, "expected_kl");
            near(d_hidden[i * K + k], d[k], 1, tolerance, "d_hidden");
        }
    }
    for (int64_t i = 0; i < V * K; ++i) near(d_weight[i], want_d_weight[i], 1, tolerance, "d_weight");
    for (int64_t i = 0; i < V * K; ++i) {
        require(rounded[i] == nearest_bf16(d_weight[i]), name + ": d_weight in bf16 is the fp32 sum rounded once");
    }
    for (int64_t v = 0; v < V; ++v) near(d_bias[v], want_d_bias[v], 1, tolerance, "d_bias");
    for (int64_t v = 0; v < V && extra > 0; ++v) {
        for (int64_t k = H; k < K; ++k) require(part[v * K + k] == d_weight[v * K + k], name + ": some columns alone");
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
    RandomMatrix extra_hidden(n, extra, extra, type, 1.0f), extra_weight(V, extra, extra, type, 1.0f);
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
    const Head head{weight.matrix, extra_weight.matrix, options ? bias.get() : nullptr, H, extra, V,
                    options ? 2.0f : 0.0f, options ? 1.2f : 1.0f};
    const Batch batch{hidden.matrix, extra_hidden.matrix, rows.get(), n, temperature.get(), nullptr};
    head_sample(head, batch, {seed.get(), position.get(), options ? greedy.get() : nullptr,
                              bans ? forbidden.get() : nullptr, bans ? 2 : 0, bans ? forbids.get() : nullptr, 9,
                              token.get(), logprob.get(), entropy.get()}, threads);
    for (int64_t i = 0; i < n; ++i) {
        std::vector<double> z(V), score(V);
        double total = 0, p_z = 0;
        for (int64_t v = 0; v < V; ++v) {
            double y = options ? bias[v] : 0.0;
            for (int64_t k = 0; k < H; ++k) y += weight.values[v * H + k] * hidden.values[i * H + k];
            for (int64_t k = 0; k < extra; ++k) y += extra_weight.values[v * extra + k] * extra_hidden.values[i * extra + k];
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
