// lora_kernels.inc.h compiled for avx512.
#if defined(__x86_64__) && defined(__linux__)
#include <cstdint>
#include <cstring>

#include <immintrin.h>

#include "cpu/lora_kernels.h"

#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in the intrinsics of g++ 12
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,bmi2")
#define RLHF_AVX512

#include "cpu/philox.h"
#include "cpu/simd.h"

namespace rlhf::cpu::lora {
namespace avx512 {
#include "cpu/lora_kernels.inc.h"
}  // namespace avx512

const Kernels& avx512_kernels() { return avx512::kTable; }

}  // namespace rlhf::cpu::lora

#pragma GCC pop_options
#endif
