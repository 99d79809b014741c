// Log-probabilities and row statistics from logits on the CPU. The contract stands in gather_logprob.cpp.
#pragma once

#include <cstdint>

namespace rlhf::cpu {

struct Bfloat16 {
    uint16_t bits;
};

template <typename S>
struct Accumulate {
    using type = float;
};
template <>
struct Accumulate<double> {
    using type = double;
};

// Where row i starts: data + (offsets ? offsets[i] : i * row_stride); its elements are inner_stride apart. In elements.
template <typename S>
struct LogitRows {
    S* data;
    const int64_t* offsets;
    int64_t row_stride, inner_stride;

    S* row(int64_t i) const { return data + (offsets ? offsets[i] : i * row_stride); }
};

// What both directions need to know of every row.
template <typename T>
struct RowOptions {
    const int64_t* target;
    const T* row_temperature;  // null: `temperature` for all
    double temperature;
    int64_t ignore_index;
};

// Results [rows] each; null: not wanted.
template <typename T>
struct RowOutputs {
    T *logprob, *entropy, *lse, *is_top1, *mean_logit, *log_sum_sq_prob;
};

// Gradients [rows] of the outputs (null: zero), and the outputs that the backward reads: lse always, the other two where
// their gradient is given.
template <typename T>
struct RowGradients {
    const T *logprob, *entropy, *lse, *mean_logit, *log_sum_sq_prob;
    const T *saved_lse, *saved_entropy, *saved_log_sum_sq_prob;
};

template <typename S, typename T = typename Accumulate<S>::type>
void gather_logprob_forward(LogitRows<const S> logits, RowOptions<T> options, int64_t rows, int64_t vocab, int threads,
                            RowOutputs<T> outputs);

template <typename S, typename T = typename Accumulate<S>::type>
void gather_logprob_backward(LogitRows<const S> logits, RowOptions<T> options, RowGradients<T> gradients, int64_t rows,
                             int64_t vocab, int threads, LogitRows<S> d_logits);

}  // namespace rlhf::cpu
