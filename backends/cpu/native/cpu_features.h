// What this processor can run and what the operating system saves of it.
#pragma once

#include <string>
#include <vector>

namespace trivium {

struct CpuFeatures {
  bool avx2 = false;    // with FMA, F16C and BMI2
  bool avx512 = false;  // F, BW, VL and DQ, on top of avx2
  bool avx512_vnni = false;
  bool avx512_bf16 = false;
  bool fast_bf16_dot = false;  // more products of bfloat16 dots than of float32 multiply-adds in the same time
  bool avx_vnni = false;
  bool amx = false;  // tiles, int8 and bfloat16, on top of avx512_vnni and avx512_bf16, permitted to this process
  bool neon_dot = false;  // aarch64: four-way dot products of bytes
  bool crc32c = false;  // an instruction for that checksum: SSE 4.2, or the CRC extension of ARMv8
};

// Read once. A set counts only if the operating system saves its registers (XCR0), whatever CPUID says. Tile registers must also be
// granted to the process: the first call asks for them.
const CpuFeatures& cpu_features();

// The processor's own name, or "" where it does not say.
std::string cpu_name();

// Tiers of kernels that this machine can run, best first; the last is "portable".
std::vector<std::string> available_tiers();

// Tiers that this machine can only emulate, slowly: for tests of their kernels.
std::vector<std::string> emulated_tiers();

// Why a tier is not among them; "" if it is.
std::string missing(const std::string& tier);

}  // namespace trivium
