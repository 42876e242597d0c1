// Python names of single tile instructions, for tests: trivium_cpu._native.amx.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "amx_dot.h"
#include "cpu_features.h"
#include "module.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace trivium {
namespace {

using Tile = nb::ndarray<const uint8_t, nb::shape<amx::kRows, amx::kRowBytes>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::shape<64>, nb::c_contig, nb::device::cpu>;

// uint8[16, 64]: c + a b with the given operand of LDTILECFG.
nb::ndarray<nb::numpy, uint8_t> dot(const std::string& tiles, int kind, const Bytes& config, const Tile& a, const Tile& b, const Tile& c) {
  if (kind < 0 || kind > static_cast<int>(amx::Dot::bfloat16)) throw std::invalid_argument("no such dot");
  amx::Config operand;
  std::memcpy(&operand, config.data(), sizeof operand);
  auto result = new_array<uint8_t>({amx::kRows, amx::kRowBytes});
  std::copy_n(c.data(), amx::kTileBytes, result.data());
  const auto which = static_cast<amx::Dot>(kind);
  if (tiles == "emulated") {
    amx::emulated_dot(which, operand, a.data(), b.data(), result.data());
    return result;
  }
#if TRIVIUM_X86
  if (cpu_features().amx) {
    amx::hardware_dot(which, operand, a.data(), b.data(), result.data());
    return result;
  }
#endif
  throw std::invalid_argument("this machine lacks " + tiles);
}

}  // namespace

void bind_amx(nb::module_& m) {
  m.def("dot", &dot, "tiles"_a, "kind"_a, "config"_a, "a"_a, "b"_a, "c"_a,
        "c + a b on tiles \"emulated\" or \"amx\"; kinds: 0 signed x signed, 1 signed x unsigned, 2 unsigned x signed, 3 bfloat16.");
}

}  // namespace trivium
