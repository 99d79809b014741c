// decode_step.h for one instruction set; see isa.h. Standard headers come before the target is chosen, so that nothing of
// theirs is compiled for it.

#include "cpu/decode_step.h"

#include <cstdint>
#include <cstring>
#if defined(_OPENMP)
#include <omp.h>
#endif

#if defined(__x86_64__) && defined(__linux__)
#include <immintrin.h>

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")

#define RLHF_AVX512
#include "cpu/simd.h"

#define RLHF_TILE_BF16 0
#define RLHF_TILE_AMX 0

namespace rlhf::cpu::step {
namespace {
#include "cpu/decode_step_body.inc.h"
}  // namespace

const StepFunction step_avx512 = run_step;

}  // namespace rlhf::cpu::step

#endif
