#include "cpu/isa.h"

#include <atomic>

#include "common/check.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__)
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#endif

namespace rlhf::cpu {
namespace {

#define RLHF_NAME(set, ...) #set,
constexpr const char* kNames[] = {RLHF_EACH_SET(RLHF_NAME)};
#undef RLHF_NAME

// ---- what this CPU has beyond the set before ------------------------------------------------------------------------

bool has_portable() { return true; }

#if defined(__aarch64__)
bool has_neon() { return true; }  // part of the architecture

bool has_neon_bf16() {
#if defined(__linux__)
    constexpr unsigned long kBf16 = 1ul << 14;  // HWCAP2_BF16
    return getauxval(AT_HWCAP2) & kBf16;
#elif defined(__APPLE__)
    int found = 0;
    size_t size = sizeof found;
    return sysctlbyname("hw.optional.arm.FEAT_BF16", &found, &size, nullptr, 0) == 0 && found;
#else
    return false;
#endif
}
#elif defined(__x86_64__)
bool has_avx2() {
    unsigned a, b, c, d;
    const bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & (1u << 29));
    return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
           __builtin_cpu_supports("bmi2");
}

bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool has_avx512_bf16() {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 5));
}

bool has_amx_bf16() {
#if defined(__linux__)
    // Tile registers are large, so Linux gives them only to processes that ask. Threads inherit the permission.
    constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
    constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & (1u << 22)) && (d & (1u << 24)) &&
           syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}
#endif

Isa detect() {
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
    Isa best = Isa::portable;
    bool contained = true;  // every set before
#define RLHF_TRY(set, ...)                \
    contained = contained && has_##set(); \
    if (contained) best = Isa::set;
    RLHF_EACH_SET(RLHF_TRY)
#undef RLHF_TRY
    return best;
}

Isa best() {
    static const Isa found = detect();
    return found;
}

std::atomic<int> chosen{-1};  // -1: the best there is

}  // namespace

Isa current_isa() {
    const int isa = chosen.load(std::memory_order_relaxed);
    return isa < 0 ? best() : static_cast<Isa>(isa);
}

void set_isa(const std::string& name) {
    if (name == "auto") {
        chosen = -1;
        return;
    }
    std::string expected = "auto";
    for (int i = 0; i <= static_cast<int>(best()); ++i) {
        if (name == kNames[i]) {
            chosen = i;
            return;
        }
        expected += std::string(", ") + kNames[i];
    }
    RLHF_CHECK(false, "isa", expected.c_str(), name);
}

std::vector<std::string> available_isas() { return {kNames, kNames + static_cast<int>(best()) + 1}; }

const char* name(Isa isa) { return kNames[static_cast<int>(isa)]; }

bool multiplies_bf16() {
#if defined(__x86_64__)
    return current_isa() >= Isa::avx512_bf16;
#elif defined(__aarch64__)
    return current_isa() >= Isa::neon_bf16;
#else
    return false;
#endif
}

}  // namespace rlhf::cpu
