// The checksum of what is kept on disk: CRC-32C (Castagnoli; RFC 3720, appendix B.4).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace trivium {

struct Checksum {
  const char* name;
  // The checksum of what `before` is the checksum of (0: of nothing), followed by these bytes.
  uint32_t (*extend)(uint32_t before, const uint8_t* data, size_t bytes);
};

// Ways to compute it on this machine, best first; the last is portable. All give the same value.
std::vector<const Checksum*> checksums();
// The best of them.
const Checksum& checksum();

// The checksum of two parts after each other; `bytes`: of the second.
uint32_t join_checksums(uint32_t first, uint32_t second, uint64_t bytes);

}  // namespace trivium
