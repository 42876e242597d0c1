// The processor's tiles against the emulation: no kernel runs on tiles that do something else than those the tests judged it on.
#include "amx_dot.h"

#include <bit>
#include <cstring>
#include <initializer_list>

namespace trivium::amx {
namespace {

struct Bytes {
  alignas(64) uint8_t data[kTileBytes];
};

// Bytes without a pattern (a linear congruential generator), or small whole numbers in bfloat16, whose sums are exact in any order.
Bytes noise(uint32_t seed, bool pairs) {
  Bytes bytes;
  for (int i = 0; i < kTileBytes; i += pairs ? 2 : 1) {
    seed = seed * 1664525u + 1013904223u;
    bytes.data[i] = static_cast<uint8_t>(seed >> 24);
    if (!pairs) continue;
    const uint32_t bits = std::bit_cast<uint32_t>(static_cast<float>(static_cast<int>(seed >> 28) - 8));
    bytes.data[i] = static_cast<uint8_t>(bits >> 16);
    bytes.data[i + 1] = static_cast<uint8_t>(bits >> 24);
  }
  return bytes;
}

Config config_of(int rows, int depth) {
  Config config;
  config.shape(0, rows, kRowBytes);
  config.shape(1, rows, 4 * depth);
  config.shape(2, depth, kRowBytes);
  return config;
}

bool agrees(Dot kind) {
  const Bytes a = noise(1, kind == Dot::bfloat16), b = noise(2, kind == Dot::bfloat16);
  for (const Config& config : {config_of(16, 16), config_of(16, 8), config_of(5, 4)}) {
    Bytes real = {}, expected = {};
    for (int times = 0; times < 2; ++times) {
      hardware_dot(kind, config, a.data, b.data, real.data);
      emulated_dot(kind, config, a.data, b.data, expected.data);
    }
    if (std::memcmp(&real, &expected, sizeof real) != 0) return false;
  }
  return true;
}

}  // namespace

void hardware_dot(Dot kind, const Config& config, const uint8_t* a, const uint8_t* b, uint8_t* c) {
  dot_once<HardwareTiles>(kind, config, a, b, c);
}

bool check_tiles() {
  return agrees(Dot::signed_signed) && agrees(Dot::signed_unsigned) && agrees(Dot::unsigned_signed) && agrees(Dot::bfloat16);
}

}  // namespace trivium::amx
