// Every op for AVX-512 with tile registers that multiply bf16.
#if defined(__x86_64__)
#include "cpu/variants/target.h"

#define RLHF_SET amx_bf16
#define RLHF_AVX512
#define RLHF_AVX512_BF16
#define RLHF_AMX

RLHF_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,bmi,bmi2,amx-tile,amx-bf16")
#include "cpu/variants/bodies.inc.h"

RLHF_TARGET_END
#endif
