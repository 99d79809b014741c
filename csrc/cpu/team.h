// Threads of one call that wait for each other many times, each time for little.
#pragma once

#include <cstdint>

namespace rlhf::cpu {

struct Team {
    alignas(64) int32_t arrived = 0;
    alignas(64) int32_t round = 0;
    alignas(64) int32_t asleep = 0;
};

// Returns when `threads` threads have called it. Whoever waits spins for the tenth of a millisecond that work shared
// evenly may take longer elsewhere, then sleeps: what is late is a thread that has no core, and the waiting one's core is
// where it can go on. OpenMP's barrier spins for milliseconds.
void wait_for_team(Team& team, int32_t threads);

}  // namespace rlhf::cpu
