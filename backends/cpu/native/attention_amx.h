// Attention of bfloat16 pages on matrix tiles: another attend_rows (see attention_impl.h) for up to 16 rows of one kv head.
//
// Keys lie in pages in pairs of dimensions and values in pairs of tokens, so that both are second operands of the dot as they lie, and
// its sums go to the scores and to the partial results without a detour. Work of 16 rows on a span of 256 keys at head_dim 64:
//   dots     32 for the scores and 32 for the values, 16 cycles each: 1,024 cycles; 16 key tiles' and 32 value tiles' loads of 8 cycles beside
//   softmax  4,096 weights of about 20 operations on 16 lanes: 2,560 cycles on two ports
// The softmax is the bound; the tiles run at two fifths of their peak of 512 multiply-adds a cycle. Bytes: 64 kB of keys and values.
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
  static_assert(kKeyRun == kTileDims && kValueAlign == kTileDims && kSpanRows == amx::kRows);

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

  // Tiles 0-3: sums; 4 and 6: the factors of a whole dot; 5 and 7: those of the last dimensions of keys.
  static amx::Config config(int64_t rows, int64_t last_pairs) {
    amx::Config c;
    for (int sum = 0; sum < 4; ++sum) c.shape(sum, rows, amx::kRowBytes);
    c.shape(4, rows, amx::kRowBytes);
    c.shape(5, rows, 4 * last_pairs);
    c.shape(6, kDepth / 2, amx::kRowBytes);
    c.shape(7, last_pairs, amx::kRowBytes);
    return c;
  }

  // Calls f.operator()<i>() for the first `count` sums.
  template <class F>
  static void each_sum(int64_t count, F f) {
    f.template operator()<0>();
    if (count > 1) f.template operator()<1>();
    if (count > 2) f.template operator()<2>();
    if (count > 3) f.template operator()<3>();
  }

  static void score(Tiles& tiles, const Block& b) {
    const AttentionSpan& s = b.s;
    const int64_t pairs = s.layout.key_dim() / 2, stride = s.layout.page_size * 4, whole = (pairs - 1) / (kDepth / 2);
    const uint8_t* q = s.q + b.row * s.layout.query_bytes();
    for (int n = b.first; n < b.last; n += 4) {
      const int64_t count = b.last - n;
      const auto add = [&]<int kQuery, int kKey>(int64_t block) {
        tiles.template load<kQuery>(q + block * amx::kRowBytes, s.layout.query_bytes());
        each_sum(count, [&]<int i>() {
          const Run& run = b.runs[n + i];
          tiles.template load<kKey>(run.page + s.key_offset + block * (kDepth / 2) * stride + run.token * 4, stride);
          tiles.template dot_bfloat16<i, kQuery, kKey>();
        });
      };
      each_sum(count, [&]<int i>() { tiles.template zero<i>(); });
      for (int64_t block = 0; block < whole; ++block) add.template operator()<4, 6>(block);
      add.template operator()<5, 7>(whole);
      each_sum(count, [&]<int i>() { tiles.template store<i>(s.scores + (n + i) * kKeyRun, kSpan * 4); });
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

  static void weigh(Tiles& tiles, const Block& b, float* values) {
    const int64_t dims = b.s.layout.value_dim();
    const auto* weights = reinterpret_cast<const uint16_t*>(b.s.scores);
    for (int64_t dim = 0; dim < dims; dim += 4 * kTileDims) {
      const int64_t count = std::min<int64_t>(4, (dims - dim) / kTileDims);
      each_sum(count, [&]<int i>() { tiles.template zero<i>(); });
      for (int64_t chunk = b.keys.low / kDepth; chunk * kDepth < b.keys.high; ++chunk) {
        const Values v(b, chunk, dim, count);
        tiles.template load<4>(weights + chunk * kDepth, kSpan * 4);
        each_sum(count, [&]<int i>() {
          tiles.template load<6>(v.data + i * amx::kRowBytes, v.stride);
          tiles.template dot_bfloat16<i, 4, 6>();
        });
      }
      each_sum(count, [&]<int i>() { tiles.template store<i>(values + dim + i * kTileDims, dims * 4); });
    }
  }

  static void attend_block(Tiles& tiles, const Block& b, const Partial& out) {
    const AttentionSpan& s = b.s;
    if (b.keys.low >= b.keys.high) {
      for (int64_t r = 0; r < b.rows; ++r) out.peak[b.row + r] = -INFINITY;
      return;
    }
    score(tiles, b);
    const Keys scored{b.keys.low / kDepth * kDepth, (b.keys.high + kDepth - 1) / kDepth * kDepth};  // all that weigh() reads
    for (int64_t r = 0; r < b.rows; ++r) {
      const Softened softened = soften<Pages>(s, visible(s, b.row + r), scored, b.runs, s.scores + r * kSpan);
      out.peak[b.row + r] = softened.peak;
      out.total[b.row + r] = softened.total;
    }
    weigh(tiles, b, out.values + b.row * s.layout.value_dim());
  }

  // As Kernels::attend.
  static void attend(const AttentionSpan& s, const Partial& out) {
    if (s.layout.type != KvType::bfloat16) return TRIVIUM_TIER::attend(s, out);
    const int64_t pairs = s.layout.key_dim() / 2, last_pairs = (pairs - 1) % (kDepth / 2) + 1;
    int64_t rows = std::min(s.rows, kSpanRows);
    Tiles tiles(config(rows, last_pairs));
    for (int64_t row = 0; row < s.rows; row += rows) {
      if (s.rows - row < rows) tiles.configure(config(rows = s.rows - row, last_pairs));
      attend_block(tiles, Block(s, row, rows), out);
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
