// Generalised advantage estimation over [rows, columns] = [B, T], and its gradient. Contract: csrc/cpu/gae.cpp.
//
// A row is a chain of affine maps (common/affine_map.h), computed as a scan: one block per row; a thread composes four
// neighbouring positions, warps scan the threads' maps with shuffles, the block scans its warps' maps, and rows that are
// longer than a block's tile go on with the state that the tile before left. The value of the next unmasked position is
// found first, by votes of the warp, so that delta is rounded as the reference rounds it.
//
// Order: the scan runs over positions as the chain does, backward in time for the forward, forward in time for the
// backward. Arithmetic is in T. The order of operations depends on T alone: same bits on every device, for every B.

#include "common/affine_map.h"
#include "cuda/launch.cuh"

namespace rlhf::cuda {
namespace {

constexpr int kMaxThreads = 512;
constexpr int kMaxWarps = kMaxThreads / kWarp;

// A [B, T] array with any strides, in elements.
template <typename T>
struct Matrix {
    const T* data;
    int64_t row_stride;
    int64_t column_stride;

    __device__ Pack<T> load(int64_t row, int64_t t, int inside, bool wide) const {
        return load_pack(data + row * row_stride + t * column_stride, column_stride, inside, wide);
    }
    bool wide() const { return aligned(data) && column_stride == 1 && row_stride % kPack == 0; }
};

// Where a thread's pack lies: t .. t + inside - 1. Packs are counted from the end of the row if `reversed`.
struct Place {
    int64_t t;
    int inside;
};

template <bool reversed>
__device__ __forceinline__ Place place_of(int64_t pack, int64_t columns) {
    const int64_t packs = (columns + kPack - 1) / kPack;
    if (pack >= packs) return {0, 0};
    const int64_t t = (reversed ? packs - 1 - pack : pack) * kPack;
    return {t, inside_of(t, columns)};
}

// State before this thread's positions, given their composed map; `state` becomes the state after the whole block.
template <typename T>
__device__ __forceinline__ T scan_block(AffineMap<T> map, T floor, T& state) {
    __shared__ T warp_scale[kMaxWarps], warp_offset[kMaxWarps];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
        AffineMap<T> before;
        before.scale = __shfl_up_sync(kAllLanes, map.scale, distance);
        before.offset = __shfl_up_sync(kAllLanes, map.offset, distance);
        if (lane >= distance) map = then(before, map, floor);
    }
    AffineMap<T> before;
    before.scale = __shfl_up_sync(kAllLanes, map.scale, 1);
    before.offset = __shfl_up_sync(kAllLanes, map.offset, 1);
    if (lane == kWarp - 1) {
        warp_scale[warp] = map.scale;
        warp_offset[warp] = map.offset;
    }
    __syncthreads();
    T mine = state;
    for (int w = 0; w < warps; ++w) {
        if (w == warp) mine = state;
        AffineMap<T> whole;
        whole.scale = warp_scale[w];
        whole.offset = warp_offset[w];
        state = whole(state);
    }
    __syncthreads();  // the next tile writes what slower warps still read
    return lane == 0 ? mine : before(mine);
}

// The latest value that a thread before this one has, or `latest`; which becomes the latest of the whole block.
template <typename T>
__device__ __forceinline__ T latest_before(bool has, T own, T& latest) {
    __shared__ T warp_value[kMaxWarps];
    __shared__ bool warp_has[kMaxWarps];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
    const unsigned having = __ballot_sync(kAllLanes, has);
    const unsigned earlier = having & ((1u << lane) - 1);
    const T in_warp = __shfl_sync(kAllLanes, own, earlier ? kWarp - 1 - __clz(int(earlier)) : 0);
    const T last = __shfl_sync(kAllLanes, own, having ? kWarp - 1 - __clz(int(having)) : 0);
    if (lane == 0) {
        warp_value[warp] = last;
        warp_has[warp] = having != 0;
    }
    __syncthreads();
    T mine = latest;
    for (int w = 0; w < warps; ++w) {
        if (w == warp) mine = latest;
        if (warp_has[w]) latest = warp_value[w];
    }
    return earlier ? in_warp : mine;
}

template <typename T>
__global__ void __launch_bounds__(kMaxThreads)
gae_forward_kernel(Matrix<T> reward, Matrix<T> value, Matrix<uint8_t> mask, const T* bootstrap, int64_t columns,
                   T gamma, T decay, bool wide, T* advantage, T* ret) {
    const int64_t row = blockIdx.x;
    const T floor = scale_floor(decay);
    T next_value = bootstrap ? bootstrap[row] : T(0), next_advantage = T(0);
    for (int64_t first = 0; first * kPack < columns; first += blockDim.x) {
        const Place place = place_of<true>(first + threadIdx.x, columns);
        const Pack<T> r = reward.load(row, place.t, place.inside, wide);
        const Pack<T> v = value.load(row, place.t, place.inside, wide);
        const Pack<uint8_t> keep = mask.load(row, place.t, place.inside, wide);
        bool has = false;
        T own = T(0);
#pragma unroll
        for (int i = kPack - 1; i >= 0; --i) {
            has = has || keep.item[i];
            own = keep.item[i] ? v.item[i] : own;
        }
        T after = latest_before(has, own, next_value);
        T delta[kPack];
        AffineMap<T> map;
#pragma unroll
        for (int i = kPack - 1; i >= 0; --i) {
            delta[i] = (r.item[i] + gamma * after) - v.item[i];
            map = then(map, affine_step(keep.item[i] != 0, decay, delta[i]), floor);
            after = keep.item[i] ? v.item[i] : after;
        }
        T state = scan_block(map, floor, next_advantage);
        Pack<T> a, total;
#pragma unroll
        for (int i = kPack - 1; i >= 0; --i) {
            const T here = delta[i] + decay * state;
            state = keep.item[i] ? here : state;
            a.item[i] = keep.item[i] ? here : T(0);
            total.item[i] = keep.item[i] ? here + v.item[i] : T(0);
        }
        store_pack(advantage + row * columns + place.t, a, place.inside, wide);
        store_pack(ret + row * columns + place.t, total, place.inside, wide);
    }
}

template <typename T>
__global__ void __launch_bounds__(kMaxThreads)
gae_backward_kernel(Matrix<T> grad_advantage, Matrix<T> grad_ret, Matrix<uint8_t> mask, int64_t columns, T gamma,
                    T decay, bool wide, T* d_reward, T* d_value, T* d_bootstrap) {
    const int64_t row = blockIdx.x;
    const T floor = scale_floor(decay);
    T previous = T(0);
    for (int64_t first = 0; first * kPack < columns; first += blockDim.x) {
        const Place place = place_of<false>(first + threadIdx.x, columns);
        const Pack<T> from_advantage = grad_advantage.load(row, place.t, place.inside, wide);
        const Pack<T> from_ret = grad_ret.load(row, place.t, place.inside, wide);
        const Pack<uint8_t> keep = mask.load(row, place.t, place.inside, wide);
        T arriving[kPack];
        AffineMap<T> map;
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
            arriving[i] = from_advantage.item[i] + from_ret.item[i];
            map = then(map, affine_step(keep.item[i] != 0, decay, arriving[i]), floor);
        }
        T state = scan_block(map, floor, previous);
        Pack<T> to_reward, to_value;
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
            const T here = arriving[i] + decay * state;
            to_reward.item[i] = keep.item[i] ? here : T(0);
            to_value.item[i] = keep.item[i] ? (gamma * state - here) + from_ret.item[i] : T(0);
            state = keep.item[i] ? here : state;
        }
        store_pack(d_reward + row * columns + place.t, to_reward, place.inside, wide);
        store_pack(d_value + row * columns + place.t, to_value, place.inside, wide);
    }
    if (threadIdx.x == 0) d_bootstrap[row] = gamma * previous;
}

// As many whole warps as a row has packs, so that short rows leave few threads idle.
int threads_for(int64_t columns) {
    const int64_t packs = (columns + kPack - 1) / kPack;
    const int64_t warps = (packs + kWarp - 1) / kWarp;
    return int(warps < 1 ? 1 : (warps < kMaxWarps ? warps : kMaxWarps)) * kWarp;
}

template <typename T>
int forward(Matrix<T> reward, Matrix<T> value, Matrix<uint8_t> mask, const T* bootstrap, int64_t rows, int64_t columns,
            double gamma, double lam, T* advantage, T* ret, void* stream) {
    if (rows < 0 || columns < 0) return cudaErrorInvalidValue;
    if (rows == 0 || columns == 0) return cudaSuccess;
    if (!reward.data || !value.data || !mask.data || !advantage || !ret) return cudaErrorInvalidValue;
    const bool wide = reward.wide() && value.wide() && mask.wide() && aligned(advantage) && aligned(ret) &&
                      columns % kPack == 0;
    return launch(gae_forward_kernel<T>, rows, threads_for(columns), stream, reward, value, mask, bootstrap, columns,
                  T(gamma), T(gamma * lam), wide, advantage, ret);
}

template <typename T>
int backward(Matrix<T> grad_advantage, Matrix<T> grad_ret, Matrix<uint8_t> mask, int64_t rows, int64_t columns,
             double gamma, double lam, T* d_reward, T* d_value, T* d_bootstrap, void* stream) {
    if (rows < 0 || columns < 0) return cudaErrorInvalidValue;
    if (rows == 0) return cudaSuccess;
    const bool complete = grad_advantage.data && grad_ret.data && mask.data && d_reward && d_value;
    if (!d_bootstrap || (columns > 0 && !complete)) return cudaErrorInvalidValue;
    const bool wide = grad_advantage.wide() && grad_ret.wide() && mask.wide() && aligned(d_reward) &&
                      aligned(d_value) && columns % kPack == 0;
    return launch(gae_backward_kernel<T>, rows, threads_for(columns), stream, grad_advantage, grad_ret, mask, columns,
                  T(gamma), T(gamma * lam), wide, d_reward, d_value, d_bootstrap);
}

}  // namespace
}  // namespace rlhf::cuda

#define RLHF_DEFINE(T, dtype)                                                                                         \
    RLHF_API int rlhf_gae_forward_##dtype(                                                                            \
        const T* reward, int64_t reward_row, int64_t reward_column, const T* value, int64_t value_row,                \
        int64_t value_column, const uint8_t* mask, int64_t mask_row, int64_t mask_column, const T* bootstrap,         \
        int64_t rows, int64_t columns, double gamma, double lam, T* advantage, T* ret, void* stream) {                \
        return rlhf::cuda::forward<T>({reward, reward_row, reward_column}, {value, value_row, value_column},          \
                                      {mask, mask_row, mask_column}, bootstrap, rows, columns, gamma, lam, advantage, \
                                      ret, stream);                                                                   \
    }                                                                                                                 \
    RLHF_API int rlhf_gae_backward_##dtype(                                                                           \
        const T* grad_advantage, int64_t grad_advantage_row, int64_t grad_advantage_column, const T* grad_ret,        \
        int64_t grad_ret_row, int64_t grad_ret_column, const uint8_t* mask, int64_t mask_row, int64_t mask_column,    \
        int64_t rows, int64_t columns, double gamma, double lam, T* d_reward, T* d_value, T* d_bootstrap,             \
        void* stream) {                                                                                               \
        return rlhf::cuda::backward<T>({grad_advantage, grad_advantage_row, grad_advantage_column},                   \
                                       {grad_ret, grad_ret_row, grad_ret_column}, {mask, mask_row, mask_column},      \
                                       rows, columns, gamma, lam, d_reward, d_value, d_bootstrap, stream);            \
    }
RLHF_DEFINE(float, float32)
RLHF_DEFINE(double, float64)
