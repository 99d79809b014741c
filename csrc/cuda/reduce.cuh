// Sums in two stages and a fixed order: each block leaves its partial sums, a later kernel adds those of all blocks.
//
// The number of blocks, and with it the order of every addition, depends on the number of elements alone: equal inputs
// give equal bits on every device, aligned or not. No atomics.
#pragma once

#include "cuda/launch.cuh"

namespace rlhf::cuda {

constexpr int kReduceThreads = 256;
constexpr int kReduceWarps = kReduceThreads / kWarp;
constexpr int64_t kMaxReduceBlocks = 512;  // about four for each multiprocessor of the largest devices
constexpr int kMaxSums = 8;                // of any reduction here: a workspace holds this many for each block

inline int64_t reduce_blocks(int64_t count) {
    const int64_t per_block = int64_t(kReduceThreads) * kPack;
    const int64_t blocks = (count + per_block - 1) / per_block;
    return blocks < 1 ? 1 : (blocks < kMaxReduceBlocks ? blocks : kMaxReduceBlocks);
}

// Calls body(first element, how many of its pack are inside) for the packs of this thread.
template <typename Body>
__device__ __forceinline__ void for_packs(int64_t count, Body body) {
    const int64_t step = int64_t(gridDim.x) * kReduceThreads * kPack;
    for (int64_t begin = (int64_t(blockIdx.x) * kReduceThreads + threadIdx.x) * kPack; begin < count; begin += step) {
        body(begin, inside_of(begin, count));
    }
}

template <typename T>
__device__ __forceinline__ T max_with_nan(T a, T b) {
    return a > b || a != a ? a : b;
}

// Over all threads of the block, in place in every thread: S totals, of which number `maximum` (if not negative) is a
// maximum and the others are sums.
template <typename T, int S, int maximum = -1>
__device__ __forceinline__ void block_totals(T (&values)[S]) {
    static_assert(S <= kWarp && S <= kMaxSums, "one thread adds up each quantity");
    __shared__ T of_warp[kReduceWarps][S];
    __shared__ T of_block[S];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
    for (int s = 0; s < S; ++s) {
#pragma unroll
        for (int distance = kWarp / 2; distance > 0; distance /= 2) {
            const T other = __shfl_xor_sync(kAllLanes, values[s], distance);
            values[s] = s == maximum ? max_with_nan(values[s], other) : values[s] + other;
        }
        if (lane == 0) of_warp[warp][s] = values[s];
    }
    __syncthreads();
    if (threadIdx.x < S) {
        T total = of_warp[0][threadIdx.x];
#pragma unroll
        for (int w = 1; w < kReduceWarps; ++w) {
            const T other = of_warp[w][threadIdx.x];
            total = int(threadIdx.x) == maximum ? max_with_nan(total, other) : total + other;
        }
        of_block[threadIdx.x] = total;
    }
    __syncthreads();
#pragma unroll
    for (int s = 0; s < S; ++s) values[s] = of_block[s];
}

// Stage one: this block's totals into its place of the workspace.
template <typename T, int S, int maximum = -1>
__device__ __forceinline__ void leave_partials(T (&values)[S], T* partials) {
    block_totals<T, S, maximum>(values);
    if (threadIdx.x == 0) {
#pragma unroll
        for (int s = 0; s < S; ++s) partials[int64_t(blockIdx.x) * S + s] = values[s];
    }
}

// Stage two, in any block: the totals over the partials of `blocks` blocks.
template <typename T, int S, int maximum = -1>
__device__ __forceinline__ void collect_partials(const T* partials, int blocks, T (&values)[S]) {
#pragma unroll
    for (int s = 0; s < S; ++s) values[s] = T(0);
    for (int block = threadIdx.x; block < blocks; block += kReduceThreads) {
#pragma unroll
        for (int s = 0; s < S; ++s) {
            const T other = partials[int64_t(block) * S + s];
            values[s] = s == maximum ? max_with_nan(values[s], other) : values[s] + other;
        }
    }
    block_totals<T, S, maximum>(values);
}

}  // namespace rlhf::cuda
