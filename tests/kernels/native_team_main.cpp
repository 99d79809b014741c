// csrc/cpu/team.cpp and share.inc.h: who of a team does what, when one member has no core or is slow. Nothing is timed:
// the late member waits for what the others must have done without it, and ends the program where that never comes.

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <thread>

#include "cpu/team.h"

#define RLHF_INLINE static inline __attribute__((always_inline))

namespace {

using namespace rlhf::cpu;
#include "cpu/share.inc.h"

constexpr int kMost = 5;
constexpr std::chrono::seconds kNever(20);

void require(bool condition, const char* what, int threads, long number) {
    if (condition) return;
    std::printf("FAILED: %s, %d threads, %ld\n", what, threads, number);
    std::fflush(stdout);
    std::_Exit(1);  // the other members may be waiting for each other
}

// Returns when *count >= enough, which others bring about.
void until(const std::atomic<int64_t>& count, int64_t enough, const char* what, int threads) {
    const auto end = std::chrono::steady_clock::now() + kNever;
    while (count.load() < enough) {
        require(std::chrono::steady_clock::now() < end, what, threads, long(count.load()));
        std::this_thread::yield();
    }
}

// Loops one after the other, of which each needs all of the last one.
void every_piece_once(int threads) {
    constexpr int64_t kCounts[] = {0, 1, 2, 3, 7, 64, 1, 0, 500, 5};
    constexpr int64_t kMany = 500;
    std::unique_ptr<std::atomic<int>[]> done(new std::atomic<int>[kMany]);
    for (int64_t i = 0; i < kMany; ++i) done[i] = 0;
    run_together(threads, [&](Member& me) {
        for (int64_t round = 0; round < 50; ++round) {
            for (const int64_t count : kCounts) steal(me, count, [&](int64_t i) { done[i].fetch_add(1); });
        }
    });
    for (int64_t i = 0; i < kMany; ++i) {
        int expected = 0;
        for (const int64_t count : kCounts) expected += i < count ? 50 : 0;
        require(done[i] == expected, "a piece was done twice or not at all", threads, long(i));
    }
}

// What a loop leaves is there for every member in the next one.
void loops_wait(int threads) {
    constexpr int64_t kCount = 97;
    int64_t left[kCount] = {}, right[kCount] = {};
    run_together(threads, [&](Member& me) {
        for (int64_t round = 1; round <= 100; ++round) {
            steal(me, kCount, [&](int64_t i) { left[i] = right[(i + 13) % kCount] + 1; });
            steal(me, kCount, [&](int64_t i) { right[i] = left[(i + 31) % kCount] + 1; });
        }
    });
    for (int64_t i = 0; i < kCount; ++i) require(right[i] == 200, "a loop began too early", threads, long(right[i]));
}

// A member that comes when all is done finds nothing; one that is held up in its first piece does no other.
void others_take_over(int threads, int late, bool in_a_piece) {
    for (const int64_t count : {int64_t(1), int64_t(threads), int64_t(40)}) {
        std::atomic<int64_t> done{0}, mine{0};
        run_together(threads, [&](Member& me) {
            const bool is_late = me.threads > 1 && me.thread == late;
            for (int round = 0; round < 3; ++round) {  // both sets of counters, and the first one again
                const int64_t before = round * count;
                if (is_late && !in_a_piece) until(done, before + count, "a share was left to its late owner", threads);
                steal(me, count, [&](int64_t) {
                    if (is_late) {
                        mine.fetch_add(1);
                        until(done, before + count - 1, "pieces were left to a slow member", threads);
                    }
                    done.fetch_add(1);
                });
            }
        });
        require(done == 3 * count, "pieces are missing", threads, long(done));
        require(mine <= (in_a_piece ? 3 : 0), "a slow member did the work of others", threads, long(mine));
    }
}

}  // namespace

int main() {
    for (int threads = 1; threads <= kMost; ++threads) {
        every_piece_once(threads);
        loops_wait(threads);
        for (int late = 0; late < threads; ++late) {
            others_take_over(threads, late, false);
            others_take_over(threads, late, true);
        }
    }
    std::printf("native code is clean\n");
    return 0;
}
