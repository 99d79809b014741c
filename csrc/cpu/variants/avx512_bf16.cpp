// Every op for AVX-512 with products of bf16 pairs.
#if defined(__x86_64__)
#include "cpu/variants/target.h"

#define RLHF_SET avx512_bf16
#define RLHF_AVX512
#define RLHF_AVX512_BF16

RLHF_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,bmi,bmi2")
#include "cpu/variants/bodies.inc.h"

RLHF_TARGET_END
#endif
