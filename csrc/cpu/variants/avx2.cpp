// Every op for AVX2 with FMA: most x86 CPUs since 2013.
#if defined(__x86_64__)
#include "cpu/variants/target.h"

#define RLHF_SET avx2
#define RLHF_AVX2

RLHF_TARGET_BEGIN("avx2,fma,f16c,bmi,bmi2")
#include "cpu/variants/bodies.inc.h"

RLHF_TARGET_END
#endif
