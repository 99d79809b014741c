// lora_kernels.inc.h compiled for portable.
#include <cstdint>
#include <cstring>

#include "cpu/lora_kernels.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // sixteen floats are passed to inlined functions only
#include "cpu/philox.h"
#include "cpu/simd.h"

namespace rlhf::cpu::lora {
namespace portable {
#include "cpu/lora_kernels.inc.h"
}  // namespace portable

const Kernels& portable_kernels() { return portable::kTable; }

}  // namespace rlhf::cpu::lora
