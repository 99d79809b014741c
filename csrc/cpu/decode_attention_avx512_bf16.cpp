// decode_attention_kernel.inc.h for AVX-512 with conversions to bfloat16.
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#define RLHF_ISA avx512_bf16
#define RLHF_AVX512
#define RLHF_AVX512_BF16
#include "cpu/decode_attention_kernel.inc.h"
#pragma GCC pop_options
#endif
