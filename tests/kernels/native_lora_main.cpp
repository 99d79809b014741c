// csrc/cpu/lora*.cpp under ASan and UBSan: test_native.py builds and runs this. Every array is a heap block of exactly
// its size, so one element too far ends the process (tile loads excepted, which the sanitizers do not see; the NaN
// around the inputs in test_lora_native.py is for them). Results are compared with the definition, in double.

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cpu/lora.h"
#include "cpu/lora_decode.h"
#include "native_driver.h"

namespace {

using namespace driver;
using namespace rlhf::cpu::lora;

struct Array {
    std::unique_ptr<char[]> memory;
    int64_t rows, columns, stride;
    Type type;

    Array(int64_t rows, int64_t columns, int64_t gap, Type type, bool random = true)
        : rows(rows), columns(columns), stride(columns + gap), type(type) {
        memory.reset(new char[count() * size()]);
        for (int64_t i = 0; i < count(); ++i) set(i, random ? float(random_number(8)) : 0);
    }
    int64_t size() const { return type == Type::bfloat16 ? 2 : 4; }
    int64_t count() const { return rows && columns ? (rows - 1) * stride + columns : 0; }
    Matrix matrix() const { return {memory.get(), stride, type}; }
    void set(int64_t i, float value) {
        char bytes[4];
        std::memcpy(bytes, &value, 4);  // bf16 is the upper half of fp32
        std::memcpy(memory.get() + i * size(), bytes + 4 - size(), size());
    }
    double at(int64_t n, int64_t c) const {
        char bytes[4] = {};
        std::memcpy(bytes + 4 - size(), memory.get() + (n * stride + c) * size(), size());
        float value;
        std::memcpy(&value, bytes, 4);
        return value;
    }
};

void require(double got, double want, double tolerance, const char* what, const std::string& where) {
    if (std::abs(got - want) <= tolerance * (1 + std::abs(want))) return;
    fail(std::string(what) + " of " + where + ": " + std::to_string(got) + " instead of " + std::to_string(want));
}

void run_case(const std::string& isa, int64_t N, int64_t K, int64_t M, int64_t r, Type type, Type adapter,
              int threads) {
    rlhf::cpu::set_isa(isa);
    const std::string where = isa + " " + std::to_string(N) + "x" + std::to_string(K) + "->" + std::to_string(M) +
                              " r " + std::to_string(r) + (type == Type::bfloat16 ? " bf16" : " fp32");
    const double scale = 0.5, tolerance = type == Type::bfloat16 || adapter == Type::bfloat16 ? 1e-2 : 1e-4;
    Array x(N, K, 3, type), y(N, M, 1, type, false), dy(N, M, 5, type), dx(N, K, 0, type, false);
    Array A(r, K, 2, adapter), B(M, r, 1, adapter), dA(r, K, 0, adapter, false), dB(M, r, 0, adapter, false);
    const int64_t cut = N / 3, after = N / 2;
    std::vector<Run> runs{{0, 0, cut, 0}, {after, after, N - after, 0}};
    std::vector<Slot> slots{{A.matrix(), B.matrix(), r, scale, 0, dA.matrix(), dB.matrix()}};
    forward(x.matrix(), y.matrix(), true, K, M, slots, runs, {0, nullptr, 0}, threads);
    backward(dy.matrix(), x.matrix(), dx.matrix(), K, M, slots, runs, {0, nullptr, 0}, threads);
    std::vector<double> h(N * r), g(N * r);
    for (int64_t n = 0; n < N; ++n) {
        const bool on = n < cut || n >= after;
        for (int64_t i = 0; i < r; ++i) {
            for (int64_t c = 0; on && c < K; ++c) h[n * r + i] += scale * x.at(n, c) * A.at(i, c);
            for (int64_t c = 0; on && c < M; ++c) g[n * r + i] += scale * dy.at(n, c) * B.at(c, i);
        }
    }
    const auto product = [&](int64_t n, const std::vector<double>& left, const Array& right, bool by_row, int64_t c) {
        double sum = 0;
        for (int64_t i = 0; i < r; ++i) sum += left[n * r + i] * (by_row ? right.at(i, c) : right.at(c, i));
        return sum;
    };
    for (int64_t n = 0; n < N; ++n) {
        for (int64_t c = 0; c < M; ++c) require(y.at(n, c), product(n, h, B, false, c), tolerance, "y", where);
        for (int64_t c = 0; c < K; ++c) require(dx.at(n, c), product(n, g, A, true, c), tolerance, "dx", where);
    }
    for (int64_t i = 0; i < r; ++i) {
        for (int64_t c = 0; c < K; ++c) {
            double sum = 0;
            for (int64_t n = 0; n < N; ++n) sum += g[n * r + i] * x.at(n, c);
            require(dA.at(i, c), sum, tolerance, "dA", where);
        }
        for (int64_t c = 0; c < M; ++c) {
            double sum = 0;
            for (int64_t n = 0; n < N; ++n) sum += h[n * r + i] * dy.at(n, c);
            require(dB.at(c, i), sum, tolerance, "dB", where);
        }
    }
    // With dropout: two slots, nothing needed but dx; every mask and every copy is as long as its block.
    std::unique_ptr<int64_t[]> row_ids(new int64_t[N]);
    for (int64_t n = 0; n < N; ++n) row_ids[n] = n << 31;
    slots.push_back(slots[0]);
    slots[1].p = 0.5;
    slots[1].dA.data = slots[1].dB.data = slots[0].dB.data = nullptr;
    runs[1].slot = 1;
    forward(x.matrix(), y.matrix(), false, K, M, slots, runs, {-7, row_ids.get(), 9}, threads);
    backward(dy.matrix(), x.matrix(), dx.matrix(), K, M, slots, runs, {-7, row_ids.get(), 9}, threads);
    for (int64_t n = cut; n < after; ++n) {
        for (int64_t c = 0; c < M; ++c) require(y.at(n, c), 0, 0, "y of an off row", where);
    }
}

}  // namespace

// Two slots on alternate stretches of rows, whole linears with bias.
void decode_case(const std::string& isa, int64_t N, int64_t K, int64_t M, int64_t r, Type type, Type adapter,
                 int threads) {
    rlhf::cpu::set_isa(isa);
    const std::string where = isa + " decode " + std::to_string(N) + "x" + std::to_string(K) + "->" + std::to_string(M);
    const double scale = 0.5, tolerance = type == Type::bfloat16 ? 1e-2 : 1e-4;
    Array x(N, K, 3, type), w(M, K, 2, type), bias(1, M, 0, type), y(N, M, 1, type, false);
    Array A(r, K, 2, adapter), B(M, r, 1, adapter), A1(1, K, 0, adapter), B1(M, 1, 0, adapter);
    const int64_t cut = N / 3;
    const std::vector<Run> runs{{0, 0, cut, 1}, {cut, cut, N - cut, 0}};
    const std::vector<Slot> slots{{A.matrix(), B.matrix(), r, scale, 0, {}, {}}, {A1.matrix(), B1.matrix(), 1, 1, 0, {}, {}}};
    decode(x.matrix(), w.matrix(), bias.memory.get(), y.matrix(), N, K, M, slots, runs, threads);
    for (int64_t n = 0; n < N; ++n) {
        const Array &a = n < cut ? A1 : A, &b = n < cut ? B1 : B;
        std::vector<double> h(a.rows);
        for (int64_t i = 0; i < a.rows; ++i) {
            for (int64_t k = 0; k < K; ++k) h[i] += (n < cut ? 1 : scale) * x.at(n, k) * a.at(i, k);
        }
        for (int64_t c = 0; c < M; ++c) {
            double sum = bias.at(0, c);
            for (int64_t k = 0; k < K; ++k) sum += x.at(n, k) * w.at(c, k);
            const double base = std::abs(sum);  // is rounded by itself
            for (int64_t i = 0; i < a.rows; ++i) sum += h[i] * b.at(c, i);
            require(y.at(n, c), sum, tolerance * (1 + base), "y", where);
        }
    }
}

int main() {
    for (const std::string& isa : rlhf::cpu::available_isas()) {
        for (Type type : {Type::float32, Type::bfloat16}) {
            for (Type adapter : {Type::float32, Type::bfloat16}) {
                run_case(isa, 0, 4, 5, 2, type, adapter, 1);
                run_case(isa, 1, 1, 1, 1, type, adapter, 1);
                run_case(isa, 37, 45, 70, 3, type, adapter, 2);
                run_case(isa, 70, 33, 129, 16, type, adapter, 1);
                run_case(isa, 41, 64, 32, 33, type, adapter, 1);
                run_case(isa, 5, 30, 17, 100, type, adapter, 1);
                decode_case(isa, 0, 32, 5, 2, type, adapter, 1);
                decode_case(isa, 1, 32, 1, 1, type, adapter, 1);
                decode_case(isa, 17, 64, 70, 3, type, adapter, 2);
                decode_case(isa, 40, 96, 33, 20, type, adapter, 1);
            }
            run_case(isa, 640, 300, 31, 48, type, Type::float32, 3);  // several groups, work enough for threads
            decode_case(isa, 33, 512, 300, 16, type, Type::float32, 3);
            decode_case(isa, 9, 512, 1024, 2, type, Type::float32, 6);  // more threads than ranks
        }
    }
    return is_clean();
}
