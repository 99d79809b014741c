// csrc/cpu/gather_logprob.cpp under ASan and UBSan: test_native.py builds and runs this. Every array is a heap block of
// exactly its size, so one element too far ends the process. Results are compared with the definition, in double.

#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "cpu/gather_logprob.h"
#include "native_driver.h"

namespace {

using namespace driver;
using namespace rlhf::cpu;

template <typename S>
S make(double x) {
    return S(x);
}
template <>
Bfloat16 make<Bfloat16>(double x) {
    return {upper_half(float(x))};
}

template <typename S>
double number(S x) {
    return x;
}
template <>
double number<Bfloat16>(Bfloat16 x) {
    return from_upper_half(x.bits);
}

bool near(double got, double want, double tolerance) { return std::abs(got - want) <= tolerance * (1 + std::abs(want)); }

// stride: between rows; inner: between elements. Row 1 is ignored and holds NaN, which also fills every gap.
template <typename S>
void run_case(int64_t rows, int64_t vocab, int64_t inner, bool by_offsets, bool in_place, int threads, double tolerance,
              double gradient_tolerance) {
    using T = typename Accumulate<S>::type;
    const int64_t stride = vocab * inner + 3, count = rows ? (rows - 1) * stride + (vocab - 1) * inner + 1 : 0;
    std::unique_ptr<S[]> logits(new S[count]), d_logits(new S[count]);
    std::unique_ptr<int64_t[]> target(new int64_t[rows]), offsets(new int64_t[rows]);
    std::unique_ptr<T[]> temperature(new T[rows]), grad(new T[rows]);
    for (int64_t i = 0; i < count; ++i) logits[i] = d_logits[i] = make<S>(std::numeric_limits<double>::quiet_NaN());
    for (int64_t i = 0; i < rows; ++i) {
        target[i] = i == 1 ? -100 : (i * 7) % vocab;
        offsets[i] = i * stride;
        temperature[i] = T(i == 1 ? -1 : 0.5 + i % 3);
        grad[i] = T(random_number());
        if (i == 1) continue;
        for (int64_t j = 0; j < vocab; ++j) logits[i * stride + j * inner] = make<S>(4 * random_number());
    }
    std::unique_ptr<T[]> out[6];
    for (auto& x : out) x.reset(new T[rows]);
    const LogitRows<const S> in{logits.get(), by_offsets ? offsets.get() : nullptr, stride, inner};
    const RowOptions<T> options{target.get(), temperature.get(), 1.0, -100};
    gather_logprob_forward<S>(in, options, rows, vocab, threads,
                              {out[0].get(), out[1].get(), out[2].get(), out[3].get(), out[4].get(), out[5].get()});
    std::vector<double> want(rows * vocab);
    for (int64_t i = 0; i < rows; ++i) {
        if (i == 1) {
            for (const auto& x : out) require(x[i] == 0, "an ignored row gives 0");
            continue;
        }
        std::vector<double> z(vocab);
        double total = 0, sum = 0, entropy = 0, squares = 0;
        int64_t top = 0;
        for (int64_t j = 0; j < vocab; ++j) {
            z[j] = number(logits[i * stride + j * inner]) / double(temperature[i]);
            total += std::exp(z[j]);
            sum += z[j];
            if (z[j] > z[top]) top = j;
        }
        const double lse = std::log(total);
        for (double x : z) {
            const double p = std::exp(x - lse);
            entropy -= p * (x - lse);
            squares += p * p;
        }
        require(near(out[0][i], z[target[i]] - lse, tolerance), "logprob");
        require(near(out[1][i], entropy, tolerance), "entropy");
        require(near(out[2][i], lse, tolerance), "lse");
        require(out[3][i] == T(top == target[i]), "is_top1");
        require(near(out[4][i], sum / double(vocab), tolerance), "mean_logit");
        require(near(out[5][i], std::log(squares), tolerance), "log_sum_sq_prob");
        for (int64_t j = 0; j < vocab; ++j) {  // every output has the gradient grad[i]
            const double log_p = z[j] - lse, p = std::exp(log_p);
            const double g = (j == target[i]) - p + p - p * (log_p + entropy) + 1 / double(vocab) + 2 * p * p / squares - 2 * p;
            want[i * vocab + j] = grad[i] * g / temperature[i];
        }
    }
    S* to = in_place ? logits.get() : d_logits.get();
    const RowGradients<T> gradients{grad.get(), grad.get(), grad.get(), grad.get(), grad.get(),
                                    out[2].get(), out[1].get(), out[5].get()};
    gather_logprob_backward<S>(in, options, gradients, rows, vocab, threads,
                               {to, by_offsets ? offsets.get() : nullptr, stride, inner});
    for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < vocab; ++j) {
            require(near(number(to[i * stride + j * inner]), want[i * vocab + j], gradient_tolerance), "gradient");
        }
        for (int64_t j = vocab * inner; j < stride && i + 1 < rows; ++j) {
            require(std::isnan(number(to[i * stride + j])), "nothing is written between rows");
        }
    }
}

}  // namespace

int main() {
    for (const std::string& isa : available_isas()) {
        set_isa(isa);
        for (int64_t rows : {0, 1, 3}) {
            for (int64_t vocab : {1, 3, 4, 15, 16, 17, 33, 2047, 2048, 2049, 4100}) {
                for (int64_t inner : {1, 2}) {
                    for (bool in_place : {false, true}) {
                        run_case<float>(rows, vocab, inner, in_place, in_place, 1, 1e-5, 1e-5);
                        run_case<double>(rows, vocab, inner, !in_place, in_place, 1, 1e-12, 1e-12);
                        run_case<Bfloat16>(rows, vocab, inner, in_place, in_place, 1, 1e-5, 1e-2);
                    }
                }
            }
        }
        run_case<float>(9, 40000, 1, false, true, 2, 1e-4, 1e-4);  // large enough for the parallel loop
    }
    float x[2] = {}, y[2] = {};
    int64_t target[1] = {2};
    float temperature[1] = {0};
    const RowOutputs<float> outputs{y, nullptr, y, nullptr, nullptr, nullptr};
    const LogitRows<const float> in{x, nullptr, 2, 1};
    refuses([&] { gather_logprob_forward<float>(in, {target, nullptr, 1, -100}, 1, 2, 1, outputs); }, "target 2 of 2");
    target[0] = 1;
    refuses([&] { gather_logprob_forward<float>(in, {target, temperature, 1, -100}, 1, 2, 1, outputs); }, "temperature 0");
    refuses([&] { gather_logprob_forward<float>({nullptr, nullptr, 2, 1}, {target, nullptr, 1, -100}, 1, 2, 1, outputs); },
            "null logits");
    refuses([&] { gather_logprob_forward<float>(in, {target, nullptr, 1, -100}, 1, 0, 1, outputs); }, "no vocabulary");
    return is_clean();
}
