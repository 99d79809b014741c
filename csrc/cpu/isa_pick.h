// The choice between the namespaces that a kernel was compiled into.
#pragma once

#include "cpu/isa.h"

// Points `pointer`, whose type says which overload is meant, at `function` as compiled for the best there is; the second
// form is for kernels that were compiled for avx512_bf16 as well.
#if defined(__x86_64__)
#define RLHF_PICK(pointer, function)                                                                 \
    do {                                                                                             \
        if (::rlhf::cpu::current_isa() == ::rlhf::cpu::Isa::portable) pointer = portable::function; \
        else pointer = avx512::function;                                                             \
    } while (0)
#define RLHF_PICK_BF16(pointer, function)                                                  \
    do {                                                                                   \
        RLHF_PICK(pointer, function);                                                      \
        if (::rlhf::cpu::current_isa() >= ::rlhf::cpu::Isa::avx512_bf16) pointer = avx512_bf16::function; \
    } while (0)
#else
#define RLHF_PICK(pointer, function) pointer = portable::function
#define RLHF_PICK_BF16(pointer, function) pointer = portable::function
#endif
