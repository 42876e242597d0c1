#include "cpu_features.h"

#include <cstdint>
#include <cstring>

#if TRIVIUM_X86
#include <cpuid.h>
#endif

namespace trivium {
namespace {

#if TRIVIUM_X86

struct Registers {
  uint32_t a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
  Registers r;
  if (!__get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d)) return {};
  return r;
}

bool bit(uint32_t word, int index) { return (word >> index) & 1; }

// Which register files the operating system saves. Only valid if CPUID reports OSXSAVE.
uint64_t saved_state() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

CpuFeatures detect() {
  CpuFeatures f;
  const Registers basic = cpuid(1, 0);
  if (!bit(basic.c, 27)) return f;  // OSXSAVE
  const uint64_t saved = saved_state();
  const bool ymm = (saved & 0x6) == 0x6;
  const bool zmm = ymm && (saved & 0xe0) == 0xe0;
  const bool tiles = (saved & 0x60000) == 0x60000;
  const Registers extended = cpuid(7, 0);
  const Registers extended1 = cpuid(7, 1);
  f.avx2 = ymm && bit(extended.b, 5) && bit(basic.c, 12) && bit(basic.c, 29) && bit(extended.b, 8);
  f.avx512 = f.avx2 && zmm && bit(extended.b, 16) && bit(extended.b, 30) && bit(extended.b, 31) && bit(extended.b, 17);
  f.avx512_vnni = f.avx512 && bit(extended.c, 11);
  f.avx512_bf16 = f.avx512 && bit(extended1.a, 5);
  f.avx_vnni = f.avx2 && bit(extended1.a, 4);
  f.amx_int8 = tiles && bit(extended.d, 24) && bit(extended.d, 25);
  f.amx_bf16 = tiles && bit(extended.d, 24) && bit(extended.d, 22);
  return f;
}

#else

CpuFeatures detect() { return {}; }

#endif

}  // namespace

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = detect();
  return features;
}

std::string cpu_name() {
#if TRIVIUM_X86
  uint32_t words[12] = {};
  for (uint32_t i = 0; i < 3; ++i) {
    if (!__get_cpuid(0x80000002 + i, &words[4 * i], &words[4 * i + 1], &words[4 * i + 2], &words[4 * i + 3])) return "";
  }
  char text[sizeof(words) + 1] = {};
  std::memcpy(text, words, sizeof(words));
  std::string name(text);
  name.erase(0, name.find_first_not_of(' '));
  name.erase(name.find_last_not_of(' ') + 1);
  return name;
#else
  return "";
#endif
}

std::vector<std::string> available_tiers() {
  std::vector<std::string> tiers;
  if (cpu_features().avx512) tiers.push_back("avx512");
  if (cpu_features().avx2) tiers.push_back("avx2");
  tiers.push_back("portable");
  return tiers;
}

}  // namespace trivium
