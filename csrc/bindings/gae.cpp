#include "cpu/gae.h"

#include <string>

#include "bindings/address.h"
#include "bindings/define.h"
#include "cpu/whiten.h"

namespace rlhf::bindings {
namespace {

using namespace rlhf::cpu;
namespace py = pybind11;

template <typename T>
void define(py::module_& m, const std::string& dtype) {
    m.def(("gae_forward_" + dtype).c_str(), [](Address reward, int64_t reward_stride, Address value,
                                               int64_t value_stride, Address mask, int64_t mask_stride,
                                               Address bootstrap, int64_t rows, int64_t columns, double gamma,
                                               double lam, int threads, Address advantage, Address ret) {
        gae_forward<T>({at<T>(reward), reward_stride}, {at<T>(value), value_stride}, {at<uint8_t>(mask), mask_stride},
                       at<T>(bootstrap), rows, columns, gamma, lam, threads, at<T>(advantage), at<T>(ret));
    }, NoGil());
    m.def(("gae_backward_" + dtype).c_str(), [](Address grad_advantage, int64_t grad_advantage_stride,
                                                Address grad_ret, int64_t grad_ret_stride, Address mask,
                                                int64_t mask_stride, int64_t rows, int64_t columns, double gamma,
                                                double lam, int threads, Address d_reward, Address d_value,
                                                Address d_bootstrap) {
        gae_backward<T>({at<T>(grad_advantage), grad_advantage_stride}, {at<T>(grad_ret), grad_ret_stride},
                        {at<uint8_t>(mask), mask_stride}, rows, columns, gamma, lam, threads, at<T>(d_reward),
                        at<T>(d_value), at<T>(d_bootstrap));
    }, NoGil());
    m.def(("masked_moments_" + dtype).c_str(), [](Address x, Address mask, int64_t count, int threads,
                                                  Address moments) {
        masked_moments<T>(at<T>(x), at<uint8_t>(mask), count, threads, at<double>(moments));
    }, NoGil());
    m.def(("whiten_forward_" + dtype).c_str(), [](Address x, Address mask, Address moments, int64_t count,
                                                  bool shift_mean, double eps, int threads, Address y, Address stats) {
        whiten_forward<T>(at<T>(x), at<uint8_t>(mask), at<double>(moments), count, shift_mean, eps, threads, at<T>(y),
                          at<double>(stats));
    }, NoGil());
    m.def(("whiten_backward_" + dtype).c_str(), [](Address grad, Address x, Address mask, Address stats, int64_t count,
                                                   bool shift_mean, bool constant_moments, int threads, Address d_x) {
        whiten_backward<T>(at<T>(grad), at<T>(x), at<uint8_t>(mask), at<double>(stats), count, shift_mean,
                           constant_moments, threads, at<T>(d_x));
    }, NoGil());
}

}  // namespace

RLHF_BINDINGS(gae) {
    define<float>(m, "float32");
    define<double>(m, "float64");
}

}  // namespace rlhf::bindings
