// Every op for AVX-512 (F, BW, DQ, VL).
#if defined(__x86_64__)
#include "cpu/variants/target.h"

#define RLHF_SET avx512
#define RLHF_AVX512

RLHF_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2")
#include "cpu/variants/bodies.inc.h"

RLHF_TARGET_END
#endif
