#include "cpu/linear.h"

#include <pybind11/pybind11.h>

#include "bindings/address.h"
#include "bindings/define.h"
#include "common/check.h"

namespace rlhf::bindings {
namespace {

using namespace rlhf::cpu;

Type element_type(int type) {
    RLHF_CHECK(type >= 0 && type <= 2, "type", "0 (float32), 1 (bfloat16) or 2 (float16)", type);
    return static_cast<Type>(type);
}

Matrix matrix(Address data, int64_t stride, int type) { return {at<const void>(data), stride, element_type(type)}; }

}  // namespace

RLHF_BINDINGS(linear) {
    m.def("linear_forward", [](int type, Address x, int64_t x_stride, Address weight, int64_t weight_stride, Address bias,
                               Address y, int64_t y_stride, int64_t N, int64_t K, int64_t M, int threads) {
        linear_forward(matrix(x, x_stride, type), matrix(weight, weight_stride, type), at<const void>(bias),
                       matrix(y, y_stride, type), N, K, M, threads);
    }, NoGil());
    m.def("linear_input_gradient", [](int type, Address dy, int64_t dy_stride, Address weight, int64_t weight_stride,
                                      Address packed, Address bias, Address dx, int64_t dx_stride, int64_t N, int64_t K,
                                      int64_t M, int threads) {
        linear_input_gradient(matrix(dy, dy_stride, type), matrix(weight, weight_stride, type), at<const void>(packed),
                              at<const void>(bias), matrix(dx, dx_stride, type), N, K, M, threads);
    }, NoGil());
    m.def("linear_packed_bytes", [](int type, int64_t K, int64_t M) {
        return linear_packed_bytes(element_type(type), K, M);
    });
    m.def("linear_pack", [](int type, Address weight, int64_t weight_stride, Address packed, int64_t K, int64_t M,
                            int threads) {
        linear_pack(matrix(weight, weight_stride, type), at<void>(packed), K, M, threads);
    }, NoGil());
    m.def("linear_is_packed", [](int type, Address weight, int64_t weight_stride, Address packed, int64_t K, int64_t M,
                                 int64_t turn) {
        return linear_is_packed(matrix(weight, weight_stride, type), at<const void>(packed), K, M, turn);
    }, NoGil());
    m.def("linear_weight_gradient", [](int type, Address dy, int64_t dy_stride, Address x, int64_t x_stride, Address dw,
                                       int64_t dw_stride, int64_t N, int64_t K, int64_t M, int threads) {
        linear_weight_gradient(matrix(dy, dy_stride, type), matrix(x, x_stride, type), matrix(dw, dw_stride, type), N, K,
                               M, threads);
    }, NoGil());
}

}  // namespace rlhf::bindings
