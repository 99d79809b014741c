// block_kernel.inc.h for AVX-512.
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#define RLHF_ISA avx512
#define RLHF_AVX512
#include "cpu/block_kernel.inc.h"
#pragma GCC pop_options
#endif
