// head.h for one instruction set; see isa.h. Standard headers come before the target is chosen, so that nothing of
// theirs is compiled for it.

#include "cpu/head_isa.h"

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#if defined(_OPENMP)
#include <omp.h>
#endif

#include "cpu/simd.h"
#include "cpu/philox.h"

#define RLHF_TILE_BF16 0
#define RLHF_TILE_AMX 0

namespace rlhf::cpu {
namespace {
#include "cpu/head_body.inc.h"
#include "cpu/head_sample.inc.h"
}  // namespace

const HeadFunctions head_portable{run_forward, run_backward, run_sample};

}  // namespace rlhf::cpu
