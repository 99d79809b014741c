#include "cpu/lora.h"

#include <pybind11/stl.h>

#include <tuple>

#include "bindings/define.h"
#include "bindings/matrix.h"
#include "cpu/lora_decode.h"

namespace rlhf::bindings {
namespace {

using namespace rlhf::cpu::lora;

using SlotArguments = std::tuple<MatrixArguments, MatrixArguments, int64_t, double, double, Address, Address>;
using RunArguments = std::tuple<int64_t, int64_t, int64_t, int64_t>;
using DropoutArguments = std::tuple<int64_t, Address, uint32_t>;

std::vector<Slot> slots_of(const std::vector<SlotArguments>& arguments, int64_t K) {
    std::vector<Slot> slots;
    for (const auto& [A, B, rank, scale, p, dA, dB] : arguments) {
        Slot slot{matrix(A), matrix(B), rank, scale, p, {}, {}};
        slot.dA = {at<void>(dA), K, slot.A.type};
        slot.dB = {at<void>(dB), rank, slot.B.type};
        slots.push_back(slot);
    }
    return slots;
}

std::vector<Run> runs_of(const std::vector<RunArguments>& arguments) {
    std::vector<Run> runs;
    for (const auto& [x_row, y_row, rows, slot] : arguments) runs.push_back({x_row, y_row, rows, slot});
    return runs;
}

Dropout dropout_of(const DropoutArguments& arguments) {
    const auto& [seed, row_ids, stream] = arguments;
    return {seed, at<const int64_t>(row_ids), stream};
}

// All that `decode` takes but x and y, which are the only things that change from one token to the next.
class Decoder {
public:
    Decoder(const MatrixArguments& weight, Address bias, int64_t N, int64_t K, int64_t M,
            const std::vector<SlotArguments>& slots, const std::vector<RunArguments>& runs)
        : weight_(matrix(weight)), bias_(at<const void>(bias)), N_(N), K_(K), M_(M), slots_(slots_of(slots, K)),
          runs_(runs_of(runs)) {}

    // x [N, K] with rows `stride` apart, y [N, M] dense.
    void run(Address x, int64_t stride, Address y, int threads) const {
        const Matrix from{at<void>(x), stride, weight_.type}, to{at<void>(y), M_, weight_.type};
        decode(from, weight_, bias_, to, N_, K_, M_, slots_, runs_, threads);
    }

private:
    const Matrix weight_;
    const void* const bias_;
    const int64_t N_, K_, M_;
    const std::vector<Slot> slots_;
    const std::vector<Run> runs_;
};

}  // namespace

RLHF_BINDINGS(lora) {
    m.def("lora_forward", [](const MatrixArguments& x, const MatrixArguments& y, bool add, int64_t K, int64_t M,
                             const std::vector<SlotArguments>& slots, const std::vector<RunArguments>& runs,
                             const DropoutArguments& dropout, int threads) {
        forward(matrix(x), matrix(y), add, K, M, slots_of(slots, K), runs_of(runs), dropout_of(dropout), threads);
    }, NoGil());
    pybind11::class_<Decoder>(m, "LoraDecoder")
        .def(pybind11::init<const MatrixArguments&, Address, int64_t, int64_t, int64_t,
                            const std::vector<SlotArguments>&, const std::vector<RunArguments>&>())
        .def("__call__", &Decoder::run, NoGil());
    m.def("lora_backward", [](const MatrixArguments& dy, const MatrixArguments& x, const MatrixArguments& dx, int64_t K,
                              int64_t M, const std::vector<SlotArguments>& slots,
                              const std::vector<RunArguments>& runs, const DropoutArguments& dropout, int threads) {
        backward(matrix(dy), matrix(x), matrix(dx), K, M, slots_of(slots, K), runs_of(runs), dropout_of(dropout),
                 threads);
    }, NoGil());
}

}  // namespace rlhf::bindings
