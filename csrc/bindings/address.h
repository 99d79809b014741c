// Addresses come from Python as integers; see kernels/rlhf_kernels/runtime/native.py.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace rlhf::bindings {

using Address = std::uintptr_t;
using NoGil = pybind11::call_guard<pybind11::gil_scoped_release>;

template <typename T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

}  // namespace rlhf::bindings
