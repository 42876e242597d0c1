#include "kernels.h"

namespace trivium {

extern const Kernels kernels_portable;
#if TRIVIUM_X86
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
extern const Kernels kernels_avx512vnni;
extern const Kernels kernels_avx512bf16;
extern const Kernels kernels_amx;
extern const Kernels kernels_amx_emulated;
#endif

const Kernels* find_kernels(const std::string& tier) {
#if TRIVIUM_X86
  if (tier == "amx") return &kernels_amx;
  if (tier == "amx_emulated") return &kernels_amx_emulated;
  if (tier == "avx512bf16") return &kernels_avx512bf16;
  if (tier == "avx512vnni") return &kernels_avx512vnni;
  if (tier == "avx512") return &kernels_avx512;
  if (tier == "avx2") return &kernels_avx2;
#endif
  return tier == "portable" || tier == "neon" ? &kernels_portable : nullptr;
}

}  // namespace trivium
