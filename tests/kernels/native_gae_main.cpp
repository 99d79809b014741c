// csrc/cpu/{gae,whiten}.cpp under ASan and UBSan: test_native.py builds and runs this. Every array is a heap block of
// exactly its size, so one element too far ends the process. Results are compared with the definition, written here as
// plainly as possible. Masked elements hold NaN.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/gae.h"
#include "cpu/whiten.h"
#include "native_driver.h"

namespace {

using namespace driver;
using rlhf::cpu::Rows;

bool near(double got, double want, double tolerance) { return std::abs(got - want) <= tolerance; }

// A strided [B, T] array without anything behind its last element: count = (B - 1) stride + T.
int64_t strided_count(int64_t B, int64_t T, int64_t stride) { return B && T ? (B - 1) * stride + T : 0; }

template <typename F>
void gae_case(int64_t B, int64_t T, int64_t stride, double keep_share, bool with_bootstrap, int threads, double tol) {
    const double gamma = 0.97, lam = 0.9;
    const int64_t count = strided_count(B, T, stride);
    auto reward = heap<F>(count), value = heap<F>(count), bootstrap = heap<F>(B);
    auto mask = heap<uint8_t>(count);
    for (int64_t i = 0; i < count; ++i) {
        mask[i] = (random_number() + 1) / 2 < keep_share;
        reward[i] = mask[i] ? F(random_number()) : std::numeric_limits<F>::quiet_NaN();
        value[i] = mask[i] ? F(random_number()) : std::numeric_limits<F>::quiet_NaN();
    }
    for (int64_t b = 0; b < B; ++b) bootstrap[b] = F(random_number());
    auto advantage = heap<F>(B * T), ret = heap<F>(B * T), d_reward = heap<F>(B * T), d_value = heap<F>(B * T);
    auto d_bootstrap = heap<F>(B);
    const F* last_value = with_bootstrap ? bootstrap.get() : nullptr;
    rlhf::cpu::gae_forward<F>({reward.get(), stride}, {value.get(), stride}, {mask.get(), stride}, last_value, B, T,
                              gamma, lam, threads, advantage.get(), ret.get());
    // Gradient of sum(advantage) + sum(ret): every unmasked element of both has gradient 1.
    auto ones = heap<F>(count);
    for (int64_t i = 0; i < count; ++i) ones[i] = mask[i] ? F(1) : std::numeric_limits<F>::quiet_NaN();
    rlhf::cpu::gae_backward<F>({ones.get(), stride}, {ones.get(), stride}, {mask.get(), stride}, B, T, gamma, lam,
                               threads, d_reward.get(), d_value.get(), d_bootstrap.get());
    for (int64_t b = 0; b < B; ++b) {
        std::vector<int64_t> kept;
        for (int64_t t = 0; t < T; ++t) {
            if (mask[b * stride + t]) {
                kept.push_back(t);
            } else {
                require(advantage[b * T + t] == 0 && ret[b * T + t] == 0, "masked outputs are 0");
                require(d_reward[b * T + t] == 0 && d_value[b * T + t] == 0, "masked gradients are 0");
            }
        }
        const int64_t n = kept.size();
        for (int64_t i = 0; i < n; ++i) {
            double a = 0, d_r = 0;
            for (int64_t j = i; j < n; ++j) {
                const double here = value[b * stride + kept[j]];
                const double next = j + 1 < n ? double(value[b * stride + kept[j + 1]])
                                              : (with_bootstrap ? double(bootstrap[b]) : 0.0);
                a += std::pow(gamma * lam, j - i) * (reward[b * stride + kept[j]] + gamma * next - here);
            }
            for (int64_t j = 0; j <= i; ++j) d_r += 2 * std::pow(gamma * lam, i - j);
            const double v = value[b * stride + kept[i]];
            const int64_t at = b * T + kept[i];
            require(near(advantage[at], a, tol), "advantage");
            require(near(ret[at], a + v, tol), "ret");
            require(near(d_reward[at], d_r, tol * 10), "d_reward");
            const double before = i ? (d_r - 2) / lam : 0.0;  // gamma G of the previous position
            require(near(d_value[at], before - d_r + 1, tol * 10), "d_value");
            if (i == n - 1) require(near(d_bootstrap[b], gamma * d_r, tol * 10), "d_bootstrap");
        }
        if (n == 0) require(d_bootstrap[b] == 0, "d_bootstrap of an empty row");
    }
}

template <typename F>
void whiten_case(int64_t count, double keep_share, int threads, double tol) {
    auto x = heap<F>(count), y = heap<F>(count), d_x = heap<F>(count);
    auto mask = heap<uint8_t>(count);
    auto moments = heap<double>(3), stats = heap<double>(3);
    double n = 0, sum = 0, squares = 0;
    for (int64_t i = 0; i < count; ++i) {
        mask[i] = (random_number() + 1) / 2 < keep_share;
        x[i] = mask[i] ? F(3 + random_number()) : std::numeric_limits<F>::quiet_NaN();
        if (mask[i]) n += 1, sum += x[i], squares += double(x[i]) * x[i];
    }
    rlhf::cpu::masked_moments<F>(x.get(), mask.get(), count, threads, moments.get());
    require(moments[0] == n && near(moments[1], sum, 1e-9 * (1 + n)) && near(moments[2], squares, 1e-8 * (1 + n)),
            "moments");
    const double mean = sum / std::max(n, 1.0);
    const double rstd = 1 / std::sqrt((squares - sum * mean) / std::max(n - 1, 1.0) + 1e-8);
    for (const double* given : {static_cast<const double*>(nullptr), static_cast<const double*>(moments.get())}) {
        rlhf::cpu::whiten_forward<F>(x.get(), mask.get(), given, count, true, 1e-8, threads, y.get(), stats.get());
        rlhf::cpu::whiten_backward<F>(y.get(), x.get(), mask.get(), stats.get(), count, true, given != nullptr,
                                      threads, d_x.get());
        for (int64_t i = 0; i < count; ++i) {
            require(near(y[i], mask[i] ? (x[i] - mean) * rstd : 0.0, tol), "whitened");
            require(std::isfinite(d_x[i]) && (mask[i] || d_x[i] == 0), "whitened gradient");
        }
    }
}

}  // namespace

int main() {
    for (int threads : {1, 3}) {
        for (int64_t B : {0, 1, 3, 4, 5, 9}) {
            for (int64_t T : {0, 1, 2, 17}) {
                for (double keep_share : {0.0, 0.6, 1.0}) {
                    for (bool with_bootstrap : {false, true}) {
                        gae_case<float>(B, T, T + 3, keep_share, with_bootstrap, threads, 2e-5);
                        gae_case<double>(B, T, T, keep_share, with_bootstrap, threads, 1e-12);
                    }
                }
            }
        }
        for (const char* isa : {"portable", "auto"}) {
            rlhf::cpu::set_isa(isa);
            for (int64_t count : {0, 1, 2, 7, 15, 16, 17, 4096, 4111, 300001}) {
                if (count > 5000 && (threads == 1 || isa[0] == 'p')) continue;  // for the parallel loop, once
                for (double keep_share : {0.0, 0.6, 1.0}) {
                    whiten_case<float>(count, keep_share, threads, 1e-5);
                    whiten_case<double>(count, keep_share, threads, 1e-9);
                }
            }
        }
    }
    gae_case<float>(600, 500, 501, 0.8, true, 2, 2e-4);  // large enough for the parallel loop
    float x[2] = {};
    uint8_t mask[2] = {1, 1};
    const Rows<float> rows{x, 2}, nothing{nullptr, 2};
    refuses([&] { rlhf::cpu::gae_forward<float>(nothing, rows, {mask, 2}, nullptr, 1, 2, 1, 1, 1, x, x); }, "null reward");
    refuses([&] { rlhf::cpu::gae_forward<float>(rows, rows, {mask, 2}, nullptr, 1, 2, 1, 1, 1, x, nullptr); }, "null ret");
    refuses([&] { rlhf::cpu::gae_forward<float>(rows, rows, {mask, 2}, nullptr, -1, 2, 1, 1, 1, x, x); }, "negative rows");
    refuses([&] { rlhf::cpu::gae_forward<float>(rows, rows, {mask, 2}, nullptr, 1, 2, 1, 1, 0, x, x); }, "no threads");
    refuses([&] { rlhf::cpu::gae_backward<float>(rows, rows, {mask, 2}, 1, 0, 1, 1, 1, x, x, nullptr); }, "null d_bootstrap");
    refuses([&] { rlhf::cpu::masked_moments<float>(x, mask, 2, 1, nullptr); }, "null moments");
    return is_clean();
}
