// csrc/cpu/llama_ops.cpp under ASan and UBSan: test_native.py builds and runs this. Every array is a heap block of exactly its
// size, so one element too far ends the process. Results are compared with the definition, in double.

#include <cmath>
#include <memory>

#include "cpu/llama_ops.h"
#include "native_driver.h"

namespace {

using namespace driver;
using namespace rlhf::cpu;

template <typename T>
T make(double x);
template <>
float make<float>(double x) {
    return float(x);
}
template <>
uint16_t make<uint16_t>(double x) {
    return upper_half(float(x));
}

double number(float x) { return x; }
double number(uint16_t x) {
    return from_upper_half(x);
}

template <typename T>
constexpr double kTolerance = sizeof(T) == sizeof(float) ? 1e-5 : 2e-2;

template <typename T>
bool near(T got, double want) {
    return std::abs(number(got) - want) <= kTolerance<T> * (1 + std::abs(want));
}

template <typename T>
std::unique_ptr<T[]> numbers(int64_t count, double scale = 1) {
    std::unique_ptr<T[]> made(new T[count]);
    for (int64_t i = 0; i < count; ++i) made[i] = make<T>(scale * random_number());
    return made;
}

template <typename T>
void norm_case(int64_t rows, int64_t width, int threads, bool plus_one = false) {
    const auto x = numbers<T>(rows * width), dy = numbers<T>(rows * width), weight = numbers<T>(width);
    std::unique_ptr<float[]> rstd(new float[rows]);
    std::unique_ptr<T[]> y(new T[rows * width]), dx(new T[rows * width]);
    rms_norm_apply<T>(x.get(), weight.get(), plus_one, 1e-3f, rows, width, threads, y.get(), rstd.get());
    rms_norm_gradient<T>(dy.get(), x.get(), weight.get(), plus_one, rstd.get(), rows, width, threads, dx.get());
    const auto factor = [&](int64_t i) { return number(weight[i % width]) + (plus_one ? 1 : 0); };
    for (int64_t r = 0; r < rows; ++r) {
        double mean = 0, square = 0;
        for (int64_t i = r * width; i < (r + 1) * width; ++i) square += number(x[i]) * number(x[i]) / width;
        require(std::abs(rstd[r] * std::sqrt(square + 1e-3) - 1) < 1e-5, "rstd");
        for (int64_t i = r * width; i < (r + 1) * width; ++i) {
            mean += number(dy[i]) * factor(i) * number(x[i]) * rstd[r] / width;
        }
        for (int64_t i = r * width; i < (r + 1) * width; ++i) {
            const double normed = number(x[i]) * rstd[r], g = number(dy[i]) * factor(i);
            require(near(y[i], normed * factor(i)), "norm");
            require(near(dx[i], rstd[r] * (g - normed * mean)), "gradient of a norm");
        }
    }
}

// `gap` elements lie between heads; the last head ends its array.
template <typename T>
void rotary_case(int64_t batch, int64_t heads, int64_t tokens, int64_t dim, int64_t gap, bool one_angle, int threads) {
    const HeadStrides strides{tokens * heads * (dim + gap), dim + gap, heads * (dim + gap)};
    const int64_t count = batch * tokens * heads * (dim + gap) - gap, dense = batch * tokens * heads * dim;
    const int64_t angle_stride = one_angle ? 0 : tokens * dim, angles = (one_angle ? 1 : batch) * tokens * dim;
    const auto x = numbers<T>(count), cos = numbers<T>(angles), sin = numbers<T>(angles);
    std::unique_ptr<T[]> y(new T[dense]), dx(new T[dense]);
    rotary_apply<T>(x.get(), strides, cos.get(), sin.get(), angle_stride, batch, heads, tokens, dim, threads, y.get());
    rotary_gradient<T>(x.get(), strides, cos.get(), sin.get(), angle_stride, batch, heads, tokens, dim, threads,
                       dx.get());
    for (int64_t b = 0; b < batch; ++b) {
        for (int64_t t = 0; t < tokens; ++t) {
            const T *c = cos.get() + b * angle_stride + t * dim, *s = sin.get() + b * angle_stride + t * dim;
            for (int64_t h = 0; h < heads; ++h) {
                const T* from = x.get() + b * strides.batch + t * strides.token + h * strides.head;
                const int64_t to = ((b * tokens + t) * heads + h) * dim;
                for (int64_t i = 0; i < dim; ++i) {
                    const int64_t other = (i + dim / 2) % dim;
                    const double sign = i < dim / 2 ? -1 : 1;
                    const double own = number(from[i]), partner = number(from[other]);
                    require(near(y[to + i], own * number(c[i]) + sign * partner * number(s[i])), "rotary");
                    require(near(dx[to + i], own * number(c[i]) - sign * partner * number(s[other])),
                            "gradient of rotary");
                }
            }
        }
    }
}

template <typename T>
void swiglu_case(int64_t count, int threads) {
    const auto dy = numbers<T>(count), gate = numbers<T>(count, 100), up = numbers<T>(count);
    std::unique_ptr<T[]> d_gate(new T[count]), d_up(new T[count]), y(new T[count]);
    swiglu_apply<T>(gate.get(), up.get(), count, threads, y.get());
    swiglu_gradient<T>(dy.get(), gate.get(), up.get(), count, threads, d_gate.get(), d_up.get());
    for (int64_t i = 0; i < count; ++i) {
        const double g = number(gate[i]), s = 1 / (1 + std::exp(-g));
        require(near(y[i], g * s * number(up[i])), "gated product");
        require(near(d_up[i], number(dy[i]) * g * s), "gradient of up");
        require(near(d_gate[i], number(dy[i]) * number(up[i]) * s * (1 + g * (1 - s))), "gradient of gate");
    }
}

template <typename T>
void activation_case(int kind, int64_t count, int threads) {
    const auto dy = numbers<T>(count), x = numbers<T>(count, 20);
    std::unique_ptr<T[]> dx(new T[count]), y(new T[count]);
    activation_apply<T>(x.get(), kind, count, threads, y.get());
    activation_gradient<T>(dy.get(), x.get(), kind, count, threads, dx.get());
    const double pi = std::acos(-1.0), a = kind == kSilu ? 1 : kind == kQuickGelu ? 1.702 : 2 * std::sqrt(2 / pi);
    const double b = kind == kGeluTanh ? 0.044715 * a : 0;
    for (int64_t i = 0; i < count; ++i) {
        const double v = number(x[i]), s = 1 / (1 + std::exp(-v * (a + b * v * v)));
        const bool normal = kind == kGelu;
        const double share = normal ? std::erfc(-v / std::sqrt(2.0)) / 2 : s;
        const double slope = normal ? std::exp(-v * v / 2) / std::sqrt(2 * pi) : s * (1 - s) * (a + 3 * b * v * v);
        require(near(y[i], v * share), "activation");
        require(near(dx[i], number(dy[i]) * (share + v * slope)), "gradient of an activation");
    }
}

template <typename T>
void all_cases() {
    for (int threads : {1, 2}) {
        for (int64_t width : {1, 3, 4, 5, 15, 16, 17, 40, 129}) {
            norm_case<T>(0, width, threads);
            norm_case<T>(3, width, threads);
            norm_case<T>(2, width, threads, true);
        }
        norm_case<T>(300, 128, threads);
        for (int64_t dim : {2, 6, 8, 10, 32, 34, 70}) {
            rotary_case<T>(1, 2, 3, dim, 0, false, threads);
            rotary_case<T>(2, 3, 4, dim, 5, true, threads);
        }
        rotary_case<T>(2, 4, 70, 64, 1, false, threads);
        rotary_case<T>(1, 2, 0, 4, 0, false, threads);
        for (int64_t count : {0, 1, 3, 15, 16, 17, 4095, 4097, 40000}) {
            swiglu_case<T>(count, threads);
            for (int kind = kSilu; kind <= kQuickGelu; ++kind) activation_case<T>(kind, count, threads);
        }
    }
    T one = make<T>(1), out = make<T>(0);
    float scale = 1;
    refuses_as("x", [&] { rms_norm_apply<T>(nullptr, &one, false, 0, 1, 1, 1, &out, &scale); });
    refuses_as("width", [&] { rms_norm_apply<T>(&one, &one, false, 0, 1, 0, 1, &out, &scale); });
    refuses_as("rows", [&] { rms_norm_gradient<T>(&one, &one, &one, true, &scale, -1, 1, 1, &out); });
    refuses_as("dim", [&] { rotary_apply<T>(&one, {1, 1, 1}, &one, &one, 0, 1, 1, 1, 1, 1, &out); });
    refuses_as("up", [&] { swiglu_apply<T>(&one, nullptr, 1, 1, &out); });
    refuses_as("threads", [&] { swiglu_gradient<T>(&one, &one, &one, 1, 0, &out, &out); });
    refuses_as("d_up", [&] { swiglu_gradient<T>(&one, &one, &one, 1, 1, &out, nullptr); });
    refuses_as("kind", [&] { activation_apply<T>(&one, 4, 1, 1, &out); });
    refuses_as("kind", [&] { activation_gradient<T>(&one, &one, -1, 1, 1, &out); });
    refuses_as("x", [&] { activation_gradient<T>(&one, nullptr, kGelu, 1, 1, &out); });
    refuses_as("y", [&] { activation_apply<T>(&one, kSilu, 1, 1, nullptr); });
}

}  // namespace

int main() {
    for (const std::string& isa : available_isas()) {
        set_isa(isa);
        all_cases<float>();
        all_cases<uint16_t>();
    }
    return is_clean();
}
