#include "checksum.h"

#include <array>

#include "cpu_features.h"

namespace trivium {

extern const Checksum kChecksumSse42, kChecksumNeonCrc;

namespace {

constexpr uint32_t kPolynomial = 0x82f63b78u;  // the lowest bit is the coefficient of the highest power
constexpr uint32_t kOne = 1u << 31;            // the polynomial 1

constexpr uint32_t times_x(uint32_t a) { return a >> 1 ^ (a & 1 ? kPolynomial : 0); }

// a * b modulo the polynomial.
constexpr uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = kOne; bit != 0; bit >>= 1, b = times_x(b)) {
    if (a & bit) product ^= b;
  }
  return product;
}

// x to the power of 8 * 2^i: what 2^i bytes of zeros multiply by.
constexpr auto kPowers = [] {
  std::array<uint32_t, 64> powers{};
  powers[0] = kOne >> 8;
  for (size_t i = 1; i < powers.size(); ++i) powers[i] = multiply(powers[i - 1], powers[i - 1]);
  return powers;
}();

// [i][b]: what byte b becomes when i more bytes follow it.
constexpr auto kTables = [] {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (auto& table : tables) {
      for (int bit = 0; bit < 8; ++bit) value = times_x(value);
      table[byte] = value;
    }
  }
  return tables;
}();

uint32_t extend_portable(uint32_t before, const uint8_t* p, size_t bytes) {
  uint32_t value = ~before;
  for (; bytes >= 8; bytes -= 8, p += 8) {
    uint32_t next = 0;
    for (size_t i = 0; i < 8; ++i) next ^= kTables[7 - i][p[i] ^ (i < 4 ? value >> 8 * i & 255 : 0)];
    value = next;
  }
  for (; bytes > 0; --bytes, ++p) value = value >> 8 ^ kTables[0][(value ^ *p) & 255];
  return ~value;
}

constexpr Checksum kPortable{"portable", extend_portable};

}  // namespace

uint32_t join_checksums(uint32_t first, uint32_t second, uint64_t bytes) {
  for (size_t i = 0; bytes != 0; ++i, bytes >>= 1) {
    if (bytes & 1) first = multiply(first, kPowers[i]);
  }
  return first ^ second;
}

std::vector<const Checksum*> checksums() {
  std::vector<const Checksum*> found;
#if TRIVIUM_X86
  if (cpu_features().crc32c) found.push_back(&kChecksumSse42);
#elif TRIVIUM_AARCH64
  if (cpu_features().crc32c) found.push_back(&kChecksumNeonCrc);
#endif
  found.push_back(&kPortable);
  return found;
}

const Checksum& checksum() {
  static const Checksum& best = *checksums().front();
  return best;
}

}  // namespace trivium
