// What ppo_loss.cpp calls once per block of at most kTokenBlock elements; compiled per instruction set from
// ppo_loss_kernel.inc.h. Within a block each lane sums in T, across lanes sums are double.
#pragma once

#include "cpu/isa.h"
#include "cpu/ppo_loss.h"

namespace rlhf::cpu {

constexpr int kTokenBlock = 1024;

enum PpoSum : int { kPolicy, kKl, kEntropy, kLow, kHigh, kApproxKl, kRatio, kRatioMax, kPpoSums };
enum ValueSum : int { kSquare, kClipped, kCount, kError, kErrorSq, kRet, kRetSq, kValueSums };

#define RLHF_DECLARE_BLOCKS(T)                                                                                    \
    void ppo_block(const PpoInputs& inputs, const PpoKnobs& knobs, T inverse_denom, int64_t begin, int n,         \
                   T* dloss, double* sums);                                                                            \
    void value_block(const ValueInputs& inputs, double clip, T inverse_denom, int64_t begin, int n, T* dloss,     \
                     double* sums);                                                                                    \
    void weight_block(TokenMask mask, T factor, int64_t begin, int n, T* out);

RLHF_IN_EVERY_SET(RLHF_DECLARE_BLOCKS(float) RLHF_DECLARE_BLOCKS(double))
#undef RLHF_DECLARE_BLOCKS

}  // namespace rlhf::cpu
