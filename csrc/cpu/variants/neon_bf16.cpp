// Every op for aarch64 with products of bf16 pairs.
#if defined(__aarch64__)
#include "cpu/variants/target.h"

#define RLHF_SET neon_bf16
#define RLHF_NEON
#define RLHF_NEON_BF16

#if defined(__clang__)
RLHF_TARGET_BEGIN("bf16")
#else
RLHF_TARGET_BEGIN("+bf16")
#endif
#include "cpu/variants/bodies.inc.h"

RLHF_TARGET_END
#endif
