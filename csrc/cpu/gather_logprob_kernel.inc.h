// One row of gather_logprob.cpp; namespace RLHF_SET. The logits are read tile by tile, twice while a tile is in the
// first cache: for its maximum, then for the sums, which are rescaled when the running maximum has risen.

#include "cpu/gather_logprob_rows.h"
#include "cpu/lanes.h"

namespace rlhf::cpu::RLHF_SET {
namespace gather_rows {

// Elements of a tile: 128 per lane, 8 KiB of fp32 with AVX-512.
template <typename T>
constexpr int kTile = 128 * Lanes<T>::count;

// How elements of type S are read and written as lanes of T.
template <typename S>
struct Storage {
    using T = S;
    RLHF_INLINE typename Lanes<T>::V load(const S* p) { return Lanes<T>::load(p); }
    RLHF_INLINE void store(S* p, typename Lanes<T>::V x) { Lanes<T>::store(p, x); }
    RLHF_INLINE void store_two(S* p, typename Lanes<T>::V a, typename Lanes<T>::V b) {
        store(p, a);
        store(p + Lanes<T>::count, b);
    }
    RLHF_INLINE typename Lanes<T>::V probability(typename Lanes<T>::V log_p) { return Lanes<T>::exp(log_p); }
};
template <>
struct Storage<Bfloat16> {
    using T = float;
    RLHF_INLINE Lanes<T>::V load(const Bfloat16* p) { return Lanes<T>::load(&p->bits); }
    RLHF_INLINE void store(Bfloat16* p, Lanes<T>::V x) { Lanes<T>::store(&p->bits, x); }
    RLHF_INLINE void store_two(Bfloat16* p, Lanes<T>::V a, Lanes<T>::V b) { Lanes<T>::store_two(&p->bits, a, b); }
    // The result is rounded to 8 bits: an error in the last digits of log_p is nothing.
    RLHF_INLINE Lanes<T>::V probability(Lanes<T>::V log_p) {
        return Lanes<T>::exp2_of_negative(log_p * Lanes<T>::splat(1.4426950408889634f));
    }
};

template <typename T>
constexpr T kLowest = sizeof(T) == sizeof(float) ? T(-3.402823466e+38) : T(-1.7976931348623157e+308);

// Below it e^y is 0: where y stands beside e^y it may end here, so that -inf does not make NaN of the product.
template <typename T>
constexpr T kNoChance = T(-1000);

// A vector whose first `n` lanes are those at p and whose others hold `fill`.
template <typename S, typename T = typename Storage<S>::T>
RLHF_INLINE typename Lanes<T>::V load_some(const S* p, int64_t n, T fill) {
    using L = Lanes<T>;
    S some[L::count] = {};
    std::memcpy(some, p, sizeof(S) * n);
    T lanes[L::count];
    L::store(lanes, Storage<S>::load(some));
    for (int64_t i = n; i < L::count; ++i) lanes[i] = fill;
    return L::load(lanes);
}

template <typename S, typename T = typename Storage<S>::T>
RLHF_INLINE T element(const S* p) {
    T lanes[Lanes<T>::count];
    Lanes<T>::store(lanes, load_some(p, 1, T(0)));
    return lanes[0];
}

// The largest of n elements; -inf if there is none, NaN are passed over or returned.
template <typename S, typename T = typename Storage<S>::T>
RLHF_INLINE T largest(const S* p, int64_t n) {
    using L = Lanes<T>;
    const T none = -__builtin_inf();
    typename L::V top = L::splat(none), second = top;
    int64_t i = 0;
    for (; i + 2 * L::count <= n; i += 2 * L::count) {
        top = L::at_least(Storage<S>::load(p + i), top);
        second = L::at_least(Storage<S>::load(p + i + L::count), second);
    }
    for (; i < n; i += L::count) {
        const int64_t left = n - i < L::count ? n - i : L::count;
        top = L::at_least(load_some(p + i, left, none), top);
    }
    top = L::at_least(second, top);
    T lanes[L::count], result = none;
    L::store(lanes, top);
    for (T lane : lanes) result = lane > result || lane != lane ? lane : result;
    return result;
}

template <typename V>
struct TileSums {
    V exp = {}, weighted = {}, squares = {}, logits = {};
};

// x: logits; shift: the maximum so far; y = (x - shift) / temperature, at most 0. inverse2: of the temperature times ln2.
template <typename T, typename V = typename Lanes<T>::V>
RLHF_INLINE void add(V x, V shift, V inverse, V inverse2, int wants, TileSums<V>& sums) {
    using L = Lanes<T>;
    const V gap = x - shift;
    const V e = L::exp2_of_negative(gap * inverse2);
    sums.exp += e;
    if (wants & kWantEntropy) {
        sums.weighted = L::fma(L::at_least(gap * inverse, L::splat(kNoChance<T>)), e, sums.weighted);
    }
    if (wants & kWantSquares) sums.squares = L::fma(e, e, sums.squares);
}

// First position of a NaN, as torch.argmax has it; vocab if there is none.
template <typename S>
RLHF_INLINE int64_t first_nan(const S* row, int64_t vocab) {
    for (int64_t i = 0; i < vocab; ++i) {
        const auto x = element(row + i);
        if (x != x) return i;
    }
    return vocab;
}

template <typename S, typename T = typename Storage<S>::T>
RLHF_INLINE void forward(const S* row, int64_t vocab, int64_t target, double temperature, int wants,
                         RowStatistics* out) {
    using L = Lanes<T>;
    using V = typename L::V;
    const V inverse = L::splat(T(1 / temperature));
    const V inverse2 = L::splat(T(1.4426950408889634 / temperature));
    const double infinity = __builtin_inf();
    double top = -infinity, before_target = -infinity;
    double total = 0, weighted = 0, squares = 0, sum = 0;
    for (int64_t begin = 0; begin < vocab; begin += kTile<T>) {
        const S* tile = row + begin;
        const int64_t n = vocab - begin < kTile<T> ? vocab - begin : kTile<T>;
        if ((wants & kWantTop1) && target >= begin && target < begin + n) {
            const double inside = largest(tile, target - begin);
            before_target = inside > top ? inside : top;
        }
        const double tile_top = largest(tile, n);
        if (tile_top > top) {
            if (top > -infinity) {
                const double change = (top - tile_top) / temperature, factor = __builtin_exp(change);
                if (factor > 0) weighted = factor * (weighted + change * total);
                else weighted = 0;
                total *= factor;
                squares *= factor * factor;
            }
            top = tile_top;
        }
        const V shift = L::splat(T(top > kLowest<T> ? top : kLowest<T>));  // a row of -inf has no finite maximum
        TileSums<V> sums;
        int64_t i = 0;
        for (; i + L::count <= n; i += L::count) {
            __builtin_prefetch(tile + kTile<T> + i);  // or the next maximum would wait for memory, with nothing to compute
            const V x = Storage<S>::load(tile + i);
            add<T>(x, shift, inverse, inverse2, wants, sums);
            sums.logits += x;
        }
        if (i < n) {
            add<T>(load_some(tile + i, n - i, T(-infinity)), shift, inverse, inverse2, wants, sums);
            sums.logits += load_some(tile + i, n - i, T(0));
        }
        total += lane_sum<T>(sums.exp);
        weighted += lane_sum<T>(sums.weighted);
        squares += lane_sum<T>(sums.squares);
        sum += lane_sum<T>(sums.logits);
    }
    const double shift = top > kLowest<T> ? top : kLowest<T>;
    const double log_total = __builtin_log(total), at_target = element(row + target);
    out->logprob = (at_target - shift) / temperature - log_total;
    out->lse = shift / temperature + log_total;
    out->entropy = log_total - weighted / total;
    out->mean_logit = sum / double(vocab) / temperature;
    out->log_sum_sq_prob = __builtin_log(squares) - 2 * log_total;
    out->is_top1 = at_target > before_target || target == 0 ? at_target >= top : 0;
    if ((wants & kWantTop1) && total != total) {
        const int64_t nan = first_nan(row, vocab);
        if (nan < vocab) out->is_top1 = nan == target;
    }
}

// d_row = (p (on_p - on_log_p (log p + entropy) + on_p_squared p) + everywhere + at_target [j = t]) / temperature
template <bool kHasEntropy, bool kHasSquares, typename S, typename T = typename Storage<S>::T>
RLHF_INLINE void backward_of(const S* row, int64_t vocab, int64_t target, double temperature, const RowSlopes& slopes,
                          S* d_row) {
    using L = Lanes<T>;
    using V = typename L::V;
    // z = x / temperature as division rounds it, so that it meets the rounded lse: in a row of one certain token, z - lse
    // is 0 and not the rounding of lse. The reciprocal comes in two parts for that, where multiply-add rounds once.
    const V divisor = L::splat(T(temperature));
    const V inverse = L::splat(T(1 / temperature));
    const V inverse_rest = L::splat(T(1 / temperature - double(T(1 / temperature))));
    const V lse = L::splat(T(slopes.lse)), finite = L::splat(kLowest<T>), no_chance = L::splat(kNoChance<T>);
    const V on_p = L::splat(T(slopes.on_p / temperature)), on_log_p = L::splat(T(-slopes.on_log_p / temperature));
    const V entropy = L::splat(T(slopes.entropy)), squares = L::splat(T(slopes.on_p_squared / temperature));
    const V everywhere = L::splat(T(slopes.everywhere / temperature));
    const auto gradient = [&](V x) __attribute__((always_inline)) {
        const V held = L::at_least(x, finite);  // -inf times a rest of 0 would be NaN
        const V z = kFused ? L::fma(held, inverse, held * inverse_rest) : held / divisor;
        const V log_p = z - lse;
        const V p = Storage<S>::probability(log_p);
        V factor = on_p;
        if (kHasEntropy) factor = L::fma(on_log_p, L::at_least(log_p, no_chance) + entropy, factor);
        if (kHasSquares) factor = L::fma(squares, p, factor);
        return L::fma(p, factor, everywhere);
    };
    // The target's own, before the row may be overwritten.
    const V there = gradient(load_some(row + target, 1, T(0))) + L::splat(T(slopes.at_target / temperature));
    int64_t i = 0;
    for (; i + 2 * L::count <= vocab; i += 2 * L::count) {
        const V first = gradient(Storage<S>::load(row + i)), second = gradient(Storage<S>::load(row + i + L::count));
        Storage<S>::store_two(d_row + i, first, second);
    }
    for (; i + L::count <= vocab; i += L::count) Storage<S>::store(d_row + i, gradient(Storage<S>::load(row + i)));
    S some[L::count];
    if (i < vocab) {
        Storage<S>::store(some, gradient(load_some(row + i, vocab - i, T(0))));
        std::memcpy(d_row + i, some, sizeof(S) * (vocab - i));
    }
    Storage<S>::store(some, there);
    d_row[target] = some[0];
}

// What a loss does not use is in no loop: registers are few, and with AVX2 in fp32 a tenth of the time went to it.
template <typename S>
RLHF_INLINE void backward(const S* row, int64_t vocab, int64_t target, double temperature, const RowSlopes& slopes,
                          S* d_row) {
    const bool has_entropy = slopes.on_log_p != 0, has_squares = slopes.on_p_squared != 0;
    if (!has_entropy && !has_squares) return backward_of<false, false>(row, vocab, target, temperature, slopes, d_row);
    if (!has_squares) return backward_of<true, false>(row, vocab, target, temperature, slopes, d_row);
    if (!has_entropy) return backward_of<false, true>(row, vocab, target, temperature, slopes, d_row);
    backward_of<true, true>(row, vocab, target, temperature, slopes, d_row);
}

}  // namespace gather_rows

#define RLHF_DEFINE_ROWS(S)                                                                                    \
    void row_forward(const S* row, int64_t vocab, int64_t target, double temperature, int wants,               \
                     RowStatistics* out) {                                                                     \
        gather_rows::forward(row, vocab, target, temperature, wants, out);                                                  \
    }                                                                                                          \
    void row_backward(const S* row, int64_t vocab, int64_t target, double temperature, const RowSlopes& slopes, \
                      S* d_row) {                                                                              \
        gather_rows::backward(row, vocab, target, temperature, slopes, d_row);                                              \
    }
RLHF_DEFINE_ROWS(float)
RLHF_DEFINE_ROWS(double)
RLHF_DEFINE_ROWS(Bfloat16)
#undef RLHF_DEFINE_ROWS

}  // namespace rlhf::cpu::RLHF_SET
