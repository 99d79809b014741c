// Blocks of a cluster (sm_90 and later): dynamic shared memory, the others' shared memory, a barrier over all threads.
//
// Elsewhere a kernel may be compiled for clusters but must not be launched in one: a cluster of one block needs nothing
// of all this but its own memory.
#pragma once

#include "cuda/launch.cuh"

namespace rlhf::cuda {

// The block's dynamic shared memory.
__device__ __forceinline__ void* dynamic_shared() {
#ifdef __CUDACC__
    extern __shared__ __align__(16) unsigned char rlhf_dynamic_shared[];
    return rlhf_dynamic_shared;
#else
    return on_host::dynamic_shared();
#endif
}

__device__ __forceinline__ int cluster_rank() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return int(rank);
#elif !defined(__CUDACC__)
    return int(on_host::block_rank());
#else
    return 0;
#endif
}

// All threads of the cluster, and with them their writes to shared memory.
__device__ __forceinline__ void cluster_sync() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
#elif !defined(__CUDACC__)
    on_host::wait_for_cluster();
#elif defined(__CUDA_ARCH__)
    __trap();
#endif
}

// The place in block `rank`'s shared memory that `mine` is in this block's.
template <typename T>
__device__ __forceinline__ T* shared_of(T* mine, int rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint64_t theirs;
    asm("mapa.u64 %0, %1, %2;" : "=l"(theirs) : "l"(mine), "r"(unsigned(rank)));
    return reinterpret_cast<T*>(theirs);
#elif !defined(__CUDACC__)
    return on_host::shared_of(mine, unsigned(rank));
#else
    return mine;
#endif
}

}  // namespace rlhf::cuda
