#include "cpu/isa.h"

#include <atomic>

#include "common/check.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace rlhf::cpu {
namespace {

constexpr const char* kNames[] = {"portable", "avx512", "avx512_bf16", "amx_bf16"};

#if defined(__x86_64__) && defined(__linux__)
// Tile registers are large, so Linux gives them only to processes that ask. Threads inherit the permission.
bool ask_for_tiles() {
    constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
    constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

Isa detect() {
    __builtin_cpu_init();
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (!avx512) return Isa::portable;
    unsigned a, b, c, d;
    const bool bf16 = __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 5));
    if (!bf16) return Isa::avx512;
    const bool tiles = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & (1u << 22)) && (d & (1u << 24));
    return tiles && ask_for_tiles() ? Isa::amx_bf16 : Isa::avx512_bf16;
}
#else
Isa detect() { return Isa::portable; }
#endif

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

}  // namespace rlhf::cpu
