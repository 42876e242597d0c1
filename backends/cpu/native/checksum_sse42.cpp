// CRC-32C by SSE 4.2.
#include <nmmintrin.h>

#include "checksum_impl.h"

namespace trivium {
namespace {

struct Sse42 {
  static uint32_t eight(uint32_t value, uint64_t word) { return static_cast<uint32_t>(_mm_crc32_u64(value, word)); }
  static uint32_t one(uint32_t value, uint8_t byte) { return _mm_crc32_u8(value, byte); }
};

}  // namespace

extern const Checksum kChecksumSse42;
const Checksum kChecksumSse42{"sse42", extend_by_instruction<Sse42>};

}  // namespace trivium
