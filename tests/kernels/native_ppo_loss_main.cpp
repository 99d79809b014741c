// csrc/cpu/ppo_loss.cpp under ASan and UBSan: test_native.py builds and runs this. Every array is a heap block of exactly
// its size, so one element too far ends the process. Results are compared with the definition. Dead elements hold NaN.

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "cpu/ppo_loss.h"
#include "native_driver.h"

namespace {

using namespace driver;
using namespace rlhf::cpu;

// One input on the heap, as T or as bfloat16, and what it holds as double.
template <typename T>
struct Input {
    std::unique_ptr<T[]> wide;
    std::unique_ptr<uint16_t[]> narrow;
    std::unique_ptr<double[]> exact;

    Input(int64_t count, const uint8_t* live, bool bfloat16) : exact(new double[count]) {
        if (bfloat16) narrow.reset(new uint16_t[count]);
        else wide.reset(new T[count]);
        for (int64_t i = 0; i < count; ++i) {
            float x = live[i] ? float(random_number()) : std::numeric_limits<float>::quiet_NaN();
            if (bfloat16) {
                uint32_t bits;
                std::memcpy(&bits, &x, sizeof bits);
                narrow[i] = uint16_t(bits >> 16);
                bits &= 0xffff0000u;
                std::memcpy(&x, &bits, sizeof bits);
            } else {
                wide[i] = T(x);
            }
            exact[i] = x;
        }
    }

    TokenInput get() const {
        if (narrow) return {narrow.get(), true};
        return {wide.get(), false};
    }
};

bool near(double got, double want, double tolerance) { return std::abs(got - want) <= tolerance * (1 + std::abs(want)); }

template <typename T>
void run_case(int64_t count, double keep_share, bool weights, bool bfloat16, int kl, int threads, double tolerance) {
    std::unique_ptr<uint8_t[]> live(new uint8_t[count]);
    std::unique_ptr<T[]> weight(new T[count]);
    for (int64_t i = 0; i < count; ++i) {
        live[i] = (random_number() + 1) / 2 < keep_share;
        weight[i] = T(live[i] ? (weights ? 0.5 : 1.0) : 0.0);
    }
    const Input<T> now(count, live.get(), bfloat16), old(count, live.get(), false), gain(count, live.get(), bfloat16);
    const Input<T> ref(count, live.get(), bfloat16), entropy(count, live.get(), false);
    const TokenMask mask{weights ? static_cast<const void*>(weight.get()) : live.get(), weights};
    const double denom = 7, kl_coef = 0.3, entropy_coef = 0.2;
    const PpoKnobs knobs{0.8, 1.3, 1.5, kl, kl_coef, entropy_coef};
    std::unique_ptr<T[]> loss(new T[1]), statistics(new T[kPpoStatistics]), dloss(new T[count]), d_entropy(new T[count]);
    ppo_loss_forward<T>({now.get(), old.get(), gain.get(), ref.get(), entropy.get(), mask}, knobs, denom, count, threads,
                        loss.get(), statistics.get(), dloss.get());
    ppo_loss_entropy_gradient<T>(2.0, mask, denom, entropy_coef, count, threads, d_entropy.get());
    double policy = 0, kl_sum = 0, entropy_sum = 0, clipped = 0, largest = 0;
    for (int64_t i = 0; i < count; ++i) {
        if (!live[i]) {
            require(dloss[i] == 0 && d_entropy[i] == 0, "a dead element has no gradient");
            continue;
        }
        const double w = weight[i], r = std::exp(now.exact[i] - old.exact[i]), a = gain.exact[i];
        const double d = ref.exact[i] - now.exact[i];
        const double bounded = std::min(std::max(r, 0.8), 1.3);
        double term = std::max(-a * r, -a * bounded), slope = -a * r;
        if (a < 0 && r > 1.5) term = -a * 1.5;
        if ((a < 0 && (r < 0.8 || r > 1.5)) || (a > 0 && r > 1.3)) slope = 0, clipped += w;
        policy += w * term;
        kl_sum += w * (kl == kK1 ? -d : kl == kK2 ? d * d / 2 : std::expm1(d) - d);
        slope += kl_coef * (kl == kK1 ? 1 : kl == kK2 ? -d : -std::expm1(d));
        entropy_sum += w * entropy.exact[i];
        largest = std::max(largest, r);
        require(near(dloss[i], w * slope / denom, tolerance), "gradient");
        require(near(d_entropy[i], -2 * entropy_coef * w / denom, tolerance), "gradient to entropy");
    }
    require(near(loss[0], (policy + kl_coef * kl_sum - entropy_coef * entropy_sum) / denom, tolerance), "loss");
    require(near(statistics[0], policy / denom, tolerance), "policy loss");
    require(near(statistics[1], kl_sum / denom, tolerance), "kl");
    require(near(statistics[3], clipped / denom, tolerance), "clip fraction");
    require(near(statistics[8], largest, tolerance), "largest ratio");

    std::unique_ptr<T[]> value_statistics(new T[kValueStatistics]);
    value_loss_forward<T>({now.get(), old.get(), ref.get(), mask}, 0.2, denom, count, threads, loss.get(),
                          value_statistics.get(), dloss.get());
    double squares = 0, number = 0, error_sum = 0;
    for (int64_t i = 0; i < count; ++i) {
        if (!live[i]) continue;
        const double w = weight[i], error = now.exact[i] - ref.exact[i], moved = now.exact[i] - old.exact[i];
        const double held = old.exact[i] + std::min(std::max(moved, -0.2), 0.2) - ref.exact[i];
        const bool cut = std::abs(moved) > 0.2 && held * held > error * error;
        squares += w * (cut ? held * held : error * error);
        number += w;
        error_sum -= w * error;
        require(near(dloss[i], cut ? 0 : w * error / denom, tolerance), "value gradient");
    }
    require(near(loss[0], squares / 2 / denom, tolerance), "value loss");
    require(value_statistics[1] == T(number), "count");
    require(near(value_statistics[2], error_sum, tolerance), "sum of errors");
}

}  // namespace

int main() {
    for (const char* isa : {"portable", "auto"}) {
        set_isa(isa);
        for (int64_t count : {0, 1, 3, 4, 7, 8, 15, 16, 17, 1023, 1024, 1025, 2050}) {
            for (double keep_share : {0.0, 0.6, 1.0}) {
                for (int kl : {kK1, kK2, kK3}) {
                    for (bool weights : {false, true}) {
                        run_case<float>(count, keep_share, weights, false, kl, 1, 1e-4);
                        run_case<float>(count, keep_share, weights, true, kl, 1, 1e-4);
                        run_case<double>(count, keep_share, weights, false, kl, 1, 1e-11);
                    }
                }
            }
        }
        run_case<float>(200003, 0.7, false, true, kK3, 2, 1e-3);  // large enough for the parallel loop
    }
    float x[2] = {};
    uint8_t mask[2] = {1, 1};
    const TokenInput in{x, false}, nothing{nullptr, false};
    const PpoKnobs knobs{0.8, 1.2, 3, kK3, 0, 0};
    float loss, statistics[9], dloss[2];
    refuses([&] { ppo_loss_forward<float>({in, nothing, in, in, in, {mask, false}}, knobs, 1, 2, 1, &loss, statistics, dloss); },
            "null old_logprob");
    refuses([&] { ppo_loss_forward<float>({in, in, in, in, in, {mask, false}}, knobs, 1, -1, 1, &loss, statistics, dloss); },
            "negative count");
    refuses([&] { value_loss_forward<float>({in, in, in, {nullptr, false}}, 1, 1, 2, 1, &loss, statistics, dloss); },
            "null mask");
    refuses([&] { value_loss_forward<float>({in, in, in, {mask, false}}, 1, 1, 2, 0, &loss, statistics, dloss); },
            "no threads");
    return is_clean();
}
