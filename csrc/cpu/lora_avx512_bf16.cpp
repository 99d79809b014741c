// lora_kernels.inc.h compiled for avx512_bf16.
#if defined(__x86_64__) && defined(__linux__)
#include <cstdint>
#include <cstring>

#include <immintrin.h>

#include "cpu/lora_kernels.h"

#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in the intrinsics of g++ 12
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,bmi2")
#define RLHF_AVX512
#define RLHF_AVX512_BF16

#include "cpu/philox.h"
#include "cpu/simd.h"

namespace rlhf::cpu::lora {
namespace avx512_bf16 {
#include "cpu/lora_kernels.inc.h"
}  // namespace avx512_bf16

const Kernels& avx512_bf16_kernels() { return avx512_bf16::kTable; }

}  // namespace rlhf::cpu::lora

#pragma GCC pop_options
#endif
