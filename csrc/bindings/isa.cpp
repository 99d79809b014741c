#include "cpu/isa.h"

#include <pybind11/stl.h>

#include "bindings/address.h"

namespace rlhf::bindings {

void define_isa(pybind11::module_& m) {
    m.def("isa", [] { return cpu::name(cpu::current_isa()); });
    m.def("set_isa", [](const std::string& name) { cpu::set_isa(name); });
    m.def("isas", [] { return cpu::available_isas(); });
}

}  // namespace rlhf::bindings
