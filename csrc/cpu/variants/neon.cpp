// Every op for aarch64, whose baseline has NEON with FMA.
#if defined(__aarch64__)
#include "cpu/variants/target.h"

#define RLHF_SET neon
#define RLHF_NEON

#include "cpu/variants/bodies.inc.h"
#endif
