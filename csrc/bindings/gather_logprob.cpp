#include "cpu/gather_logprob.h"

#include <string>

#include "bindings/address.h"
#include "bindings/define.h"

namespace rlhf::bindings {
namespace {

using namespace rlhf::cpu;
namespace py = pybind11;

template <typename S>
void define(py::module_& m, const std::string& dtype) {
    using T = typename Accumulate<S>::type;
    m.def(("gather_logprob_forward_" + dtype).c_str(),
          [](Address logits, Address offsets, int64_t row_stride, int64_t inner_stride, Address target,
             Address row_temperature, double temperature, int64_t ignore_index, int64_t rows, int64_t vocab,
             int threads, Address logprob, Address entropy, Address lse, Address is_top1, Address mean_logit,
             Address log_sum_sq_prob) {
              gather_logprob_forward<S>(
                  {at<const S>(logits), at<int64_t>(offsets), row_stride, inner_stride},
                  {at<int64_t>(target), at<T>(row_temperature), temperature, ignore_index}, rows, vocab, threads,
                  {at<T>(logprob), at<T>(entropy), at<T>(lse), at<T>(is_top1), at<T>(mean_logit),
                   at<T>(log_sum_sq_prob)});
          },
          NoGil());
    m.def(("gather_logprob_backward_" + dtype).c_str(),
          [](Address logits, Address offsets, int64_t row_stride, int64_t inner_stride, Address target,
             Address row_temperature, double temperature, int64_t ignore_index, int64_t rows, int64_t vocab,
             int threads, Address d_logprob, Address d_entropy, Address d_lse, Address d_mean_logit,
             Address d_log_sum_sq_prob, Address lse, Address entropy, Address log_sum_sq_prob, Address d_logits,
             Address d_offsets, int64_t d_row_stride, int64_t d_inner_stride) {
              gather_logprob_backward<S>(
                  {at<const S>(logits), at<int64_t>(offsets), row_stride, inner_stride},
                  {at<int64_t>(target), at<T>(row_temperature), temperature, ignore_index},
                  {at<T>(d_logprob), at<T>(d_entropy), at<T>(d_lse), at<T>(d_mean_logit), at<T>(d_log_sum_sq_prob),
                   at<T>(lse), at<T>(entropy), at<T>(log_sum_sq_prob)},
                  rows, vocab, threads, {at<S>(d_logits), at<int64_t>(d_offsets), d_row_stride, d_inner_stride});
          },
          NoGil());
}

}  // namespace

RLHF_BINDINGS(gather_logprob) {
    define<float>(m, "float32");
    define<double>(m, "float64");
    define<Bfloat16>(m, "bfloat16");
}

}  // namespace rlhf::bindings
