// Python names of what keeps packed weights on disk: its checksum, and what became of reading them.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "checksum.h"
#include "module.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace trivium {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

const Checksum& named(const std::optional<std::string>& name) {
  if (!name) return checksum();
  for (const Checksum* one : checksums()) {
    if (*name == one->name) return *one;
  }
  throw std::invalid_argument("this machine lacks " + *name);
}

uint32_t crc32c(const Bytes& data, uint32_t before, const std::optional<std::string>& isa) {
  const Checksum& by = named(isa);
  nb::gil_scoped_release release;
  return by.extend(before, data.data(), data.size());
}

std::vector<std::string> names() {
  std::vector<std::string> found;
  for (const Checksum* one : checksums()) found.emplace_back(one->name);
  return found;
}

}  // namespace

void bind_checksum(nb::module_& m) {
  m.def("crc32c", &crc32c, "data"_a, "before"_a = 0, "isa"_a = nb::none(),
        "CRC-32C of uint8 data[bytes], continued from `before`. isa: one of crc32c_isas(); by default, the first.");
  m.def("crc32c_isas", &names, "Ways to compute it on this machine, best first.");
  m.def("join_crc32c", &join_checksums, "first"_a, "second"_a, "bytes"_a, "That of two parts after each other; bytes: of the second.");
  nb::class_<Filling>(m, "Filling", "What became of Runtime.read(), after finish_packing().")
      .def_prop_ro("whole", [](const Filling& filling) { return filling.filled; }, "The file has as many bytes as the matrix.")
      .def_ro("crc32c", &Filling::checksum, "Of these.")
      .def_prop_ro("rest", [](const Filling& filling) { return nb::bytes(filling.rest.data(), filling.rest.size()); }, "At most 64 bytes that follow.");
}

}  // namespace trivium
