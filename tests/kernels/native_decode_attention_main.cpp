// csrc/cpu/decode_attention*.cpp under ASan and UBSan: test_native.py builds and runs this. Every array is a heap block of
// exactly its size, so one element too far ends the process; unused cache holds NaN and unused table entries are wild.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cpu/decode_attention.h"
#include "native_driver.h"

namespace {

using namespace driver;
using namespace rlhf::cpu;

// Numbers of either type.
struct Numbers {
    std::unique_ptr<float[]> wide;
    std::unique_ptr<uint16_t[]> narrow;

    Numbers(int64_t count, CacheType type) {
        if (type == CacheType::float32) {
            wide.reset(new float[count]);
        } else {
            narrow.reset(new uint16_t[count]);
        }
        for (int64_t i = 0; i < count; ++i) set(i, std::numeric_limits<float>::quiet_NaN());
    }
    void* data() const { return wide ? static_cast<void*>(wide.get()) : narrow.get(); }
    void set(int64_t i, float x) {
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        if (wide) {
            wide[i] = x;
        } else {
            narrow[i] = uint16_t(bits >> 16);
        }
    }
    double at(int64_t i) const {
        if (wide) return wide[i];
        const uint32_t bits = uint32_t(narrow[i]) << 16;
        float x;
        std::memcpy(&x, &bits, 4);
        return x;
    }
};

void decode_case(int64_t group, int64_t n_kv, int64_t D, int64_t block, std::vector<int64_t> lengths, int64_t window,
                 float softcap, int64_t inner, CacheType type, int threads, bool sinking = false) {
    const int64_t n = lengths.size(), longest = *std::max_element(lengths.begin(), lengths.end());
    const int64_t per_row = (longest + block - 1) / block + 1, blocks = n * per_row + 1, heads = group * n_kv;
    const std::string name = std::string(rlhf::cpu::name(current_isa())) + " group=" + std::to_string(group) +
                             " heads=" + std::to_string(n_kv) + " D=" + std::to_string(D) + " block=" +
                             std::to_string(block) + " window=" + std::to_string(window) +
                             (sinking ? " sinks" : "");
    const int64_t head = D * inner, position = n_kv * head, page = block * position, count = blocks * page;
    Numbers q(n * heads * D, type), k(count, type), v(count, type), out(n * heads * D, type);
    for (int64_t i = 0; i < n * heads * D; ++i) q.set(i, 2 * float(random_number()));
    std::unique_ptr<int64_t[]> table(new int64_t[n * per_row]), rows(new int64_t[n]);
    for (int64_t i = 0; i < n; ++i) {
        rows[i] = lengths[i];
        const int64_t first = window ? std::max<int64_t>(0, lengths[i] - window) : 0;
        for (int64_t j = 0; j < per_row; ++j) {
            const bool used = j * block < lengths[i] && (j + 1) * block > first;
            table[i * per_row + j] = used ? blocks - 1 - (i * per_row + j) : int64_t(1) << 40;
        }
        for (int64_t s = first; s < lengths[i]; ++s) {
            const int64_t at = table[i * per_row + s / block] * page + s % block * position;
            for (int64_t d = 0; d < n_kv * D; ++d) {
                k.set(at + d * inner, float(random_number()));
                v.set(at + d * inner, float(random_number()));
            }
        }
    }
    std::unique_ptr<float[]> sinks(sinking ? new float[heads] : nullptr);
    for (int64_t h = 0; sinking && h < heads; ++h) sinks[h] = 3 * float(random_number());
    const Cache keys{k.data(), page, position, head, inner}, values{v.data(), page, position, head, inner};
    decode_attention(type, {n, heads, n_kv, D}, {q.data(), heads * D, D, 1}, keys, values,
                     {rows.get(), table.get(), per_row, blocks, block}, {0.5f, window, softcap, sinks.get()}, out.data(), threads);
    for (int64_t i = 0; i < n; ++i) {
        const int64_t first = window ? std::max<int64_t>(0, lengths[i] - window) : 0;
        for (int64_t h = 0; h < heads; ++h) {
            const auto place = [&](int64_t s, int64_t d) {
                return table[i * per_row + s / block] * page + s % block * position + (h / group) * head + d * inner;
            };
            std::vector<double> p;
            double total = sinking ? std::exp(double(sinks[h])) : 0;
            for (int64_t s = first; s < lengths[i]; ++s) {
                double z = 0;
                for (int64_t d = 0; d < D; ++d) z += 0.5 * q.at((i * heads + h) * D + d) * k.at(place(s, d));
                p.push_back(std::exp(softcap != 0 ? softcap * std::tanh(z / softcap) : z));
                total += p.back();
            }
            for (int64_t d = 0; d < D; ++d) {
                double want = 0;
                for (int64_t s = first; s < lengths[i]; ++s) want += p[s - first] / total * v.at(place(s, d));
                const double got = out.at((i * heads + h) * D + d);
                const double tolerance = type == CacheType::float32 ? 1e-5 : 5e-3;
                require(std::abs(got - want) < tolerance, name + ": " + std::to_string(got) + " instead of " +
                        std::to_string(want));
            }
        }
    }
}

}  // namespace

int main() {
    for (const std::string& isa : available_isas()) {
        set_isa(isa);
        for (CacheType type : {CacheType::float32, CacheType::bfloat16}) {
            for (int64_t D : {1, 8, 16, 20, 64, 80}) {
                for (int64_t window : {0, 1, 5}) {
                    decode_case(1, 2, D, 4, {5, 1, 12, 0, 16, 17}, window, 0, 1, type, 1);
                    decode_case(5, 1, D, 16, {33, 15, 16}, window, 1.5f, 1, type, 1);
                    decode_case(3, 2, D, 16, {33, 0, 16}, window, 1.5f, 1, type, 1, true);
                }
                decode_case(2, 3, D, 7, {31, 3}, 0, 0, 2, type, 1);
            }
            for (bool sinking : {false, true}) {  // enough for the parallel loop
                decode_case(4, 4, 64, 32, {200, 150, 97, 260}, 0, 0, 1, type, 2, sinking);
            }
        }
    }
    float x[4] = {};
    int64_t length[1] = {3}, table[1] = {1};
    const Cache cache{x, 2, 1, 1, 1};
    const auto run = [&](int threads, const void* q) {
        decode_attention(CacheType::float32, {1, 1, 1, 1}, {q, 1, 1, 1}, cache, cache, {length, table, 1, 2, 2},
                         {1.0f, 0, 0.0f}, x, threads);
    };
    refuses([&] { run(1, x); }, "a length above the table's capacity");
    length[0] = -1;
    refuses([&] { run(1, x); }, "a negative length");
    length[0] = 2;
    refuses([&] { run(0, x); }, "no thread");
    refuses([&] { run(1, nullptr); }, "no queries");
    table[0] = 2;
    refuses([&] { run(1, x); }, "a block that does not exist");
    return is_clean();
}
