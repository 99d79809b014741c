// Matrices of lora.h as Python passes them.
#pragma once

#include <cstdint>
#include <tuple>

#include "bindings/address.h"
#include "common/check.h"
#include "cpu/lora.h"

namespace rlhf::bindings {

using MatrixArguments = std::tuple<Address, int64_t, int>;  // address, row stride, 0 = float32 or 1 = bfloat16

inline cpu::lora::Type element_type(int type) {
    RLHF_CHECK(type == 0 || type == 1, "type", "0 or 1", type);
    return static_cast<cpu::lora::Type>(type);
}

inline cpu::lora::Matrix matrix(const MatrixArguments& arguments) {
    const auto& [address, stride, type] = arguments;
    return {at<void>(address), stride, element_type(type)};
}

}  // namespace rlhf::bindings
