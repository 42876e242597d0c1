// CRC-32C by a processor's instruction; for files that are built for an instruction set.
#pragma once

#include <cstring>

#include "checksum.h"

namespace trivium {
namespace {

uint64_t load_eight(const uint8_t* p) {
  uint64_t word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

// The instruction takes three cycles, and one can begin in each: three stretches are done at once, then joined, which takes as long as 2 KB.
constexpr size_t kWorthJoining = 8 << 10;

// Cpu::eight(value, word), Cpu::one(value, byte): the instruction.
template <class Cpu>
uint32_t extend_by_instruction(uint32_t before, const uint8_t* p, size_t bytes) {
  if (bytes >= kWorthJoining) {
    const size_t each = bytes / 24 * 8;
    uint32_t a = ~before, b = ~0u, c = ~0u;
    for (const uint8_t* end = p + each; p != end; p += 8) {
      a = Cpu::eight(a, load_eight(p));
      b = Cpu::eight(b, load_eight(p + each));
      c = Cpu::eight(c, load_eight(p + 2 * each));
    }
    before = join_checksums(join_checksums(~a, ~b, each), ~c, each);
    p += 2 * each;
    bytes -= 3 * each;
  }
  uint32_t value = ~before;
  for (; bytes >= 8; bytes -= 8, p += 8) value = Cpu::eight(value, load_eight(p));
  for (; bytes > 0; --bytes, ++p) value = Cpu::one(value, *p);
  return ~value;
}

}  // namespace
}  // namespace trivium
