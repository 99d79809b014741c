// What GCC makes of OpenMP's pragmas in csrc, on std::thread: TSan sees how these threads begin and wait, which it does
// not of libgomp. At its end a program prints the code that asked for several threads, as addresses for addr2line.

#include <execinfo.h>
#include <link.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

namespace {

struct Region {
    int threads;
    std::atomic<long> next{0};  // piece of its loop; a region of csrc has one at most
};

struct Place {
    Region* region = nullptr;
    int number = 0;
    long begin = 0, end = 0, step = 1;  // of the loop
};

thread_local Place place;

// Every frame above a region, once.
struct Seen {
    std::mutex lock;
    std::set<void*> frames;

    void add() {
        void* stack[64];
        const int depth = backtrace(stack, 64);
        const std::lock_guard<std::mutex> held(lock);
        for (int i = 1; i < depth; ++i) frames.insert(static_cast<char*>(stack[i]) - 1);  // the call, not what follows
    }

    ~Seen() {
        ElfW(Addr) base = 0;
        dl_iterate_phdr([](dl_phdr_info* object, size_t, void* out) {
            *static_cast<ElfW(Addr)*>(out) = object->dlpi_addr;
            return 1;  // the first one is the program
        }, &base);
        for (void* frame : frames) std::printf("at %zx\n", size_t(frame) - size_t(base));
    }
} seen;

void run(void (*work)(void*), void* data, Region& region) {
    if (region.threads > 1) seen.add();
    const Place outer = place;
    std::vector<std::thread> others;
    for (int i = 1; i < region.threads; ++i) {
        others.emplace_back([&region, work, data, i] {
            place = {&region, i};
            work(data);
        });
    }
    place = {&region, 0};
    work(data);
    for (std::thread& other : others) other.join();
    place = outer;
}

}  // namespace

extern "C" {

int omp_get_thread_num() { return place.number; }
int omp_get_num_threads() { return place.region ? place.region->threads : 1; }

void GOMP_parallel(void (*work)(void*), void* data, unsigned threads, unsigned) {
    Region region{int(threads)};
    run(work, data, region);
}

bool GOMP_loop_nonmonotonic_dynamic_next(long* begin, long* end) {
    *begin = place.begin + place.step * place.region->next.fetch_add(1, std::memory_order_relaxed);
    *end = std::min(*begin + place.step, place.end);
    return *begin < place.end;
}

bool GOMP_loop_nonmonotonic_dynamic_start(long first, long last, long, long piece, long* begin, long* end) {
    place.begin = first, place.end = last, place.step = piece;
    return GOMP_loop_nonmonotonic_dynamic_next(begin, end);
}

void GOMP_loop_end_nowait() {}
}
