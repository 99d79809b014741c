// Just enough of CUDA to run csrc/cuda/*.cu on a CPU: a kernel's threads are fibers of one thread, a block after another.
//
// g++ finds this header in place of NVIDIA's. A fiber runs until it waits for others: at __syncthreads() for those of its
// block, at a shuffle or a vote for those of its warp. So a warp runs ahead of the others as far as it can, and a missing
// __syncthreads() shows as a wrong result. Threads that wait for one that never comes abort the program. Blocks have
// whole warps. The blocks of a cluster run together, each with dynamic shared memory of its own; what is __shared__ they
// would share, so kernels that are launched in clusters have no such variables. `fail_next_launch` stands in for a launch
// that the device refuses.
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

enum cudaLaunchAttributeID { cudaLaunchAttributeClusterDimension = 4 };
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    struct {
        dim3 clusterDim;
    } val;
};

struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes = 0;
    cudaStream_t stream = nullptr;
    cudaLaunchAttribute* attrs = nullptr;
    unsigned numAttrs = 0;
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

// The blocks of a cluster; mostly it is one.
struct Cluster {
    std::vector<Fiber> fibers;  // a block's after another's
    std::vector<Barrier> warps, blocks;
    std::vector<uint64_t> slots;  // what each lane shows the others of its warp
    Barrier all;
    unsigned threads, first_block;
    std::vector<std::unique_ptr<char[]>> shared;  // of each block
    unsigned current = 0;
    unsigned waits = 0;  // since a barrier last opened
    ucontext_t outside;
    void (*body)(void*);
    void* argument;
};

inline Cluster* cluster = nullptr;

inline void switch_to(unsigned next) {
    const unsigned previous = cluster->current;
    cluster->current = next;
    threadIdx.x = next % cluster->threads;
    blockIdx.x = cluster->first_block + next / cluster->threads;
    if (next != previous) swapcontext(&cluster->fibers[previous].context, &cluster->fibers[next].context);
}

// On to the next fiber of `count` from `first` on that is not done.
inline void yield(unsigned first, unsigned count) {
    if (++cluster->waits > 8 * cluster->fibers.size() + 64) {
        std::fprintf(stderr, "threads wait for others that do not come\n");
        std::abort();
    }
    for (unsigned step = 1; step < count; ++step) {
        const unsigned next = first + (cluster->current - first + step) % count;
        if (!cluster->fibers[next].done) return switch_to(next);
    }
}

inline void wait(Barrier& barrier, unsigned first, unsigned count) {
    const unsigned generation = barrier.generation;
    if (++barrier.arrived == count) {
        barrier.arrived = 0;
        ++barrier.generation;
        cluster->waits = 0;
        return;
    }
    while (barrier.generation == generation) yield(first, count);
}

inline void wait_for_warp() {
    const unsigned warp = cluster->current / kWarp;
    wait(cluster->warps[warp], warp * kWarp, kWarp);
}

inline void enter() {
    cluster->body(cluster->argument);
    const unsigned me = cluster->current, threads = cluster->fibers.size();
    cluster->fibers[me].done = true;
    cluster->waits = 0;
    for (unsigned step = 1; step < threads; ++step) {
        const unsigned next = (me + step) % threads;
        if (!cluster->fibers[next].done) switch_to(next);
    }
    setcontext(&cluster->outside);
}

inline void run_cluster(unsigned first_block, unsigned blocks, unsigned threads, size_t shared_bytes,
                        void (*body)(void*), void* argument) {
    Cluster here;
    here.fibers.resize(blocks * threads);
    here.warps.resize((blocks * threads + kWarp - 1) / kWarp);
    here.blocks.resize(blocks);
    here.slots.resize(blocks * threads);
    here.threads = threads;
    here.first_block = first_block;
    for (unsigned b = 0; b < blocks; ++b) {
        here.shared.emplace_back(new char[shared_bytes]);
        std::memset(here.shared.back().get(), 0xff, shared_bytes);  // NaN in any floating type
    }
    here.body = body;
    here.argument = argument;
    cluster = &here;
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
    blockIdx.x = first_block;
    swapcontext(&here.outside, &here.fibers[0].context);
    cluster = nullptr;
}

// Every lane shows `value` and sees lane `source`'s.
template <typename T>
T exchange(T value, unsigned source) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    const unsigned base = cluster->current / kWarp * kWarp, me = cluster->current;
    std::memcpy(&cluster->slots[me], &value, sizeof(T));
    wait_for_warp();
    T seen;
    std::memcpy(&seen, &cluster->slots[base + source], sizeof(T));
    wait_for_warp();
    return seen;
}

inline unsigned lane() { return cluster->current % kWarp; }

}  // namespace on_host

namespace on_host {

inline unsigned block_rank() { return cluster->current / cluster->threads; }
inline void wait_for_cluster() { wait(cluster->all, 0, cluster->fibers.size()); }
inline void* dynamic_shared() { return cluster->shared[block_rank()].get(); }

// The place in block `rank`'s shared memory that `mine` is in this block's.
template <typename T>
T* shared_of(T* mine, unsigned rank) {
    const auto offset = reinterpret_cast<char*>(mine) - cluster->shared[block_rank()].get();
    return reinterpret_cast<T*>(cluster->shared[rank].get() + offset);
}

}  // namespace on_host

inline void __syncthreads() {
    const unsigned rank = on_host::block_rank(), threads = on_host::cluster->threads;
    on_host::wait(on_host::cluster->blocks[rank], rank * threads, threads);
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
    const unsigned base = on_host::cluster->current / on_host::kWarp * on_host::kWarp;
    on_host::cluster->slots[on_host::cluster->current] = vote;
    on_host::wait_for_warp();
    unsigned votes = 0;
    for (unsigned i = 0; i < on_host::kWarp; ++i) votes |= unsigned(on_host::cluster->slots[base + i]) << i;
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
    const unsigned blocks = config->numAttrs > 0 ? config->attrs[0].val.clusterDim.x : 1;
    if (gridDim.x % blocks != 0) return cudaErrorInvalidConfiguration;
    for (unsigned first = 0; first < gridDim.x; first += blocks) {
        on_host::run_cluster(
            first, blocks, blockDim.x, config->dynamicSmemBytes,
            [](void* pointer) {
                auto& call = *static_cast<decltype(bound)*>(pointer);
                std::apply(std::get<0>(call), std::get<1>(call));
            },
            &bound);
    }
    return cudaSuccess;
}
