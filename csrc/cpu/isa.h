// Which instruction set the CPU code uses, chosen once at run time from what this CPU and kernel offer.
//
// RLHF_EACH_SET is the only list: a set has its name there, a file in variants/ and a test of the CPU in isa.cpp.
#pragma once

#include <string>
#include <vector>

// DO(set, argument) for every set of this architecture, in rising order: each contains the ones before it.
#if defined(__x86_64__)
#define RLHF_EACH_SET(DO, ...)                                                                      \
    DO(portable, __VA_ARGS__) DO(avx2, __VA_ARGS__) DO(avx512, __VA_ARGS__) DO(avx512_bf16, __VA_ARGS__) \
    DO(amx_bf16, __VA_ARGS__)
#elif defined(__aarch64__)
#define RLHF_EACH_SET(DO, ...) DO(portable, __VA_ARGS__) DO(neon, __VA_ARGS__) DO(neon_bf16, __VA_ARGS__)
#else
#define RLHF_EACH_SET(DO, ...) DO(portable, __VA_ARGS__)
#endif

// Declarations of functions that every set's file defines in its own namespace.
#define RLHF_IN_SET(set, ...) \
    namespace set {           \
    __VA_ARGS__               \
    }
#define RLHF_IN_EVERY_SET(...) RLHF_EACH_SET(RLHF_IN_SET, __VA_ARGS__)

// Points `pointer`, whose type says which overload is meant, at `function` as compiled for the current set.
#define RLHF_PICK_IF(set, pointer, function) \
    if (rlhf_isa == ::rlhf::cpu::Isa::set) pointer = set::function;
#define RLHF_PICK(pointer, function)                                     \
    do {                                                                 \
        const ::rlhf::cpu::Isa rlhf_isa = ::rlhf::cpu::current_isa();    \
        pointer = nullptr;                                               \
        RLHF_EACH_SET(RLHF_PICK_IF, pointer, function)                   \
    } while (0)

namespace rlhf::cpu {

enum class Isa {
#define RLHF_NAME(set, ...) set,
    RLHF_EACH_SET(RLHF_NAME)
#undef RLHF_NAME
};

// The best of what this machine has, or what set_isa chose.
Isa current_isa();

// Use `name` from now on ("auto": the best there is). Throws std::invalid_argument if this machine does not have it.
// For tests and measurements; not to be called while a kernel runs.
void set_isa(const std::string& name);

// Names of all this machine has, the best last.
std::vector<std::string> available_isas();

const char* name(Isa isa);

// Whether the current set has products of bf16 numbers; elsewhere they become floats on the way.
bool multiplies_bf16();

}  // namespace rlhf::cpu
