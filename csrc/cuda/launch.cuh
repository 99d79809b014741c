// What every .cu file shares: how its functions are exported, how kernels are launched, and packs of four elements.
//
// The C interface. Every function takes addresses on one device, sizes and strides in elements, and the stream last; it
// returns a cudaError_t (0 is success) that covers its arguments and its launches. It allocates nothing, reads nothing
// back and waits for nothing, so calls can be captured in a CUDA graph. Nothing here knows torch.
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>

#define RLHF_API extern "C" __attribute__((visibility("default")))

// Leave the function with this cudaError_t unless it is success.
#define RLHF_RETURN_IF_ERROR(call)                      \
    do {                                                \
        const cudaError_t status = (call);              \
        if (status != cudaSuccess) return int(status);  \
    } while (0)

namespace rlhf::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kPack = 4;  // elements that a thread reads and writes together

template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), int64_t blocks, int threads, void* stream, Arguments... arguments) {
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(unsigned(blocks));
    config.blockDim = dim3(unsigned(threads));
    config.stream = static_cast<cudaStream_t>(stream);
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

constexpr int pack_alignment(int size) { return size * kPack < 16 ? size * kPack : 16; }

// Four consecutive elements: one memory access of up to 16 bytes (two for double).
template <typename T>
struct alignas(pack_alignment(sizeof(T))) Pack {
    T item[kPack];
};

template <typename T>
bool aligned(const T* data) {
    return reinterpret_cast<uintptr_t>(data) % alignof(Pack<T>) == 0;
}

// from[0], from[stride], ..., `inside` of them and 0 beyond. wide: the caller knows them to be dense and aligned.
template <typename T>
__device__ __forceinline__ Pack<T> load_pack(const T* from, int64_t stride, int inside, bool wide) {
    if (wide && inside >= kPack) return *reinterpret_cast<const Pack<T>*>(from);
    Pack<T> pack;
#pragma unroll
    for (int i = 0; i < kPack; ++i) pack.item[i] = i < inside ? from[i * stride] : T{};
    return pack;
}

template <typename T>
__device__ __forceinline__ void store_pack(T* to, const Pack<T>& pack, int inside, bool wide) {
    if (wide && inside >= kPack) {
        *reinterpret_cast<Pack<T>*>(to) = pack;
        return;
    }
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
        if (i < inside) to[i] = pack.item[i];
    }
}

// How many of the kPack elements from `begin` on lie before `end`.
__device__ __forceinline__ int inside_of(int64_t begin, int64_t end) {
    const int64_t left = end - begin;
    return left < kPack ? int(left < 0 ? 0 : left) : kPack;
}

}  // namespace rlhf::cuda
