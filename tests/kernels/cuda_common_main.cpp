// What the CUDA kernels compute with, csrc/common, under the sanitizers; prints "common code is clean" or fails.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <vector>

#include "common/affine_map.h"
#include "common/half.h"
#include "common/ppo_terms.h"

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

void require(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "FAILED: %s\n", what);
    std::exit(1);
}

uint64_t state = 1;

double random_number() {  // a linear congruential generator, in (-1, 1)
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    return double(int64_t(state) >> 11) / double(int64_t(1) << 52);
}

bool near(double got, double want, double tolerance) {
    return std::isnan(want) ? std::isnan(got) : got == want || std::abs(got - want) <= tolerance;
}

// --- maps: any way of composing a chain gives what the recurrence gives ---------------------------------------------

template <typename T>
rlhf::AffineMap<T> compose(const std::vector<rlhf::AffineMap<T>>& steps, int64_t begin, int64_t end, T floor) {
    if (begin == end) return {};
    if (end - begin == 1) return steps[begin];
    const int64_t middle = begin + 1 + int64_t((random_number() + 1) / 2 * (end - begin - 1));
    return then(compose(steps, begin, middle, floor), compose(steps, middle, end, floor), floor);
}

template <typename T>
void maps(double decay, double tolerance) {
    for (int64_t length : {0, 1, 2, 7, 500}) {
        for (double special : {0.0, kInf, -kInf, kNan}) {
            std::vector<rlhf::AffineMap<T>> steps;
            T last = T(0.5);
            const T floor = rlhf::scale_floor(T(decay));
            for (int64_t i = 0; i < length; ++i) {
                const bool keep = i % 3 != 1;
                // A special number early on: the product of decays behind it underflows.
                const T offset = keep ? T(i == 3 && special != 0 ? special : random_number()) : T(kNan);
                steps.push_back(rlhf::affine_step(keep, T(decay), offset));
                if (keep) last = offset + T(decay) * last;
            }
            for (int repeat = 0; repeat < 5; ++repeat) {
                require(near(compose(steps, 0, length, floor)(T(0.5)), last, tolerance), "composed maps");
            }
        }
    }
}

// --- per-token terms ------------------------------------------------------------------------------------------------

void terms() {
    const rlhf::ClipRange<double> clip{0.8, 1.3, 3.0, true}, without_dual{0.8, 1.3, 0.0, false};
    struct { double ratio, advantage, loss, slope; bool low, high; } cases[] = {
        {1.0, 2.0, -2.0, -2.0, false, false}, {1.1, 2.0, -2.2, -2.2, false, false}, {1.5, 2.0, -2.6, 0.0, false, true},
        {0.5, 2.0, -1.0, -1.0, false, false}, {0.5, -2.0, 1.6, 0.0, true, false},   {2.0, -2.0, 4.0, 4.0, false, false},
        {5.0, -2.0, 6.0, 0.0, false, true},   {5.0, 0.0, 0.0, 0.0, false, false},
    };
    for (const auto& c : cases) {
        const auto got = rlhf::policy_terms(std::log(c.ratio) - 1.0, -1.0, c.advantage, clip);
        require(near(got.loss, c.loss, 1e-12) && near(got.slope, c.slope, 1e-12), "policy loss and slope");
        require(got.clipped_low == c.low && got.clipped_high == c.high, "clipped");
        require(near(got.ratio, c.ratio, 1e-12), "ratio");
        require(near(got.approx_kl, c.ratio - 1 - std::log(c.ratio), 1e-12), "approx_kl");
    }
    require(rlhf::policy_terms(std::log(5.0), 0.0, -2.0, without_dual).loss > 9.9, "no dual clip, no bound");
    require(std::isnan(rlhf::policy_terms(kNan, 0.0, 1.0, clip).loss), "NaN stays");
    require(std::isnan(rlhf::policy_terms(kInf, 0.0, 0.0, clip).loss), "0 inf is NaN, as in the reference");
    for (int k : {1, 2, 3}) {
        const double d = -0.5;  // ref - new
        const double value[] = {0, 0.5, 0.125, std::exp(d) - 1 - d}, slope[] = {0, 1.0, 0.5, 1 - std::exp(d)};
        const auto got = rlhf::kl_terms(0.25, -0.25, rlhf::KlEstimator(k));
        require(near(got.value, value[k], 1e-15) && near(got.slope, slope[k], 1e-15), "kl");
    }
    // v, old, R with clip 0.5: inside; outside and better than its clipped self; outside and worse
    require(near(rlhf::value_terms(1.2, 1.0, 2.0, 0.5, true).worst, 0.64, 1e-15), "value inside");
    require(near(rlhf::value_terms(2.0, 1.0, 0.0, 0.5, true).slope, 2.0, 1e-15), "value outside, not cut");
    const auto cut = rlhf::value_terms(3.0, 1.0, 3.5, 0.5, true);
    require(cut.clipped && cut.slope == 0 && near(cut.worst, 4.0, 1e-15), "value outside, cut");
    require(!rlhf::value_terms(3.0, 1.0, 3.5, 0.5, false).clipped, "value without a range");
}

// --- half types: every value comes back, and what lies between two goes to the nearer, a tie to the even one ---------

template <typename H>
void halves(uint16_t infinity) {
    const auto bits = [](double x) { return rlhf::Rounded<H>::from(float(x)).bits; };
    for (uint32_t pattern = 0; pattern < 65536; ++pattern) {
        const uint16_t here = uint16_t(pattern), size = here & 0x7fff, sign = here & 0x8000;
        const float x = rlhf::to_float(H{here});
        require(size > infinity ? std::isnan(x) && (bits(x) & 0x7fff) > infinity : bits(x) == here, "half and back");
        if (size >= infinity) continue;
        const double after = size + 1 == infinity ? 2.0 * x - rlhf::to_float(H{uint16_t(here - 1)})
                                                  : rlhf::to_float(H{uint16_t(here + 1)});
        const float middle = float((double(x) + after) / 2);
        require(bits(middle) == (size % 2 ? here + 1 : here), "a tie goes to the even one");
        require(bits(std::nextafterf(middle, x)) == here, "nearer to this one");
        require(bits(std::nextafterf(middle, float(after))) == (sign | (size + 1)), "nearer to the next one");
    }
    require(bits(kInf) == infinity && bits(-kInf) == (infinity | 0x8000), "infinities");
}

}  // namespace

int main() {
    halves<rlhf::BFloat16>(0x7f80);
    halves<rlhf::Float16>(0x7c00);
    for (double decay : {0.0, 0.05, 0.97, 1.0}) {
        maps<float>(decay, 2e-5);
        maps<double>(decay, 1e-13);
    }
    terms();
    std::puts("common code is clean");
}
