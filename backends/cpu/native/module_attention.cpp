// Attention's timed loops, for benchmarks.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "measure_attention.h"
#include "module.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace trivium {

void bind_attention(nb::module_& m) {
  m.def("measure_attention", [](const std::string& tier, const KvLayer& layer, int64_t group, int64_t context, int64_t queries, int64_t layers,
                                int64_t rounds, int repeats) {
    const Kernels* kernels = find_kernels(tier);
    if (kernels == nullptr || queries > context) throw std::invalid_argument("no such tier, or more queries than tokens");
    const AttentionShape shape{layer.layout, group, context, queries, layers};
    AttentionTimes times;
    {
      nb::gil_scoped_release release;
      times = measure_attention(*kernels, shape, rounds, repeats);
    }
    nb::dict d;
    d["operations"] = shape.operations();
    d["bytes"] = shape.bytes();
    d["product_operations"] = static_cast<double>(rounds * kProductSums * kernels->lanes * 4);
    d["attend"] = times.attend;
    d["products"] = times.products;
    d["read"] = times.read;
    d["write"] = times.write;
    return d;
  }, "tier"_a, "layer"_a, "group"_a, "context"_a, "queries"_a, "layers"_a, "rounds"_a, "repeats"_a,
     "Processor seconds of this thread: attention, the ceiling of its products, a plain read of the pages, writing them.");
}

}  // namespace trivium
