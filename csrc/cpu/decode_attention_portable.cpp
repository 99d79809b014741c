// decode_attention_kernel.inc.h for the baseline of the architecture.
#include <cstdint>
#include <cstring>

#define RLHF_ISA portable
#include "cpu/decode_attention_kernel.inc.h"
