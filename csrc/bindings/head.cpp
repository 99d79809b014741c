#include "cpu/head.h"

#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "bindings/address.h"
#include "bindings/define.h"
#include "common/check.h"

namespace rlhf::bindings {
namespace {

namespace py = pybind11;
using namespace rlhf::cpu;

// A tuple's elements are read by their places, so that it has to have all of them.
void check_length(const py::tuple& t, const char* name, size_t length) {
    RLHF_CHECK(t.size() == length, name, ("a tuple of " + std::to_string(length)).c_str(), t.size());
}

// Element i of a tuple: an address, or a number.
template <typename T>
T* pointer(const py::tuple& t, size_t i) {
    return at<T>(t[i].cast<Address>());
}
int64_t number(const py::tuple& t, size_t i) { return t[i].cast<int64_t>(); }

// (address, row stride, 1 for bf16 and 0 for fp32) from element i on.
Matrix matrix(const py::tuple& t, size_t i) {
    return {pointer<const void>(t, i), number(t, i + 1), number(t, i + 2) ? Type::bfloat16 : Type::float32};
}

Head head_of(const py::tuple& t) {
    check_length(t, "head", 9);
    return {matrix(t, 0), pointer<const float>(t, 3), number(t, 4), number(t, 5), t[6].cast<float>(), t[7].cast<float>(),
            pointer<const void>(t, 8)};
}

// A batch and the runs that it points to.
struct BatchWithRuns {
    std::vector<HeadRun> runs;
    Batch batch;
    BatchWithRuns(const py::tuple& t, const std::vector<py::tuple>& runs_t) {
        check_length(t, "batch", 7);
        for (const py::tuple& r : runs_t) {
            check_length(r, "run", 12);
            runs.push_back({number(r, 0), number(r, 1), matrix(r, 2), number(r, 5), matrix(r, 6), pointer<float>(r, 9),
                            pointer<float>(r, 10), pointer<float>(r, 11)});
        }
        batch = {matrix(t, 0), pointer<const int64_t>(t, 3), number(t, 4), pointer<const float>(t, 5),
                 pointer<const int64_t>(t, 6), runs.data(), static_cast<int64_t>(runs.size())};
    }
};

}  // namespace

RLHF_BINDINGS(head) {
    m.def("head_forward", [](const py::tuple& head_t, const py::tuple& batch_t, const std::vector<py::tuple>& runs_t,
                             const py::tuple& statistics_t, const std::optional<py::tuple>& pair_t, Address expected,
                             Address expected_kl, int threads) {
        const Head head = head_of(head_t);
        const BatchWithRuns rows_of(batch_t, runs_t);
        const Batch& batch = rows_of.batch;
        check_length(statistics_t, "statistics", 6);
        float* out[6];
        for (size_t i = 0; i < 6; ++i) out[i] = pointer<float>(statistics_t, i);
        const Statistics statistics{out[0], out[1], out[2], out[3], out[4], out[5]};
        std::optional<Pair> pair;
        if (pair_t) {
            check_length(*pair_t, "pair", 6);
            pair = Pair{matrix(*pair_t, 0), pointer<float>(*pair_t, 3), pointer<float>(*pair_t, 4),
                        pointer<float>(*pair_t, 5)};
        }
        py::gil_scoped_release release;
        head_forward(head, batch, statistics, pair ? &*pair : nullptr, {at<float>(expected), at<float>(expected_kl)},
                     threads);
    });
    m.def("head_backward", [](const py::tuple& head_t, const py::tuple& batch_t, const std::vector<py::tuple>& runs_t,
                              const py::tuple& rows_t, Address hidden, Address weight, bool weight_bf16, Address bias,
                              int threads) {
        const Head head = head_of(head_t);
        const BatchWithRuns rows_of(batch_t, runs_t);
        const Batch& batch = rows_of.batch;
        check_length(rows_t, "rows", 13);
        const float* row[11];
        for (size_t i = 0; i < 11; ++i) row[i] = pointer<const float>(rows_t, i);
        const LogitGradients rows{row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7], row[8], row[9],
                                row[10], pointer<const void>(rows_t, 11), number(rows_t, 12)};
        py::gil_scoped_release release;
        head_backward(head, batch, rows, {at<float>(hidden), at<void>(weight),
                                            weight_bf16 ? Type::bfloat16 : Type::float32, at<float>(bias)},
                      threads);
    });
    m.def("head_sample", [](const py::tuple& head_t, const py::tuple& batch_t, const std::vector<py::tuple>& runs_t,
                            Address seed, Address position, Address greedy, Address forbidden, int64_t n_forbidden,
                            Address forbids, uint32_t stream, Address token, Address logprob, Address entropy,
                            int threads) {
        const Head head = head_of(head_t);
        const BatchWithRuns rows_of(batch_t, runs_t);
        const Batch& batch = rows_of.batch;
        const Draws draws{at<const int64_t>(seed), at<const int64_t>(position), at<const uint8_t>(greedy),
                          at<const int64_t>(forbidden), n_forbidden, at<const uint8_t>(forbids), stream,
                          at<int64_t>(token), at<float>(logprob), at<float>(entropy)};
        py::gil_scoped_release release;
        head_sample(head, batch, draws, threads);
    });
}

}  // namespace rlhf::bindings
