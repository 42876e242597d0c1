// CRC-32C by the instructions that ARMv8.1 requires and ARMv8.0 may have.
#include <arm_acle.h>

#include "checksum_impl.h"

namespace trivium {
namespace {

struct ArmCrc {
  static uint32_t eight(uint32_t value, uint64_t word) { return __crc32cd(value, word); }
  static uint32_t one(uint32_t value, uint8_t byte) { return __crc32cb(value, byte); }
};

}  // namespace

extern const Checksum kChecksumNeonCrc;
const Checksum kChecksumNeonCrc{"crc", extend_by_instruction<ArmCrc>};

}  // namespace trivium
