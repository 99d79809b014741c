// csrc/cpu/attention.cpp under ASan and UBSan: test_native.py builds and runs this. Every array is a heap block of exactly
// its size, so a read or write past an end is found. Results are held to double, gradients to differences of outputs.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cpu/attention.h"
#include "native_driver.h"

namespace {

using namespace driver;
using namespace rlhf::cpu;

struct Numbers {
    CacheType type;
    std::unique_ptr<char[]> bytes;
    int64_t count;

    Numbers(int64_t count, CacheType type)
        : type(type), bytes(new char[count * (type == CacheType::float32 ? 4 : 2)]), count(count) {}
    void fill() {
        for (int64_t i = 0; i < count; ++i) set(i, float(random_number()));
    }
    void set(int64_t i, float x) {
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        const uint16_t half = uint16_t(bits >> 16);
        type == CacheType::float32 ? std::memcpy(bytes.get() + 4 * i, &x, 4) : std::memcpy(bytes.get() + 2 * i, &half, 2);
    }
    double at(int64_t i) const {
        uint32_t bits = 0;
        if (type == CacheType::float32) {
            std::memcpy(&bits, bytes.get() + 4 * i, 4);
        } else {
            std::memcpy(reinterpret_cast<char*>(&bits) + 2, bytes.get() + 2 * i, 2);
        }
        float x;
        std::memcpy(&x, &bits, 4);
        return x;
    }
    void* data() const { return bytes.get(); }
};

using Exact = std::vector<double>;

// What the driver's arrays are, in double: outputs, or for `d_out` the gradients of q, k, v and the sinks.
struct Oracle {
    int64_t heads, n_kv, D;
    std::vector<int64_t> lengths, parents;
    ScoreOptions options;
    Exact q, k, v, out, d_q, d_k, d_v, d_sinks;

    void run(const Numbers* d_out) {
        const int64_t group = heads / n_kv;
        std::vector<int64_t> starts{0};
        for (int64_t n : lengths) starts.push_back(starts.back() + n);
        out.assign(q.size(), 0);
        d_q.assign(q.size(), 0);
        d_k.assign(k.size(), 0);
        d_v.assign(k.size(), 0);
        d_sinks.assign(heads, 0);
        for (size_t i = 0; i < lengths.size(); ++i) {
            for (int64_t t = 0; t < lengths[i]; ++t) {
                std::vector<int64_t> rows;
                const int64_t p = parents[i];
                for (int64_t s = p < 0 ? 0 : starts[p]; s < (p < 0 ? 0 : starts[p + 1]); ++s) rows.push_back(s);
                for (int64_t s = starts[i]; s <= starts[i] + t; ++s) rows.push_back(s);
                const int64_t most = options.window ? options.window : int64_t(rows.size());
                if (int64_t(rows.size()) > most) rows.erase(rows.begin(), rows.end() - most);
                for (int64_t h = 0; h < heads; ++h) row(starts[i] + t, h, h / group, rows, d_out);
            }
        }
    }

    void row(int64_t t, int64_t h, int64_t c, const std::vector<int64_t>& rows, const Numbers* d_out) {
        const int64_t at = (t * heads + h) * D;
        Exact p, bend;
        const double start = options.sinks ? std::exp(double(options.sinks[h])) : 0;
        double total = start, mean = 0;
        for (int64_t s : rows) {
            double z = 0;
            for (int64_t d = 0; d < D; ++d) z += double(options.scale) * q[at + d] * k[(s * n_kv + c) * D + d];
            const double bent = options.softcap != 0 ? std::tanh(z / options.softcap) : 0;
            bend.push_back(1 - bent * bent);
            p.push_back(std::exp(options.softcap != 0 ? bent * options.softcap : z));
            total += p.back();
        }
        for (size_t i = 0; i < rows.size(); ++i) {
            for (int64_t d = 0; d < D; ++d) out[at + d] += p[i] / total * v[(rows[i] * n_kv + c) * D + d];
        }
        if (!d_out) return;
        for (int64_t d = 0; d < D; ++d) mean += d_out->at(at + d) * out[at + d];
        d_sinks[h] -= start / total * mean;
        for (size_t i = 0; i < rows.size(); ++i) {
            const int64_t key = (rows[i] * n_kv + c) * D;
            double slope = -mean;
            for (int64_t d = 0; d < D; ++d) slope += d_out->at(at + d) * v[key + d];
            const double dz = p[i] / total * slope * bend[i] * options.scale;
            for (int64_t d = 0; d < D; ++d) {
                d_q[at + d] += dz * k[key + d];
                d_k[key + d] += dz * q[at + d];
                d_v[key + d] += p[i] / total * d_out->at(at + d);
            }
        }
    }
};

Exact exact(const Numbers& x) {
    Exact all;
    for (int64_t i = 0; i < x.count; ++i) all.push_back(x.at(i));
    return all;
}

void packed_case(int64_t group, int64_t n_kv, int64_t D, std::vector<int64_t> lengths, std::vector<int64_t> parents,
                 int64_t window, float softcap, bool sinking, CacheType type, int threads) {
    const int64_t heads = group * n_kv, count = lengths.size();
    int64_t T = 0;
    for (int64_t n : lengths) T += n;
    const std::string name = std::string(rlhf::cpu::name(current_isa())) + " group=" + std::to_string(group) + " heads=" +
                             std::to_string(n_kv) + " D=" + std::to_string(D) + " window=" + std::to_string(window);
    Numbers q(T * heads * D, type), k(T * n_kv * D, type), v(T * n_kv * D, type), out(T * heads * D, type);
    Numbers d_out(T * heads * D, type), d_q(T * heads * D, type), d_k(T * n_kv * D, type), d_v(T * n_kv * D, type);
    for (Numbers* x : {&q, &k, &v, &d_out}) x->fill();
    std::unique_ptr<int64_t[]> sizes(new int64_t[count]), above(new int64_t[count]);
    std::copy(lengths.begin(), lengths.end(), sizes.get());
    std::copy(parents.begin(), parents.end(), above.get());
    std::unique_ptr<float[]> sinks(sinking ? new float[heads] : nullptr), d_sinks(sinking ? new float[heads] : nullptr);
    for (int64_t h = 0; sinking && h < heads; ++h) sinks[h] = 3 * float(random_number());
    std::unique_ptr<float[]> totals(new float[2 * T * heads]);
    const ScoreOptions options{0.5f, window, softcap, sinks.get()};
    const Heads queries{q.data(), heads * D, D}, keys{k.data(), n_kv * D, D}, values{v.data(), n_kv * D, D};
    const AttentionSizes all{T, count, heads, n_kv, D};
    attention(type, all, queries, keys, values, {sizes.get(), above.get()}, options, out.data(), totals.get(), threads);
    attention_gradient(type, all, {d_out.data(), heads * D, D}, queries, keys, values, {sizes.get(), above.get()}, options,
                       out.data(), totals.get(), {d_q.data(), d_k.data(), d_v.data(), d_sinks.get()}, threads);
    Oracle oracle{heads, n_kv, D, lengths, parents, options, exact(q), exact(k), exact(v), {}, {}, {}, {}, {}};
    oracle.run(&d_out);
    const auto hold = [&](const char* what, const Exact& got, const Exact& want) {
        for (size_t i = 0; i < want.size(); ++i) {
            const double tolerance = (type == CacheType::float32 ? 1e-5 : 2e-2) * (2 + std::abs(want[i]));
            require(std::abs(got[i] - want[i]) < tolerance, name + " " + what + ": " + std::to_string(got[i]) +
                    " instead of " + std::to_string(want[i]));
        }
    };
    hold("out", exact(out), oracle.out);
    hold("d_q", exact(d_q), oracle.d_q);
    hold("d_k", exact(d_k), oracle.d_k);
    hold("d_v", exact(d_v), oracle.d_v);
    if (sinking) hold("d_sinks", Exact(d_sinks.get(), d_sinks.get() + heads), oracle.d_sinks);
}

}  // namespace

int main() {
    for (const std::string& isa : available_isas()) {
        set_isa(isa);
        for (CacheType type : {CacheType::float32, CacheType::bfloat16}) {
            for (int64_t D : {1, 8, 16, 20, 64}) {
                for (int64_t window : {0, 1, 5, 20}) {
                    packed_case(1, 2, D, {5, 1, 17, 0, 16}, {-1, -1, -1, -1, -1}, window, 0, false, type, 1);
                    packed_case(3, 1, D, {19, 4, 15, 2}, {-1, 0, -1, 0}, window, 1.5f, true, type, 1);
                }
            }
            packed_case(4, 2, 64, {40, 60, 33}, {-1, 0, -1}, 0, 0, true, type, 2);  // enough for the parallel loop
            packed_case(40, 1, 8, {9}, {-1}, 0, 0, false, type, 1);  // more heads than rows of a block
            packed_case(2, 2, 0, {3, 2}, {-1, 0}, 0, 0, true, type, 1);
        }
    }
    float x[8] = {};
    int64_t length[2] = {2, 1}, parent[2] = {-1, 0};
    const Heads heads{x, 1, 1};
    const auto run = [&](int threads, const Heads& q) {
        attention(CacheType::float32, {3, 2, 1, 1, 1}, q, heads, heads, {length, parent}, {1.0f, 0, 0.0f}, x, x, threads);
    };
    refuses([&] { run(0, heads); }, "no thread");
    refuses([&] { run(1, {nullptr, 1, 1}); }, "no queries");
    length[1] = 2;
    refuses([&] { run(1, heads); }, "lengths beyond the rows");
    length[0] = 3;
    length[1] = -1;
    refuses([&] { run(1, heads); }, "a negative length");
    length[0] = 2;
    length[1] = 1;
    parent[1] = 1;
    refuses([&] { run(1, heads); }, "a parent of its own");
    parent[1] = -2;
    refuses([&] { run(1, heads); }, "a parent below -1");
    return is_clean();
}
