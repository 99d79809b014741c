#include "cpu/isa.h"

#include <pybind11/stl.h>

#include "bindings/address.h"
#include "bindings/define.h"
#include "cpu/tiles.h"

namespace rlhf::bindings {

using namespace pybind11::literals;

RLHF_BINDINGS(isa) {
    m.def("isa", [] { return cpu::name(cpu::current_isa()); });
    m.def("set_isa", [](const std::string& name) { cpu::set_isa(name); });
    m.def("isas", [] { return cpu::available_isas(); });
    m.attr("tiles") = pybind11::dict("head_panel"_a = cpu::kHeadPanel, "head_block"_a = cpu::kHeadBlock,
                                     "strip_rows"_a = cpu::kStripRows, "linear_columns"_a = cpu::kLinearColumns,
                                     "linear_tiles"_a = cpu::kLinearTiles, "lora_rank"_a = cpu::kLoraRank);
}

}  // namespace rlhf::bindings
