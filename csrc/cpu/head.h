// Sweeps over the vocabulary of a language-model head: row statistics of the logits, gradients through them, and draws
// from them, without a matrix of logits. What `linear_logprob`, its pair form, `linear_ppo_loss` and `sample` are made of.
//
// Notation: n active rows of hidden states h [H], weight W [V, H], both optionally widened by `extra` columns that are
// multiplied like the others (a rank-r addition), K = H + extra. The rows of a run share these columns; another run has
// others, and W itself is read once for all of them. For a row with temperature T:
//     y = h W' + bias    c = softcap tanh(scale y / softcap)  (c = scale y without softcap)    z = c / T
// Logits are fp32 accumulators that are never rounded. Operands are bf16 where both matrices are bf16 and this CPU
// multiplies bf16, otherwise fp32. A row's bits depend on that row and its run's columns alone: not on n, on the rows and
// runs around it, or on the number of threads. A run's own gradient depends on its rows alone, too.
#pragma once

#include <cstdint>

#include "cpu/tiles.h"

namespace rlhf::cpu {

enum class Type : int { float32 = 0, bfloat16 = 1, float16 = 2 };  // the last in linear.h alone

// A row-major matrix with inner stride 1.
struct Matrix {
    const void* data;
    int64_t stride;  // elements from one row to the next
    Type type;
};

struct Head {
    Matrix weight;      // [V, H]
    const float* bias;  // [V] or null
    int64_t H, V;
    float softcap;  // 0: none
    float scale;
    const void* packed = nullptr;  // linear_pack's copy of the weight, for products with it across; null: packed per call
};

// Rows that follow each other and share columns of their own, and what is made for these columns.
struct HeadRun {
    int64_t end;    // row after its last one; it begins where the run before it ends
    int64_t extra;  // columns; 0: none
    // The columns beside W are B [V, rank]: once, or, for operands of bf16, B twice (of bf16), or B rounded twice and then
    // what that left of it.
    Matrix weight;
    int64_t rank;
    Matrix hidden;  // [rows of the run, extra], of the type of the batch's
    float* sums;      // [rows of the run, extra]: more columns of `Expected::expected` or `HeadGradients::hidden`
    float* sums_kl;   // of `Expected::expected_kl`
    float* d_weight;  // [V, extra]: more columns of `HeadGradients::weight`; null: not wanted
};

struct Batch {
    Matrix hidden;        // [.., H], read at `rows`
    const int64_t* rows;  // [n] distinct
    int64_t n;
    const float* temperature;  // [n]
    const int64_t* target;     // [n] in [0, V); not read by head_sample
    const HeadRun* runs;       // the last one ends at n
    int64_t n_runs;
};

// Per-row results [n]; a null pointer is not wanted. With p = softmax(z):
struct Statistics {
    float* logprob;          // z_t - lse
    float* lse;              // log sum exp(z)
    float* entropy;          // lse - sum p z
    float* is_top1;          // 1 if the target is the first of the largest logits
    float* mean_logit;       // sum z / V
    float* log_sum_sq_prob;  // log sum p^2
};

// For the pair form: the second set of rows with the plain head, and what compares it to the first.
struct Pair {
    Matrix hidden;  // [.., H], read at the same rows
    float* logprob;  // [n]
    float* lse;      // [n]
    float* kl;       // [n] KL(softmax(z) || softmax(z of the second))
};

// With u = dz/dy: expected_n = sum_v p_nv u_nv W'_v, and for a pair expected_kl_n = sum_v p_nv (log p_nv - log p2_nv -
// kl_n) u_nv W'_v, both over all v but the target, [n, H] dense; null where not wanted. Without the target, because a
// likely one would enter rounded to bf16 and then be subtracted again. The columns of runs go where these say.
struct Expected {
    float* expected;
    float* expected_kl;
};

void head_forward(const Head& head, const Batch& batch, const Statistics& statistics, const Pair* pair,
                  const Expected& expected, int threads);

// Gradients [n] of the row statistics with respect to z; null ones are absent. entropy, log_sum_sq_prob and kl are
// pairs of (gradient, value).
struct LogitGradients {
    const float* lse;  // value
    const float* logprob;
    const float* on_lse;
    const float* entropy;
    const float* entropy_value;
    const float* mean_logit;
    const float* log_sum_sq_prob;
    const float* log_sum_sq_prob_value;
    const float* kl;
    const float* kl_value;
    const float* pair_lse;     // value
    const void* pair_hidden;   // null without kl; a matrix like batch.hidden
    int64_t pair_stride;
};

// Sums of dL/dy W' and of its transpose times h'; null where not wanted.
struct HeadGradients {
    float* hidden;     // [n, H] dense
    void* weight;      // [V, H] dense, of weight_type
    Type weight_type;  // bf16 is rounded once, from the complete sum
    float* bias;       // [V]
};

void head_backward(const Head& head, const Batch& batch, const LogitGradients& gradients, const HeadGradients& sums,
                   int threads);

// One draw per row [n]: token = argmax_v (z_v + g_v), or argmax_v c_v where greedy, the first of equal ones, a NaN above
// all. g = -log(-log1p(-u)), u = min((word + 1/2) / 2^32, 1 - 2^-24), word: Philox4x32-10 as in
// kernels/rlhf_kernels/runtime/philox.py with this seed, position and stream.
struct Draws {
    const int64_t* seed;
    const int64_t* position;
    const uint8_t* greedy;  // 0 or 1 per row; null: no row is
    const int64_t* forbidden;  // words that rows marked in forbids never draw
    int64_t n_forbidden;
    const uint8_t* forbids;  // 0 or 1 per row; null with n_forbidden 0
    uint32_t stream;
    int64_t* token;
    float* logprob;  // z_token - lse
    float* entropy;  // null: not wanted
};

void head_sample(const Head& head, const Batch& batch, const Draws& draws, int threads);

}  // namespace rlhf::cpu
