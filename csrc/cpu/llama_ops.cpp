// RMS norm, rotary embedding, the gated MLP's product and activations.
//
// Contract. Equations: kernels/rlhf_kernels/llama_ops/__init__.py. Every element of the output is written, nothing is
// accumulated. x, dy of a norm [rows, width], weight [width], rstd [rows], gate, up, dy of the product, x, dy of an activation: dense. Heads
// [batch, heads, tokens, dim] have strides of their own and dim is even; what comes out is dense as [batch, tokens, heads,
// dim], where the projections put them. cos, sin [1 or batch, tokens, dim] are dense within one sequence. Arithmetic is
// float; rotary_apply has the bits of torch's elementwise ops, and the other forward functions those of decode_step.cpp. An
// element of the product or of an activation depends on nothing but itself, and rows of a norm do not interact: the bits depend neither on the
// number of rows, nor on where in memory they lie, nor on the number of threads.

#include "cpu/llama_ops.h"

#include <algorithm>

#include "common/check.h"
#include "cpu/llama_ops_rows.h"

namespace rlhf::cpu {
namespace {

// Fewer elements take at most a few tens of microseconds: too little to wake a second core. It is torch's own grain size.
constexpr int64_t kSerialElements = 1 << 15;
constexpr int64_t kStretch = 1 << 12;

template <typename Body>
void for_each(int64_t count, int64_t elements, int threads, Body body) {
    [[maybe_unused]] const bool parallel = threads > 1 && elements >= kSerialElements;
#pragma omp parallel for schedule(static) num_threads(threads) if (parallel)
    for (int64_t i = 0; i < count; ++i) body(i);
}

template <typename T>
using RotateHead = void (*)(const T*, const T*, const T*, int64_t, T*);

template <typename T>
void for_heads(RotateHead<T> rotate, const T* x, HeadStrides strides, const T* cos, const T* sin,
               int64_t angle_batch_stride, int64_t batch, int64_t heads, int64_t tokens, int64_t dim, int threads,
               T* y) {
    RLHF_CHECK_SIZE(batch);
    RLHF_CHECK_SIZE(heads);
    RLHF_CHECK_SIZE(tokens);
    RLHF_CHECK(dim >= 2 && dim % 2 == 0, "dim", "an even number of at least 2", dim);
    RLHF_CHECK_THREADS(threads);
    const int64_t elements = RLHF_PRODUCT(batch, tokens, heads, dim), rows = RLHF_PRODUCT(batch, tokens);
    RLHF_CHECK_POINTER(x, elements);
    RLHF_CHECK_POINTER(cos, elements);
    RLHF_CHECK_POINTER(sin, elements);
    RLHF_CHECK_POINTER(y, elements);
    for_each(rows, elements, threads, [=](int64_t row) {
        const int64_t b = row / tokens, t = row % tokens;
        const int64_t angle = b * angle_batch_stride + t * dim;
        const T* from = x + b * strides.batch + t * strides.token;
        T* to = y + row * heads * dim;
        for (int64_t h = 0; h < heads; ++h) {
            rotate(from + h * strides.head, cos + angle, sin + angle, dim / 2, to + h * dim);
        }
    });
}

void check_rows(int64_t rows, int64_t width, int threads) {
    RLHF_CHECK_SIZE(rows);
    RLHF_CHECK(width >= 1, "width", "at least 1", width);
    RLHF_CHECK_THREADS(threads);
    RLHF_PRODUCT(rows, width);
}

Share share_of(int kind) {
    RLHF_CHECK(kind >= kSilu && kind <= kQuickGelu, "kind", "the number of an activation", kind);
    const float a = 1.5957691216f;  // 2 sqrt(2 / pi)
    switch (kind) {
        case kGelu: return {true, 0.0f, 0.0f};
        case kGeluTanh: return {false, a, 0.044715f * a};
        case kQuickGelu: return {false, 1.702f, 0.0f};
        default: return {false, 1.0f, 0.0f};
    }
}

}  // namespace

template <typename T>
void rms_norm_apply(const T* x, const T* weight, bool plus_one, float eps, int64_t rows, int64_t width, int threads, T* y,
                    float* rstd) {
    check_rows(rows, width, threads);
    RLHF_CHECK_POINTER(x, rows);
    RLHF_CHECK_POINTER(weight, width);
    RLHF_CHECK_POINTER(rstd, rows);
    RLHF_CHECK_POINTER(y, rows);
    float (*norm)(const T*, const T*, bool, float, int64_t, T*);
    RLHF_PICK(norm, norm_row);
    for_each(rows, rows * width, threads,
             [=](int64_t i) { rstd[i] = norm(x + i * width, weight, plus_one, eps, width, y + i * width); });
}

template <typename T>
void rms_norm_gradient(const T* dy, const T* x, const T* weight, bool plus_one, const float* rstd, int64_t rows,
                       int64_t width, int threads, T* dx) {
    check_rows(rows, width, threads);
    RLHF_CHECK_POINTER(dy, rows);
    RLHF_CHECK_POINTER(x, rows);
    RLHF_CHECK_POINTER(weight, width);
    RLHF_CHECK_POINTER(rstd, rows);
    RLHF_CHECK_POINTER(dx, rows);
    void (*gradient)(const T*, const T*, const T*, bool, float, int64_t, T*);
    RLHF_PICK(gradient, norm_gradient_row);
    for_each(rows, rows * width, threads, [=](int64_t i) {
        gradient(dy + i * width, x + i * width, weight, plus_one, rstd[i], width, dx + i * width);
    });
}

template <typename T>
void rotary_apply(const T* x, HeadStrides strides, const T* cos, const T* sin, int64_t angle_batch_stride,
                  int64_t batch, int64_t heads, int64_t tokens, int64_t dim, int threads, T* y) {
    RotateHead<T> rotate;
    RLHF_PICK(rotate, rotate_head);
    for_heads(rotate, x, strides, cos, sin, angle_batch_stride, batch, heads, tokens, dim, threads, y);
}

template <typename T>
void rotary_gradient(const T* dy, HeadStrides strides, const T* cos, const T* sin, int64_t angle_batch_stride,
                     int64_t batch, int64_t heads, int64_t tokens, int64_t dim, int threads, T* dx) {
    RotateHead<T> rotate;
    RLHF_PICK(rotate, rotate_back_head);
    for_heads(rotate, dy, strides, cos, sin, angle_batch_stride, batch, heads, tokens, dim, threads, dx);
}

template <typename T>
void swiglu_apply(const T* gate, const T* up, int64_t count, int threads, T* y) {
    RLHF_CHECK_SIZE(count);
    RLHF_CHECK_THREADS(threads);
    RLHF_CHECK_POINTER(gate, count);
    RLHF_CHECK_POINTER(up, count);
    RLHF_CHECK_POINTER(y, count);
    void (*product)(const T*, const T*, int64_t, T*);
    RLHF_PICK(product, swiglu_stretch);
    for_each((count + kStretch - 1) / kStretch, count, threads, [=](int64_t i) {
        const int64_t begin = i * kStretch;
        product(gate + begin, up + begin, std::min(kStretch, count - begin), y + begin);
    });
}

template <typename T>
void swiglu_gradient(const T* dy, const T* gate, const T* up, int64_t count, int threads, T* d_gate, T* d_up) {
    RLHF_CHECK_SIZE(count);
    RLHF_CHECK_THREADS(threads);
    RLHF_CHECK_POINTER(dy, count);
    RLHF_CHECK_POINTER(gate, count);
    RLHF_CHECK_POINTER(up, count);
    RLHF_CHECK_POINTER(d_gate, count);
    RLHF_CHECK_POINTER(d_up, count);
    void (*gradient)(const T*, const T*, const T*, int64_t, T*, T*);
    RLHF_PICK(gradient, swiglu_gradient_stretch);
    for_each((count + kStretch - 1) / kStretch, count, threads, [=](int64_t i) {
        const int64_t begin = i * kStretch, n = std::min(kStretch, count - begin);
        gradient(dy + begin, gate + begin, up + begin, n, d_gate + begin, d_up + begin);
    });
}

template <typename T>
void activation_apply(const T* x, int kind, int64_t count, int threads, T* y) {
    const Share share = share_of(kind);
    RLHF_CHECK_SIZE(count);
    RLHF_CHECK_THREADS(threads);
    RLHF_CHECK_POINTER(x, count);
    RLHF_CHECK_POINTER(y, count);
    void (*activation)(const T*, Share, int64_t, T*);
    RLHF_PICK(activation, activation_stretch);
    for_each((count + kStretch - 1) / kStretch, count, threads, [=](int64_t i) {
        const int64_t begin = i * kStretch;
        activation(x + begin, share, std::min(kStretch, count - begin), y + begin);
    });
}

template <typename T>
void activation_gradient(const T* dy, const T* x, int kind, int64_t count, int threads, T* dx) {
    const Share share = share_of(kind);
    RLHF_CHECK_SIZE(count);
    RLHF_CHECK_THREADS(threads);
    RLHF_CHECK_POINTER(dy, count);
    RLHF_CHECK_POINTER(x, count);
    RLHF_CHECK_POINTER(dx, count);
    void (*gradient)(const T*, const T*, Share, int64_t, T*);
    RLHF_PICK(gradient, activation_gradient_stretch);
    for_each((count + kStretch - 1) / kStretch, count, threads, [=](int64_t i) {
        const int64_t begin = i * kStretch;
        gradient(dy + begin, x + begin, share, std::min(kStretch, count - begin), dx + begin);
    });
}

#define INSTANTIATE(T)                                                                                              \
    template void rms_norm_apply<T>(const T*, const T*, bool, float, int64_t, int64_t, int, T*, float*);            \
    template void swiglu_apply<T>(const T*, const T*, int64_t, int, T*);                                            \
    template void rms_norm_gradient<T>(const T*, const T*, const T*, bool, const float*, int64_t, int64_t, int,     \
                                       T*);                                                                         \
    template void rotary_apply<T>(const T*, HeadStrides, const T*, const T*, int64_t, int64_t, int64_t, int64_t,    \
                                  int64_t, int, T*);                                                                \
    template void rotary_gradient<T>(const T*, HeadStrides, const T*, const T*, int64_t, int64_t, int64_t, int64_t, \
                                     int64_t, int, T*);                                                             \
    template void swiglu_gradient<T>(const T*, const T*, const T*, int64_t, int, T*, T*);                           \
    template void activation_apply<T>(const T*, int, int64_t, int, T*);                                             \
    template void activation_gradient<T>(const T*, const T*, int, int64_t, int, T*);
INSTANTIATE(float)
INSTANTIATE(uint16_t)
#undef INSTANTIATE

}  // namespace rlhf::cpu
