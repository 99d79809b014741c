// rlhf_kernels._native: every function takes addresses, sizes and strides (in elements) as integers and holds no GIL
// while it works. The Python side has checked devices, dtypes and shapes; see kernels/rlhf_kernels/native.py.
// Each op defines its functions in bindings/<op>.cpp.

#include <pybind11/pybind11.h>

namespace rlhf::bindings {
void define_block(pybind11::module_& m);
void define_decode_attention(pybind11::module_& m);
void define_decode_step(pybind11::module_& m);
void define_gae(pybind11::module_& m);
void define_head(pybind11::module_& m);
void define_gather_logprob(pybind11::module_& m);
void define_isa(pybind11::module_& m);
void define_linear(pybind11::module_& m);
void define_ppo_loss(pybind11::module_& m);
void define_lora(pybind11::module_& m);
}  // namespace rlhf::bindings

PYBIND11_MODULE(_native, m) {
    rlhf::bindings::define_block(m);
    rlhf::bindings::define_decode_attention(m);
    rlhf::bindings::define_decode_step(m);
    rlhf::bindings::define_gae(m);
    rlhf::bindings::define_head(m);
    rlhf::bindings::define_gather_logprob(m);
    rlhf::bindings::define_isa(m);
    rlhf::bindings::define_linear(m);
    rlhf::bindings::define_ppo_loss(m);
    rlhf::bindings::define_lora(m);
}
