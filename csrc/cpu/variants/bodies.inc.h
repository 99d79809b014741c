// Every op's inner functions, for the target that the including file has chosen and for its namespace RLHF_SET.

#include "cpu/simd.h"

#include "cpu/philox.h"

#include "cpu/lanes.h"

#include "cpu/llama_ops_kernel.inc.h"
#include "cpu/attention_lanes.inc.h"
#include "cpu/decode_attention_kernel.inc.h"
#include "cpu/attention_kernel.inc.h"
#include "cpu/attention_gradient_kernel.inc.h"
#include "cpu/gather_logprob_kernel.inc.h"
#include "cpu/ppo_loss_kernel.inc.h"
#include "cpu/whiten_kernel.inc.h"

namespace rlhf::cpu::lora::RLHF_SET {
#include "cpu/lora_kernels.inc.h"
}  // namespace rlhf::cpu::lora::RLHF_SET

// Weights as they lie in memory (STORED) and what their products take (TILE): bf16 operands only where the CPU has
// products of them.
#define RLHF_STORED float32
#define RLHF_STORED_BF16 0
#define RLHF_TILE_BF16 0
#define RLHF_TILE_AMX 0
#include "cpu/variants/products.inc.h"
#undef RLHF_STORED
#undef RLHF_STORED_BF16
#undef RLHF_TILE_BF16
#undef RLHF_TILE_AMX

#define RLHF_STORED bfloat16
#define RLHF_STORED_BF16 1
#if defined(RLHF_AVX512_BF16) || defined(RLHF_NEON_BF16)
#define RLHF_TILE_BF16 1
#else
#define RLHF_TILE_BF16 0
#endif
#if defined(RLHF_AMX)
#define RLHF_TILE_AMX 1
#else
#define RLHF_TILE_AMX 0
#endif
#include "cpu/variants/products.inc.h"
