// What gather_logprob.cpp calls once per row; compiled per instruction set from gather_logprob_kernel.inc.h.
#pragma once

#include "cpu/gather_logprob.h"
#include "cpu/isa.h"

namespace rlhf::cpu {

enum RowWants : int { kWantEntropy = 1, kWantTop1 = 2, kWantSquares = 4 };  // the other statistics cost nothing

// All in double: they are sums and logarithms of sums.
struct RowStatistics {
    double logprob, entropy, lse, is_top1, mean_logit, log_sum_sq_prob;
};

// Coefficients of one row's gradient, see row_backward.
struct RowSlopes {
    double lse;
    double on_p, on_log_p, entropy, on_p_squared, everywhere, at_target;
};

#define RLHF_DECLARE_ROWS(S)                                                                      \
    void row_forward(const S* row, int64_t vocab, int64_t target, double temperature, int wants,  \
                     RowStatistics* out);                                                         \
    void row_backward(const S* row, int64_t vocab, int64_t target, double temperature,            \
                      const RowSlopes& slopes, S* d_row);

RLHF_IN_EVERY_SET(RLHF_DECLARE_ROWS(float) RLHF_DECLARE_ROWS(double) RLHF_DECLARE_ROWS(Bfloat16))
#undef RLHF_DECLARE_ROWS

}  // namespace rlhf::cpu
