// Attention of bfloat16 pages on matrix tiles: another attend_rows (see attention_impl.h) for up to 32 rows of one kv head.
//
// Keys lie in pages in pairs of dimensions and values in pairs of tokens, so that both are second operands of the dot as they lie, and
// its sums go to the scores and to the partial results without a detour. Work of 16 rows on a span of 256 keys at head_dim 64:
//   dots     32 for the scores and 32 for the values, 16 cycles each: 1,024 cycles
//   softmax  256 vectors of ten operations on two ports: 1,280 cycles
// The scores of 32 rows take 34 of the 48 kB of a first-level cache; a tile of keys or values comes from the second in 20 cycles. So each is
// loaded once for two blocks of 16 rows, with a hint to leave the scores where they are.
//
// Every number of rows takes this way, and sums run over blocks of 32 dimensions and 32 tokens from the span's start, whatever the rows
// see: that is why a row's bits don't depend on its neighbours. Within a dot even and odd numbers are summed apart (TDPBF16PS), so that
// bits differ from those of the vector kernel, within the same error.
#pragma once

#include "amx_tiles.h"
#include "attention_impl.h"

namespace trivium::TRIVIUM_TIER {

template <class Tiles>
struct TileAttention {
  using Pages = Bfloat16Pages;
  static_assert(std::is_same_v<Pages::Number, uint16_t>, "queries and weights must be bfloat16");

  static constexpr int64_t kDepth = 32;  // dimensions, or tokens, of one dot
  static constexpr int64_t kTileDims = amx::kRowBytes / 4;
  static_assert(kKeyRun == kTileDims && kValueAlign == kTileDims && kSpanRows == 2 * amx::kRows);

  // Some rows of a span, the keys that any of them sees, and where these are.
  struct Block {
    const AttentionSpan& s;
    int64_t row, rows;
    Keys keys;
    Run runs[kRuns] = {};
    int first = 0, last = 0;  // runs with such keys

    Block(const AttentionSpan& span, int64_t at, int64_t count)
        : s(span), row(at), rows(count), keys{visible(s, row).low, visible(s, row + rows - 1).high} {
      if (keys.low >= keys.high) return;
      first = static_cast<int>(keys.low / kKeyRun);
      last = static_cast<int>((keys.high + kKeyRun - 1) / kKeyRun);
      for (int n = first; n < last; ++n) {
        const int64_t key = s.begin + n * kKeyRun;
        runs[n] = {s.pages + s.blocks[key / s.layout.page_size] * s.page_bytes, key % s.layout.page_size};
      }
    }
  };

  // One or two blocks of 16 rows are worked on at a time, with four columns of 16 sums for one, two for each of two. Tiles 0-3: sums; 4 and 6:
  // the factors of a whole dot; 5 and 7: one block's factors of the last dimensions of keys, or the second ones of two.
  template <int kBlocks>
  static constexpr int kColumns = 4 / kBlocks;

  static amx::Config config(int64_t rows, int64_t last_pairs) {
    amx::Config c;
    const int64_t first = std::min<int64_t>(rows, amx::kRows), second = rows > amx::kRows ? rows - amx::kRows : first;
    for (int sum = 0; sum < 4; ++sum) c.shape(sum, sum < 2 ? first : second, amx::kRowBytes);
    c.shape(4, first, amx::kRowBytes);
    c.shape(5, second, 4 * last_pairs);
    c.shape(6, kDepth / 2, amx::kRowBytes);
    c.shape(7, last_pairs, amx::kRowBytes);
    return c;
  }

  // Calls f.operator()<i>() for i in 0 .. count - 1, at most kMost.
  template <int kMost, class F>
  static void each(int64_t count, F f) {
    if constexpr (kMost > 1) each<kMost - 1>(count, f);
    if (kMost <= count) f.template operator()<kMost - 1>();
  }

  // Sums of one block and `count` columns += a dot. left: its rows, stride bytes apart; right<tile>(i) loads the factors of column i.
  template <int kLeft, int kRight, class Right>
  static void dot_one(Tiles& tiles, int64_t count, const uint8_t* left, int64_t stride, Right right) {
    tiles.template load<kLeft>(left, stride);
    each<4>(count, [&]<int i>() {
      right.template operator()<kRight>(i);
      tiles.template dot_bfloat16<i, kLeft, kRight>();
    });
  }

  // The same for two blocks.
  template <class Right>
  static void dot_two(Tiles& tiles, int64_t count, const uint8_t* left, int64_t stride, Right right) {
    right.template operator()<6>(0);
    tiles.template load<4>(left, stride);
    tiles.template dot_bfloat16<0, 4, 6>();
    tiles.template load<5>(left + amx::kRows * stride, stride);
    tiles.template dot_bfloat16<2, 5, 6>();
    if (count < 2) return;
    right.template operator()<7>(1);
    tiles.template dot_bfloat16<1, 4, 7>();
    tiles.template dot_bfloat16<3, 5, 7>();
  }

  static void zero(Tiles& tiles) {
    each<4>(4, [&]<int i>() { tiles.template zero<i>(); });
  }

  // `count` columns of all blocks to rows of `stride` numbers.
  template <int kBlocks>
  static void store(const Tiles& tiles, int64_t count, float* to, int64_t stride) {
    each<kColumns<kBlocks>>(count, [&]<int i>() {
      tiles.template store<i>(to + i * kTileDims, stride * 4);
      if constexpr (kBlocks == 2) tiles.template store<2 + i>(to + amx::kRows * stride + i * kTileDims, stride * 4);
    });
  }

  template <int kBlocks>
  static void score(Tiles& tiles, const Block& b) {
    const AttentionSpan& s = b.s;
    const int64_t pairs = s.layout.key_dim() / 2, stride = s.layout.page_size * 4, last = (pairs - 1) / (kDepth / 2), row = s.layout.query_bytes();
    const uint8_t* q = s.q + b.row * row;
    for (int n = b.first; n < b.last; n += kColumns<kBlocks>) {
      const int64_t count = b.last - n;
      zero(tiles);
      for (int64_t block = 0; block <= last; ++block) {
        const auto keys = [&]<int tile>(int i) {
          const Run& run = b.runs[n + i];
          tiles.template stream<tile>(run.page + s.key_offset + block * (kDepth / 2) * stride + run.token * 4, stride);
        };
        if constexpr (kBlocks == 2) dot_two(tiles, count, q + block * amx::kRowBytes, row, keys);
        else if (block < last) dot_one<4, 6>(tiles, count, q + block * amx::kRowBytes, row, keys);
        else dot_one<5, 7>(tiles, count, q + block * amx::kRowBytes, row, keys);
      }
      store<kBlocks>(tiles, count, s.scores + n * kKeyRun, kScoreStride);
    }
  }

  // 32 tokens' values of 64 dimensions as the dot takes them: in place, or a copy where they lie in two pages or not all of them are
  // the rows' to read.
  struct Values {
    alignas(64) uint16_t copy[kDepth / 2][4 * 2 * kTileDims];
    const uint8_t* data;
    int64_t stride;

    Values(const Block& b, int64_t chunk, int64_t dim, int64_t count) {
      const int64_t dims = b.s.layout.value_dim(), begin = chunk * kDepth;
      const Run *one = &b.runs[begin / kKeyRun], *two = one + 1;
      const auto place = [&](const Run& run, int64_t token) { return run.page + b.s.value_offset + ((run.token + token) / 2 * dims + dim) * 4; };
      if (begin >= b.keys.low && begin + kDepth <= b.keys.high && one->page == two->page) {
        data = place(*one, 0);
        stride = dims * 4;
        return;
      }
      data = reinterpret_cast<const uint8_t*>(copy);
      stride = sizeof copy[0];
      const auto bytes = static_cast<size_t>(count * amx::kRowBytes);
      for (int64_t pair = 0; pair < kDepth / 2; ++pair) {
        const int64_t token = begin + 2 * pair;
        if (token + 1 < b.keys.low || token >= b.keys.high) {
          std::memset(copy[pair], 0, bytes);
          continue;
        }
        std::memcpy(copy[pair], place(b.runs[token / kKeyRun], token % kKeyRun), bytes);
        if (token + 1 < b.keys.high) continue;
        for (int64_t i = 0; i < count * kTileDims; ++i) copy[pair][2 * i + 1] = 0;  // does not exist yet
      }
    }
  };

  template <int kBlocks>
  static void weigh(Tiles& tiles, const Block& b, float* values) {
    const int64_t dims = b.s.layout.value_dim();
    const auto* weights = reinterpret_cast<const uint8_t*>(b.s.scores);
    for (int64_t dim = 0; dim < dims; dim += kColumns<kBlocks> * kTileDims) {
      const int64_t count = std::min<int64_t>(kColumns<kBlocks>, (dims - dim) / kTileDims);
      zero(tiles);
      for (int64_t chunk = b.keys.low / kDepth; chunk * kDepth < b.keys.high; ++chunk) {
        const Values v(b, chunk, dim, count);
        const auto values_of = [&]<int tile>(int i) { tiles.template stream<tile>(v.data + i * amx::kRowBytes, v.stride); };
        if constexpr (kBlocks == 2) dot_two(tiles, count, weights + chunk * amx::kRowBytes, kScoreStride * 4, values_of);
        else dot_one<4, 6>(tiles, count, weights + chunk * amx::kRowBytes, kScoreStride * 4, values_of);
      }
      store<kBlocks>(tiles, count, values + dim, dims);
    }
  }

  template <int kBlocks>
  static void attend_block(Tiles& tiles, const Block& b, const Partial& out) {
    const AttentionSpan& s = b.s;
    if (b.keys.low >= b.keys.high) {
      for (int64_t r = 0; r < b.rows; ++r) out.peak[b.row + r] = -INFINITY;
      return;
    }
    score<kBlocks>(tiles, b);
    const Keys scored{b.keys.low / kDepth * kDepth, (b.keys.high + kDepth - 1) / kDepth * kDepth};  // all that weigh() reads
    float *peak = out.peak + b.row, *total = out.total + b.row;
    for (int64_t r = 0; r < b.rows; ++r) peak[r] = find_peak(s, visible(s, b.row + r), s.scores + r * kScoreStride);
    for (int64_t r = 0; r < b.rows; ++r) {
      total[r] = soften<Pages>(s, visible(s, b.row + r), scored, b.runs, peak[r], s.scores + r * kScoreStride).total;
    }
    weigh<kBlocks>(tiles, b, out.values + b.row * s.layout.value_dim());
  }

  // As Kernels::attend.
  static void attend(const AttentionSpan& s, const Partial& out) {
    if (s.layout.type != KvType::bfloat16 || s.layout.latent > 0) return TRIVIUM_TIER::attend(s, out);
    const int64_t pairs = s.layout.key_dim() / 2, last_pairs = (pairs - 1) % (kDepth / 2) + 1;
    const int64_t most = last_pairs == kDepth / 2 ? 2 * amx::kRows : amx::kRows;  // two blocks have no tiles for part of a dot
    int64_t rows = std::min(s.rows, most);
    Tiles tiles(config(rows, last_pairs));
    for (int64_t row = 0; row < s.rows; row += rows) {
      if (s.rows - row < rows) tiles.configure(config(rows = s.rows - row, last_pairs));
      const Block block(s, row, rows);
      if (rows > amx::kRows) attend_block<2>(tiles, block, out);
      else attend_block<1>(tiles, block, out);
    }
  }
};

template <class Tiles>
constexpr Kernels make_tile_kernels(const char* name) {
  Kernels kernels = make_kernels(name);
  kernels.attend = TileAttention<Tiles>::attend;
  return kernels;
}

}  // namespace trivium::TRIVIUM_TIER
