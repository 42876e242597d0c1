// Linear layers on the CPU: weights packed once into the order the kernels stream, and y = x W^T on them.
//
// Life of a weight: choose_layout -> allocate (from a huge-page Arena) -> pack_tiles (any thread, any tile range) ->
// MatrixView. A step: quantise_row for inputs of matrices that need it, then multiply for a range of outputs and rows on each
// thread. Kernels do not allocate, throw or start threads. Within one Isa the bits of an output depend on its weights and its
// input row only, never on how many rows or outputs are computed with it or how the ranges are split.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace trivium::linear {

inline constexpr int64_t kTile = 16;        // outputs that are packed together; ranges of outputs are split at multiples of it
inline constexpr int64_t kGroup = 32;       // inputs that share a scale in a quantised row
inline constexpr int64_t kPart = 256;       // inputs that share one in a row quantised by parts
inline constexpr int64_t kAlign = 64;       // alignment, in bytes, of packed matrices and of quantised rows
inline constexpr int64_t kRowBlock = 8;     // ranges of rows are best split at multiples of it

// ---------------------------------------------------------------------------------------------------------------- formats

// How a checkpoint stores a row. The block formats are those of GGUF (ggml's block layouts).
enum class Storage : uint8_t {
  float32, bfloat16, float16, q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k, q3_k, iq4_nl, iq4_xs, tq1_0, tq2_0, mxfp4
};
inline constexpr const char* kStorageNames[] = {"float32", "bfloat16", "float16", "q4_0",   "q4_1",   "q5_0",  "q5_1",  "q8_0", "q4_k",
                                                "q5_k",    "q6_k",     "q3_k",    "iq4_nl", "iq4_xs", "tq1_0", "tq2_0", "mxfp4"};

// What the caller asks for. Groups of 32 inputs unless the name says otherwise; asym: with a minimum (32) or a zero point; i8: 4-bit codes
// that stand for whole numbers of 8 bits, as round_row makes them.
enum class Format : uint8_t {
  float32, bfloat16, float16, int8, int8_channel, int4, int4_g64, int4_g128, int4_asym, int4_asym_g64, int4_asym_g128, int4_i8
};
inline constexpr const char* kFormatNames[] = {"float32",   "bfloat16",  "float16",       "int8",           "int8_channel", "int4", "int4_g64",
                                               "int4_g128", "int4_asym", "int4_asym_g64", "int4_asym_g128", "int4_i8"};

// What lies in memory. Suffixes: s, float16 scale a group of 32, symmetric; sm, float16 scale and minimum a group of 32; k,
// 8-bit scale and minimum a group of 32 under two float16 factors a block of 256; k6, signed 8-bit scale a group of 16 under
// one factor a 256; s64, s128, c: as s with one scale for 64 inputs, for 128, for the whole row; z64, z128: float16 scale and
// whole zero point for 64 inputs, for 128; i: two 8-bit whole numbers a group of 32, step and offset, under one float32 scale a part of
// kPart inputs: a weight is scale * (step * code + offset - kZero8), and step * code + offset always fits a byte.
enum class Layout : uint8_t {
  float32, bfloat16, float16, q8_s, q8_sm, q8_k, q8_k6, q8_c, q4_s, q4_sm, q4_k, q4_k6, q4_s64, q4_s128, q4_z64, q4_z128, q4_i
};
inline constexpr const char* kLayoutNames[] = {"float32", "bfloat16", "float16", "q8_s",   "q8_sm",   "q8_k",   "q8_k6",   "q8_c", "q4_s",
                                               "q4_sm",   "q4_k",     "q4_k6",   "q4_s64", "q4_s128", "q4_z64", "q4_z128", "q4_i"};

// The layout that holds `storage` in `format`: without loss where that exists, else by rounding.
Layout choose_layout(Format format, Storage storage);
// True if packing `storage` into choose_layout(format, storage) keeps every decoded float32 bit for bit.
bool is_lossless(Format format, Storage storage);
// True for int8 and int4 layouts: multiply reads Input::quantised instead of Input::x.
constexpr bool needs_quantised(Layout layout) { return layout >= Layout::q8_s; }

// How a row of inputs is quantised: what one layout's kernels read. A record may hold both.
enum class Records : uint8_t { none = 0, groups = 1, parts = 2, both = 3 };
constexpr Records operator|(Records a, Records b) { return static_cast<Records>(static_cast<uint8_t>(a) | static_cast<uint8_t>(b)); }
constexpr bool has(Records records, Records kind) { return (static_cast<uint8_t>(records) & static_cast<uint8_t>(kind)) != 0; }
constexpr Records records_of(Layout layout) {
  return !needs_quantised(layout) ? Records::none : layout == Layout::q4_i ? Records::parts : Records::groups;
}
// Bytes of one row of `in` numbers in a checkpoint; 0 if `in` is not a whole number of blocks.
int64_t storage_row_bytes(Storage storage, int64_t in);

// ----------------------------------------------------------------------------------------------------------------- memory

// Memory for weights: 64-byte aligned pieces of large anonymous maps, advised for huge pages where the system has them. A piece
// keeps its map alive. Untouched memory costs nothing. Not thread-safe.
class Arena {
public:
  explicit Arena(size_t map_bytes = size_t{256} << 20) : map_bytes_(map_bytes) {}
  std::shared_ptr<uint8_t> allocate(size_t bytes);  // zeroed; throws std::bad_alloc

private:
  size_t map_bytes_;
  size_t used_ = 0;
  size_t size_ = 0;
  std::shared_ptr<uint8_t> map_;
};

// ----------------------------------------------------------------------------------------------------------------- weights

// A packed matrix as kernels see it (no ownership). Tiles of kTile outputs follow each other; each holds all its inputs.
struct MatrixView {
  const uint8_t* data = nullptr;
  int64_t out = 0;
  int64_t in = 0;
  int64_t tile_bytes = 0;
  Layout layout = Layout::float32;

  // Outputs [begin, begin + count) as a matrix of its own. begin: a multiple of kTile.
  MatrixView rows(int64_t begin, int64_t count) const {
    return {data + begin / kTile * tile_bytes, count, in, tile_bytes, layout};
  }
};

class PackedMatrix {
public:
  PackedMatrix() = default;
  // Zeroed memory for out x in weights; fill it with pack_tiles. Throws std::bad_alloc.
  PackedMatrix(Arena& arena, Layout layout, int64_t out, int64_t in);

  const MatrixView& view() const { return view_; }
  int64_t tiles() const { return (view_.out + kTile - 1) / kTile; }
  int64_t bytes() const { return tiles() * view_.tile_bytes; }
  uint8_t* tile(int64_t index) { return memory_.get() + index * view_.tile_bytes; }

private:
  std::shared_ptr<uint8_t> memory_;
  MatrixView view_;
};

// Bytes of one tile of `layout` with `in` inputs.
int64_t tile_bytes(Layout layout, int64_t in);

// Rows of a checkpoint tensor: row r starts at data + r * row_bytes. float32, float16 and bfloat16 rows need no alignment.
struct Source {
  Storage storage = Storage::float32;
  const uint8_t* data = nullptr;
  int64_t row_bytes = 0;
};

// Packs outputs [tile_begin * kTile, tile_end * kTile) of `source` (rows beyond `out` become zeros). Threads may pack disjoint
// ranges at once, so that the thread that will read a tile touches it first. A storage that the layout doesn't hold exactly is
// rounded to nearest. Throws std::invalid_argument if the layout can't hold it (numbers that are not finite or exceed the
// range).
void pack_tiles(PackedMatrix& matrix, const Source& source, int64_t tile_begin, int64_t tile_end);

// Decoded output row `row`: out[0, in). Exact: what the packed numbers mean, in float32. For embedding lookups and reading
// back.
void unpack_row(const MatrixView& matrix, int64_t row, float* out);

// ----------------------------------------------------------------------------------------------------------------- inputs

// Input rows as signed 8-bit numbers, in one of two ways or both. By groups: under one float32 scale a row and a multiplier a group of
// kGroup:
//   x = scale * 2^shift * (1 + quarters / 4) * q, |q| <= 127.
// scale is the row's largest magnitude / (127 * 2^kMaxShift); a group has the least multiplier that holds it. So kernels need no
// product for it: they shift whole sums, take the weight's scale times (1 + quarters / 4) from a table of four, and multiply by the
// row's scale once an output.
inline constexpr int kMaxShift = 10;
inline constexpr int kQuarters = 4;

// A group of a quantised row, with what kernels need of it: one cache line.
struct alignas(64) QuantisedGroup {
  int8_t q[kGroup];
  int32_t shift;           // 0 to kMaxShift
  int32_t quarters;        // 0 to 3
  int32_t start4;          // -8 * sum(q), where sums of products with unsigned 4-bit codes start
  int32_t start8;          // -128 * sum(q)
  int32_t start8_half[2];  // -128 * sum(q) of each 16
  float scaled_sum;        // 2^shift * (1 + quarters / 4) * sum(q)
};

// By parts: x = scale * q, |q| <= 127, scale = the part's largest magnitude / 127. All sums of products of a part, with any bytes, are
// whole numbers below 2^24: exact in int32 and in float32, in any order.
struct alignas(64) QuantisedPart {
  int8_t q[kPart];
  float scale;                     // NaN if one of its numbers is not finite
  int32_t start;                   // -128 * sum(q), where sums of products with unsigned bytes start
  float start_float;               // the same
  float sums[kPart / kGroup];      // of each group's q, whole
};

// What matrix tiles need of a group beside its codes.
struct TileFactor {
  float scaled_sum;  // of the group
  uint32_t entry;    // where the group's quarters lie in a kernel's table
};

// A view on caller's memory: rows * row_bytes(in, records) bytes, aligned to kAlign. A row is its parts, the last of which may be cut
// short after a pair of groups as far as kernels care; then its groups, an even number of them, a line that starts with its scale, and what
// only kernels on matrix tiles write and read: each group's kGroup codes times 2^shift in bfloat16, of every 8 inputs the even ones first,
// and the groups' factors. An odd number of cache lines, so that rows spread over the cache's sets.
struct QuantisedRows {
  uint8_t* data = nullptr;
  int64_t in = 0;
  int64_t stride = 0;
  Records records = Records::none;

  static constexpr int64_t groups_of(int64_t in) { return (in + 2 * kGroup - 1) / (2 * kGroup) * 2; }
  static constexpr int64_t parts_of(int64_t in) { return (in + kPart - 1) / kPart; }
  static constexpr int64_t part_bytes(int64_t in, Records records) {
    return has(records, Records::parts) ? parts_of(in) * static_cast<int64_t>(sizeof(QuantisedPart)) : 0;
  }
  static constexpr int64_t row_bytes(int64_t in, Records records) {
    constexpr int64_t kLineFactors = kAlign / static_cast<int64_t>(sizeof(TileFactor));
    const int64_t groups = groups_of(in);
    const int64_t lines = has(records, Records::groups) ? 2 * groups + 1 + (groups + kLineFactors - 1) / kLineFactors : 0;
    return ((part_bytes(in, records) / kAlign + lines) | 1) * kAlign;
  }
  QuantisedRows() = default;
  QuantisedRows(void* memory, int64_t in_, Records records_)
      : data(static_cast<uint8_t*>(memory)), in(in_), stride(row_bytes(in_, records_)), records(records_) {}

  QuantisedPart* part(int64_t row) const { return reinterpret_cast<QuantisedPart*>(data + row * stride); }
  int64_t groups() const { return groups_of(in); }
  QuantisedGroup* group(int64_t row) const {
    return reinterpret_cast<QuantisedGroup*>(data + row * stride + part_bytes(in, records));
  }
  float* scale(int64_t row) const { return reinterpret_cast<float*>(group(row) + groups()); }
  uint8_t* wide(int64_t row) const { return reinterpret_cast<uint8_t*>(group(row) + groups() + 1); }
  TileFactor* factors(int64_t row) const { return reinterpret_cast<TileFactor*>(wide(row) + groups() * kAlign); }
};

// What multiply reads: `quantised` for layouts that need it, else `x` (row r at x + r * ldx). Matrices of both kinds may share
// one Input.
struct Input {
  const float* x = nullptr;
  int64_t ldx = 0;
  QuantisedRows quantised;
};

// The rows of an input from `first` on.
inline Input from_row(Input input, int64_t first) {
  if (input.x != nullptr) input.x += first * input.ldx;
  if (input.quantised.data != nullptr) input.quantised.data += first * input.quantised.stride;
  return input;
}

// Where multiply writes: y[r * ldy + o] (+)= sum_i x[r, i] * W[o, i] (+ bias[o]).
struct Output {
  float* y = nullptr;
  int64_t ldy = 0;
  const float* bias = nullptr;  // [out] or null
  bool accumulate = false;      // adds to what y holds (a residual)
};

// ----------------------------------------------------------------------------------------------------------------- kernels

enum class Isa : uint8_t { portable, avx2, avx512, avx512_vnni, amx, amx_emulated, neon };

struct Range {
  int64_t begin = 0;
  int64_t end = 0;
};

struct LinearKernels {
  Isa isa;
  const char* name;
  // Quantises x[0, rows.in) into record `row`, padding included. A row with a number that is not finite gets the scale NaN, so that
  // what is computed from it is NaN too. Cheap (about 0.1 ns a number): with few rows let each thread do it for itself
  // rather than wait.
  void (*quantise_row)(const float* x, const QuantisedRows& rows, int64_t row);
  // The same of one row by parts alone, whose records begin at `parts`: x[0, in).
  void (*quantise_parts)(const float* x, int64_t in, QuantisedPart* parts);
  // Computes outputs [outs.begin, outs.end) of rows [rows.begin, rows.end) on the calling thread. outs.begin: a multiple of
  // kTile; outs.end: a multiple of kTile or matrix.out. Nothing outside these ranges of y is read or written.
  void (*multiply)(const MatrixView& matrix, const Input& input, Range rows, Range outs, const Output& output);
  // For benchmarks: 4-way dots on registers, 64 multiply-adds each, as fast as they go. Returns how many were done.
  int64_t (*dot_ceiling)(int64_t rounds);
};

// Instruction sets of this machine, best first; the last is portable. Never an emulated one.
std::vector<Isa> available_isas();
// Sets that this machine can only emulate, slowly: for tests of their kernels.
std::vector<Isa> emulated_isas();
// The kernels of an available or emulated instruction set.
const LinearKernels& kernels(Isa isa);

}  // namespace trivium::linear
