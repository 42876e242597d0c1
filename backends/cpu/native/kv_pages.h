// The number formats of a KV page: what lies where, how numbers get in and out, and how attention multiplies with them.
#pragma once

#include <cmath>
#include <type_traits>

#include "kernels.h"
#include "simd_math.h"
#include "simd_narrow.h"

namespace trivium::TRIVIUM_TIER {

// A format has
//   Item            what a page holds of one number
//   Number          what queries and softmax weights are rounded to, in pairs: even and odd dimensions, or tokens
//   Sum             W sums of products, zero() at first; kHalves steps add one pair
//   key(...)        W keys' numbers of pair `pair` of dimensions, from token `token` on; half: of its even or odd dimension
//   value(...)      W dimensions' numbers of pair `pair` of tokens, from dimension `dim` on; first(...): without the odd token
//   step(...)       sum + the product with a pair of Numbers
// and row by row: query() and weights() round, key_scores() and value_sums() bring sums back to floats.
// Each sum runs over the dimensions, or the tokens of a span, in order: which rows and vectors are worked on together changes no bit.

// Keys [dim][token], values [token][dim], float32 arithmetic.
template <typename ItemType, Vec (*load_items)(const ItemType*), void (*store_items)(ItemType*, Vec)>
struct ColumnPages {
  using Item = ItemType;
  using Number = float;
  using Sum = Vec;
  static constexpr bool kPairs = false;
  static constexpr int kHalves = 2;
  static Sum zero() { return set1(0); }
  static void encode(Vec x, Item* to) { store_items(to, x); }
  static Vec key(const Item* block, int64_t token, int64_t page_size, int64_t pair, int half) {
    return load_items(block + (2 * pair + half) * page_size + token);
  }
  static Vec value(const Item* block, int64_t dim, int64_t dims, int64_t pair, int half) {
    return load_items(block + (2 * pair + half) * dims + dim);
  }
  static Vec first(Vec x) { return x; }
  static Sum step(Sum sum, Vec x, const Number* two, int half) { return fma(set1(two[half]), x, sum); }
};

using Float32Pages = ColumnPages<float, load, store>;
using Float16Pages = ColumnPages<uint16_t, load_f16, store_f16>;

// Pairs of dimensions, and of tokens, side by side. Without an instruction for bfloat16 the arithmetic is float32.
struct Bfloat16Pages {
  using Item = uint16_t;
  using Sum = Vec;
  static constexpr bool kPairs = true;
  static Sum zero() { return set1(0); }
  static void encode(Vec x, Item* to) { store_bf16(to, x); }
  static const Item* key_at(const Item* block, int64_t token, int64_t page_size, int64_t pair) { return block + (pair * page_size + token) * 2; }
  static const Item* value_at(const Item* block, int64_t dim, int64_t dims, int64_t pair) { return block + (pair * dims + dim) * 2; }
#if defined(__AVX512BF16__)
  using Number = uint16_t;
  static constexpr int kHalves = 1;
  static Bf16Pairs key(const Item* block, int64_t token, int64_t page_size, int64_t pair, int) {
    return load_bf16_pairs(key_at(block, token, page_size, pair));
  }
  static Bf16Pairs value(const Item* block, int64_t dim, int64_t dims, int64_t pair, int) { return load_bf16_pairs(value_at(block, dim, dims, pair)); }
  static Bf16Pairs first(Bf16Pairs x) { return first_of_pairs(x); }
  static Sum step(Sum sum, Bf16Pairs x, const Number* two, int) { return dot(sum, x, two); }
#else
  using Number = float;
  static constexpr int kHalves = 2;
  static Vec half_of(Pair x, int half) { return half == 0 ? x.even : x.odd; }
  static Vec key(const Item* block, int64_t token, int64_t page_size, int64_t pair, int half) {
    return half_of(load_pairs_bf16(key_at(block, token, page_size, pair)), half);
  }
  static Vec value(const Item* block, int64_t dim, int64_t dims, int64_t pair, int half) {
    return half_of(load_pairs_bf16(value_at(block, dim, dims, pair)), half);
  }
  static Vec first(Vec x) { return x; }
  static Sum step(Sum sum, Vec x, const Number* two, int half) { return fma(set1(two[half]), x, sum); }
#endif
};

// The same places as bfloat16 with a byte a number; each token's key and value has a scale (bfloat16), which lie behind the numbers of the
// block. Products are those of 16-bit whole numbers and exact, so every instruction set has the same sums.
struct Int8Pages {
  using Item = int8_t;
  using Number = int16_t;
  using Sum = Ints;
  static constexpr bool kPairs = true;
  static constexpr int kHalves = 1;
  static Sum zero() { return zero_ints(); }
  static Int16Pairs key(const Item* block, int64_t token, int64_t page_size, int64_t pair, int) {
    return load_pairs_i8(block + (pair * page_size + token) * 2);
  }
  static Int16Pairs value(const Item* block, int64_t dim, int64_t dims, int64_t pair, int) { return load_pairs_i8(block + (pair * dims + dim) * 2); }
  static Int16Pairs first(Int16Pairs x) { return first_of_pairs(x); }
  static Sum step(Sum sum, Int16Pairs x, const Number* two, int) { return dot(sum, x, two); }
};

template <typename Use>
inline void with_pages(KvType type, Use use) {
  switch (type) {
    case KvType::float32: return use(Float32Pages{});
    case KvType::bfloat16: return use(Bfloat16Pages{});
    case KvType::float16: return use(Float16Pages{});
    case KvType::int8: return use(Int8Pages{});
  }
}

template <typename Pages>
inline constexpr bool kScaled = std::is_same_v<Pages, Int8Pages>;

// Calls f(i, x) for n numbers, W at a time; lanes beyond n are zero.
template <typename F>
inline void each_vec(const float* x, int64_t n, F f) {
  int64_t i = 0;
  for (; i + W <= n; i += W) f(i, load(x + i));
  if (i < n) f(i, load_n(x + i, n - i));
}

// The largest size among n numbers; NaN if one is not finite.
inline float largest(const float* x, int64_t n) {
  Vec top = set1(0), fault = set1(0);
  each_vec(x, n, [&](int64_t, Vec v) {
    top = max(abs(v), top);
    fault = fault + v * set1(0);
  });
  return reduce_max(top) + reduce_add(fault);
}

// The scale of a key or value in 8 bits: largest / 127 as a bfloat16, so that scale * 127 and all other products are exact floats, and numbers
// that were read from a page can be written again without a change.
inline uint16_t scale_of(const float* x, int64_t n) { return float_to_bf16(largest(x, n) / 127.0f); }

inline uint16_t* key_scales(const KvLayout& layout, uint8_t* key) { return reinterpret_cast<uint16_t*>(key + layout.key_dim() * layout.page_size); }
inline uint16_t* value_scales(const KvLayout& layout, uint8_t* value) {
  return reinterpret_cast<uint16_t*>(value + layout.value_dim() * layout.page_size);
}

// Writes up to kKeyRun tokens' numbers of one page, kChunk dimensions at a time.
template <typename Pages>
struct RunWriter {
  using Item = typename Pages::Item;
  static constexpr int64_t kChunk = 64;
  Item items[kKeyRun][kChunk];

  // Items of dimensions d .. of `count` tokens; those beyond head_dim are 0.
  void encode(const float* x, int64_t stride, int64_t count, int64_t d, int64_t head_dim, const uint16_t* scales) {
    const int64_t n = head_dim - d < kChunk ? head_dim - d : kChunk;
    for (int64_t t = 0; t < count; ++t) {
      Item* to = items[t];
      if constexpr (kScaled<Pages>) {
        const float scale = bf16_to_float(scales[t]);
        const Vec divisor = set1(scale == 0 ? INFINITY : scale), limit = set1(127), floor = set1(-127);
        each_vec(x + t * stride + d, n, [&](int64_t i, Vec v) { store_i8(to + i, min(limit, max(floor, v / divisor))); });
      } else {
        each_vec(x + t * stride + d, n, [&](int64_t i, Vec v) { Pages::encode(v, to + i); });
      }
      if (n % 2 != 0) to[n] = 0;
    }
  }

  void put_keys(Item* block, int64_t offset, int64_t count, int64_t d, int64_t n, int64_t page_size) const {
    if constexpr (Pages::kPairs) {
      for (int64_t i = 0; i < n; i += 2) {
        Item* to = block + ((d + i) / 2 * page_size + offset) * 2;
        for (int64_t t = 0; t < count; ++t) std::memcpy(to + 2 * t, items[t] + i, 2 * sizeof(Item));
      }
    } else {
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t t = 0; t < count; ++t) block[(d + i) * page_size + offset + t] = items[t][i];
      }
    }
  }

  // Where only one token of a pair is written its items go one by one: its partner may be another thread's to write.
  void put_values(Item* block, int64_t offset, int64_t count, int64_t d, int64_t n, int64_t dims) const {
    for (int64_t t = 0; t < count;) {
      const int64_t token = offset + t;
      if (!Pages::kPairs) {
        std::memcpy(block + token * dims + d, items[t], static_cast<size_t>(n) * sizeof(Item));
        ++t;
        continue;
      }
      Item* to = block + (token / 2 * dims + d) * 2;
      if (token % 2 == 0 && t + 1 < count) {
        const Item *a = items[t], *b = items[t + 1];
        for (int64_t i = 0; i < n; ++i) {
          to[2 * i] = a[i];
          to[2 * i + 1] = b[i];
        }
        t += 2;
      } else {
        for (int64_t i = 0; i < n; ++i) to[2 * i + token % 2] = items[t][i];
        ++t;
      }
    }
  }
};

// Keys and values of `count` tokens, `stride` numbers apart, into tokens offset .. of a page.
inline void write_kv(const KvLayout& layout, int64_t offset, int64_t count, const float* k, int64_t k_stride, const float* v, int64_t v_stride,
                     uint8_t* key, uint8_t* value) {
  with_pages(layout.type, [&](auto pages) {
    using Pages = decltype(pages);
    using Item = typename Pages::Item;
    using Writer = RunWriter<Pages>;
    Writer writer;
    const int64_t dim = layout.head_dim;
    uint16_t *of_keys = nullptr, *of_values = nullptr;
    for (int64_t at = 0; at < count; at += kKeyRun) {
      const int64_t n = count - at < kKeyRun ? count - at : kKeyRun, first = offset + at;
      const float *keys = k + at * k_stride, *values = v + at * v_stride;
      if constexpr (kScaled<Pages>) {
        of_keys = key_scales(layout, key) + first;
        of_values = value_scales(layout, value) + first;
        for (int64_t t = 0; t < n; ++t) {
          of_keys[t] = scale_of(keys + t * k_stride, dim);
          of_values[t] = scale_of(values + t * v_stride, dim);
        }
      }
      for (int64_t d = 0; d < dim; d += Writer::kChunk) {
        const int64_t width = dim - d < Writer::kChunk ? dim - d : Writer::kChunk;
        writer.encode(keys, k_stride, n, d, dim, of_keys);
        writer.put_keys(reinterpret_cast<Item*>(key), first, n, d, (width + 1) / 2 * 2, layout.page_size);
        writer.encode(values, v_stride, n, d, dim, of_values);
        writer.put_values(reinterpret_cast<Item*>(value), first, n, d, width, layout.value_dim());
      }
    }
  });
}

inline void read_kv(const KvLayout& layout, int64_t offset, const uint8_t* key, const uint8_t* value, float* k, float* v) {
  const int64_t page_size = layout.page_size, dims = layout.value_dim();
  auto read = [&](auto convert, bool pairs, auto item) {
    using Item = decltype(item);
    const auto *keys = reinterpret_cast<const Item*>(key), *values = reinterpret_cast<const Item*>(value);
    for (int64_t d = 0; d < layout.head_dim; ++d) {
      k[d] = convert(keys[pairs ? (d / 2 * page_size + offset) * 2 + d % 2 : d * page_size + offset]);
      v[d] = convert(values[pairs ? (offset / 2 * dims + d) * 2 + offset % 2 : offset * dims + d]);
    }
  };
  switch (layout.type) {
    case KvType::float32: return read([](float x) { return x; }, false, float{});
    case KvType::float16: return read(f16_to_float, false, uint16_t{});
    case KvType::bfloat16: return read(bf16_to_float, true, uint16_t{});
    case KvType::int8: {
      read([](int8_t x) { return static_cast<float>(x); }, true, int8_t{});
      const float k_scale = bf16_to_float(key_scales(layout, const_cast<uint8_t*>(key))[offset]);
      const float v_scale = bf16_to_float(value_scales(layout, const_cast<uint8_t*>(value))[offset]);
      for (int64_t d = 0; d < layout.head_dim; ++d) {
        k[d] *= k_scale;
        v[d] *= v_scale;
      }
    }
  }
}

}  // namespace trivium::TRIVIUM_TIER
