// RLHF_HOST_DEVICE: a function for the CPU and, under nvcc, for the GPU too.
#pragma once

#ifdef __CUDACC__
#define RLHF_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define RLHF_HOST_DEVICE inline
#endif
