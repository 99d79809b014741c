// rlhf_kernels._native: every function takes addresses, sizes and strides (in elements) as integers and holds no GIL
// while it works. The Python side has checked devices, dtypes and shapes; see kernels/rlhf_kernels/runtime/native.py.
// Each op defines its functions in bindings/<op>.cpp.

#include <pybind11/pybind11.h>

#include "bindings/define.h"

namespace rlhf::bindings {

std::vector<Define>& definitions() {
    static std::vector<Define> all;  // made by the first file that registers, in whatever order files are initialised
    return all;
}

}  // namespace rlhf::bindings

PYBIND11_MODULE(_native, m) {
    for (const auto define : rlhf::bindings::definitions()) define(m);
}
