#include "cpu/decode_attention.h"

#include "bindings/address.h"
#include "bindings/define.h"

namespace rlhf::bindings {

namespace py = pybind11;
using namespace rlhf::cpu;

RLHF_BINDINGS(decode_attention) {
    using Strides3 = std::tuple<int64_t, int64_t, int64_t>;
    using Strides4 = std::tuple<int64_t, int64_t, int64_t, int64_t>;
    m.def("decode_attention",
          [](bool bf16, const Strides4& sizes, Address q, const Strides3& q_strides, Address k, const Strides4& k_strides,
             Address v, const Strides4& v_strides, Address lengths, Address table, const Strides3& pages, double scale,
             int64_t window, double softcap, Address sinks, Address out, int threads) {
              const auto [n, query_heads, cache_heads, features] = sizes;
              const auto [q_row, q_head, q_inner] = q_strides;
              const auto [k_block, k_position, k_head, k_inner] = k_strides;
              const auto [v_block, v_position, v_head, v_inner] = v_strides;
              const auto [table_blocks, blocks, block] = pages;
              decode_attention(bf16 ? CacheType::bfloat16 : CacheType::float32,
                               {n, query_heads, cache_heads, features}, {at<void>(q), q_row, q_head, q_inner},
                               {at<void>(k), k_block, k_position, k_head, k_inner},
                               {at<void>(v), v_block, v_position, v_head, v_inner},
                               {at<int64_t>(lengths), at<int64_t>(table), table_blocks, blocks, block},
                               {float(scale), window, float(softcap), at<float>(sinks)}, at<void>(out), threads);
          },
          NoGil());
}

}  // namespace rlhf::bindings
