// Which instruction set the CPU code uses, chosen once at run time from what this CPU and kernel offer.
#pragma once

#include <string>
#include <vector>

namespace rlhf::cpu {

// In rising order: each contains the ones before it.
enum class Isa {
    portable,     // whatever the compiler makes of plain loops for the baseline of the architecture
    avx512,       // F, BW, DQ, VL
    avx512_bf16,  // and vdpbf16ps
    amx_bf16,     // and tile registers with tdpbf16ps
};

// The best of what this machine has, or what set_isa chose.
Isa current_isa();

// Use `name` from now on ("auto": the best there is). Throws std::invalid_argument if this machine does not have it.
// For tests and measurements; not to be called while a kernel runs.
void set_isa(const std::string& name);

// Names of all this machine has, the best last.
std::vector<std::string> available_isas();

const char* name(Isa isa);

}  // namespace rlhf::cpu
