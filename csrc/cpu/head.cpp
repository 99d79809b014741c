// Checks of the sweeps' arguments and the choice of instruction set; the sweeps are in head_body.inc.h.

#include "cpu/head.h"

#include "common/check.h"
#include "cpu/head_functions.h"

namespace rlhf::cpu {
namespace {

const HeadFunctions& functions(const Head& head, const Batch& batch) {
    const bool bf16 = head.weight.type == Type::bfloat16 && batch.hidden.type == Type::bfloat16;
    const HeadFunctions& (*table)();
    if (bf16) RLHF_PICK(table, head_bfloat16);
    else RLHF_PICK(table, head_float32);
    return table();
}

void check(const Head& head, const Batch& batch, int threads) {
    RLHF_CHECK_SIZE(batch.n);
    RLHF_CHECK_SIZE(head.H);
    RLHF_CHECK(head.V >= 1, "V", "at least 1", head.V);
    RLHF_CHECK_THREADS(threads);
    RLHF_CHECK_POINTER(head.weight.data, RLHF_PRODUCT(head.V, head.H));
    RLHF_CHECK_POINTER(batch.hidden.data, RLHF_PRODUCT(batch.n, head.H));
    RLHF_CHECK_SIZE(batch.n_runs);
    RLHF_CHECK_POINTER(batch.runs, batch.n_runs);
    int64_t end = 0;
    for (int64_t i = 0; i < batch.n_runs; ++i) {
        const HeadRun& run = batch.runs[i];
        RLHF_CHECK(run.end >= end, "end of a run", "the end of the one before it, or more", run.end);
        RLHF_CHECK_SIZE(run.extra);
        RLHF_CHECK_SIZE(run.rank);
        RLHF_CHECK(run.extra == run.rank || run.extra == (run.weight.type == Type::bfloat16 ? 2 : 3) * run.rank, "extra",
                   "rank, or as many times that as parts of a number", run.extra);
        RLHF_CHECK_POINTER(run.weight.data, RLHF_PRODUCT(head.V, run.rank));
        RLHF_CHECK_POINTER(run.hidden.data, RLHF_PRODUCT(run.end - end, run.extra));
        end = run.end;
    }
    RLHF_CHECK(end == batch.n, "end of the last run", "the number of rows", end);
    RLHF_CHECK_POINTER(batch.rows, batch.n);
    RLHF_CHECK_POINTER(batch.temperature, batch.n);
}

// Where the sums of H columns are wanted, those of a run's own are made, too.
void check_sums(const Batch& batch, const float* sums, const float* sums_kl) {
    int64_t first = 0;
    for (int64_t i = 0; i < batch.n_runs; first = batch.runs[i++].end) {
        const HeadRun& run = batch.runs[i];
        if (sums) RLHF_CHECK_POINTER(run.sums, RLHF_PRODUCT(run.end - first, run.extra));
        if (sums_kl) RLHF_CHECK_POINTER(run.sums_kl, RLHF_PRODUCT(run.end - first, run.extra));
    }
}

}  // namespace

void head_forward(const Head& head, const Batch& batch, const Statistics& statistics, const Pair* pair,
                  const Expected& expected, int threads) {
    check(head, batch, threads);
    RLHF_CHECK_POINTER(batch.target, batch.n);
    if (pair) {
        RLHF_CHECK_POINTER(pair->hidden.data, RLHF_PRODUCT(batch.n, head.H));
        RLHF_CHECK_POINTER(pair->logprob, batch.n);
        RLHF_CHECK_POINTER(pair->lse, batch.n);
        RLHF_CHECK_POINTER(pair->kl, batch.n);
    }
    RLHF_CHECK(pair || !expected.expected_kl, "pair", "a pair with expected_kl", "none");
    RLHF_CHECK(expected.expected || !expected.expected_kl, "expected_kl", "expected to be made with it", "null");
    check_sums(batch, expected.expected, expected.expected_kl);
    if (batch.n > 0) functions(head, batch).forward(head, batch, statistics, pair, expected, threads);
}

void head_backward(const Head& head, const Batch& batch, const LogitGradients& gradients, const HeadGradients& sums,
                   int threads) {
    check(head, batch, threads);
    RLHF_CHECK_POINTER(batch.target, batch.n);
    RLHF_CHECK_POINTER(gradients.lse, batch.n);
    if (gradients.entropy) RLHF_CHECK_POINTER(gradients.entropy_value, batch.n);
    if (gradients.log_sum_sq_prob) RLHF_CHECK_POINTER(gradients.log_sum_sq_prob_value, batch.n);
    if (gradients.kl) {
        RLHF_CHECK_POINTER(gradients.kl_value, batch.n);
        RLHF_CHECK_POINTER(gradients.pair_lse, batch.n);
        RLHF_CHECK_POINTER(gradients.pair_hidden, RLHF_PRODUCT(batch.n, head.H));
    }
    check_sums(batch, sums.hidden, nullptr);
    functions(head, batch).backward(head, batch, gradients, sums, threads);
}

void head_sample(const Head& head, const Batch& batch, const Draws& draws, int threads) {
    check(head, batch, threads);
    RLHF_CHECK(head.V <= INT32_MAX, "V", "at most 2^31 - 1", head.V);
    RLHF_CHECK_POINTER(draws.seed, batch.n);
    RLHF_CHECK_POINTER(draws.position, batch.n);
    RLHF_CHECK_SIZE(draws.n_forbidden);
    RLHF_CHECK_POINTER(draws.forbidden, draws.n_forbidden);
    RLHF_CHECK_POINTER(draws.forbids, RLHF_PRODUCT(draws.n_forbidden, batch.n));
    RLHF_CHECK_POINTER(draws.token, batch.n);
    RLHF_CHECK_POINTER(draws.logprob, batch.n);
    if (batch.n > 0) functions(head, batch).sample(head, batch, draws, threads);
}

}  // namespace rlhf::cpu
