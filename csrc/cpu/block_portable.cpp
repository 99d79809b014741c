// block_kernel.inc.h for the baseline of the architecture.
#include <cstdint>
#include <cstring>

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed to inlined functions only
#define RLHF_ISA portable
#include "cpu/block_kernel.inc.h"
