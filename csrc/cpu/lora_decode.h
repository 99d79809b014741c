// A linear with its adapters on a few rows, as in decoding. The contract stands in lora_decode.cpp.
#pragma once

#include "cpu/isa.h"
#include "cpu/lora.h"

namespace rlhf::cpu::lora {

constexpr int64_t kDecodeDepth = 32;  // K is a multiple of it

// y [N, M] = x [N, K] Wᵀ + bias + the deltas of all runs. bias [M] has W's type, or is null.
void decode(Matrix x, Matrix weight, const void* bias, Matrix y, int64_t N, int64_t K, int64_t M,
            const std::vector<Slot>& slots, const std::vector<Run>& runs, int threads);

// The same as compiled for each instruction set, after the checks.
struct DecodeArguments {
    Matrix x, weight, y;
    const void* bias;
    int64_t N, K, M;
    const Slot* slots;
    int64_t n_slots;
    const Run* runs;
    int64_t n_runs;
    int threads;
};
#define RLHF_DECLARE_DECODE                               \
    void decode_float32(const DecodeArguments& arguments); \
    void decode_bfloat16(const DecodeArguments& arguments);
RLHF_IN_EVERY_SET(RLHF_DECLARE_DECODE)
#undef RLHF_DECLARE_DECODE

}  // namespace rlhf::cpu::lora
