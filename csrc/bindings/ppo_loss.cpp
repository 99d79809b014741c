#include "cpu/ppo_loss.h"

#include <string>

#include "bindings/address.h"
#include "bindings/define.h"

namespace rlhf::bindings {
namespace {

using namespace rlhf::cpu;
namespace py = pybind11;

// Which inputs are bfloat16: bit i for the i-th of them.
TokenInput input(Address address, int bfloat16, int bit) { return {at<void>(address), ((bfloat16 >> bit) & 1) != 0}; }

template <typename T>
void define(py::module_& m, const std::string& dtype) {
    m.def(("ppo_loss_forward_" + dtype).c_str(),
          [](Address new_logprob, Address old_logprob, Address advantage, Address ref_logprob, Address entropy,
             int bfloat16, Address mask, bool mask_weights, double denom, double ratio_low, double ratio_high,
             double dual_clip, int kl, double kl_coef, double entropy_coef, int64_t count, int threads, Address loss,
             Address statistics, Address dloss) {
              const PpoInputs inputs{input(new_logprob, bfloat16, 0), input(old_logprob, bfloat16, 1),
                                     input(advantage, bfloat16, 2),   input(ref_logprob, bfloat16, 3),
                                     input(entropy, bfloat16, 4),     {at<void>(mask), mask_weights}};
              ppo_loss_forward<T>(inputs, {ratio_low, ratio_high, dual_clip, kl, kl_coef, entropy_coef}, denom,
                                  count, threads, at<T>(loss), at<T>(statistics), at<T>(dloss));
          },
          NoGil());
    m.def(("ppo_loss_entropy_gradient_" + dtype).c_str(),
          [](double grad_loss, Address mask, bool mask_weights, double denom, double entropy_coef, int64_t count,
             int threads, Address d_entropy) {
              ppo_loss_entropy_gradient<T>(grad_loss, {at<void>(mask), mask_weights}, denom,
                                           entropy_coef, count, threads, at<T>(d_entropy));
          },
          NoGil());
    m.def(("value_loss_forward_" + dtype).c_str(),
          [](Address value, Address old_value, Address ret, int bfloat16, Address mask, bool mask_weights,
             double denom, double clip, int64_t count, int threads, Address loss, Address statistics, Address dloss) {
              const ValueInputs inputs{input(value, bfloat16, 0), input(old_value, bfloat16, 1),
                                       input(ret, bfloat16, 2), {at<void>(mask), mask_weights}};
              value_loss_forward<T>(inputs, clip, denom, count, threads, at<T>(loss), at<T>(statistics),
                                    at<T>(dloss));
          },
          NoGil());
}

}  // namespace

RLHF_BINDINGS(ppo_loss) {
    define<float>(m, "float32");
    define<double>(m, "float64");
}

}  // namespace rlhf::bindings
