// What the loader asks the library about itself.

#include "cuda/reduce.cuh"

#ifndef RLHF_SOURCE_KEY
#define RLHF_SOURCE_KEY "unknown"
#endif

// The sources and flags it was built from, as kernels/rlhf_kernels/runtime/cuda_native.py computes them.
RLHF_API const char* rlhf_source_key() { return RLHF_SOURCE_KEY; }

RLHF_API const char* rlhf_error_string(int code) { return cudaGetErrorString(cudaError_t(code)); }

// 0 if the driver serves this library's CUDA runtime and there is a device; otherwise a cudaError_t.
RLHF_API int rlhf_probe() {
    int devices = 0;
    return int(cudaGetDeviceCount(&devices));
}

// Elements of workspace that a reduction over `count` elements needs.
RLHF_API int64_t rlhf_workspace(int64_t count) {
    return rlhf::cuda::reduce_blocks(count) * rlhf::cuda::kMaxSums;
}
