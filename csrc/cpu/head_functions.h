// The sweeps of head.h as compiled for each instruction set.
#pragma once

#include "cpu/head.h"
#include "cpu/isa.h"

namespace rlhf::cpu {

struct HeadFunctions {
    decltype(&head_forward) forward;
    decltype(&head_backward) backward;
    decltype(&head_sample) sample;
};

// For bf16 weights and hidden states, and for all others.
#define RLHF_DECLARE_HEAD                 \
    const HeadFunctions& head_float32();  \
    const HeadFunctions& head_bfloat16();
RLHF_IN_EVERY_SET(RLHF_DECLARE_HEAD)
#undef RLHF_DECLARE_HEAD

}  // namespace rlhf::cpu
