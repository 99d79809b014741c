// csrc/cpu/linear.cpp under ASan and UBSan: test_native.py builds and runs this. Every array is a heap block of exactly
// its size, so one element too far ends the process. Between the rows lies NaN, which nobody may read or write.
//
// Inputs of the first part are multiples of 1/128, so every sum is exact in float, in any order. The result is then known
// to the last bit: the sum, rounded once. Inputs of the second part are any, and bits are compared between calls.

#include <cstring>
#include <memory>
#include <string>

#include "common/half.h"
#include "cpu/linear.h"
#include "native_driver.h"

namespace {

using namespace driver;
using namespace rlhf::cpu;

struct Array {
    int64_t rows, columns, stride;
    Type type;
    std::unique_ptr<char[]> memory;

    Array(int64_t rows, int64_t columns, int64_t gap, Type type)
        : rows(rows), columns(columns), stride(columns + gap), type(type), memory(new char[bytes()]) {
        std::memset(memory.get(), 0xff, bytes());  // NaN in every type
    }
    int64_t size() const { return type == Type::float32 ? 4 : 2; }
    int64_t bytes() const { return rows && columns ? ((rows - 1) * stride + columns) * size() : 0; }
    char* at(int64_t row, int64_t column) const { return memory.get() + (row * stride + column) * size(); }
    Matrix from(int64_t row) const { return {at(row, 0), stride, type}; }
    float get(int64_t row, int64_t column) const {
        if (type == Type::bfloat16) return rlhf::to_float(load<rlhf::BFloat16>(row, column));
        if (type == Type::float16) return rlhf::to_float(load<rlhf::Float16>(row, column));
        return load<float>(row, column);
    }
    void set(int64_t row, int64_t column, float x) {
        if (type == Type::bfloat16) store(row, column, rlhf::Rounded<rlhf::BFloat16>::from(x));
        else if (type == Type::float16) store(row, column, rlhf::Rounded<rlhf::Float16>::from(x));
        else store(row, column, x);
    }
    Array&& filled(int bits) && {
        for (int64_t r = 0; r < rows; ++r) {
            for (int64_t c = 0; c < columns; ++c) set(r, c, float(random_number(bits)));
        }
        return std::move(*this);
    }
    bool has_bits_of(const Array& other, int64_t first, int64_t count) const {  // its rows from `first` on
        for (int64_t r = 0; r < count; ++r) {
            if (std::memcmp(at(r, 0), other.at(first + r, 0), columns * size()) != 0) return false;
        }
        return true;
    }

private:
    template <typename T>
    T load(int64_t row, int64_t column) const {
        T x;
        std::memcpy(&x, at(row, column), sizeof x);
        return x;
    }
    template <typename T>
    void store(int64_t row, int64_t column, T x) {
        std::memcpy(at(row, column), &x, sizeof x);
    }
};

void require(bool condition, const std::string& what, const std::string& where) {
    driver::require(condition, what + " of " + where);
}

std::string place(const std::string& isa, int64_t N, int64_t K, int64_t M, Type type) {
    return isa + " " + std::to_string(N) + "x" + std::to_string(K) + "->" + std::to_string(M) + " type " +
           std::to_string(int(type));
}

// Every element is that of `sum`, rounded once, and what lies between the rows is as it was.
template <typename Sum>
void check(const Array& got, const Sum& sum, const char* what, const std::string& where) {
    Array want(got.rows, got.columns, got.stride - got.columns, got.type);
    for (int64_t r = 0; r < got.rows; ++r) {
        for (int64_t c = 0; c < got.columns; ++c) want.set(r, c, sum(r, c));
    }
    require(std::memcmp(got.memory.get(), want.memory.get(), got.bytes()) == 0, what, where);
}

// dx of a packed weight has the bits of `dx`, where this instruction set keeps such a copy.
void check_packed(const Array& dy, const Array& w, const Array& dx, int threads, const std::string& where) {
    const int64_t N = dy.rows, M = w.rows, K = w.columns, bytes = linear_packed_bytes(w.type, K, M);
    if (bytes == 0) return;
    const std::unique_ptr<void, decltype(&std::free)> packed(std::aligned_alloc(64, bytes), std::free);
    const Array other(N, K, dx.stride - K, dx.type);
    linear_pack(w.from(0), packed.get(), K, M, threads);
    linear_input_gradient(dy.from(0), w.from(0), packed.get(), nullptr, other.from(0), N, K, M, threads);
    require(other.has_bits_of(dx, 0, N), "dx of a packed weight", where);
    const int64_t pieces = M * ((K + 15) / 16);
    for (int64_t i : {int64_t(0), (M * K - 1) / 2, M * K - 1}) {
        require(linear_is_packed(w.from(0), packed.get(), K, M, i), "a packed weight", where);
        char* element = static_cast<char*>(w.memory.get()) + (i / K * w.stride + i % K) * (w.type == Type::float32 ? 4 : 2);
        *element ^= 1;
        bool same = true;
        for (int64_t turn = 0; turn <= pieces / 4096 + 1; ++turn) {
            same = same && linear_is_packed(w.from(0), packed.get(), K, M, turn);
        }
        require(!same, "a packed weight of which one element has changed", where);
        *element ^= 1;
    }
}

void check_values(const std::string& isa, int64_t N, int64_t K, int64_t M, Type type, int threads) {
    const std::string where = place(isa, N, K, M, type);
    const Array x = Array(N, K, 3, type).filled(8), w = Array(M, K, 1, type).filled(8), b = Array(1, M, 0, type).filled(8);
    const Array dy = Array(N, M, 2, type).filled(8);
    const Array y(N, M, 5, type), plain(N, M, 0, type), dx(N, K, 7, type), dw(M, K, 3, type);
    linear_forward(x.from(0), w.from(0), b.memory.get(), y.from(0), N, K, M, threads);
    linear_forward(x.from(0), w.from(0), nullptr, plain.from(0), N, K, M, threads);
    linear_input_gradient(dy.from(0), w.from(0), nullptr, nullptr, dx.from(0), N, K, M, threads);
    linear_weight_gradient(dy.from(0), x.from(0), dw.from(0), N, K, M, threads);
    check_packed(dy, w, dx, threads, where);
    const auto product = [&](int64_t n, int64_t m) {
        float sum = 0;
        for (int64_t k = 0; k < K; ++k) sum += x.get(n, k) * w.get(m, k);
        return sum;
    };
    check(y, [&](int64_t n, int64_t m) { return product(n, m) + b.get(0, m); }, "y", where);
    check(plain, product, "y without bias", where);
    check(dx, [&](int64_t n, int64_t k) {
        float sum = 0;
        for (int64_t m = 0; m < M; ++m) sum += dy.get(n, m) * w.get(m, k);
        return sum;
    }, "dx", where);
    check(dw, [&](int64_t m, int64_t k) {
        float sum = 0;
        for (int64_t n = 0; n < N; ++n) sum += dy.get(n, m) * x.get(n, k);
        return sum;
    }, "dW", where);
}

// A row has the same bits alone, among a few and among many rows, and on any number of threads.
void check_bits(const std::string& isa, Type type) {
    const int64_t N = 75, K = 301, M = 101, parts[][2] = {{0, 1}, {74, 1}, {3, 16}, {20, 32}, {9, 33}, {0, 75}};
    const std::string where = place(isa, N, K, M, type);
    const Array x = Array(N, K, 3, type).filled(40), w = Array(M, K, 1, type).filled(40);
    const Array b = Array(1, M, 0, type).filled(40), dy = Array(N, M, 2, type).filled(40);
    const Array y(N, M, 0, type), dx(N, K, 0, type), dw(M, K, 0, type), other(M, K, 0, type);
    linear_forward(x.from(0), w.from(0), b.memory.get(), y.from(0), N, K, M, 1);
    linear_input_gradient(dy.from(0), w.from(0), nullptr, nullptr, dx.from(0), N, K, M, 1);
    linear_weight_gradient(dy.from(0), x.from(0), dw.from(0), N, K, M, 1);
    for (const auto& [first, count] : parts) {
        const Array some(count, M, 0, type), dsome(count, K, 0, type);
        linear_forward(x.from(first), w.from(0), b.memory.get(), some.from(0), count, K, M, 3);
        linear_input_gradient(dy.from(first), w.from(0), nullptr, nullptr, dsome.from(0), count, K, M, 3);
        require(some.has_bits_of(y, first, count), "bits of y", where + ", rows from " + std::to_string(first));
        require(dsome.has_bits_of(dx, first, count), "bits of dx", where + ", rows from " + std::to_string(first));
    }
    linear_weight_gradient(dy.from(0), x.from(0), other.from(0), N, K, M, 3);
    require(other.has_bits_of(dw, 0, M), "bits of dW", where);
}

}  // namespace

int main() {
    for (const std::string& isa : available_isas()) {
        set_isa(isa);
        for (Type type : {Type::float32, Type::bfloat16, Type::float16}) {
            check_values(isa, 1, 1, 1, type, 1);
            check_values(isa, 5, 33, 70, type, 1);
            check_values(isa, 0, 5, 7, type, 1);
            check_values(isa, 32, 0, 7, type, 1);
            check_values(isa, 40, 0, 7, type, 1);
            check_values(isa, 5, 7, 0, type, 2);
            check_values(isa, 33, 64, 31, type, 1);
            check_values(isa, 17, 300, 231, type, 3);   // few rows, work enough for threads
            check_values(isa, 45, 290, 175, type, 3);   // many, and several pieces of the depth
            check_values(isa, 801, 17, 33, type, 1);    // several blocks of rows
            check_bits(isa, type);
        }
    }
    const Array x(2, 3, 0, Type::float32), narrow(2, 3, 0, Type::bfloat16), y(2, 2, 0, Type::float32);
    const Matrix nothing{nullptr, 3, Type::float32};
    refuses_as("x: expected", [&] { linear_forward(narrow.from(0), x.from(0), nullptr, y.from(0), 2, 3, 2, 1); });
    refuses_as("weight: expected", [&] { linear_forward(x.from(0), nothing, nullptr, y.from(0), 2, 3, 2, 1); });
    refuses_as("N: expected", [&] { linear_forward(x.from(0), x.from(0), nullptr, y.from(0), -2, 3, 2, 1); });
    refuses_as("dx: expected", [&] { linear_input_gradient(y.from(0), x.from(0), nullptr, nullptr, nothing, 2, 3, 2, 1); });
    refuses_as("threads: expected", [&] { linear_weight_gradient(y.from(0), x.from(0), x.from(0), 2, 3, 2, 0); });
    return is_clean();
}
