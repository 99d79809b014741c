// Threads of one call that share its work and wait for each other many times, each time for little.
//
// No pragma of OpenMP stands in the files of variants/: clang compiles what it cuts out of a parallel region for the
// baseline, whatever target the function around it has.
#pragma once

#include <cstdint>

namespace rlhf::cpu {

struct Team {
    alignas(64) int32_t arrived = 0;
    alignas(64) int32_t round = 0;
    alignas(64) int32_t asleep = 0;
    int64_t* taken[2] = {nullptr, nullptr};  // pieces of every member's share, kLine apart, of this loop and the next
    static constexpr int64_t kLine = 8;
};

// One thread of a team.
struct Member {
    Team& team;
    int32_t thread, threads;
    int32_t loop = 0;  // which of `taken` the next loop uses
};

// Number of the calling thread within an OpenMP region.
int thread_number();

// work(context, member) on up to `threads` threads, the caller's among them; returns when all are done.
void run_team(int threads, void (*work)(const void* context, Member& member), const void* context);

// Returns when `threads` threads have called it. Whoever waits spins for the tenth of a millisecond that work shared
// evenly may take longer elsewhere, then sleeps: what is late is a thread that has no core, and the waiting one's core is
// where it can go on. OpenMP's barrier spins for milliseconds.
void wait_for_team(Team& team, int32_t threads);

// Returns when *count >= enough, which other members bring about; spins as above, then yields instead of sleeping.
void wait_for_count(const int64_t* count, int64_t enough);

}  // namespace rlhf::cpu
