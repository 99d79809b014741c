// Masked moments, whitening and its gradient over `count` dense elements. Contract: csrc/cpu/whiten.cpp.
//
// Sums and arithmetic are in double, outputs are rounded once. Passes over the data meet in `workspace`: each block
// leaves partial sums, and every block of the next pass adds up the same partials in the same order, so that no pass
// waits for a kernel of its own. Whitening takes three passes, its gradient two.

#include "cuda/reduce.cuh"

namespace rlhf::cuda {
namespace {

__device__ __forceinline__ double at_least_one(double x) { return x < 1.0 ? 1.0 : x; }

template <typename T>
struct Elements {
    const T* data;
    const uint8_t* mask;
    int64_t count;
    bool wide;
};

template <typename T>
bool wide(const T* data, const uint8_t* mask) {
    return aligned(data) && aligned(mask);
}

// n, the sum, and the sum of squares if S is 3.
template <typename T, int S>
__global__ void __launch_bounds__(kReduceThreads) moments_kernel(Elements<T> x, double* partials) {
    double sums[S] = {};
    for_packs(x.count, [&](int64_t begin, int inside) {
        const Pack<T> pack = load_pack(x.data + begin, 1, inside, x.wide);
        const Pack<uint8_t> keep = load_pack(x.mask + begin, 1, inside, x.wide);
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
            const double value = keep.item[i] ? double(pack.item[i]) : 0.0;
            sums[0] += keep.item[i] ? 1.0 : 0.0;
            sums[1] += value;
            if (S == 3) sums[S - 1] += value * value;
        }
    });
    leave_partials<double, S>(sums, partials);
}

__global__ void __launch_bounds__(kReduceThreads)
collect_moments_kernel(const double* partials, int blocks, double* moments) {
    double sums[3];
    collect_partials<double, 3>(partials, blocks, sums);
    if (threadIdx.x == 0) {
        moments[0] = sums[0];
        moments[1] = sums[1];
        moments[2] = sums[2];
    }
}

// The sum of squares around the mean, which follows from what moments_kernel left.
template <typename T>
__global__ void __launch_bounds__(kReduceThreads)
squares_kernel(Elements<T> x, const double* moment_partials, double* partials) {
    double sums[2];
    collect_partials<double, 2>(moment_partials, gridDim.x, sums);
    const double mean = sums[1] / at_least_one(sums[0]);
    double squares[1] = {};
    for_packs(x.count, [&](int64_t begin, int inside) {
        const Pack<T> pack = load_pack(x.data + begin, 1, inside, x.wide);
        const Pack<uint8_t> keep = load_pack(x.mask + begin, 1, inside, x.wide);
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
            const double d = keep.item[i] ? double(pack.item[i]) - mean : 0.0;
            squares[0] += d * d;
        }
    });
    leave_partials<double, 1>(squares, partials);
}

template <typename T>
__global__ void __launch_bounds__(kReduceThreads)
whiten_kernel(Elements<T> x, const double* moments, const double* moment_partials, const double* square_partials,
              bool shift_mean, double eps, T* y, double* stats) {
    double n, mean, squares;
    if (moments) {
        n = moments[0];
        mean = moments[1] / at_least_one(n);
        squares = moments[2] - moments[1] * mean;
        squares = squares < 0.0 ? 0.0 : squares;
    } else {
        double sums[2], square_sum[1];
        collect_partials<double, 2>(moment_partials, gridDim.x, sums);
        collect_partials<double, 1>(square_partials, gridDim.x, square_sum);
        n = sums[0];
        mean = sums[1] / at_least_one(n);
        squares = square_sum[0];
    }
    const double rstd = 1.0 / sqrt(squares / at_least_one(n - 1.0) + eps);
    const double shift = shift_mean ? 0.0 : mean;
    for_packs(x.count, [&](int64_t begin, int inside) {
        const Pack<T> pack = load_pack(x.data + begin, 1, inside, x.wide);
        const Pack<uint8_t> keep = load_pack(x.mask + begin, 1, inside, x.wide);
        Pack<T> out;
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
            out.item[i] = keep.item[i] ? T((double(pack.item[i]) - mean) * rstd + shift) : T(0);
        }
        store_pack(y + begin, out, inside, x.wide);
    });
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        stats[0] = n;
        stats[1] = mean;
        stats[2] = rstd;
    }
}

// The sums of g and of g (x - mean).
template <typename T>
__global__ void __launch_bounds__(kReduceThreads)
gradient_sums_kernel(const T* grad, Elements<T> x, const double* stats, double* partials) {
    const double mean = stats[1];
    double sums[2] = {};
    for_packs(x.count, [&](int64_t begin, int inside) {
        const Pack<T> g = load_pack(grad + begin, 1, inside, x.wide);
        const Pack<T> pack = load_pack(x.data + begin, 1, inside, x.wide);
        const Pack<uint8_t> keep = load_pack(x.mask + begin, 1, inside, x.wide);
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
            const double here = keep.item[i] ? double(g.item[i]) : 0.0;
            const double d = keep.item[i] ? double(pack.item[i]) - mean : 0.0;
            sums[0] += here;
            sums[1] += here * d;
        }
    });
    leave_partials<double, 2>(sums, partials);
}

template <typename T>
__global__ void __launch_bounds__(kReduceThreads)
gradient_kernel(const T* grad, Elements<T> x, const double* stats, const double* partials, bool shift_mean, T* d_x) {
    const double n = stats[0], mean = stats[1], rstd = stats[2];
    double shift = 0.0, slope = 0.0;  // d_x = rstd g - shift - slope d
    if (partials) {                   // none: the moments are constants
        double sums[2];
        collect_partials<double, 2>(partials, gridDim.x, sums);
        shift = (shift_mean ? rstd : rstd - 1.0) * sums[0] / at_least_one(n);
        slope = rstd * rstd * rstd * sums[1] / at_least_one(n - 1.0);
    }
    for_packs(x.count, [&](int64_t begin, int inside) {
        const Pack<T> g = load_pack(grad + begin, 1, inside, x.wide);
        const Pack<T> pack = load_pack(x.data + begin, 1, inside, x.wide);
        const Pack<uint8_t> keep = load_pack(x.mask + begin, 1, inside, x.wide);
        Pack<T> out;
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
            const double d = double(pack.item[i]) - mean;
            out.item[i] = keep.item[i] ? T((rstd * double(g.item[i]) - shift) - slope * d) : T(0);
        }
        store_pack(d_x + begin, out, inside, x.wide);
    });
}

template <typename T>
int masked_moments(const T* data, const uint8_t* mask, int64_t count, double* workspace, double* moments,
                   void* stream) {
    if (count < 0 || (count > 0 && !(data && mask)) || !workspace || !moments) return cudaErrorInvalidValue;
    const int64_t blocks = reduce_blocks(count);
    const Elements<T> x{data, mask, count, wide(data, mask)};
    RLHF_RETURN_IF_ERROR(launch(moments_kernel<T, 3>, blocks, kReduceThreads, stream, x, workspace));
    return launch(collect_moments_kernel, 1, kReduceThreads, stream, workspace, int(blocks), moments);
}

template <typename T>
int whiten_forward(const T* data, const uint8_t* mask, const double* moments, int64_t count, bool shift_mean,
                   double eps, double* workspace, T* y, double* stats, void* stream) {
    if (count < 0 || (count > 0 && !(data && mask && y)) || !workspace || !stats) return cudaErrorInvalidValue;
    const int64_t blocks = reduce_blocks(count);
    const Elements<T> x{data, mask, count, wide(data, mask) && aligned(y)};
    double *moment_partials = workspace, *square_partials = workspace + 2 * blocks;
    if (!moments) {
        RLHF_RETURN_IF_ERROR(launch(moments_kernel<T, 2>, blocks, kReduceThreads, stream, x, moment_partials));
        RLHF_RETURN_IF_ERROR(
            launch(squares_kernel<T>, blocks, kReduceThreads, stream, x, moment_partials, square_partials));
    }
    return launch(whiten_kernel<T>, blocks, kReduceThreads, stream, x, moments, moment_partials, square_partials,
                  shift_mean, eps, y, stats);
}

template <typename T>
int whiten_backward(const T* grad, const T* data, const uint8_t* mask, const double* stats, int64_t count,
                    bool shift_mean, bool constant_moments, double* workspace, T* d_x, void* stream) {
    if (count < 0 || (count > 0 && !(grad && data && mask && d_x)) || !stats || !workspace) {
        return cudaErrorInvalidValue;
    }
    const int64_t blocks = reduce_blocks(count);
    const Elements<T> x{data, mask, count, wide(data, mask) && aligned(grad) && aligned(d_x)};
    double* partials = constant_moments ? nullptr : workspace;
    if (partials) {
        RLHF_RETURN_IF_ERROR(
            launch(gradient_sums_kernel<T>, blocks, kReduceThreads, stream, grad, x, stats, partials));
    }
    return launch(gradient_kernel<T>, blocks, kReduceThreads, stream, grad, x, stats, partials, shift_mean, d_x);
}

}  // namespace
}  // namespace rlhf::cuda

#define RLHF_DEFINE(T, dtype)                                                                                         \
    RLHF_API int rlhf_masked_moments_##dtype(const T* x, const uint8_t* mask, int64_t count, double* workspace,       \
                                             double* moments, void* stream) {                                         \
        return rlhf::cuda::masked_moments<T>(x, mask, count, workspace, moments, stream);                             \
    }                                                                                                                 \
    RLHF_API int rlhf_whiten_forward_##dtype(const T* x, const uint8_t* mask, const double* moments, int64_t count,   \
                                             int shift_mean, double eps, double* workspace, T* y, double* stats,      \
                                             void* stream) {                                                          \
        return rlhf::cuda::whiten_forward<T>(x, mask, moments, count, shift_mean != 0, eps, workspace, y, stats,      \
                                             stream);                                                                 \
    }                                                                                                                 \
    RLHF_API int rlhf_whiten_backward_##dtype(const T* grad, const T* x, const uint8_t* mask, const double* stats,    \
                                              int64_t count, int shift_mean, int constant_moments, double* workspace, \
                                              T* d_x, void* stream) {                                                 \
        return rlhf::cuda::whiten_backward<T>(grad, x, mask, stats, count, shift_mean != 0, constant_moments != 0,    \
                                              workspace, d_x, stream);                                                \
    }
RLHF_DEFINE(float, float32)
RLHF_DEFINE(double, float64)
