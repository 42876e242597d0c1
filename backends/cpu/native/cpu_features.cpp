#include "cpu_features.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if TRIVIUM_X86
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif TRIVIUM_AARCH64 && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
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

bool has_amx_instructions() {
  const uint32_t d = cpuid(7, 0).d;
  return bit(d, 24) && bit(d, 25) && bit(d, 22);  // tiles, int8, bfloat16
}

// Linux gives a process tile registers when it asks (Documentation/arch/x86/xstate.rst); elsewhere saving them is all it takes.
bool tiles_permitted() {
#ifdef __linux__
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return true;
#endif
}

bool tiles_saved() { return (saved_state() & 0x60000) == 0x60000; }

// Intel's cores take two cycles for a dot of 16 pairs, in which they do four multiply-adds of 16 lanes (measured: family 6 model 207); AMD's take as
// long for the one as for the other (Zen 4). By name rather than by a clock: the bits of a result hang on it.
bool bf16_dots_pay() {
  const Registers r = cpuid(0, 0);
  char vendor[13] = {};
  std::memcpy(vendor, &r.b, 4);
  std::memcpy(vendor + 4, &r.d, 4);
  std::memcpy(vendor + 8, &r.c, 4);
  return std::strcmp(vendor, "GenuineIntel") != 0;
}

CpuFeatures detect() {
  CpuFeatures f;
  const Registers basic = cpuid(1, 0);
  f.crc32c = bit(basic.c, 20);
  if (!bit(basic.c, 27)) return f;  // OSXSAVE
  const uint64_t saved = saved_state();
  const bool ymm = (saved & 0x6) == 0x6;
  const bool zmm = ymm && (saved & 0xe0) == 0xe0;
  const Registers extended = cpuid(7, 0);
  const Registers extended1 = cpuid(7, 1);
  f.avx2 = ymm && bit(extended.b, 5) && bit(basic.c, 12) && bit(basic.c, 29) && bit(extended.b, 8);
  f.avx512 = f.avx2 && zmm && bit(extended.b, 16) && bit(extended.b, 30) && bit(extended.b, 31) && bit(extended.b, 17);
  f.avx512_vnni = f.avx512 && bit(extended.c, 11);
  f.avx512_bf16 = f.avx512 && bit(extended1.a, 5);
  f.fast_bf16_dot = f.avx512_bf16 && bf16_dots_pay();
  f.avx_vnni = f.avx2 && bit(extended1.a, 4);
  f.amx = f.avx512_vnni && f.avx512_bf16 && has_amx_instructions() && tiles_saved() && tiles_permitted();
  return f;
}

#elif TRIVIUM_AARCH64

CpuFeatures detect() {
  CpuFeatures f;
#if defined(__linux__)
  f.neon_dot = (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
  f.crc32c = (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
#elif defined(__APPLE__)
  f.neon_dot = f.crc32c = true;  // every processor of theirs with this architecture
#endif
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
  if (cpu_features().amx) tiers.push_back("amx");
  const bool dots = cpu_features().avx512_bf16 && cpu_features().avx512_vnni;
  if (dots && cpu_features().fast_bf16_dot) tiers.push_back("avx512bf16");
  if (cpu_features().avx512_vnni) tiers.push_back("avx512vnni");
  if (dots && !cpu_features().fast_bf16_dot) tiers.push_back("avx512bf16");
  if (cpu_features().avx512) tiers.push_back("avx512");
  if (cpu_features().avx2) tiers.push_back("avx2");
  if (cpu_features().neon_dot) tiers.push_back("neon");
  tiers.push_back("portable");
  return tiers;
}

std::vector<std::string> emulated_tiers() {
  if (!cpu_features().avx512_vnni || !cpu_features().avx512_bf16) return {};
  return {"amx_emulated"};
}

std::string missing(const std::string& tier) {
  const std::vector<std::string> tiers = available_tiers();
  if (std::find(tiers.begin(), tiers.end(), tier) != tiers.end()) return "";
#if TRIVIUM_X86
  if (tier == "amx" && has_amx_instructions()) {
    if (!cpu_features().avx512_vnni || !cpu_features().avx512_bf16) return "the processor has AMX, but not AVX-512 with VNNI and BF16";
    if (!tiles_saved()) return "the processor has AMX, but the system does not save tile registers";
    return "the processor has AMX, but the system refuses tile registers to this process (arch_prctl)";
  }
#endif
  return "the processor lacks its instructions, or the system does not save their registers";
}

}  // namespace trivium
