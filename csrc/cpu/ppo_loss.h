// PPO policy and value losses on the CPU. The contract stands in ppo_loss.cpp.
#pragma once

#include <cstdint>

namespace rlhf::cpu {

// Elements of one input: in the dtype that is computed in, or in bfloat16. Null: the input was not given.
struct TokenInput {
    const void* data;
    bool bfloat16;
};

// One byte per element (0 = left out), or a weight in the dtype that is computed in (0 = left out).
struct TokenMask {
    const void* data;
    bool weights;
};

enum KlEstimator : int { kK1, kK2, kK3 };

struct PpoInputs {
    TokenInput new_logprob, old_logprob, advantage, ref_logprob, entropy;  // the last two may be null
    TokenMask mask;
};

struct PpoKnobs {
    double ratio_low, ratio_high;  // 1 - clip_low, 1 + clip_high
    double dual_clip;              // infinity: none
    int kl;
    double kl_coef, entropy_coef;
};

struct ValueInputs {
    TokenInput value, old_value, ret;  // old_value may be null: nothing is clipped
    TokenMask mask;
};

constexpr int kPpoStatistics = 9;
constexpr int kValueStatistics = 6;

template <typename T>
void ppo_loss_forward(const PpoInputs& inputs, const PpoKnobs& knobs, double denom, int64_t count, int threads,
                      T* loss, T* statistics, T* dloss);

template <typename T>
void ppo_loss_entropy_gradient(double grad_loss, TokenMask mask, double denom, double entropy_coef, int64_t count,
                               int threads, T* d_entropy);

template <typename T>
void value_loss_forward(const ValueInputs& inputs, double clip, double denom, int64_t count, int threads, T* loss,
                        T* statistics, T* dloss);

}  // namespace rlhf::cpu
