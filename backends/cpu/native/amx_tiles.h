// The tile registers of AMX, twice: the instructions, and an emulation of them, so that the kernels' own lines run and are judged
// on any machine. A kernel takes one of the two as a template argument and makes one object of it on the thread that works: the
// constructor configures the thread's tiles, the destructor releases them.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1 chapter "Programming with Intel Advanced Matrix
// Extensions" and the instructions' pages in volume 2. Palette 1: eight tiles of at most 16 rows of 64 bytes.
//   dot_*: c[m][n] += sum over k of the dot product of a[m] dword k and b[k] dword n, each dword four bytes or two bfloat16.
#pragma once

#include <cstdint>

namespace trivium::amx {

inline constexpr int kTiles = 8;
inline constexpr int kRows = 16;       // most of a tile
inline constexpr int kRowBytes = 64;   // most of a tile's row
inline constexpr int kTileBytes = kRows * kRowBytes;

// The operand of LDTILECFG. What is not set is an empty tile.
struct alignas(64) Config {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  constexpr void shape(int tile, int64_t tile_rows, int64_t bytes) {
    rows[tile] = static_cast<uint8_t>(tile_rows);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};
static_assert(sizeof(Config) == 64);

// What the manual says that the instructions do, number for number. Where a processor would raise #GP or #UD (a configuration that
// is not allowed, operands whose shapes don't agree) the program ends with a message: such a kernel must not pass a test.
class EmulatedTiles {
public:
  explicit EmulatedTiles(const Config& config) { configure(config); }
  EmulatedTiles(const EmulatedTiles&) = delete;
  EmulatedTiles& operator=(const EmulatedTiles&) = delete;

  void configure(const Config& config);  // LDTILECFG: all tiles become zero
  template <int tile> void zero() { zero_tile(tile); }
  template <int tile> void load(const void* from, int64_t stride) { load_tile(tile, from, stride); }
  template <int tile> void stream(const void* from, int64_t stride) { load_tile(tile, from, stride); }
  template <int tile> void store(void* to, int64_t stride) const { store_tile(tile, to, stride); }
  template <int c, int a, int b> void dot_signed_signed() { dot_bytes(c, a, b, true, true); }       // TDPBSSD
  template <int c, int a, int b> void dot_signed_unsigned() { dot_bytes(c, a, b, true, false); }    // TDPBSUD
  template <int c, int a, int b> void dot_unsigned_signed() { dot_bytes(c, a, b, false, true); }    // TDPBUSD
  template <int c, int a, int b> void dot_bfloat16() { dot_pairs(c, a, b); }                        // TDPBF16PS

  void zero_tile(int tile);
  void load_tile(int tile, const void* from, int64_t stride);
  void store_tile(int tile, void* to, int64_t stride) const;
  void dot_bytes(int c, int a, int b, bool a_is_signed, bool b_is_signed);
  void dot_pairs(int c, int a, int b);

private:
  struct Tile {
    int rows = 0, row_bytes = 0;
    uint8_t data[kRows][kRowBytes] = {};
  };

  const Tile& configured(int tile) const;
  void check_dot(int c, int a, int b) const;

  Tile tiles_[kTiles];
};

#if defined(__AMX_TILE__)

// The instructions. Each statement orders memory for the compiler, whose own wrappers declare less than they touch.
class HardwareTiles {
public:
  explicit HardwareTiles(const Config& config) { configure(config); }
  ~HardwareTiles() { asm volatile("tilerelease" ::: "memory"); }
  HardwareTiles(const HardwareTiles&) = delete;
  HardwareTiles& operator=(const HardwareTiles&) = delete;

  void configure(const Config& config) { asm volatile("ldtilecfg %0" : : "m"(config) : "memory"); }
  template <int tile> void zero() { asm volatile("tilezero %%tmm%c0" : : "i"(tile)); }
  template <int tile> void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(tile) : "memory");
  }
  // A load of what shall not push other things out of the first-level cache.
  template <int tile> void stream(const void* from, int64_t stride) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(tile) : "memory");
  }
  template <int tile> void store(void* to, int64_t stride) const {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(tile) : "memory");
  }
  template <int c, int a, int b> void dot_signed_signed() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
  }
  template <int c, int a, int b> void dot_signed_unsigned() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
  }
  template <int c, int a, int b> void dot_unsigned_signed() {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
  }
  template <int c, int a, int b> void dot_bfloat16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
  }
};

#endif

// Whether this machine's tiles give what the emulation gives for all kinds of dots on full and partial tiles. Only where
// cpu_features() has amx.
bool check_tiles();

}  // namespace trivium::amx
