// y[n] += s_i B_i (A_i x[n]) for up to a few hundred rows n, each with a slot i of its own or none, in one launch.
//
// Contract. x [N, K] and y [N, M] in one of three types, rows with any stride; row_slot [N] on the device, a slot or
// anything else for a row that is off. slots [n_slots, 6] as kernels/rlhf_kernels/lora/tables.py lays them out: address of
// A [rank, K], address of B [M, rank], rank (1 to 128), two numbers for dropout, the scale's bits. A and B are dense, of
// one type. Rows that are off are neither read nor written. Products and sums in float; y is rounded once.
//
// A cluster of kBlocks blocks works on kRows neighbouring rows, slot after slot. Shrink: every warp of the cluster makes
// four components of h = A x for all of these rows from its share of K, one pack per lane and step, and adds up its lanes.
// Every block collects the shares of all and so has the whole h. Expand: a block owns groups of 32 columns; a warp takes
// an eighth of the ranks, and eight partial sums make a delta. On devices without clusters kBlocks is 1: each block makes
// the whole h for itself. The order of every addition depends on K, M, the rank and kBlocks alone: a row's bits depend
// neither on its neighbours nor on the number of rows. No atomics.

#include "common/half.h"
#include "cuda/cluster.cuh"

namespace rlhf::cuda {
namespace {

constexpr int kRows = 8;
constexpr int kRanks = 4;  // components of h that a warp makes at a time: with kRows as many sums as a warp has lanes
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kMaxRank = 128;
constexpr int kStep = kWarp * kPack;  // elements of K that a warp reads at a time
constexpr int kSlotWidth = 6;
constexpr int kTargetBlocks = 132;  // one per multiprocessor of an H200
constexpr int kClusterBlocks = 8;
static_assert(kRows * kRanks == kWarp && kRows == kWarps);

struct Shared {
    float shares[kMaxRank * kRows];               // [part][row][rank], of this block
    float h[kRows * kMaxRank];                    // [row][rank], scaled
    float deltas[kWarps * kRows * kWarp];         // [part][row][column]
};

template <typename X, typename W>
struct Call {
    const X* x;
    X* y;
    int64_t x_stride, y_stride, n_rows, n_in, n_out;
    const void* row_slot;
    bool wide_slots;  // row_slot is int64, else int32
    const int64_t* slots;
    int64_t n_slots;
    int blocks_per_tile;
    bool wide_x, wide_slot;  // x and A, B are aligned for whole packs

    // -1 for a row that is off or not there.
    __device__ int64_t slot_of(int64_t row) const {
        if (row >= n_rows) return -1;
        const int64_t slot = wide_slots ? static_cast<const int64_t*>(row_slot)[row]
                                        : int64_t(static_cast<const int32_t*>(row_slot)[row]);
        return slot >= 0 && slot < n_slots ? slot : -1;
    }
};

// Lane i ends with the sum over all lanes of v[i], which is then v[0].
template <int half = kWarp / 2>
__device__ __forceinline__ void add_lanes(float (&v)[kWarp]) {
    const bool upper = threadIdx.x & half;
#pragma unroll
    for (int i = 0; i < half; ++i) {
        const float low = v[i], high = v[i + half];
        v[i] = (upper ? high : low) + __shfl_xor_sync(kAllLanes, upper ? low : high, half);
    }
    if constexpr (half > 1) add_lanes<half / 2>(v);
}

// Shares [part][row][rank] of h from this warp's part of K, for the rows in `mask`.
template <typename X, typename W>
__device__ void shrink(const Call<X, W>& call, const W* A, int rank, int64_t row0, unsigned mask, int worker,
                       int n_workers, int part, int n_parts, float* shares) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const int groups = (rank + kRanks - 1) / kRanks, ranks = groups * kRanks;
    const int64_t n_steps = (call.n_in + kStep - 1) / kStep;
    const int64_t per_worker = (n_steps + n_workers - 1) / n_workers;
    const int64_t begin = worker * per_worker, end = begin + per_worker < n_steps ? begin + per_worker : n_steps;
    const bool wide_A = call.wide_slot && call.n_in % kPack == 0;
#pragma unroll 1  // more steps at once do not fit into registers
    for (int group = warp / n_parts; group < groups; group += kWarps / n_parts) {
        float sums[kWarp] = {};
#pragma unroll 1
        for (int64_t step = begin; step < end; ++step) {
            const int64_t k = step * kStep + lane * kPack;
            const int inside = inside_of(k, call.n_in);
            Pack<W> a[kRanks];
#pragma unroll
            for (int j = 0; j < kRanks; ++j) {
                const bool there = group * kRanks + j < rank;
                a[j] = load_pack(A + (group * kRanks + j) * call.n_in + k, 1, there ? inside : 0, wide_A);
            }
#pragma unroll
            for (int row = 0; row < kRows; ++row) {
                if (!(mask >> row & 1u)) continue;
                const Pack<X> x = load_pack(call.x + (row0 + row) * call.x_stride + k, 1, inside, call.wide_x);
#pragma unroll
                for (int i = 0; i < kPack; ++i) {
                    const float value = to_float(x.item[i]);
#pragma unroll
                    for (int j = 0; j < kRanks; ++j) sums[row * kRanks + j] += to_float(a[j].item[i]) * value;
                }
            }
        }
        add_lanes(sums);
        shares[(part * kRows + lane / kRanks) * ranks + group * kRanks + lane % kRanks] = sums[0];
    }
}

template <typename X, typename W>
__device__ void expand(const Call<X, W>& call, const W* B, int rank, int64_t row0, unsigned mask, Shared& shared) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const int per_part = (rank + kWarps - 1) / kWarps;
    const int begin = warp * per_part, end = begin + per_part < rank ? begin + per_part : rank;
    const bool wide_B = call.wide_slot && rank % kPack == 0 && per_part % kPack == 0;
#pragma unroll 1
    for (int64_t group = blockIdx.x % call.blocks_per_tile; group * kWarp < call.n_out; group += call.blocks_per_tile) {
        const int64_t column = group * kWarp + lane;
        float sums[kRows] = {};
        for (int j = begin; j < end; j += kPack) {
            const int inside = column < call.n_out ? (end - j < kPack ? end - j : kPack) : 0;
            const Pack<W> b = load_pack(B + column * rank + j, 1, inside, wide_B);
#pragma unroll
            for (int row = 0; row < kRows; ++row) {
#pragma unroll
                for (int i = 0; i < kPack; ++i) {
                    if (i < inside) sums[row] += to_float(b.item[i]) * shared.h[row * kMaxRank + j + i];
                }
            }
        }
#pragma unroll
        for (int row = 0; row < kRows; ++row) shared.deltas[(warp * kRows + row) * kWarp + lane] = sums[row];
        __syncthreads();
        // A warp per row
        float delta = 0.0f;
#pragma unroll
        for (int part = 0; part < kWarps; ++part) delta += shared.deltas[(part * kRows + warp) * kWarp + lane];
        if (mask >> warp & 1u && column < call.n_out) {
            X* const to = call.y + (row0 + warp) * call.y_stride + column;
            *to = Rounded<X>::from(to_float(*to) + delta);
        }
        __syncthreads();
    }
}

template <typename X, typename W, int kBlocks>
__global__ void __launch_bounds__(kThreads, 1) lora_decode_kernel(Call<X, W> call) {
    Shared& shared = *static_cast<Shared*>(dynamic_shared());
    const int64_t row0 = int64_t(blockIdx.x / call.blocks_per_tile) * kRows;
    unsigned todo = 0;
#pragma unroll
    for (int row = 0; row < kRows; ++row) todo |= unsigned(call.slot_of(row0 + row) >= 0) << row;
    while (todo != 0) {  // the same in all threads of the cluster
        const int64_t slot = call.slot_of(row0 + __ffs(int(todo)) - 1);
        unsigned mask = 0;
#pragma unroll
        for (int row = 0; row < kRows; ++row) mask |= unsigned(call.slot_of(row0 + row) == slot) << row;
        todo &= ~mask;
        const int64_t* const entry = call.slots + slot * kSlotWidth;
        const W* const A = reinterpret_cast<const W*>(entry[0]);
        const W* const B = reinterpret_cast<const W*>(entry[1]);
        const int rank = int(entry[2]);
        const float scale = float_of(uint32_t(entry[5]));
        const int groups = (rank + kRanks - 1) / kRanks, ranks = groups * kRanks;
        // Warps that few ranks leave idle take a part of K
        const int n_parts = groups >= kWarps ? 1 : groups > 2 ? 2 : groups == 2 ? 4 : 8;
        const int part = int(threadIdx.x / kWarp) % n_parts;
        const int worker = (kBlocks > 1 ? cluster_rank() : 0) * n_parts + part;
        shrink(call, A, rank, row0, mask, worker, kBlocks * n_parts, part, n_parts, shared.shares);
        kBlocks > 1 ? cluster_sync() : __syncthreads();
        for (int at = threadIdx.x; at < kRows * rank; at += kThreads) {
            const int row = at / rank, j = at % rank;
            float sum = 0.0f;
            for (int block = 0; block < kBlocks; ++block) {
                const float* const shares = kBlocks > 1 ? shared_of(shared.shares, block) : shared.shares;
                for (int p = 0; p < n_parts; ++p) sum += shares[(p * kRows + row) * ranks + j];
            }
            shared.h[row * kMaxRank + j] = sum * scale;
        }
        kBlocks > 1 ? cluster_sync() : __syncthreads();  // nobody reads shares any more
        expand(call, B, rank, row0, mask, shared);
    }
}

template <typename X, typename W>
int start(const Call<X, W>& given, bool clusters, void* stream) {
    Call<X, W> call = given;
    const int64_t tiles = (call.n_rows + kRows - 1) / kRows, groups = (call.n_out + kWarp - 1) / kWarp;
    const int64_t blocks = clusters ? kClusterBlocks : 1;
    const int64_t wanted = (kTargetBlocks + tiles * blocks - 1) / (tiles * blocks);
    const int64_t useful = (groups + blocks - 1) / blocks;
    call.blocks_per_tile = int((wanted < useful ? wanted : useful) * blocks);
    const Grid grid{tiles * call.blocks_per_tile, kThreads, int(sizeof(Shared)), int(blocks)};
    return clusters ? launch(lora_decode_kernel<X, W, kClusterBlocks>, grid, stream, call)
                    : launch(lora_decode_kernel<X, W, 1>, grid, stream, call);
}

struct Arguments {
    const void* x;
    int64_t x_stride;
    void* y;
    int64_t y_stride, n_rows, n_in, n_out;
    const void* row_slot;
    bool wide_slots;
    const int64_t* slots;
    int64_t n_slots;
    bool aligned_slots, clusters;
    void* stream;
};

template <typename X, typename W>
int start(const Arguments& a) {
    Call<X, W> call = {};
    call.x = static_cast<const X*>(a.x);
    call.y = static_cast<X*>(a.y);
    call.x_stride = a.x_stride, call.y_stride = a.y_stride;
    call.n_rows = a.n_rows, call.n_in = a.n_in, call.n_out = a.n_out;
    call.row_slot = a.row_slot, call.wide_slots = a.wide_slots;
    call.slots = a.slots, call.n_slots = a.n_slots;
    call.wide_x = aligned(call.x) && a.x_stride % kPack == 0;
    call.wide_slot = a.aligned_slots;
    return start(call, a.clusters, a.stream);
}

template <typename X>
int start(const Arguments& a, int adapter_type) {
    if (adapter_type == 0) return start<X, float>(a);
    return adapter_type == 1 ? start<X, BFloat16>(a) : int(cudaErrorInvalidValue);
}

}  // namespace
}  // namespace rlhf::cuda

// Types: 0 float32, 1 bfloat16, 2 float16 (x and y only). clusters: the device has them.
RLHF_API int rlhf_lora_decode(const void* x, int64_t x_stride, void* y, int64_t y_stride, int type, int64_t n_rows,
                              int64_t n_in, int64_t n_out, const void* row_slot, int wide_slots, const int64_t* slots,
                              int64_t n_slots, int adapter_type, int aligned_slots, int clusters, void* stream) {
    using namespace rlhf::cuda;
    if (n_rows < 0 || n_in < 1 || n_out < 0 || n_slots < 0) return cudaErrorInvalidValue;
    if (n_rows == 0 || n_out == 0 || n_slots == 0) return cudaSuccess;
    if (!(x && y && row_slot && slots)) return cudaErrorInvalidValue;
    const Arguments all{x, x_stride, y, y_stride, n_rows, n_in, n_out, row_slot, wide_slots != 0,
                        slots, n_slots, aligned_slots != 0, clusters != 0, stream};
    if (type == 0) return start<float>(all, adapter_type);
    if (type == 1) return start<rlhf::BFloat16>(all, adapter_type);
    return type == 2 ? start<rlhf::Float16>(all, adapter_type) : int(cudaErrorInvalidValue);
}
