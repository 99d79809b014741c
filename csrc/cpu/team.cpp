#include "cpu/team.h"

#include <thread>
#include <vector>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(_OPENMP)
#include <omp.h>
#endif

namespace rlhf::cpu {
namespace {

constexpr int kSpins = 4000;

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");  // `yield` is over at once on most of these CPUs
#endif
}

void sleep_while(int32_t& round, int32_t expected) {
#if defined(__linux__)
    syscall(SYS_futex, &round, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);  // the kernel compares once more
#else
    if (__atomic_load_n(&round, __ATOMIC_ACQUIRE) == expected) std::this_thread::yield();
#endif
}

void wake([[maybe_unused]] int32_t& round) {
#if defined(__linux__)
    syscall(SYS_futex, &round, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#endif
}

}  // namespace

int thread_number() {
#if defined(_OPENMP)
    return omp_get_thread_num();
#else
    return 0;
#endif
}

void run_team([[maybe_unused]] int threads, void (*work)(const void* context, Member& member), const void* context) {
    Team team;
#if defined(_OPENMP)
    if (threads > 1) {
        std::vector<int64_t> taken(2 * threads * Team::kLine + Team::kLine);
        team.taken[0] = taken.data() + Team::kLine;  // away from what the allocator has beside it
        team.taken[1] = team.taken[0] + threads * Team::kLine;
#pragma omp parallel num_threads(threads)
        {
            Member member{team, thread_number(), omp_get_num_threads()};
            work(context, member);
        }
        return;
    }
#endif
    Member alone{team, 0, 1};
    work(context, alone);
}

void wait_for_count(const int64_t* count, int64_t enough) {
    for (int i = 0; __atomic_load_n(count, __ATOMIC_ACQUIRE) < enough; ++i) {
        if (i < kSpins) relax();
        else std::this_thread::yield();
    }
}

void wait_for_team(Team& team, int32_t threads) {
    if (threads == 1) return;
    const int32_t round = __atomic_load_n(&team.round, __ATOMIC_RELAXED);  // it cannot end before this thread arrives
    if (__atomic_add_fetch(&team.arrived, 1, __ATOMIC_ACQ_REL) == threads) {
        __atomic_store_n(&team.arrived, 0, __ATOMIC_RELAXED);
        // Either a thread that goes to sleep sees the new round, or it is seen here.
        __atomic_store_n(&team.round, round + 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&team.asleep, __ATOMIC_SEQ_CST) > 0) wake(team.round);
        return;
    }
    for (int i = 0; i < kSpins; ++i) {
        if (__atomic_load_n(&team.round, __ATOMIC_ACQUIRE) != round) return;
        relax();
    }
    __atomic_add_fetch(&team.asleep, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&team.round, __ATOMIC_SEQ_CST) == round) sleep_while(team.round, round);
    __atomic_sub_fetch(&team.asleep, 1, __ATOMIC_RELAXED);
}

}  // namespace rlhf::cpu
