// What a file of variants/ needs before it chooses its target: every header that the bodies use, so that nothing of theirs
// is compiled for it, and one spelling of gcc's and clang's way to choose.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "common/half.h"
#include "cpu/attention_rows.h"
#include "cpu/llama_ops_rows.h"
#include "cpu/decode_attention_rows.h"
#include "cpu/decode_step.h"
#include "cpu/gather_logprob_rows.h"
#include "cpu/head_functions.h"
#include "cpu/linear.h"
#include "cpu/lora_decode.h"
#include "cpu/lora_kernels.h"
#include "cpu/ppo_loss_blocks.h"
#include "cpu/team.h"
#include "cpu/whiten_blocks.h"

#define RLHF_DO_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define RLHF_TARGET_BEGIN(features) \
    RLHF_DO_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define RLHF_TARGET_END RLHF_DO_PRAGMA(clang attribute pop)
#else
#define RLHF_TARGET_BEGIN(features) \
    RLHF_DO_PRAGMA(GCC push_options) \
    RLHF_DO_PRAGMA(GCC target(features))
#define RLHF_TARGET_END RLHF_DO_PRAGMA(GCC pop_options)
#endif
