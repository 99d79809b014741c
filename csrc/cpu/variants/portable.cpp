// Every op for the baseline of the architecture: the oracle of the other sets, on any CPU.

#include "cpu/variants/target.h"

#define RLHF_SET portable

#include "cpu/variants/bodies.inc.h"

