// PPO policy and value losses with their statistics and gradients, over `count` dense elements.
//
// Contract. Equations: kernels/rlhf_kernels/ppo_loss. Reads every input once and writes every element of dloss [count],
// loss [1] and the statistics; nothing that was there before is accumulated. A dead element (mask 0) may hold anything,
// NaN included, and gives dloss 0. T is what is computed in and written; an input may be bfloat16 where T is float.
//     ppo statistics [9]: policy loss, kl, entropy, clip fraction, its low and high part, approximate kl, mean ratio (all
//     divided by denom), largest ratio (0 if nothing lives)
//     value statistics [6]: clip fraction (divided by denom), sum m, sum m (R - v), its square, sum m R, its square
// Each lane sums in T within a block of fixed size, lanes and blocks are added in double, in order: the bits depend on the instruction set,
// not on the number of threads.

#include "cpu/ppo_loss.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "common/check.h"
#include "cpu/ppo_loss_blocks.h"

namespace rlhf::cpu {
namespace {

// Fewer elements take at most a few tens of microseconds: too little to wake a second core. It is torch's own grain size.
constexpr int64_t kSerialElements = 1 << 15;

// body(begin, n, index) for every block of the range.
template <typename Body>
void for_blocks(int64_t count, int threads, Body body) {
    const int64_t blocks = (count + kTokenBlock - 1) / kTokenBlock;
    [[maybe_unused]] const bool parallel = threads > 1 && count >= kSerialElements;
#pragma omp parallel for schedule(static) num_threads(threads) if (parallel)
    for (int64_t block = 0; block < blocks; ++block) {
        const int64_t begin = block * kTokenBlock;
        body(begin, int(std::min<int64_t>(kTokenBlock, count - begin)), block);
    }
}

// The S sums that body leaves per block, added in order; the one at `largest` is a maximum, and NaN if one is.
template <int S, typename Body>
std::array<double, S> ordered_sums(int64_t count, int threads, int largest, Body body) {
    std::vector<std::array<double, S>> partial((count + kTokenBlock - 1) / kTokenBlock);
    for_blocks(count, threads, [&](int64_t begin, int n, int64_t block) { body(begin, n, partial[block].data()); });
    std::array<double, S> total{};
    for (const auto& sums : partial) {
        for (int s = 0; s < S; ++s) {
            if (s != largest) total[s] += sums[s];
            else if (!(sums[s] <= total[s]) && total[s] == total[s]) total[s] = sums[s];
        }
    }
    return total;
}

void check_call(int64_t count, int threads) {
    RLHF_CHECK_SIZE(count);
    RLHF_CHECK_THREADS(threads);
}

#define CHECK_TOKENS(inputs, name) RLHF_CHECK(count == 0 || (inputs).name.data, #name, "an address", "a null pointer")

}  // namespace

template <typename T>
void ppo_loss_forward(const PpoInputs& inputs, const PpoKnobs& knobs, double denom, int64_t count, int threads,
                      T* loss, T* statistics, T* dloss) {
    check_call(count, threads);
    CHECK_TOKENS(inputs, new_logprob);
    CHECK_TOKENS(inputs, old_logprob);
    CHECK_TOKENS(inputs, advantage);
    CHECK_TOKENS(inputs, mask);
    RLHF_CHECK_POINTER(loss, 1);
    RLHF_CHECK_POINTER(statistics, kPpoStatistics);
    RLHF_CHECK_POINTER(dloss, count);
    void (*block)(const PpoInputs&, const PpoKnobs&, T, int64_t, int, T*, double*);
    RLHF_PICK(block, ppo_block);
    const T inverse_denom = T(1 / denom);
    const auto sums = ordered_sums<kPpoSums>(count, threads, kRatioMax, [&](int64_t begin, int n, double* out) {
        block(inputs, knobs, inverse_denom, begin, n, dloss, out);
    });
    double total = sums[kPolicy] / denom;
    if (knobs.kl_coef != 0) total += knobs.kl_coef * (sums[kKl] / denom);
    if (knobs.entropy_coef != 0) total -= knobs.entropy_coef * (sums[kEntropy] / denom);
    *loss = T(total);
    const double results[kPpoStatistics] = {sums[kPolicy] / denom,
                                            sums[kKl] / denom,
                                            sums[kEntropy] / denom,
                                            (sums[kLow] + sums[kHigh]) / denom,
                                            sums[kLow] / denom,
                                            sums[kHigh] / denom,
                                            sums[kApproxKl] / denom,
                                            sums[kRatio] / denom,
                                            sums[kRatioMax]};
    std::copy(results, results + kPpoStatistics, statistics);
}

template <typename T>
void ppo_loss_entropy_gradient(double grad_loss, TokenMask mask, double denom, double entropy_coef, int64_t count,
                               int threads, T* d_entropy) {
    check_call(count, threads);
    RLHF_CHECK(count == 0 || mask.data, "mask", "an address", "a null pointer");
    RLHF_CHECK_POINTER(d_entropy, count);
    void (*block)(TokenMask, T, int64_t, int, T*);
    RLHF_PICK(block, weight_block);
    const T factor = T(-entropy_coef * grad_loss / denom);
    for_blocks(count, threads, [&](int64_t begin, int n, int64_t) { block(mask, factor, begin, n, d_entropy); });
}

template <typename T>
void value_loss_forward(const ValueInputs& inputs, double clip, double denom, int64_t count, int threads, T* loss,
                        T* statistics, T* dloss) {
    check_call(count, threads);
    CHECK_TOKENS(inputs, value);
    CHECK_TOKENS(inputs, ret);
    CHECK_TOKENS(inputs, mask);
    RLHF_CHECK_POINTER(loss, 1);
    RLHF_CHECK_POINTER(statistics, kValueStatistics);
    RLHF_CHECK_POINTER(dloss, count);
    void (*block)(const ValueInputs&, double, T, int64_t, int, T*, double*);
    RLHF_PICK(block, value_block);
    const T inverse_denom = T(1 / denom);
    const auto sums = ordered_sums<kValueSums>(count, threads, -1, [&](int64_t begin, int n, double* out) {
        block(inputs, clip, inverse_denom, begin, n, dloss, out);
    });
    *loss = T(0.5 * sums[kSquare] / denom);
    const double results[kValueStatistics] = {sums[kClipped] / denom, sums[kCount], sums[kError],
                                              sums[kErrorSq],          sums[kRet],   sums[kRetSq]};
    std::copy(results, results + kValueStatistics, statistics);
}

#define INSTANTIATE(T)                                                                                               \
    template void ppo_loss_forward<T>(const PpoInputs&, const PpoKnobs&, double, int64_t, int, T*, T*, T*);        \
    template void ppo_loss_entropy_gradient<T>(double, TokenMask, double, double, int64_t, int, T*);             \
    template void value_loss_forward<T>(const ValueInputs&, double, double, int64_t, int, T*, T*, T*);
INSTANTIATE(float)
INSTANTIATE(double)
#undef INSTANTIATE

}  // namespace rlhf::cpu
