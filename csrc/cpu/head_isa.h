// The sweeps of head.h as compiled for each instruction set.
#pragma once

#include "cpu/head.h"

namespace rlhf::cpu {

struct HeadFunctions {
    decltype(&head_forward) forward;
    decltype(&head_backward) backward;
    decltype(&head_sample) sample;
};

extern const HeadFunctions head_portable, head_avx512, head_avx512_bf16, head_amx_bf16;

}  // namespace rlhf::cpu
