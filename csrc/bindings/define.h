// A file of bindings registers itself: `RLHF_BINDINGS(gae) { m.def(…); }`. There is no list of them.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

namespace rlhf::bindings {

using Define = void (*)(pybind11::module_&);

// The functions that define the module's contents, each by one file.
std::vector<Define>& definitions();

struct Registration {
    explicit Registration(Define define) { definitions().push_back(define); }
};

}  // namespace rlhf::bindings

#define RLHF_BINDINGS(name)                                            \
    static void define_##name(pybind11::module_& m);                   \
    static const Registration registration_of_##name(&define_##name);  \
    static void define_##name(pybind11::module_& m)
