#include "cpu/decode_step.h"

#include <pybind11/stl.h>

#include <array>
#include <mutex>
#include <tuple>

#include "bindings/define.h"
#include "bindings/matrix.h"

namespace rlhf::bindings {
namespace {

namespace py = pybind11;
using namespace rlhf::cpu::step;

using Sizes = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>;  // vocabulary, H, query heads, cache heads, D
using LinearArguments = std::tuple<Address, int64_t, Address, int64_t, int64_t>;  // weight, stride, bias, out, in
// input norm, MLP norm, norms of q and k or 0, linears in the order of Name, window or 0
using LayerArguments =
    std::tuple<Address, Address, Address, Address, std::array<LinearArguments, kNames>, int64_t>;
using PairArguments = std::tuple<MatrixArguments, MatrixArguments, int64_t>;
using AdapterArguments = std::tuple<double, std::vector<PairArguments>>;
using CacheArguments = std::tuple<Address, int64_t, int64_t, int64_t>;  // address, strides of block, position and head

std::vector<Layer> layers_of(const std::vector<LayerArguments>& arguments) {
    std::vector<Layer> layers;
    for (const auto& [input_norm, mlp_norm, q_norm, k_norm, linears, window] : arguments) {
        Layer layer{at<void>(input_norm), at<void>(mlp_norm), at<void>(q_norm), at<void>(k_norm), {}, window};
        for (int i = 0; i < kNames; ++i) {
            const auto& [weight, stride, bias, out, in] = linears[i];
            layer.linears[i] = {at<void>(weight), stride, at<void>(bias), out, in};
        }
        layers.push_back(layer);
    }
    return layers;
}

std::vector<Adapter> adapters_of(const std::vector<AdapterArguments>& arguments) {
    std::vector<Adapter> adapters;
    for (const auto& [scale, pairs] : arguments) {
        Adapter adapter{float(scale), {}};
        for (const auto& [A, B, rank] : pairs) adapter.pairs.push_back({matrix(A), matrix(B), rank});
        adapters.push_back(std::move(adapter));
    }
    return adapters;
}

std::vector<LayerCache> caches_of(const std::vector<CacheArguments>& arguments) {
    std::vector<LayerCache> caches;
    for (const auto& [data, block, position, head] : arguments) caches.push_back({at<void>(data), block, position, head});
    return caches;
}

// A DecodeStep has memory of its own for a call, so calls from several threads take turns.
class Step {
public:
    Step(int type, const Sizes& sizes, Address embedding, int64_t stride, Address final_norm, double eps, double scale,
         const std::vector<LayerArguments>& layers, const std::vector<AdapterArguments>& adapters)
        : step_(decoder(type, sizes, embedding, stride, final_norm, eps, scale), layers_of(layers),
                adapters_of(adapters)) {}

    void bind(int64_t blocks, int64_t block, const std::vector<CacheArguments>& keys,
              const std::vector<CacheArguments>& values) {
        const std::lock_guard<std::mutex> turn(mutex_);
        step_.bind(blocks, block, caches_of(keys), caches_of(values));
    }

    void run(int64_t n, Address tokens, Address positions, Address slots, Address table, int64_t table_blocks,
             Address cos, Address sin, int64_t angles, Address out, int threads) {
        const std::lock_guard<std::mutex> turn(mutex_);
        step_.run({n, at<int64_t>(tokens), at<int64_t>(positions), at<int64_t>(slots), at<int64_t>(table), table_blocks,
                   at<void>(cos), at<void>(sin), angles},
                  at<void>(out), threads);
    }

private:
    static Decoder decoder(int type, const Sizes& sizes, Address embedding, int64_t stride, Address final_norm,
                           double eps, double scale) {
        const auto [vocabulary, hidden, query_heads, cache_heads, head_dim] = sizes;
        return {element_type(type), at<void>(embedding), at<void>(final_norm), stride, vocabulary, hidden, query_heads,
                cache_heads, head_dim, float(eps), float(scale)};
    }

    DecodeStep step_;
    std::mutex mutex_;
};

}  // namespace

RLHF_BINDINGS(decode_step) {
    py::class_<Step>(m, "DecodeStep")
        .def(py::init<int, const Sizes&, Address, int64_t, Address, double, double, const std::vector<LayerArguments>&,
                      const std::vector<AdapterArguments>&>())
        .def("bind", &Step::bind, NoGil())
        .def("__call__", &Step::run, NoGil());
}

}  // namespace rlhf::bindings
