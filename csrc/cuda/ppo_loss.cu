// PPO policy loss and value loss over `count` dense tokens, with their statistics and gradients.
//
// Contract. Terms per token: common/ppo_terms.h; equations: kernels/rlhf_kernels/ppo_loss. Reads per-token arrays, a mask
// (bytes, or weights in T) and denom [1]; writes every element of loss [1], statistics (in the order of PpoLossOutputs
// and ValueLossOutputs after `loss`) and slope [count] = d loss / d input, accumulating nothing that was there before.
// Where the mask is 0 nothing of a token is used (NaN included) and its gradient is 0. Optional arrays may be null.
// Arithmetic is in T. One pass over the tokens leaves partial sums in `workspace`, a second kernel of one block adds
// them up; see cuda/reduce.cuh for the order.

#include "common/ppo_terms.h"
#include "cuda/reduce.cuh"

namespace rlhf::cuda {
namespace {

template <typename T>
struct Mask {
    const uint8_t* bytes;  // or null
    const T* weights;      // or null

    __device__ Pack<T> load(int64_t begin, int inside, bool wide) const {
        if (weights) return load_pack(weights + begin, 1, inside, wide);
        const Pack<uint8_t> narrow = load_pack(bytes + begin, 1, inside, wide);
        Pack<T> pack;
#pragma unroll
        for (int i = 0; i < kPack; ++i) pack.item[i] = T(narrow.item[i] != 0);
        return pack;
    }
    bool wide() const { return weights ? aligned(weights) : aligned(bytes); }
    bool missing() const { return !weights && !bytes; }
};

template <typename T>
Mask<T> mask_of(const void* data, int is_bytes) {
    Mask<T> mask{nullptr, nullptr};
    if (is_bytes) mask.bytes = static_cast<const uint8_t*>(data);
    else mask.weights = static_cast<const T*>(data);
    return mask;
}

template <typename T>
__device__ __forceinline__ Pack<T> load_optional(const T* data, int64_t begin, int inside, bool wide) {
    return load_pack(data ? data + begin : nullptr, 1, data ? inside : 0, wide);
}

// --- policy loss --------------------------------------------------------------------------------------------------

enum PolicySum { kPolicy, kKl, kEntropy, kLow, kHigh, kApproxKl, kRatio, kRatioMax, kPolicySums };

template <typename T>
struct PolicyInputs {
    const T *new_logprob, *old_logprob, *advantage;
    const T *ref_logprob, *entropy;  // or null
    Mask<T> mask;
    const T* denom;
    int64_t count;
    bool wide;
    ClipRange<T> clip;
    KlEstimator kl;
    T kl_coef, entropy_coef;
};

template <typename T>
__global__ void __launch_bounds__(kReduceThreads) policy_kernel(PolicyInputs<T> in, T* slope, T* partials) {
    T sums[kPolicySums] = {};
    const T denom = *in.denom;
    for_packs(in.count, [&](int64_t begin, int inside) {
        const Pack<T> weight = in.mask.load(begin, inside, in.wide);
        const Pack<T> now = load_pack(in.new_logprob + begin, 1, inside, in.wide);
        const Pack<T> old = load_pack(in.old_logprob + begin, 1, inside, in.wide);
        const Pack<T> advantage = load_pack(in.advantage + begin, 1, inside, in.wide);
        const Pack<T> ref = load_optional(in.ref_logprob, begin, inside, in.wide);
        const Pack<T> entropy = load_optional(in.entropy, begin, inside, in.wide);
        Pack<T> out;
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
            const T w = weight.item[i];
            out.item[i] = T(0);
            if (w != T(0)) {
                const PolicyTerms<T> policy = policy_terms(now.item[i], old.item[i], advantage.item[i], in.clip);
                T token_slope = policy.slope;
                sums[kPolicy] += w * policy.loss;
                sums[kLow] += w * T(policy.clipped_low);
                sums[kHigh] += w * T(policy.clipped_high);
                sums[kApproxKl] += w * policy.approx_kl;
                sums[kRatio] += w * policy.ratio;
                sums[kRatioMax] = max_with_nan(sums[kRatioMax], policy.ratio);
                if (in.ref_logprob) {
                    const KlTerms<T> kl = kl_terms(now.item[i], ref.item[i], in.kl);
                    sums[kKl] += w * kl.value;
                    if (in.kl_coef != T(0)) token_slope += in.kl_coef * kl.slope;
                }
                if (in.entropy) sums[kEntropy] += w * entropy.item[i];
                out.item[i] = w * token_slope / denom;
            }
        }
        store_pack(slope + begin, out, inside, in.wide);
    });
    leave_partials<T, kPolicySums, kRatioMax>(sums, partials);
}

template <typename T>
__global__ void __launch_bounds__(kReduceThreads)
policy_statistics_kernel(const T* partials, int blocks, PolicyInputs<T> in, T* loss, T* statistics) {
    T sums[kPolicySums];
    collect_partials<T, kPolicySums, kRatioMax>(partials, blocks, sums);
    if (threadIdx.x != 0) return;
    const T denom = *in.denom;
    const T policy = sums[kPolicy] / denom, kl = sums[kKl] / denom, entropy = sums[kEntropy] / denom;
    const T low = sums[kLow] / denom, high = sums[kHigh] / denom;
    T total = policy;
    if (in.ref_logprob && in.kl_coef != T(0)) total += in.kl_coef * kl;
    if (in.entropy && in.entropy_coef != T(0)) total -= in.entropy_coef * entropy;
    *loss = total;
    statistics[0] = policy;
    statistics[1] = kl;
    statistics[2] = entropy;
    statistics[3] = low + high;
    statistics[4] = low;
    statistics[5] = high;
    statistics[6] = sums[kApproxKl] / denom;
    statistics[7] = sums[kRatio] / denom;
    statistics[8] = sums[kRatioMax];
}

// d_new = grad_loss slope; d_entropy = -entropy_coef grad_loss mask / denom. Either may be null.
template <typename T>
__global__ void __launch_bounds__(kReduceThreads)
policy_gradient_kernel(const T* grad_loss, const T* slope, Mask<T> mask, const T* denom, T entropy_coef, int64_t count,
                       bool wide, T* d_new, T* d_entropy) {
    const T g = *grad_loss, of_entropy = d_entropy ? -entropy_coef * g : T(0), n = d_entropy ? *denom : T(1);
    for_packs(count, [&](int64_t begin, int inside) {
        if (d_new) {
            Pack<T> pack = load_pack(slope + begin, 1, inside, wide);
#pragma unroll
            for (int i = 0; i < kPack; ++i) pack.item[i] *= g;
            store_pack(d_new + begin, pack, inside, wide);
        }
        if (d_entropy) {
            Pack<T> pack = mask.load(begin, inside, wide);
#pragma unroll
            for (int i = 0; i < kPack; ++i) pack.item[i] = of_entropy * pack.item[i] / n;
            store_pack(d_entropy + begin, pack, inside, wide);
        }
    });
}

// --- value loss ---------------------------------------------------------------------------------------------------

enum ValueSum { kWorst, kClipped, kCount, kError, kErrorSquare, kRet, kRetSquare, kValueSums };

template <typename T>
struct ValueInputs {
    const T *value, *old_value, *ret;  // old_value may be null: no clipping
    Mask<T> mask;
    const T* denom;
    int64_t count;
    bool wide;
    T clip;
};

template <typename T>
__global__ void __launch_bounds__(kReduceThreads) value_kernel(ValueInputs<T> in, T* slope, T* partials) {
    T sums[kValueSums] = {};
    const T denom = *in.denom;
    for_packs(in.count, [&](int64_t begin, int inside) {
        const Pack<T> weight = in.mask.load(begin, inside, in.wide);
        const Pack<T> value = load_pack(in.value + begin, 1, inside, in.wide);
        const Pack<T> old = load_optional(in.old_value, begin, inside, in.wide);
        const Pack<T> ret = load_pack(in.ret + begin, 1, inside, in.wide);
        Pack<T> out;
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
            const T w = weight.item[i], target = ret.item[i];
            out.item[i] = T(0);
            if (w != T(0)) {
                const bool has_clip = in.old_value != nullptr;
                const ValueTerms<T> terms = value_terms(value.item[i], old.item[i], target, in.clip, has_clip);
                sums[kWorst] += w * terms.worst;
                sums[kClipped] += w * T(terms.clipped);
                sums[kCount] += w;
                sums[kError] -= w * terms.error;
                sums[kErrorSquare] += w * (terms.error * terms.error);
                sums[kRet] += w * target;
                sums[kRetSquare] += w * (target * target);
                out.item[i] = w * terms.slope / denom;
            }
        }
        store_pack(slope + begin, out, inside, in.wide);
    });
    leave_partials<T, kValueSums>(sums, partials);
}

template <typename T>
__global__ void __launch_bounds__(kReduceThreads)
value_statistics_kernel(const T* partials, int blocks, const T* denom, T* loss, T* statistics) {
    T sums[kValueSums];
    collect_partials<T, kValueSums>(partials, blocks, sums);
    if (threadIdx.x != 0) return;
    *loss = T(0.5) * sums[kWorst] / *denom;
    statistics[0] = sums[kClipped] / *denom;
    statistics[1] = sums[kCount];
    statistics[2] = sums[kError];
    statistics[3] = sums[kErrorSquare];
    statistics[4] = sums[kRet];
    statistics[5] = sums[kRetSquare];
}

// --- launches -----------------------------------------------------------------------------------------------------

template <typename T>
int policy_forward(PolicyInputs<T> in, T* workspace, T* loss, T* statistics, T* slope, void* stream) {
    const bool complete = in.new_logprob && in.old_logprob && in.advantage && !in.mask.missing() && slope;
    if (in.count < 0 || (in.count > 0 && !complete)) return cudaErrorInvalidValue;
    if (!in.denom || !workspace || !loss || !statistics) return cudaErrorInvalidValue;
    if (in.ref_logprob && in.kl == KlEstimator::none) return cudaErrorInvalidValue;
    in.wide = aligned(in.new_logprob) && aligned(in.old_logprob) && aligned(in.advantage) && in.mask.wide() &&
              aligned(in.ref_logprob) && aligned(in.entropy) && aligned(slope);
    const int64_t blocks = reduce_blocks(in.count);
    RLHF_RETURN_IF_ERROR(launch(policy_kernel<T>, blocks, kReduceThreads, stream, in, slope, workspace));
    return launch(policy_statistics_kernel<T>, 1, kReduceThreads, stream, workspace, int(blocks), in, loss, statistics);
}

template <typename T>
int policy_backward(const T* grad_loss, const T* slope, Mask<T> mask, const T* denom, double entropy_coef,
                    int64_t count, T* d_new, T* d_entropy, void* stream) {
    if (count < 0 || !grad_loss) return cudaErrorInvalidValue;
    if (count == 0) return cudaSuccess;
    if ((d_new && !slope) || (d_entropy && (mask.missing() || !denom))) return cudaErrorInvalidValue;
    const bool wide = aligned(slope) && mask.wide() && aligned(d_new) && aligned(d_entropy);
    return launch(policy_gradient_kernel<T>, reduce_blocks(count), kReduceThreads, stream, grad_loss, slope, mask,
                  denom, T(entropy_coef), count, wide, d_new, d_entropy);
}

template <typename T>
int value_forward(ValueInputs<T> in, T* workspace, T* loss, T* statistics, T* slope, void* stream) {
    const bool complete = in.value && in.ret && !in.mask.missing() && slope;
    if (in.count < 0 || (in.count > 0 && !complete)) return cudaErrorInvalidValue;
    if (!in.denom || !workspace || !loss || !statistics) return cudaErrorInvalidValue;
    in.wide = aligned(in.value) && aligned(in.old_value) && aligned(in.ret) && in.mask.wide() && aligned(slope);
    const int64_t blocks = reduce_blocks(in.count);
    RLHF_RETURN_IF_ERROR(launch(value_kernel<T>, blocks, kReduceThreads, stream, in, slope, workspace));
    return launch(value_statistics_kernel<T>, 1, kReduceThreads, stream, workspace, int(blocks), in.denom, loss,
                  statistics);
}

}  // namespace
}  // namespace rlhf::cuda

// low, high: 1 - clip_low and 1 + clip_high. dual_clip: 0 for none. kl: 1, 2, 3 for k1, k2, k3.
#define RLHF_DEFINE(T, dtype)                                                                                          \
    RLHF_API int rlhf_ppo_loss_forward_##dtype(                                                                        \
        const T* new_logprob, const T* old_logprob, const T* advantage, const void* mask, int mask_is_bytes,           \
        const T* denom, const T* ref_logprob, const T* entropy, int64_t count, double low, double high,                \
        double dual_clip, int kl, double kl_coef, double entropy_coef, T* workspace, T* loss, T* statistics, T* slope, \
        void* stream) {                                                                                                \
        using namespace rlhf;                                                                                          \
        if (kl < 0 || kl > 3) return cudaErrorInvalidValue;                                                            \
        return cuda::policy_forward<T>(                                                                                \
            {new_logprob, old_logprob, advantage, ref_logprob, entropy, cuda::mask_of<T>(mask, mask_is_bytes), denom,  \
             count, false, {T(low), T(high), T(dual_clip), dual_clip != 0.0}, KlEstimator(kl), T(kl_coef),             \
             T(entropy_coef)},                                                                                         \
            workspace, loss, statistics, slope, stream);                                                               \
    }                                                                                                                  \
    RLHF_API int rlhf_ppo_loss_backward_##dtype(const T* grad_loss, const T* slope, const void* mask,                  \
                                                int mask_is_bytes, const T* denom, double entropy_coef, int64_t count, \
                                                T* d_new, T* d_entropy, void* stream) {                                \
        return rlhf::cuda::policy_backward<T>(grad_loss, slope, rlhf::cuda::mask_of<T>(mask, mask_is_bytes), denom,    \
                                              entropy_coef, count, d_new, d_entropy, stream);                          \
    }                                                                                                                  \
    RLHF_API int rlhf_value_loss_forward_##dtype(const T* value, const T* old_value, const T* ret, const void* mask,   \
                                                 int mask_is_bytes, const T* denom, int64_t count, double clip,        \
                                                 T* workspace, T* loss, T* statistics, T* slope, void* stream) {       \
        return rlhf::cuda::value_forward<T>({value, old_value, ret, rlhf::cuda::mask_of<T>(mask, mask_is_bytes),       \
                                             denom, count, false, T(clip)},                                            \
                                            workspace, loss, statistics, slope, stream);                               \
    }
RLHF_DEFINE(float, float32)
RLHF_DEFINE(double, float64)
