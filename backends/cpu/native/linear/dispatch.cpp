// Which instruction sets this machine has, and their kernels.
#include "dispatch.h"

#include "cpu_features.h"

namespace trivium::linear {

#ifdef TRIVIUM_X86
namespace {

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
bool has_amx() { return has_avx512_vnni() && cpu_features().amx; }

}  // namespace

std::vector<Isa> available_isas() {
  std::vector<Isa> isas;
  if (has_amx()) isas.push_back(Isa::amx);
  if (has_avx512_vnni()) isas.push_back(Isa::avx512_vnni);
  if (has_avx512()) isas.push_back(Isa::avx512);
  if (has_avx2()) isas.push_back(Isa::avx2);
  isas.push_back(Isa::portable);
  return isas;
}

std::vector<Isa> emulated_isas() { return has_avx512_vnni() ? std::vector{Isa::amx_emulated} : std::vector<Isa>{}; }

const LinearKernels& kernels(Isa isa) {
  switch (isa) {
    case Isa::amx: return amx_kernels();
    case Isa::amx_emulated: return amx_emulated_kernels();
    case Isa::avx512_vnni: return avx512_vnni_kernels();
    case Isa::avx512: return avx512_kernels();
    case Isa::avx2: return avx2_kernels();
    default: return portable_kernels();
  }
}
#elif defined(TRIVIUM_AARCH64)
std::vector<Isa> available_isas() {
  return cpu_features().neon_dot ? std::vector{Isa::neon, Isa::portable} : std::vector{Isa::portable};
}

std::vector<Isa> emulated_isas() { return {}; }

const LinearKernels& kernels(Isa isa) { return isa == Isa::neon ? neon_kernels() : portable_kernels(); }
#else
std::vector<Isa> available_isas() { return {Isa::portable}; }

std::vector<Isa> emulated_isas() { return {}; }

const LinearKernels& kernels(Isa) { return portable_kernels(); }
#endif

}  // namespace trivium::linear
