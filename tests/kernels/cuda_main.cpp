// csrc/cuda on the CPU, to be run under the sanitizers; prints "cuda code is clean" or fails.
//
// The kernels run through their C functions, on fibers (see cuda_on_host/cuda_runtime.h), against csrc/cpu and plain
// loops over the terms of csrc/common. Arrays are exactly as long as promised, so that an access outside is seen.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <vector>

#include "cpu/gae.h"
#include "cuda/gae.cu"
#undef RLHF_DEFINE
#include "cuda/ppo_loss.cu"
#undef RLHF_DEFINE
#include "cuda/library.cu"

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

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

// Exactly `count` elements, `shift` of them skipped: what a slice of a tensor is, aligned or not.
template <typename T>
struct Heap {
    std::unique_ptr<T[]> memory;
    T* data;

    explicit Heap(int64_t count, int64_t shift = 0) : memory(new T[count + shift]()), data(memory.get() + shift) {}
    T& operator[](int64_t i) { return data[i]; }
};

bool near(double got, double want, double tolerance) {
    return std::isnan(want) ? std::isnan(got) : got == want || std::abs(got - want) <= tolerance;
}

// --- kernels --------------------------------------------------------------------------------------------------------

template <typename F>
struct Functions;
template <>
struct Functions<float> {
    static constexpr auto gae_forward = rlhf_gae_forward_float32;
    static constexpr auto gae_backward = rlhf_gae_backward_float32;
    static constexpr auto ppo_loss_forward = rlhf_ppo_loss_forward_float32;
    static constexpr auto ppo_loss_backward = rlhf_ppo_loss_backward_float32;
    static constexpr auto value_loss_forward = rlhf_value_loss_forward_float32;
};
template <>
struct Functions<double> {
    static constexpr auto gae_forward = rlhf_gae_forward_float64;
    static constexpr auto gae_backward = rlhf_gae_backward_float64;
    static constexpr auto ppo_loss_forward = rlhf_ppo_loss_forward_float64;
    static constexpr auto ppo_loss_backward = rlhf_ppo_loss_backward_float64;
    static constexpr auto value_loss_forward = rlhf_value_loss_forward_float64;
};

template <typename F>
void gae_case(int64_t B, int64_t T, int64_t stride, int64_t shift, double keep_share, double tol) {
    using C = Functions<F>;
    const double gamma = 0.97, lam = 0.9;
    const int64_t count = B && T ? (B - 1) * stride + T : 0;
    Heap<F> reward(count, shift), value(count, shift), bootstrap(B), g(count, shift);
    Heap<uint8_t> mask(count, shift);
    for (int64_t i = 0; i < count; ++i) {
        mask[i] = (random_number() + 1) / 2 < keep_share;
        for (Heap<F>* x : {&reward, &value, &g}) (*x)[i] = mask[i] ? F(random_number()) : F(kNan);
    }
    for (int64_t b = 0; b < B; ++b) bootstrap[b] = F(random_number());
    std::vector<Heap<F>> got, want;
    for (std::vector<Heap<F>>* set : {&got, &want}) {
        for (int i = 0; i < 4; ++i) set->emplace_back(B * T);
        set->emplace_back(B);
    }
    const auto* m = mask.data;
    require(C::gae_forward(reward.data, stride, 1, value.data, stride, 1, m, stride, 1, bootstrap.data, B, T, gamma, lam,
                           got[0].data, got[1].data, nullptr) == 0, "gae_forward");
    require(C::gae_backward(g.data, stride, 1, value.data, stride, 1, m, stride, 1, B, T, gamma, lam, got[2].data,
                            got[3].data, got[4].data, nullptr) == 0, "gae_backward");
    rlhf::cpu::gae_forward<F>({reward.data, stride}, {value.data, stride}, {m, stride}, bootstrap.data, B, T, gamma, lam,
                              1, want[0].data, want[1].data);
    rlhf::cpu::gae_backward<F>({g.data, stride}, {value.data, stride}, {m, stride}, B, T, gamma, lam, 1, want[2].data,
                               want[3].data, want[4].data);
    for (int i = 0; i < 5; ++i) {
        for (int64_t k = 0; k < (i < 4 ? B * T : B); ++k) require(near(got[i][k], want[i][k], tol), "gae output");
    }
}

template <typename F>
void ppo_case(int64_t count, int64_t shift, bool bytes, bool options, double tol) {
    using C = Functions<F>;
    Heap<F> now(count, shift), old(count, shift), advantage(count, shift), ref(count, shift), entropy(count, shift);
    Heap<F> weights(count, shift), denom(1), workspace(rlhf_workspace(count)), loss(1), statistics(9), slope(count, shift);
    Heap<uint8_t> mask(count, shift);
    double sums[8] = {}, n = 7.0;
    denom[0] = F(n);
    for (int64_t i = 0; i < count; ++i) {
        mask[i] = random_number() > -0.4;
        weights[i] = bytes ? F(mask[i]) : F(mask[i] * 0.5);
        for (Heap<F>* x : {&now, &old, &advantage, &ref, &entropy}) {
            (*x)[i] = mask[i] ? F(random_number()) : F(kNan);
        }
    }
    const rlhf::ClipRange<double> clip{0.8, 1.3, 1.5, options};
    std::vector<double> want_slope(count);
    for (int64_t i = 0; i < count; ++i) {
        if (!mask[i]) continue;
        const double w = weights[i];
        const auto p = rlhf::policy_terms<double>(now[i], old[i], advantage[i], clip);
        const auto k = rlhf::kl_terms<double>(now[i], ref[i], rlhf::KlEstimator::k3);
        const double terms[] = {p.loss, k.value, entropy[i], 1.0 * p.clipped_low, 1.0 * p.clipped_high, p.approx_kl, p.ratio};
        for (int s = 0; s < 7; ++s) sums[s] += w * terms[s] / n;
        sums[7] = std::max(sums[7], p.ratio);
        want_slope[i] = w * (p.slope + (options ? 0.3 * k.slope : 0.0)) / n;
    }
    const void* m = bytes ? static_cast<const void*>(mask.data) : weights.data;
    require(C::ppo_loss_forward(now.data, old.data, advantage.data, m, bytes, denom.data, options ? ref.data : nullptr,
                                options ? entropy.data : nullptr, count, 0.8, 1.3, options ? 1.5 : 0.0, 3,
                                options ? 0.3 : 0.0, options ? 0.2 : 0.0, workspace.data, loss.data, statistics.data,
                                slope.data, nullptr) == 0, "ppo_loss_forward");
    if (!options) sums[1] = sums[2] = 0;
    require(near(loss[0], sums[0] + (options ? 0.3 * sums[1] - 0.2 * sums[2] : 0), tol), "ppo loss");
    const double want[] = {sums[0], sums[1], sums[2], sums[3] + sums[4], sums[3], sums[4], sums[5], sums[6], sums[7]};
    for (int i = 0; i < 9; ++i) require(near(statistics[i], want[i], tol), "ppo statistics");
    Heap<F> g(1), d_now(count), d_entropy(count);
    g[0] = F(2.0);
    require(C::ppo_loss_backward(g.data, slope.data, m, bytes, denom.data, 0.2, count, d_now.data, d_entropy.data,
                                 nullptr) == 0, "ppo_loss_backward");
    for (int64_t i = 0; i < count; ++i) {
        require(near(slope[i], want_slope[i], tol) && near(d_now[i], 2 * want_slope[i], tol), "ppo gradient");
        require(near(d_entropy[i], -0.4 * weights[i] / n, tol), "entropy gradient");
    }
    // The same numbers as values: value = now, old value = old, return = advantage.
    double worst = 0, clipped = 0, value_sums[5] = {};
    for (int64_t i = 0; i < count; ++i) {
        want_slope[i] = 0;
        if (!mask[i]) continue;
        const double w = weights[i], target = advantage[i];
        const auto t = rlhf::value_terms<double>(now[i], old[i], target, 0.25, options);
        worst += w * t.worst;
        clipped += w * t.clipped;
        const double terms[] = {1.0, -t.error, t.error * t.error, target, target * target};
        for (int s = 0; s < 5; ++s) value_sums[s] += w * terms[s];
        want_slope[i] = w * t.slope / n;
    }
    require(C::value_loss_forward(now.data, options ? old.data : nullptr, advantage.data, m, bytes, denom.data, count, 0.25,
                                  workspace.data, loss.data, statistics.data, slope.data, nullptr) == 0, "value_loss_forward");
    require(near(loss[0], 0.5 * worst / n, tol * 10) && near(statistics[0], clipped / n, tol * 10), "value loss");
    for (int s = 0; s < 5; ++s) require(near(statistics[1 + s], value_sums[s], tol * (10 + count)), "value statistics");
    for (int64_t i = 0; i < count; ++i) require(near(slope[i], want_slope[i], tol), "value gradient");
}

}  // namespace

int main() {
    for (double keep_share : {0.0, 0.02, 0.7, 1.0}) {
        for (int64_t T : {0, 1, 3, 4, 17, 128, 516, 2050, 4100}) {
            gae_case<float>(2, T, T + 3, 1, keep_share, 1e-4);
            gae_case<float>(2, T, (T + 3) / 4 * 4, 0, keep_share, 1e-4);
            gae_case<double>(1, T, T, 0, keep_share, 1e-12);
        }
    }
    gae_case<float>(0, 5, 5, 0, 1.0, 0.0);
    for (int64_t count : {0, 1, 5, 1024, 5003}) {
        for (int bits = 0; bits < 8; ++bits) {
            ppo_case<float>(count, bits & 1, bits & 2, bits & 4, 2e-3);
            ppo_case<double>(count, bits & 1, bits & 2, bits & 4, 1e-10);
        }
    }
    std::puts("cuda code is clean");
}
