// y = x Wᵀ + bias + scale (x Aᵀ) Bᵀ on a few rows.
//
// Contract. x, W and y have one type, rows of any stride and dense columns; K is a multiple of kDecodeDepth. Rows of
// runs do not overlap, `y_row` is not looked at, nor are dropout and gradients. W is read once, where it lies; products
// of W are added up in float, those with A and B are in float throughout. x Wᵀ + bias is rounded to the type of y before
// the deltas are added and the sum rounded again: so does the linear that trains, and what it rounds alike, the rollout
// and the training forward have in common. Rows do not interact and the order of additions depends on K alone, so the
// bits depend neither on the number of threads nor on what a row stands beside.

#include "cpu/lora_decode.h"

#include "common/check.h"

namespace rlhf::cpu::lora {

void decode(Matrix x, Matrix weight, const void* bias, Matrix y, int64_t N, int64_t K, int64_t M,
            const std::vector<Slot>& slots, const std::vector<Run>& runs, int threads) {
    RLHF_CHECK_SIZE(N);
    RLHF_CHECK_SIZE(M);
    RLHF_CHECK(K > 0 && K % kDecodeDepth == 0, "K", "a multiple of 32", K);
    RLHF_CHECK_THREADS(threads);
    RLHF_CHECK(x.type == weight.type && y.type == weight.type, "weight", "the type of x and y", int(weight.type));
    RLHF_PRODUCT(M, K);
    RLHF_CHECK_POINTER(x.data, RLHF_PRODUCT(N, K));
    RLHF_CHECK_POINTER(weight.data, M);
    RLHF_CHECK_POINTER(y.data, RLHF_PRODUCT(N, M));
    for (const Slot& slot : slots) {
        RLHF_CHECK(slot.rank >= 1, "rank", "at least 1", slot.rank);
        RLHF_CHECK_POINTER(slot.A.data, slot.rank);
        RLHF_CHECK_POINTER(slot.B.data, M);
    }
    const int64_t n_slots = slots.size();
    for (const Run& run : runs) {
        RLHF_CHECK(run.slot >= 0 && run.slot < n_slots, "slot", "the number of a slot", run.slot);
        RLHF_CHECK(run.x_row >= 0 && run.rows >= 0 && run.rows <= N - run.x_row, "runs", "rows of x", run.x_row);
    }
    if (N == 0 || M == 0) return;
    void (*function)(const DecodeArguments&);
    if (weight.type == Type::bfloat16) RLHF_PICK(function, decode_bfloat16);
    else RLHF_PICK(function, decode_float32);
    const int64_t n_runs = runs.size();
    function({x, weight, y, bias, N, K, M, slots.data(), n_slots, runs.data(), n_runs, threads});
}

}  // namespace rlhf::cpu::lora
