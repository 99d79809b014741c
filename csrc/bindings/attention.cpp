#include "cpu/attention.h"

#include "bindings/address.h"
#include "bindings/define.h"

namespace rlhf::bindings {
namespace {

using namespace rlhf::cpu;
namespace py = pybind11;

using Sizes = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>;
using RowHead = std::tuple<Address, int64_t, int64_t>;
using Options = std::tuple<double, int64_t, double, Address>;

AttentionSizes sizes_of(const Sizes& sizes) {
    const auto [tokens, sequences, query_heads, cache_heads, features] = sizes;
    return {tokens, sequences, query_heads, cache_heads, features};
}

Heads heads_of(const RowHead& heads) { return {at<void>(std::get<0>(heads)), std::get<1>(heads), std::get<2>(heads)}; }

ScoreOptions options_of(const Options& options) {
    const auto [scale, window, softcap, sinks] = options;
    return {float(scale), window, float(softcap), at<float>(sinks)};
}

CacheType type_of(bool bf16) { return bf16 ? CacheType::bfloat16 : CacheType::float32; }

}  // namespace

RLHF_BINDINGS(attention) {
    m.def("attention",
          [](bool bf16, const Sizes& sizes, const RowHead& q, const RowHead& k, const RowHead& v, Address lengths,
             Address parents, const Options& options, Address out, Address totals, int threads) {
              attention(type_of(bf16), sizes_of(sizes), heads_of(q), heads_of(k), heads_of(v),
                        {at<int64_t>(lengths), at<int64_t>(parents)}, options_of(options), at<void>(out),
                        at<float>(totals), threads);
          },
          NoGil());
    m.def("attention_gradient",
          [](bool bf16, const Sizes& sizes, const RowHead& d_out, const RowHead& q, const RowHead& k, const RowHead& v,
             Address lengths, Address parents, const Options& options, Address out, Address totals, Address d_q,
             Address d_k, Address d_v, Address d_sinks, int threads) {
              attention_gradient(type_of(bf16), sizes_of(sizes), heads_of(d_out), heads_of(q), heads_of(k), heads_of(v),
                                 {at<int64_t>(lengths), at<int64_t>(parents)}, options_of(options), at<void>(out),
                                 at<float>(totals), {at<void>(d_q), at<void>(d_k), at<void>(d_v), at<float>(d_sinks)},
                                 threads);
          },
          NoGil());
}

}  // namespace rlhf::bindings
