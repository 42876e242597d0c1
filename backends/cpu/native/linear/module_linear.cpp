// Python names of the linear layers, for tests and benchmarks: trivium_cpu._native.linear.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>

#include "measure.h"

namespace nb = nanobind;

namespace trivium::linear {
namespace {

using Floats = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using MutableFloats = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

constexpr const char* kIsas[] = {"portable", "avx2", "avx512", "avx512_vnni", "amx", "amx_emulated", "neon"};

template <class Enum, size_t N>
Enum named(const char* const (&names)[N], const std::string& name) {
  for (size_t i = 0; i < N; ++i) {
    if (name == names[i]) return static_cast<Enum>(i);
  }
  throw std::invalid_argument("unknown name: " + name);
}

const LinearKernels& kernels_named(const std::string& name) {
  const Isa isa = named<Isa>(kIsas, name);
  auto isas = available_isas();
  for (const Isa emulated : emulated_isas()) isas.push_back(emulated);
  if (std::find(isas.begin(), isas.end(), isa) == isas.end()) throw std::invalid_argument("this machine lacks " + name);
  return kernels(isa);
}

std::vector<std::string> names_of(const std::vector<Isa>& isas) {
  std::vector<std::string> names;
  for (const Isa isa : isas) names.emplace_back(kIsas[static_cast<int>(isa)]);
  return names;
}

// numpy array that owns its numbers.
template <class T>
nb::ndarray<nb::numpy, T> array_of(std::vector<T> values, std::initializer_list<size_t> dims) {
  auto* owner = new std::vector<T>(std::move(values));
  nb::capsule free(owner, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::ndarray<nb::numpy, T>(owner->data(), dims, free);
}

PackedMatrix pack(Arena& arena, const std::string& format, const std::string& storage, int64_t in, const Bytes& rows) {
  const Storage stored = named<Storage>(kStorageNames, storage);
  PackedMatrix matrix(arena, choose_layout(named<Format>(kFormatNames, format), stored), static_cast<int64_t>(rows.shape(0)), in);
  pack_tiles(matrix, {stored, rows.data(), static_cast<int64_t>(rows.shape(1))}, 0, matrix.tiles());
  return matrix;
}

nb::ndarray<nb::numpy, float> unpack(const PackedMatrix& matrix) {
  const MatrixView& view = matrix.view();
  std::vector<float> values(static_cast<size_t>(view.out * view.in));
  for (int64_t row = 0; row < view.out; ++row) unpack_row(view, row, values.data() + row * view.in);
  return array_of(std::move(values), {static_cast<size_t>(view.out), static_cast<size_t>(view.in)});
}

// Quantised rows in memory of their own.
struct OwnedRows {
  std::vector<uint8_t> bytes;
  QuantisedRows rows;

  OwnedRows(const LinearKernels& table, const Floats& x)
      : bytes(x.shape(0) * QuantisedRows::row_bytes(static_cast<int64_t>(x.shape(1)), Records::both) + kAlign) {
    auto start = (reinterpret_cast<uintptr_t>(bytes.data()) + kAlign - 1) / kAlign * kAlign;
    rows = QuantisedRows(reinterpret_cast<void*>(start), static_cast<int64_t>(x.shape(1)), Records::both);
    for (size_t r = 0; r < x.shape(0); ++r) table.quantise_row(x.data() + r * x.shape(1), rows, static_cast<int64_t>(r));
  }
};

nb::dict quantise(const std::string& isa, const Floats& x) {
  const OwnedRows owned(kernels_named(isa), x);
  const QuantisedRows& rows = owned.rows;
  const auto count = static_cast<int64_t>(x.shape(0));
  const int64_t groups = rows.groups();
  // at(group, i): the i-th of `width` numbers of each group.
  const auto collect = [&]<class T>(int64_t width, T (*at)(const QuantisedGroup&, int64_t i)) {
    std::vector<T> values;
    for (int64_t i = 0; i < count * groups * width; ++i) {
      values.push_back(at(rows.group(i / (groups * width))[i / width % groups], i % width));
    }
    return array_of(std::move(values), {static_cast<size_t>(count), static_cast<size_t>(groups * width)});
  };
  using G = const QuantisedGroup&;
  std::vector<float> scales;
  for (int64_t row = 0; row < count; ++row) scales.push_back(*rows.scale(row));
  nb::dict result;
  result["q"] = collect(kGroup, +[](G g, int64_t i) { return g.q[i]; });
  result["scale"] = array_of(std::move(scales), {static_cast<size_t>(count)});
  result["shift"] = collect(1, +[](G g, int64_t) { return g.shift; });
  result["quarters"] = collect(1, +[](G g, int64_t) { return g.quarters; });
  result["scaled_sum"] = collect(1, +[](G g, int64_t) { return g.scaled_sum; });
  result["start4"] = collect(1, +[](G g, int64_t) { return g.start4; });
  result["start8"] = collect(1, +[](G g, int64_t) { return g.start8; });
  result["start8_half"] = collect(2, +[](G g, int64_t i) { return g.start8_half[i]; });
  return result;
}

// Writes outputs [out_begin, out_end) of rows [row_begin, row_end) into y.
void multiply(const std::string& isa, const PackedMatrix& matrix, const Floats& x, const MutableFloats& y,
              std::optional<Vector> bias, bool accumulate, std::optional<std::vector<int64_t>> ranges) {
  const LinearKernels& table = kernels_named(isa);
  const OwnedRows owned(table, x);
  const auto rows = static_cast<int64_t>(x.shape(0));
  const MatrixView& view = matrix.view();
  if (static_cast<int64_t>(x.shape(1)) != view.in || y.shape(0) != x.shape(0) || static_cast<int64_t>(y.shape(1)) != view.out) {
    throw std::invalid_argument("shapes of matrix, x and y don't agree");
  }
  const std::vector<int64_t> r = ranges.value_or(std::vector<int64_t>{0, rows, 0, view.out});
  const Input input{x.data(), view.in, owned.rows};
  const Output output{y.data(), view.out, bias ? bias->data() : nullptr, accumulate};
  table.multiply(view, input, {r.at(0), r.at(1)}, {r.at(2), r.at(3)}, output);
}

std::vector<MatrixView> views(const std::vector<const PackedMatrix*>& matrices) {
  std::vector<MatrixView> result;
  for (const PackedMatrix* matrix : matrices) result.push_back(matrix->view());
  return result;
}

void bind_measures(nb::module_& m) {
  m.def("measure_read", [](const std::vector<const PackedMatrix*>& matrices, int threads, int repeats) {
    return measure_read(views(matrices), threads, repeats);
  }, "Seconds of each repeat of reading all matrices.");
  m.def("measure_dots", [](const std::string& isa, int64_t rounds, int threads, int repeats) {
    return measure_dots(kernels_named(isa), rounds, threads, repeats);
  }, "Seconds of each repeat of `rounds` * 12 register dots of 64 multiply-adds on each thread.");
  m.def("measure_multiply", [](const std::string& isa, const std::vector<const PackedMatrix*>& matrices, int64_t rows,
                               int threads, int repeats) {
    return measure_multiply(kernels_named(isa), views(matrices), rows, threads, repeats);
  }, "Seconds of each repeat of multiplying all matrices with `rows` inputs.");
  m.def("measure_quantise", [](const std::string& isa, const PackedMatrix& matrix, int64_t count, int repeats) {
    return measure_quantise(kernels_named(isa), records_of(matrix.view().layout), matrix.view().in, count, repeats);
  }, "Seconds of each repeat of quantising a row of inputs of `matrix` `count` times.");
}

}  // namespace

void bind_linear(nb::module_& m) {
  nb::class_<Arena>(m, "Arena").def(nb::init<>());
  nb::class_<PackedMatrix>(m, "Matrix")
      .def_prop_ro("layout", [](const PackedMatrix& matrix) { return kLayoutNames[static_cast<int>(matrix.view().layout)]; })
      .def_prop_ro("nbytes", &PackedMatrix::bytes)
      .def_prop_ro("shape", [](const PackedMatrix& matrix) { return nb::make_tuple(matrix.view().out, matrix.view().in); })
      .def_prop_ro("packed", [](nb::handle_t<PackedMatrix> self) {
        auto& matrix = nb::cast<PackedMatrix&>(self);
        return nb::ndarray<nb::numpy, uint8_t>(matrix.tile(0), {static_cast<size_t>(matrix.bytes())}, self);
      }, "uint8[nbytes], the packed bytes themselves.")
      .def("unpack", &unpack, "float32[out, in], decoded.");
  m.def("isas", [] { return names_of(available_isas()); }, "Instruction sets of this machine, best first.");
  m.def("emulated_isas", [] { return names_of(emulated_isas()); }, "Instruction sets whose kernels run here on an emulation, for tests.");
  m.def("is_lossless", [](const std::string& format, const std::string& storage) {
    return is_lossless(named<Format>(kFormatNames, format), named<Storage>(kStorageNames, storage));
  });
  m.def("pack", &pack, nb::arg("arena"), nb::arg("format"), nb::arg("storage"), nb::arg("in"), nb::arg("rows"),
        "Packs rows uint8[out, bytes a row] of a storage format.");
  m.def("quantise", &quantise, nb::arg("isa"), nb::arg("x"), "The record of each row of float32[rows, in] as arrays.");
  m.def("multiply", &multiply, nb::arg("isa"), nb::arg("matrix"), nb::arg("x"), nb::arg("y"),
        nb::arg("bias").none() = nb::none(), nb::arg("accumulate") = false, nb::arg("ranges").none() = nb::none(),
        "y (+)= x W^T (+ bias) for ranges (row begin, row end, out begin, out end).");
  bind_measures(m);
}

}  // namespace trivium::linear
