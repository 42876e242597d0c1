#include "peak.h"

namespace trivium {

namespace portable { int64_t multiply_adds(int64_t rounds); }
#if TRIVIUM_X86
namespace avx2 { int64_t multiply_adds(int64_t rounds); }
namespace avx512 { int64_t multiply_adds(int64_t rounds); }
#endif

int64_t multiply_adds([[maybe_unused]] const std::string& tier, int64_t rounds) {
#if TRIVIUM_X86
  if (tier.starts_with("avx512") || tier.starts_with("amx")) return avx512::multiply_adds(rounds);
  if (tier == "avx2") return avx2::multiply_adds(rounds);
#endif
  return portable::multiply_adds(rounds);
}

}  // namespace trivium
