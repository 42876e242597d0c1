// GGUF's block formats as plain codes. Block layouts: ggml's definitions as documented by the gguf package (gguf.quants).
#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "rows.h"
#include "scalar.h"

namespace trivium::linear {
namespace {

constexpr int64_t kBlock = 256;  // numbers in a K block
constexpr int64_t kKScaleBytes = 12;

uint16_t read_u16(const uint8_t* p) { return static_cast<uint16_t>(p[0] | p[1] << 8); }

// The 4-bit codes of a block of 32: byte i holds number i (low) and number i + 16 (high).
void read_nibbles(const uint8_t* p, uint8_t* code) {
  for (int i = 0; i < 16; ++i) {
    code[i] = p[i] & 15;
    code[i + 16] = p[i] >> 4;
  }
}

// Adds the fifth bits of a block of 32, bit i for number i.
void read_fifth_bits(const uint8_t* p, uint8_t* code) {
  for (int i = 0; i < 32; ++i) code[i] = static_cast<uint8_t>(code[i] | (p[i / 8] >> (i % 8) & 1) << 4);
}

// q4_0, q4_1, q5_0, q5_1, q8_0: float16 scale, for _1 float16 min, for q5 32 high bits, codes.
void read_small_blocks(Storage storage, const uint8_t* p, int64_t in, RowCodes& codes) {
  const bool has_min = storage == Storage::q4_1 || storage == Storage::q5_1;
  const bool has_fifth = storage == Storage::q5_0 || storage == Storage::q5_1;
  codes.zero = has_min ? 0 : storage == Storage::q4_0 ? 8 : storage == Storage::q5_0 ? 16 : 128;
  for (int64_t g = 0; g < in / kGroup; ++g) {
    uint8_t* code = codes.code.data() + g * kGroup;
    codes.scale[g] = read_u16(p);
    p += 2;
    if (has_min) codes.min[g] = read_u16(p), p += 2;
    if (storage == Storage::q8_0) {
      for (int i = 0; i < kGroup; ++i) code[i] = static_cast<uint8_t>(p[i] ^ 0x80);
      p += kGroup;
      continue;
    }
    const uint8_t* fifth = p;
    if (has_fifth) p += 4;
    read_nibbles(p, code);
    if (has_fifth) read_fifth_bits(fifth, code);
    p += 16;
  }
}

// The eight 6-bit scales and minima of a q4_k or q5_k block: four of each in bytes 0-7, the others' low nibbles in bytes 8-11
// and their high two bits on top of the first.
void read_k_scales(const uint8_t* p, uint8_t* scale, uint8_t* min) {
  for (int i = 0; i < 4; ++i) {
    scale[i] = p[i] & 63;
    min[i] = p[i + 4] & 63;
    scale[i + 4] = static_cast<uint8_t>((p[i + 8] & 15) | (p[i] >> 6) << 4);
    min[i + 4] = static_cast<uint8_t>((p[i + 8] >> 4) | (p[i + 4] >> 6) << 4);
  }
}

// q4_k, q5_k: d, dmin, scales, for q5 32 bytes whose bit g is the fifth bit of group g, codes of two groups a 32 bytes.
void read_k_blocks(bool has_fifth, const uint8_t* p, int64_t in, RowCodes& codes) {
  codes.zero = 0;
  for (int64_t block = 0; block < in / kBlock; ++block) {
    codes.d[block] = read_u16(p);
    codes.d_min[block] = read_u16(p + 2);
    read_k_scales(p + 4, codes.sub_scale.data() + 8 * block, codes.sub_min.data() + 8 * block);
    p += 4 + kKScaleBytes;
    const uint8_t* fifth = p;
    if (has_fifth) p += 32;
    uint8_t* code = codes.code.data() + block * kBlock;
    for (int g = 0; g < 8; ++g) {
      for (int i = 0; i < 32; ++i) {
        const int low = p[32 * (g / 2) + i] >> (4 * (g % 2)) & 15;
        const int high = has_fifth ? (fifth[i] >> g & 1) << 4 : 0;
        code[32 * g + i] = static_cast<uint8_t>(low | high);
      }
    }
    p += kBlock / 2;
  }
}

// q6_k: 128 bytes of low nibbles, 64 of high pairs of bits, 16 signed scales, d. Each half of the block holds 128 numbers:
// number 32 * j + i has its nibble in byte 32 * (j % 2) + i (high if j >= 2) and its pair of bits in byte i at 2 * j.
void read_q6_blocks(const uint8_t* p, int64_t in, RowCodes& codes) {
  codes.zero = 32;
  for (int64_t block = 0; block < in / kBlock; ++block, p += 210) {
    for (int k = 0; k < kBlock; ++k) {
      const int half = k / 128, j = k % 128 / 32, i = k % 32;
      const int low = p[64 * half + 32 * (j % 2) + i] >> (j >= 2 ? 4 : 0) & 15;
      const int high = p[128 + 32 * half + i] >> (2 * j) & 3;
      codes.code[block * kBlock + k] = static_cast<uint8_t>(low | high << 4);
    }
    std::copy_n(p + 192, 16, codes.sub_scale.data() + 16 * block);
    codes.d[block] = read_u16(p + 208);
  }
}

// q3_k: 32 bytes whose bit 4 * half + j says "no 4 to take off", 64 of low pairs of bits in q6_k's order of numbers, 12 of scales (low
// nibbles of 0-7 and of 8-15 in the first eight, then pairs of bits of 0-3 in the lowest, ...), less 32 each, d.
void read_q3_blocks(const uint8_t* p, int64_t in, RowCodes& codes) {
  codes.zero = 4;
  for (int64_t block = 0; block < in / kBlock; ++block, p += 110) {
    for (int k = 0; k < kBlock; ++k) {
      const int half = k / 128, j = k % 128 / 32, i = k % 32;
      const int low = p[32 + 32 * half + i] >> (2 * j) & 3;
      codes.code[block * kBlock + k] = static_cast<uint8_t>(low | (p[i] >> (4 * half + j) & 1) << 2);
    }
    for (int g = 0; g < 16; ++g) {
      const int low = p[96 + g % 8] >> (g < 8 ? 0 : 4) & 15, high = p[104 + g % 4] >> (2 * (g / 4)) & 3;
      codes.sub_scale[16 * block + g] = static_cast<uint8_t>((low | high << 4) - 32);
    }
    codes.d[block] = read_u16(p + 108);
  }
}

// The numbers that a 4-bit code of iq4_nl and iq4_xs, and one of mxfp4 (doubled E2M1), stands for.
constexpr int8_t kCurve[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

void look_up(const int8_t (&table)[16], uint8_t* code) {
  for (int i = 0; i < kGroup; ++i) code[i] = static_cast<uint8_t>(table[code[i]] + kZero8);
}

// float16 bits of 2^(exponent - 128), mxfp4's half scale.
uint16_t half_power(int exponent) {
  constexpr int kLeast = 128 - 24, kMost = 128 + 15;
  if (exponent < kLeast || exponent > kMost) {
    throw std::invalid_argument("an mxfp4 scale is beyond float16; bfloat16 or float32 hold it (dtype)");
  }
  return to_float16(std::ldexp(1.0f, exponent - 128));
}

// iq4_nl: d, nibbles. mxfp4: exponent, nibbles.
void read_table_blocks(Storage storage, const uint8_t* p, int64_t in, RowCodes& codes) {
  const bool curve = storage == Storage::iq4_nl;
  codes.zero = kZero8;
  for (int64_t g = 0; g < in / kGroup; ++g, p += curve ? 18 : 17) {
    uint8_t* code = codes.code.data() + g * kGroup;
    read_nibbles(p + (curve ? 2 : 1), code);
    look_up(curve ? kCurve : kE2m1, code);
    const bool zeros = std::all_of(code, code + kGroup, [](uint8_t c) { return c == kZero8; });
    codes.scale[g] = curve ? read_u16(p) : zeros ? uint16_t{0} : half_power(p[0]);
  }
}

// iq4_xs: d, 16 bits of high pairs and 4 bytes of low nibbles of eight scales (less 32 each), nibbles of eight groups.
void read_iq4_xs_blocks(const uint8_t* p, int64_t in, RowCodes& codes) {
  codes.zero = kZero8;
  for (int64_t block = 0; block < in / kBlock; ++block, p += 136) {
    codes.d[block] = read_u16(p);
    for (int g = 0; g < 8; ++g) {
      const int low = p[4 + g / 2] >> (4 * (g % 2)) & 15, high = read_u16(p + 2) >> (2 * g) & 3;
      std::fill_n(codes.sub_scale.data() + 16 * block + 2 * g, 2, static_cast<uint8_t>((low | high << 4) - 32));
      uint8_t* code = codes.code.data() + block * kBlock + g * kGroup;
      read_nibbles(p + 8 + 16 * g, code);
      look_up(kCurve, code);
    }
  }
}

// Number k of a tq1_0 block: digit k / n of a byte that is a fraction in base 3 (the next digit is the carry of times 3).
int ternary_digit(const uint8_t* p, int k) {
  constexpr uint8_t kPower[] = {1, 3, 9, 27, 81};
  const auto digit = [&](int byte, int place) { return static_cast<uint8_t>(p[byte] * kPower[place]) * 3 >> 8; };
  if (k < 160) return digit(k % 32, k / 32);
  if (k < 240) return digit(32 + (k - 160) % 16, (k - 160) / 16);
  return digit(48 + (k - 240) % 4, (k - 240) / 4);
}

// tq1_0: 48 bytes of five digits, 4 of four, d. tq2_0: 64 bytes of four pairs of bits, d. Codes 0, 1, 2 for -d, 0, d.
void read_ternary_blocks(Storage storage, const uint8_t* p, int64_t in, RowCodes& codes) {
  const bool packed = storage == Storage::tq1_0;
  codes.zero = 1;
  for (int64_t block = 0; block < in / kBlock; ++block, p += packed ? 54 : 66) {
    std::fill_n(codes.scale.data() + 8 * block, 8, read_u16(p + (packed ? 52 : 64)));
    for (int k = 0; k < kBlock; ++k) {
      const int code = packed ? ternary_digit(p, k) : p[32 * (k / 128) + k % 32] >> (2 * (k % 128 / 32)) & 3;
      codes.code[block * kBlock + k] = static_cast<uint8_t>(code);
    }
  }
}

void decode_floats(Storage storage, const uint8_t* row, int64_t in, float* out) {
  for (int64_t i = 0; i < in; ++i) {
    if (storage == Storage::float32) std::copy_n(row + 4 * i, 4, reinterpret_cast<uint8_t*>(out + i));
    else if (storage == Storage::bfloat16) out[i] = from_bfloat16(read_u16(row + 2 * i));
    else out[i] = from_float16(read_u16(row + 2 * i));
  }
}

}  // namespace

RowCodes::RowCodes(int64_t in) {
  const auto blocks = static_cast<size_t>((in + kBlock - 1) / kBlock);
  code.resize(blocks * kBlock);
  scale.resize(blocks * 8);
  min.resize(blocks * 8);
  d.resize(blocks);
  d_min.resize(blocks);
  sub_scale.resize(blocks * 16);
  sub_min.resize(blocks * 8);
  part_scale.resize(blocks);
}

int64_t storage_row_bytes(Storage storage, int64_t in) {
  const auto whole = [in](int64_t block, int64_t bytes) { return in % block ? 0 : in / block * bytes; };
  switch (storage) {
    case Storage::float32: return 4 * in;
    case Storage::bfloat16:
    case Storage::float16: return 2 * in;
    case Storage::q4_0: return whole(32, 18);
    case Storage::q4_1: return whole(32, 20);
    case Storage::q5_0: return whole(32, 22);
    case Storage::q5_1: return whole(32, 24);
    case Storage::q8_0: return whole(32, 34);
    case Storage::q4_k: return whole(256, 144);
    case Storage::q5_k: return whole(256, 176);
    case Storage::q6_k: return whole(256, 210);
    case Storage::q3_k: return whole(256, 110);
    case Storage::iq4_nl: return whole(32, 18);
    case Storage::iq4_xs: return whole(256, 136);
    case Storage::tq1_0: return whole(256, 54);
    case Storage::tq2_0: return whole(256, 66);
    case Storage::mxfp4: return whole(32, 17);
  }
  return 0;
}

void read_blocks(Storage storage, const uint8_t* row, int64_t in, RowCodes& codes) {
  switch (storage) {
    case Storage::q6_k: return read_q6_blocks(row, in, codes);
    case Storage::q3_k: return read_q3_blocks(row, in, codes);
    case Storage::q4_k:
    case Storage::q5_k: return read_k_blocks(storage == Storage::q5_k, row, in, codes);
    case Storage::iq4_nl:
    case Storage::mxfp4: return read_table_blocks(storage, row, in, codes);
    case Storage::iq4_xs: return read_iq4_xs_blocks(row, in, codes);
    case Storage::tq1_0:
    case Storage::tq2_0: return read_ternary_blocks(storage, row, in, codes);
    default: return read_small_blocks(storage, row, in, codes);
  }
}

void decode_row(Storage storage, const uint8_t* row, int64_t in, float* out, RowCodes& codes) {
  if (is_float(storage)) return decode_floats(storage, row, in, out);
  read_blocks(storage, row, in, codes);
  const bool has_min = storage == Storage::q4_1 || storage == Storage::q5_1;
  for (int64_t i = 0; i < in; ++i) {
    const auto code = static_cast<float>(codes.code[i] - codes.zero);
    const float d = from_float16(codes.d[i / kBlock]);
    if (storage == Storage::q6_k || storage == Storage::q3_k || storage == Storage::iq4_xs) {
      out[i] = d * static_cast<float>(static_cast<int8_t>(codes.sub_scale[i / 16])) * code;
    } else if (storage == Storage::q4_k || storage == Storage::q5_k) {
      const float minimum = from_float16(codes.d_min[i / kBlock]) * static_cast<float>(codes.sub_min[i / kGroup]);
      out[i] = d * static_cast<float>(codes.sub_scale[i / kGroup]) * code - minimum;
    } else {
      const float product = from_float16(codes.scale[i / kGroup]) * code;
      out[i] = has_min ? product + from_float16(codes.min[i / kGroup]) : product;
    }
  }
}

}  // namespace trivium::linear
