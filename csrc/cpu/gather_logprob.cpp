// Log-probability of a target and statistics of its row, from logits that exist; and the gradient to the logits.
//
// Contract. Equations: kernels/rlhf_kernels/linear_logprob/reference.py, with z = logits / temperature. Forward reads a
// row once from memory and writes element i of every wanted output. Backward reads a row and writes all of d_logits' row,
// which may be the same memory. A row with target = ignore_index is not read: its outputs and its gradient are 0.
// Logits are float, double or bfloat16; sums and outputs float (double for double), sums across tiles of a row double.
// Rows do not interact, so the bits do not depend on the number of threads.

#include "cpu/gather_logprob.h"

#include <algorithm>
#include <cmath>
#include <sstream>
#include <vector>

#include "common/check.h"
#include "cpu/gather_logprob_rows.h"
#include "cpu/team.h"

namespace rlhf::cpu {
namespace {

// Below this many elements the work takes about a tenth of a millisecond: too little to wait for a second core.
constexpr int64_t kSerialElements = 1 << 18;
// So many elements or more are taken at a time: beside them, taking costs nothing.
constexpr int64_t kTogether = 1 << 12;

// body(row, scratch) for every row; scratch holds `scratch_size` elements for one thread.
template <typename S, typename Body>
void for_rows(int64_t rows, int64_t vocab, int threads, int64_t scratch_size, Body body) {
    [[maybe_unused]] const bool parallel = threads > 1 && rows > 1 && rows * vocab >= kSerialElements;
    [[maybe_unused]] const int64_t together = std::max<int64_t>(1, kTogether / vocab);
    std::vector<S> scratch((parallel ? threads : 1) * scratch_size);  // here: what is thrown in a region ends the process
#pragma omp parallel for num_threads(threads) if (parallel) schedule(dynamic, together)
    for (int64_t row = 0; row < rows; ++row) body(row, scratch.data() + thread_number() * scratch_size);
}

template <typename T>
void check_rows(const RowOptions<T>& options, int64_t rows, int64_t vocab, int threads) {
    RLHF_CHECK_SIZE(rows);
    RLHF_CHECK(vocab >= 1, "vocab", "at least 1", vocab);
    RLHF_CHECK_THREADS(threads);
    RLHF_PRODUCT(rows, vocab);
    RLHF_PRODUCT(threads, vocab);
    RLHF_CHECK(rows == 0 || options.target, "target", "an address", "a null pointer");
    for (int64_t i = 0; i < rows; ++i) {
        const int64_t target = options.target[i];
        if (target == options.ignore_index) continue;
        if (target < 0 || target >= vocab) {
            std::ostringstream range;
            range << "values in [0, " << vocab << ") or ignore_index=" << options.ignore_index;
            refuse("target", range.str().c_str(), target);
        }
        if (options.row_temperature) {
            RLHF_CHECK(options.row_temperature[i] > 0, "temperature", "values > 0", options.row_temperature[i]);
        }
    }
}

// The row as one run of memory: itself, or a copy in `scratch`.
template <typename S>
const S* dense_row(const LogitRows<const S>& logits, int64_t i, int64_t vocab, S* scratch) {
    const S* row = logits.row(i);
    if (logits.inner_stride == 1) return row;
    for (int64_t j = 0; j < vocab; ++j) scratch[j] = row[j * logits.inner_stride];
    return scratch;
}

template <typename T>
double at(const T* values, int64_t i) {
    return values ? double(values[i]) : 0.0;
}

template <typename T>
double temperature_of(const RowOptions<T>& options, int64_t i) {
    return options.row_temperature ? double(options.row_temperature[i]) : options.temperature;
}

}  // namespace

template <typename S, typename T>
void gather_logprob_forward(LogitRows<const S> logits, RowOptions<T> options, int64_t rows, int64_t vocab, int threads,
                            RowOutputs<T> outputs) {
    check_rows(options, rows, vocab, threads);
    RLHF_CHECK(rows == 0 || logits.data, "logits", "an address", "a null pointer");
    void (*run)(const S*, int64_t, int64_t, double, int, RowStatistics*);
    RLHF_PICK(run, row_forward);
    const int wants = (outputs.entropy ? kWantEntropy : 0) | (outputs.is_top1 ? kWantTop1 : 0) |
                      (outputs.log_sum_sq_prob ? kWantSquares : 0);
    const int64_t scratch_size = logits.inner_stride == 1 ? 0 : vocab;
    for_rows<S>(rows, vocab, threads, scratch_size, [&](int64_t i, S* scratch) {
        RowStatistics row{};
        if (options.target[i] != options.ignore_index) {
            run(dense_row(logits, i, vocab, scratch), vocab, options.target[i], temperature_of(options, i), wants, &row);
        }
        if (outputs.logprob) outputs.logprob[i] = T(row.logprob);
        if (outputs.entropy) outputs.entropy[i] = T(row.entropy);
        if (outputs.lse) outputs.lse[i] = T(row.lse);
        if (outputs.is_top1) outputs.is_top1[i] = T(row.is_top1);
        if (outputs.mean_logit) outputs.mean_logit[i] = T(row.mean_logit);
        if (outputs.log_sum_sq_prob) outputs.log_sum_sq_prob[i] = T(row.log_sum_sq_prob);
    });
}

template <typename S, typename T>
void gather_logprob_backward(LogitRows<const S> logits, RowOptions<T> options, RowGradients<T> gradients, int64_t rows,
                             int64_t vocab, int threads, LogitRows<S> d_logits) {
    check_rows(options, rows, vocab, threads);
    RLHF_CHECK(rows == 0 || logits.data, "logits", "an address", "a null pointer");
    RLHF_CHECK(rows == 0 || d_logits.data, "d_logits", "an address", "a null pointer");
    RLHF_CHECK_POINTER(gradients.saved_lse, rows);
    if (gradients.entropy) RLHF_CHECK_POINTER(gradients.saved_entropy, rows);
    if (gradients.log_sum_sq_prob) RLHF_CHECK_POINTER(gradients.saved_log_sum_sq_prob, rows);
    void (*run)(const S*, int64_t, int64_t, double, const RowSlopes&, S*);
    RLHF_PICK(run, row_backward);
    const bool dense = logits.inner_stride == 1 && d_logits.inner_stride == 1;
    for_rows<S>(rows, vocab, threads, dense ? 0 : vocab, [&](int64_t i, S* scratch) {
        S* out = d_logits.inner_stride == 1 ? d_logits.row(i) : scratch;
        if (options.target[i] == options.ignore_index) {
            std::fill(out, out + vocab, S{});
        } else {
            const double d_squares = at(gradients.log_sum_sq_prob, i);
            RowSlopes slopes{};
            slopes.lse = gradients.saved_lse[i];
            slopes.on_p = at(gradients.lse, i) - at(gradients.logprob, i) - 2 * d_squares;
            slopes.on_log_p = at(gradients.entropy, i);
            slopes.entropy = gradients.entropy ? double(gradients.saved_entropy[i]) : 0.0;
            slopes.on_p_squared =
                d_squares == 0 ? 0.0 : 2 * d_squares * std::exp(-double(gradients.saved_log_sum_sq_prob[i]));
            slopes.everywhere = at(gradients.mean_logit, i) / double(vocab);
            slopes.at_target = at(gradients.logprob, i);
            run(dense_row(logits, i, vocab, scratch), vocab, options.target[i], temperature_of(options, i), slopes, out);
        }
        if (out == scratch) {
            S* row = d_logits.row(i);
            for (int64_t j = 0; j < vocab; ++j) row[j * d_logits.inner_stride] = scratch[j];
        }
    });
}

#define INSTANTIATE(S)                                                                                           \
    template void gather_logprob_forward<S>(LogitRows<const S>, RowOptions<Accumulate<S>::type>, int64_t, int64_t, int, \
                                            RowOutputs<Accumulate<S>::type>);                                    \
    template void gather_logprob_backward<S>(LogitRows<const S>, RowOptions<Accumulate<S>::type>,                \
                                             RowGradients<Accumulate<S>::type>, int64_t, int64_t, int, LogitRows<S>);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(Bfloat16)
#undef INSTANTIATE

}  // namespace rlhf::cpu
