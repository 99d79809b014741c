#include "cpu/llama_ops.h"

#include <string>

#include "bindings/address.h"
#include "bindings/define.h"

namespace rlhf::bindings {
namespace {

using namespace rlhf::cpu;
namespace py = pybind11;

template <typename T>
using Rotate = void (*)(const T*, HeadStrides, const T*, const T*, int64_t, int64_t, int64_t, int64_t, int64_t, int, T*);

template <typename T, Rotate<T> rotate>
void define_rotate(py::module_& m, const std::string& name) {
    m.def(name.c_str(), [](Address x, int64_t batch_stride, int64_t head_stride, int64_t token_stride, Address cos,
                           Address sin, int64_t angle_batch_stride, int64_t batch, int64_t heads, int64_t tokens,
                           int64_t dim, int threads, Address y) {
        rotate(at<T>(x), {batch_stride, head_stride, token_stride}, at<T>(cos), at<T>(sin), angle_batch_stride, batch,
               heads, tokens, dim, threads, at<T>(y));
    }, NoGil());
}

template <typename T>
void define(py::module_& m, const std::string& dtype) {
    m.def(("rms_norm_apply_" + dtype).c_str(), [](Address x, Address weight, bool plus_one, float eps, int64_t rows,
                                                  int64_t width, int threads, Address y, Address rstd) {
        rms_norm_apply<T>(at<T>(x), at<T>(weight), plus_one, eps, rows, width, threads, at<T>(y), at<float>(rstd));
    }, NoGil());
    m.def(("rms_norm_gradient_" + dtype).c_str(), [](Address dy, Address x, Address weight, bool plus_one, Address rstd,
                                                     int64_t rows, int64_t width, int threads, Address dx) {
        rms_norm_gradient<T>(at<T>(dy), at<T>(x), at<T>(weight), plus_one, at<float>(rstd), rows, width, threads, at<T>(dx));
    }, NoGil());
    define_rotate<T, rotary_apply<T>>(m, "rotary_apply_" + dtype);
    define_rotate<T, rotary_gradient<T>>(m, "rotary_gradient_" + dtype);
    m.def(("swiglu_apply_" + dtype).c_str(), [](Address gate, Address up, int64_t count, int threads, Address y) {
        swiglu_apply<T>(at<T>(gate), at<T>(up), count, threads, at<T>(y));
    }, NoGil());
    m.def(("swiglu_gradient_" + dtype).c_str(), [](Address dy, Address gate, Address up, int64_t count, int threads,
                                                   Address d_gate, Address d_up) {
        swiglu_gradient<T>(at<T>(dy), at<T>(gate), at<T>(up), count, threads, at<T>(d_gate), at<T>(d_up));
    }, NoGil());
    m.def(("activation_apply_" + dtype).c_str(), [](Address x, int kind, int64_t count, int threads, Address y) {
        activation_apply<T>(at<T>(x), kind, count, threads, at<T>(y));
    }, NoGil());
    m.def(("activation_gradient_" + dtype).c_str(), [](Address dy, Address x, int kind, int64_t count, int threads,
                                                       Address dx) {
        activation_gradient<T>(at<T>(dy), at<T>(x), kind, count, threads, at<T>(dx));
    }, NoGil());
}

}  // namespace

RLHF_BINDINGS(llama_ops) {
    define<float>(m, "float32");
    define<uint16_t>(m, "bfloat16");
}

}  // namespace rlhf::bindings
