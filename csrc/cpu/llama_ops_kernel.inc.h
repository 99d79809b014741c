// The loops of llama_ops.cpp over one row, one head or one stretch of elements, in float; namespace RLHF_SET.
//
// The forward functions round where torch's sequence of elementwise ops does, to the dtype of the tensors, and where they do
// nothing else (rotate_head) they have its bits: nothing is fused there (the build forbids the compiler to, see setup.py).
// An activation and a norm by 1 + weight are float inside and round once.
// The sum of squares and the logistic function are those of decode_step_body.inc.h, to the bit. The gradients round once.

#include "cpu/llama_ops_rows.h"
#include "cpu/lanes.h"

namespace rlhf::cpu::RLHF_SET {
namespace block_rows {

using L = Lanes<float>;
using V = L::V;

// The next vector of a row with `left` elements from p on; zeros after its end.
template <typename T>
RLHF_INLINE V load(const T* p, int64_t left) {
    if (left >= L::count) return L::load(p);
    T padded[L::count] = {};
    std::memcpy(padded, p, sizeof(T) * left);
    return L::load(padded);
}

template <typename T>
RLHF_INLINE void store(T* p, int64_t left, V x) {
    if (left >= L::count) return L::store(p, x);
    T padded[L::count];
    L::store(padded, x);
    std::memcpy(p, padded, sizeof(T) * left);
}

// x as a tensor of T would hold it.
template <typename T>
RLHF_INLINE V rounded(V x) {
    if constexpr (sizeof(T) == sizeof(float)) {
        return x;
    } else {
        return (V)(bf16_bits(x) << 16);
    }
}

// y[i] = f(i, elements from i on), a vector each. Two at a time: words of 16 bits are put in order once for both, and one
// long chain of operations fills the gaps of the other.
template <typename T, typename F>
RLHF_INLINE void store_each(T* y, int64_t n, const F& f) {
    int64_t i = 0;
    for (; i + 2 * L::count <= n; i += 2 * L::count) {
        const V first = f(i, L::count), second = f(i + L::count, L::count);
        L::store_two(y + i, first, second);
    }
    for (; i < n; i += L::count) store(y + i, n - i, f(i, n - i));
}
#define RLHF_LANES [&](int64_t i, int64_t left) __attribute__((always_inline))

// A norm's rstd: every L::count-th square has a sum, and the sums are added up by halves, as in `rstd_of`.
template <typename T>
RLHF_INLINE float root_mean_square(const T* x, int64_t width, float eps) {
    V sums = {};
    for (int64_t i = 0; i < width; i += L::count) {
        const V v = load(x + i, width - i);
        sums = L::fma(v, v, sums);
    }
    float lanes[L::count];
    L::store(lanes, sums);
    for (int step = L::count / 2; step > 0; step /= 2) {
        for (int i = 0; i < step; ++i) lanes[i] += lanes[i + step];
    }
    return 1.0f / __builtin_sqrtf(lanes[0] / static_cast<float>(width) + eps);
}

template <typename T>
RLHF_INLINE float norm(const T* x, const T* weight, bool plus_one, float eps, int64_t width, T* y) {
    const float rstd = root_mean_square(x, width, eps);
    const V scale = L::splat(rstd);
    if (plus_one) {  // in float, rounded once
        store_each(y, width, RLHF_LANES { return (1.0f + load(weight + i, left)) * (load(x + i, left) * scale); });
    } else {
        store_each(y, width, RLHF_LANES { return load(weight + i, left) * rounded<T>(load(x + i, left) * scale); });
    }
    return rstd;
}

// With n = x rstd and g = dy weight, or dy (1 + weight): dx = rstd (g - n mean(g n)).
template <typename T>
RLHF_INLINE void norm_gradient(const T* dy, const T* x, const T* weight, bool plus_one, float rstd, int64_t width, T* dx) {
    V sums[2] = {};
    const V offset = L::splat(plus_one ? 1.0f : 0.0f);
    for (int64_t i = 0, side = 0; i < width; i += L::count, side ^= 1) {
        const V g = load(dy + i, width - i) * (load(weight + i, width - i) + offset);
        sums[side] = L::fma(g, load(x + i, width - i), sums[side]);
    }
    const double dot = lane_sum<float>(sums[0] + sums[1]);
    const V scale = L::splat(rstd), slope = L::splat(float(-dot * rstd * rstd * rstd / double(width)));
    store_each(dx, width, RLHF_LANES {
        const V g = load(dy + i, left) * (load(weight + i, left) + offset);
        return L::fma(slope, load(x + i, left), g * scale);
    });
}

// The halves (a, b) of a head become (a cos - b sin, b cos + a sin), with the angles of either half.
template <typename T>
RLHF_INLINE void rotate(const T* x, const T* cos, const T* sin, int64_t half, T* y) {
    for (int64_t i = 0; i < half; i += L::count) {
        const int64_t left = half - i;
        const V a = load(x + i, left), b = load(x + half + i, left);
        const V a_cos = rounded<T>(a * load(cos + i, left)), b_sin = rounded<T>(b * load(sin + i, left));
        const V b_cos = rounded<T>(b * load(cos + half + i, left)), a_sin = rounded<T>(a * load(sin + half + i, left));
        store(y + i, left, a_cos - b_sin);
        store(y + half + i, left, b_cos + a_sin);
    }
}

template <typename T>
RLHF_INLINE void rotate_back(const T* dy, const T* cos, const T* sin, int64_t half, T* dx) {
    for (int64_t i = 0; i < half; i += L::count) {
        const int64_t left = half - i;
        const V da = load(dy + i, left), db = load(dy + half + i, left);
        store(dx + i, left, L::fma(da, load(cos + i, left), db * load(sin + half + i, left)));
        store(dx + half + i, left, L::fma(db, load(cos + half + i, left), -(da * load(sin + i, left))));
    }
}

template <typename T>
RLHF_INLINE V gated(V gate, V up) {
    return rounded<T>(gate / (1.0f + L::exp(-gate))) * up;
}

template <typename T>
RLHF_INLINE void swiglu(const T* gate, const T* up, int64_t n, T* y) {
    store_each(y, n, RLHF_LANES { return gated<T>(load(gate + i, left), load(up + i, left)); });
}

struct GatedGradients {
    V gate, up;
};

// With s = 1 / (1 + e^-gate): d_up = dy gate s, d_gate = dy up s (1 + gate (1 - s)).
RLHF_INLINE GatedGradients gated_gradients(V dy, V gate, V up) {
    const V s = 1.0f / (1.0f + L::exp(-gate));
    return {dy * up * (s * L::fma(gate, 1.0f - s, L::splat(1.0f))), dy * (gate * s)};
}

// Two vectors at a time, as in `store_each`.
template <typename T>
RLHF_INLINE void swiglu_gradient(const T* dy, const T* gate, const T* up, int64_t n, T* d_gate, T* d_up) {
    int64_t i = 0;
    for (; i + 2 * L::count <= n; i += 2 * L::count) {
        const int64_t k = i + L::count;
        const GatedGradients a = gated_gradients(L::load(dy + i), L::load(gate + i), L::load(up + i));
        const GatedGradients b = gated_gradients(L::load(dy + k), L::load(gate + k), L::load(up + k));
        L::store_two(d_up + i, a.up, b.up);
        L::store_two(d_gate + i, a.gate, b.gate);
    }
    for (; i < n; i += L::count) {
        const int64_t left = n - i;
        const GatedGradients a = gated_gradients(load(dy + i, left), load(gate + i, left), load(up + i, left));
        store(d_up + i, left, a.up);
        store(d_gate + i, left, a.gate);
    }
}

// Beyond these bounds a share is 0 or 1 and its slope 0, but infinity times 0 would be NaN.
RLHF_INLINE V within_bounds(V x) { return L::at_least(L::at_most(x, L::splat(128.0f)), L::splat(-128.0f)); }

// x s with s = 1 / (1 + e^-z) and z = x (a + b x^2).
struct Sigmoid {
    V a, b;
};

RLHF_INLINE V value(Sigmoid f, V x) {
    const V v = within_bounds(x);
    return x / (1.0f + L::exp(-(v * L::fma(f.b, v * v, f.a))));
}

// s + x s (1 - s) dz/dx. 1 - s is e^-z s, of which no digit cancels where s is near 1; e^-z stays below infinity.
RLHF_INLINE V slope(Sigmoid f, V x) {
    const V v = within_bounds(x), square = v * v;
    const V e = L::exp(L::at_most(-(v * L::fma(f.b, square, f.a)), L::splat(88.0f)));
    const V s = 1.0f / (1.0f + e);
    return s * L::fma(v * L::fma(3.0f * f.b, square, f.a), e * s, L::splat(1.0f));
}

// x P with P = (1 + erf(x / sqrt 2)) / 2, the share of a normal distribution that lies below x.
struct Normal {};

struct Distribution {
    V share, density;
};

// Above u = |x| lies the share Q = e^(-u^2 / 2) R(u), and R is t times a polynomial in t = 1 / (1 + u / 4), fitted on
// [0, 14.5] for the least relative error, 2.4e-8 with these coefficients. u^2 has twice the digits of u: `head` has twelve
// of them, so its square is exact, and what rounding takes from the exponent is given back to the exponential.
RLHF_INLINE Distribution distribution(V x) {
    const V v = within_bounds(x);
    const V u = (V)((L::Ints)v & 0x7fffffff), head = (V)((L::Ints)u & ~0xfff);
    const V most = -0.5f * (head * head), rest = -0.5f * ((u - head) * (u + head)), exponent = most + rest;
    const V rounded_off = rest - (exponent - most);
    V e = L::exp(exponent);
    e = L::fma(e, rounded_off, e);
    const V t = 1.0f / L::fma(L::splat(0.25f), u, L::splat(1.0f));
    V p = L::splat(0x1.14c3dp-6f);
    p = L::fma(p, t, L::splat(-0x1.085808p-4f));
    p = L::fma(p, t, L::splat(0x1.c9c35p-5f));
    p = L::fma(p, t, L::splat(0x1.72762ap-6f));
    p = L::fma(p, t, L::splat(0x1.228fcep-6f));
    p = L::fma(p, t, L::splat(0x1.577484p-4f));
    p = L::fma(p, t, L::splat(0x1.2b0f6ep-4f));
    p = L::fma(p, t, L::splat(0x1.864c92p-4f));
    p = L::fma(p, t, L::splat(0x1.97a3dp-4f));
    p = L::fma(p, t, L::splat(0x1.988f9cp-4f));
    const V above = e * (t * p);
    return {L::select(L::lt(v, L::splat(0.0f)), above, 1.0f - above), 0.3989422804f * e};
}

RLHF_INLINE V value(Normal, V x) { return x * distribution(x).share; }

RLHF_INLINE V slope(Normal, V x) {
    const Distribution d = distribution(x);
    return L::fma(within_bounds(x), d.density, d.share);
}

template <typename F, typename T>
RLHF_INLINE void activation(F f, const T* x, int64_t n, T* y) {
    store_each(y, n, RLHF_LANES { return value(f, load(x + i, left)); });
}

template <typename F, typename T>
RLHF_INLINE void activation_gradient(F f, const T* dy, const T* x, int64_t n, T* dx) {
    store_each(dx, n, RLHF_LANES { return load(dy + i, left) * slope(f, load(x + i, left)); });
}
#undef RLHF_LANES

}  // namespace block_rows

#define RLHF_DEFINE_ROWS(T)                                                                                          \
    float norm_row(const T* x, const T* weight, bool plus_one, float eps, int64_t width, T* y) {                     \
        return block_rows::norm(x, weight, plus_one, eps, width, y);                                                 \
    }                                                                                                                \
    void norm_gradient_row(const T* dy, const T* x, const T* weight, bool plus_one, float rstd, int64_t width, T* dx) { \
        block_rows::norm_gradient(dy, x, weight, plus_one, rstd, width, dx);                                         \
    }                                                                                                                \
    void rotate_head(const T* x, const T* cos, const T* sin, int64_t half, T* y) { block_rows::rotate(x, cos, sin, half, y); }   \
    void rotate_back_head(const T* dy, const T* cos, const T* sin, int64_t half, T* dx) {                            \
        block_rows::rotate_back(dy, cos, sin, half, dx);                                                                         \
    }                                                                                                                \
    void swiglu_stretch(const T* gate, const T* up, int64_t n, T* y) { block_rows::swiglu(gate, up, n, y); }            \
    void swiglu_gradient_stretch(const T* dy, const T* gate, const T* up, int64_t n, T* d_gate, T* d_up) {           \
        block_rows::swiglu_gradient(dy, gate, up, n, d_gate, d_up);                                                              \
    }                                                                                                                \
    void activation_stretch(const T* x, Share share, int64_t n, T* y) {                                              \
        using namespace block_rows;                                                                                  \
        if (share.is_normal) return activation(Normal{}, x, n, y);                                                   \
        activation(Sigmoid{L::splat(share.a), L::splat(share.b)}, x, n, y);                                          \
    }                                                                                                                \
    void activation_gradient_stretch(const T* dy, const T* x, Share share, int64_t n, T* dx) {                       \
        using namespace block_rows;                                                                                  \
        if (share.is_normal) return activation_gradient(Normal{}, dy, x, n, dx);                                     \
        activation_gradient(Sigmoid{L::splat(share.a), L::splat(share.b)}, dy, x, n, dx);                            \
    }
RLHF_DEFINE_ROWS(float)
RLHF_DEFINE_ROWS(uint16_t)
#undef RLHF_DEFINE_ROWS

}  // namespace rlhf::cpu::RLHF_SET
