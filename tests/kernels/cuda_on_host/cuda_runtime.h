// Just enough of CUDA to run csrc/cuda/*.cu on a CPU: a kernel's threads are fibers of one thread, a block after another.
//
// g++ finds this header in place of NVIDIA's. A fiber runs until it waits for others: at __syncthreads() for those of its
// block, at a shuffle or a vote for those of its warp. So a warp runs ahead of the others as far as it can, and a missing
// __syncthreads() shows as a wrong result. Threads that wait for one that never comes abort the program. Blocks have
// whole warps. `fail_next_launch` stands in for a launch that the device refuses.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <tuple>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static  // blocks run one after another

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9 };
using cudaStream_t = struct FakeStream*;

struct dim3 {
    unsigned x, y = 1, z = 1;
    dim3(unsigned x = 1) : x(x) {}
};

struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    cudaStream_t stream = nullptr;
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;
inline int fail_next_launch = 0;
extern "C" inline __attribute__((used)) void on_host_fail_next_launch(int code) { fail_next_launch = code; }

namespace on_host {

constexpr unsigned kWarp = 32;
constexpr size_t kStack = 1 << 16;

struct Barrier {
    unsigned arrived = 0, generation = 0;
};

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool done = false;
};

struct Block {
    std::vector<Fiber> fibers;
    std::vector<Barrier> warps;
    std::vector<uint64_t> slots;  // what each lane shows the others of its warp
    Barrier all;
    unsigned current = 0;
    unsigned waits = 0;  // since a barrier last opened
    ucontext_t outside;
    void (*body)(void*);
    void* argument;
};

inline Block* block = nullptr;

inline void switch_to(unsigned next) {
    const unsigned previous = block->current;
    block->current = next;
    threadIdx.x = next;
    if (next != previous) swapcontext(&block->fibers[previous].context, &block->fibers[next].context);
}

// On to the next fiber of `count` from `first` on that is not done.
inline void yield(unsigned first, unsigned count) {
    if (++block->waits > 8 * block->fibers.size() + 64) {
        std::fprintf(stderr, "threads wait for others that do not come\n");
        std::abort();
    }
    for (unsigned step = 1; step < count; ++step) {
        const unsigned next = first + (block->current - first + step) % count;
        if (!block->fibers[next].done) return switch_to(next);
    }
}

inline void wait(Barrier& barrier, unsigned first, unsigned count) {
    const unsigned generation = barrier.generation;
    if (++barrier.arrived == count) {
        barrier.arrived = 0;
        ++barrier.generation;
        block->waits = 0;
        return;
    }
    while (barrier.generation == generation) yield(first, count);
}

inline void wait_for_warp() {
    const unsigned warp = block->current / kWarp;
    wait(block->warps[warp], warp * kWarp, kWarp);
}

inline void enter() {
    block->body(block->argument);
    const unsigned me = block->current, threads = block->fibers.size();
    block->fibers[me].done = true;
    block->waits = 0;
    for (unsigned step = 1; step < threads; ++step) {
        const unsigned next = (me + step) % threads;
        if (!block->fibers[next].done) switch_to(next);
    }
    setcontext(&block->outside);
}

inline void run_block(unsigned index, unsigned threads, void (*body)(void*), void* argument) {
    Block here;
    here.fibers.resize(threads);
    here.warps.resize((threads + kWarp - 1) / kWarp);
    here.slots.resize(threads);
    here.body = body;
    here.argument = argument;
    block = &here;
    for (Fiber& fiber : here.fibers) {
        fiber.stack = std::unique_ptr<char[]>(new char[kStack]);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = kStack;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, reinterpret_cast<void (*)()>(&enter), 0);
    }
    here.current = 0;
    threadIdx.x = 0;
    blockIdx.x = index;
    swapcontext(&here.outside, &here.fibers[0].context);
    block = nullptr;
}

// Every lane shows `value` and sees lane `source`'s.
template <typename T>
T exchange(T value, unsigned source) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    const unsigned base = block->current / kWarp * kWarp, me = block->current;
    std::memcpy(&block->slots[me], &value, sizeof(T));
    wait_for_warp();
    T seen;
    std::memcpy(&seen, &block->slots[base + source], sizeof(T));
    wait_for_warp();
    return seen;
}

inline unsigned lane() { return block->current % kWarp; }

}  // namespace on_host

inline void __syncthreads() {
    on_host::wait(on_host::block->all, 0, on_host::block->fibers.size());
}

template <typename T>
T __shfl_sync(unsigned, T value, int source) {
    return on_host::exchange(value, unsigned(source));
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int distance) {
    const unsigned lane = on_host::lane();
    return on_host::exchange(value, lane >= unsigned(distance) ? lane - distance : lane);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int pattern) {
    return on_host::exchange(value, on_host::lane() ^ unsigned(pattern));
}
inline unsigned __ballot_sync(unsigned, bool vote) {
    const unsigned base = on_host::block->current / on_host::kWarp * on_host::kWarp;
    on_host::block->slots[on_host::block->current] = vote;
    on_host::wait_for_warp();
    unsigned votes = 0;
    for (unsigned i = 0; i < on_host::kWarp; ++i) votes |= unsigned(on_host::block->slots[base + i]) << i;
    on_host::wait_for_warp();
    return votes;
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(unsigned(x)); }

inline const char* cudaGetErrorString(cudaError_t error) {
    return error == cudaSuccess ? "no error" : error == cudaErrorInvalidValue ? "invalid argument" : "refused";
}

inline cudaError_t cudaGetDeviceCount(int* devices) {
    *devices = 1;
    return cudaSuccess;
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments... arguments) {
    if (fail_next_launch) {
        const cudaError_t error = cudaError_t(fail_next_launch);
        fail_next_launch = 0;
        return error;
    }
    gridDim = config->gridDim;
    blockDim = config->blockDim;
    std::tuple<void (*)(Parameters...), std::tuple<Parameters...>> bound(kernel, {arguments...});
    for (unsigned index = 0; index < gridDim.x; ++index) {
        on_host::run_block(
            index, blockDim.x,
            [](void* pointer) {
                auto& call = *static_cast<decltype(bound)*>(pointer);
                std::apply(std::get<0>(call), std::get<1>(call));
            },
            &bound);
    }
    return cudaSuccess;
}
