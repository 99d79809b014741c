// The ops that multiply with whole weights, for weights of type RLHF_STORED.

#define RLHF_JOIN(a, b) a##b
#define RLHF_OF_TYPE(name, type) RLHF_JOIN(name, type)

namespace rlhf::cpu::RLHF_SET::RLHF_STORED {
#include "cpu/share.inc.h"

#include "cpu/tile_mm.inc.h"

#include "cpu/strip_mm.inc.h"

#include "cpu/lane_rows.inc.h"

namespace head {
#include "cpu/head_body.inc.h"

#include "cpu/head_sample.inc.h"
}  // namespace head

namespace linear {
#include "cpu/linear_body.inc.h"
}  // namespace linear

namespace lora_decode {
using namespace cpu::lora;
using cpu::lora::Type;
#include "cpu/lora_decode_body.inc.h"
}  // namespace lora_decode

namespace decoder {
using namespace cpu::step;
using cpu::step::Type;
#include "cpu/decode_step_body.inc.h"
}  // namespace decoder
}  // namespace rlhf::cpu::RLHF_SET::RLHF_STORED

namespace rlhf::cpu::RLHF_SET {
const HeadFunctions& RLHF_OF_TYPE(head_, RLHF_STORED)() {
    using namespace RLHF_STORED::head;
    static constexpr HeadFunctions functions{run_forward, run_backward, run_sample};
    return functions;
}

void RLHF_OF_TYPE(multiply_, RLHF_STORED)(const Product& product) { RLHF_STORED::linear::run_multiply(product); }
void RLHF_OF_TYPE(pack_, RLHF_STORED)(const Product& product, void* packed) {
    RLHF_STORED::linear::run_pack(product, packed);
}
}  // namespace rlhf::cpu::RLHF_SET

namespace rlhf::cpu::lora::RLHF_SET {
void RLHF_OF_TYPE(decode_, RLHF_STORED)(const DecodeArguments& arguments) {
    cpu::RLHF_SET::RLHF_STORED::lora_decode::run_decode(arguments);
}
}  // namespace rlhf::cpu::lora::RLHF_SET

namespace rlhf::cpu::step::RLHF_SET {
void RLHF_OF_TYPE(step_, RLHF_STORED)(const StepCall& call) {
    cpu::RLHF_SET::RLHF_STORED::decoder::run_step(call);
}
}  // namespace rlhf::cpu::step::RLHF_SET

#undef RLHF_JOIN
#undef RLHF_OF_TYPE
