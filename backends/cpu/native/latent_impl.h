// Attention over compressed keys and values (LatentKV): one row of numbers a token, which all heads read, as key and, its first part, as value.
//
// Rows lie token by token, as they do in neutral pages, so scores are dot products along both rows: R queries by C keys at a time, each number of a
// key widened to float32 once for R queries, and one sum across lanes for each score, which takes about as long as 4 of its `head_dim / W`
// multiply-adds. Values are sums over tokens of whole rows. Spans and softmax are those of attention_impl.h and attention_softmax.h; arithmetic is float32 for
// every format.
#pragma once

#include "attention_impl.h"

namespace trivium::TRIVIUM_TIER {

template <KvType kType>
struct LatentItem;
template <>
struct LatentItem<KvType::float32> {
  using Item = float;
  static Vec read(const Item* p) { return load(p); }
  static void write(Item* p, Vec x) { store(p, x); }
};
template <>
struct LatentItem<KvType::bfloat16> {
  using Item = uint16_t;
  static Vec read(const Item* p) { return load_bf16(p); }
  static void write(Item* p, Vec x) { store_bf16(p, x); }
};
template <>
struct LatentItem<KvType::float16> {
  using Item = uint16_t;
  static Vec read(const Item* p) { return load_f16(p); }
  static void write(Item* p, Vec x) { store_f16(p, x); }
};
template <>
struct LatentItem<KvType::int8> {
  using Item = int8_t;
  static Vec read(const Item* p) { return load_i8(p); }
  static void write(Item* p, Vec x) { store_i8(p, x); }
};

template <typename Use>
inline void with_latent(KvType type, Use use) {
  switch (type) {
    case KvType::float32: return use.template operator()<KvType::float32>();
    case KvType::bfloat16: return use.template operator()<KvType::bfloat16>();
    case KvType::float16: return use.template operator()<KvType::float16>();
    case KvType::int8: return use.template operator()<KvType::int8>();
  }
}

// W items of which only `count` are there; the others are 0.
template <KvType kType>
inline Vec read_part(const typename LatentItem<kType>::Item* p, int64_t count) {
  typename LatentItem<kType>::Item items[W] = {};
  std::memcpy(items, p, static_cast<size_t>(count) * sizeof(items[0]));
  return LatentItem<kType>::read(items);
}

// x[0, n) as items; int8: returns their scale, as in write_kv.
template <KvType kType>
inline uint16_t write_part(const float* x, int64_t n, typename LatentItem<kType>::Item* to) {
  using Item = typename LatentItem<kType>::Item;
  const uint16_t bits = kType == KvType::int8 ? scale_of(x, n) : 0;
  const float scale = bf16_to_float(bits);
  const Vec divisor = set1(scale == 0 ? INFINITY : scale), limit = set1(127), floor = set1(-127);
  each_vec(x, n, [&](int64_t i, Vec v) {
    if constexpr (kType == KvType::int8) v = min(limit, max(floor, v / divisor));
    Item items[W];
    LatentItem<kType>::write(items, v);
    std::memcpy(to + i, items, static_cast<size_t>(n - i < W ? n - i : W) * sizeof(Item));
  });
  return bits;
}

inline void write_latent(const KvLayout& layout, int64_t offset, const float* latent, const float* rope, uint8_t* page) {
  with_latent(layout.type, [&]<KvType kType>() {
    using Item = typename LatentItem<kType>::Item;
    const int64_t widths[] = {layout.latent, layout.head_dim - layout.latent};
    const float* parts[] = {latent, rope};
    for (int part = 0; part < 2; ++part) {
      auto* items = reinterpret_cast<Item*>(page);
      const uint16_t scale = write_part<kType>(parts[part], widths[part], items + offset * widths[part]);
      if (kType == KvType::int8) reinterpret_cast<uint16_t*>(items + layout.page_size * widths[part])[offset] = scale;
      page += layout.latent_bytes();
    }
  });
}

// Where the rows of a span's keys lie, and the scales of their parts.
template <KvType kType>
struct LatentKeys {
  using Item = typename LatentItem<kType>::Item;
  static constexpr bool kHasScales = kType == KvType::int8;
  const Item *latent[kSpan], *rope[kSpan];
  float latent_scale[kHasScales ? kSpan : 1], rope_scale[kHasScales ? kSpan : 1];

  LatentKeys(const AttentionSpan& s, Keys keys) {
    const KvLayout& l = s.layout;
    const int64_t width = l.head_dim - l.latent;
    for (int64_t i = keys.low; i < keys.high; ++i) {
      const int64_t at = s.chosen == nullptr ? s.begin + i : s.chosen[s.begin + i], token = at % l.page_size;
      const uint8_t* page = s.pages + s.blocks[at / l.page_size] * s.page_bytes + s.key_offset;
      const auto *first = reinterpret_cast<const Item*>(page), *second = reinterpret_cast<const Item*>(page + l.latent_bytes());
      latent[i] = first + token * l.latent;
      rope[i] = second + token * width;
      if constexpr (kHasScales) {
        latent_scale[i] = bf16_to_float(reinterpret_cast<const uint16_t*>(first + l.page_size * l.latent)[token]);
        rope_scale[i] = bf16_to_float(reinterpret_cast<const uint16_t*>(second + l.page_size * width)[token]);
      }
    }
  }
};

// sums[r][c] += q[r] . keys[c] over n numbers, lane by lane.
template <KvType kType, int R, int C>
inline void dot_keys(const float* q, int64_t stride, const typename LatentItem<kType>::Item* const* keys, int64_t n, Vec (&sums)[R][C]) {
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    Vec k[C];
    for (int c = 0; c < C; ++c) k[c] = LatentItem<kType>::read(keys[c] + i);
    for (int r = 0; r < R; ++r) {
      const Vec x = load(q + r * stride + i);
      for (int c = 0; c < C; ++c) sums[r][c] = fma(x, k[c], sums[r][c]);
    }
  }
  if (i == n) return;
  for (int c = 0; c < C; ++c) {
    const Vec k = read_part<kType>(keys[c] + i, n - i);
    for (int r = 0; r < R; ++r) sums[r][c] = fma(load_n(q + r * stride + i, n - i), k, sums[r][c]);
  }
}

// scores[r][i] for R rows and keys i .. i + C.
template <KvType kType, int R, int C>
inline void score_latent(const AttentionSpan& s, const LatentKeys<kType>& keys, int64_t row, int64_t i) {
  const KvLayout& l = s.layout;
  const auto* q = reinterpret_cast<const float*>(s.q + row * l.query_bytes());
  const int64_t stride = l.query_bytes() / static_cast<int64_t>(sizeof(float));
  Vec sums[R][C];
  const auto clear = [&] {
    for (auto& of_row : sums) {
      for (Vec& x : of_row) x = set1(0);
    }
  };
  clear();
  dot_keys<kType, R, C>(q, stride, keys.latent + i, l.latent, sums);
  float* scores = s.scores + i;
  if constexpr (LatentKeys<kType>::kHasScales) {
    for (int r = 0; r < R; ++r) {
      for (int c = 0; c < C; ++c) scores[r * kScoreStride + c] = reduce_add(sums[r][c]) * keys.latent_scale[i + c];
    }
    clear();
  }
  dot_keys<kType, R, C>(q + l.latent, stride, keys.rope + i, l.head_dim - l.latent, sums);
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) {
      float& score = scores[r * kScoreStride + c];
      if constexpr (LatentKeys<kType>::kHasScales) score += reduce_add(sums[r][c]) * keys.rope_scale[i + c];
      else score = reduce_add(sums[r][c]);
    }
  }
}

// values[r][dim ..] = sum of weight * latent over `keys`, for R rows and V vectors of which the last has `part` numbers.
template <KvType kType, int R, int V>
inline void weigh_latent(const AttentionSpan& s, const LatentKeys<kType>& rows, Keys keys, float* values, int64_t dim, int64_t part) {
  Vec sums[R][V];
  for (auto& of_row : sums) {
    for (Vec& x : of_row) x = set1(0);
  }
  for (int64_t i = keys.low; i < keys.high; ++i) {
    Vec x[V];
    for (int v = 0; v < V; ++v) {
      const auto* at = rows.latent[i] + dim + v * W;
      x[v] = v + 1 == V && part < W ? read_part<kType>(at, part) : LatentItem<kType>::read(at);
    }
    for (int r = 0; r < R; ++r) {
      const Vec weight = set1(s.scores[r * kScoreStride + i]);
      for (int v = 0; v < V; ++v) sums[r][v] = fma(weight, x[v], sums[r][v]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) store(values + r * s.layout.value_dim() + dim + v * W, sums[r][v]);
  }
}

// scores[r][i] for R rows and the keys i of `keys`.
template <KvType kType, int R>
inline void score_keys(const AttentionSpan& s, const LatentKeys<kType>& rows, int64_t row, Keys keys) {
  constexpr int kTogether = kSums / R < 4 ? kSums / R : 4;
  int64_t i = keys.low;
  for (; i + kTogether <= keys.high; i += kTogether) score_latent<kType, R, kTogether>(s, rows, row, i);
  for (; i < keys.high; ++i) score_latent<kType, R, 1>(s, rows, row, i);
}

template <KvType kType, int R>
inline void attend_latent_rows(const AttentionSpan& s, const LatentKeys<kType>& rows, int64_t row, const Partial& out) {
  const Keys keys{visible(s, row).low, visible(s, row + R - 1).high};
  if (keys.low >= keys.high) {
    for (int r = 0; r < R; ++r) out.peak[row + r] = -INFINITY;
    return;
  }
  score_keys<kType, R>(s, rows, row, keys);
  const Keys scored{keys.low / kKeyRun * kKeyRun, (keys.high + kKeyRun - 1) / kKeyRun * kKeyRun};
  for (int r = 0; r < R; ++r) {
    float* scores = s.scores + r * kScoreStride;
    out.peak[row + r] = find_peak(s, visible(s, row + r), scores);
    out.total[row + r] = soften<Float32Pages>(s, visible(s, row + r), scored, nullptr, out.peak[row + r], scores).total;
    if constexpr (LatentKeys<kType>::kHasScales) {
      map(scores + keys.low, keys.high - keys.low, [](Vec w, Vec x) { return w * x; }, scores + keys.low, rows.latent_scale + keys.low);
    }
  }
  const int64_t n = s.layout.latent;
  float* values = out.values + row * s.layout.value_dim();
  int64_t dim = 0;
  for (; dim + kVectors * W <= n; dim += kVectors * W) weigh_latent<kType, R, kVectors>(s, rows, keys, values, dim, W);
  for (; dim < n; dim += W) weigh_latent<kType, R, 1>(s, rows, keys, values, dim, n - dim);
  if (dim < s.layout.value_dim()) {  // padding, for merge
    for (int r = 0; r < R; ++r) std::memset(values + r * s.layout.value_dim() + dim, 0, static_cast<size_t>(s.layout.value_dim() - dim) * sizeof(float));
  }
}

inline void attend_latent(const AttentionSpan& s, const Partial& out) {
  with_latent(s.layout.type, [&]<KvType kType>() {
    const LatentKeys<kType> rows(s, {visible(s, 0).low, visible(s, s.rows - 1).high});
    row_blocks<kRows>(s.rows, [&]<int R>(int64_t row) { attend_latent_rows<kType, R>(s, rows, row, out); });
  });
}

// Kernels::worth. Heads are added in their order.
inline void worth_of(const AttentionSpan& s, const float* weights, float* worth) {
  const Keys keys = visible(s, 0);
  std::memset(worth + keys.low, 0, static_cast<size_t>(keys.high - keys.low) * sizeof(float));
  with_latent(s.layout.type, [&]<KvType kType>() {
    const LatentKeys<kType> rows(s, keys);
    row_blocks<kRows>(s.rows, [&]<int R>(int64_t row) {
      score_keys<kType, R>(s, rows, row, keys);
      for (int r = 0; r < R; ++r) {
        map(worth + keys.low, keys.high - keys.low, [w = set1(weights[row + r]), zero = set1(0)](Vec sum, Vec x) { return fma(w, max(zero, x), sum); },
            worth + keys.low, s.scores + r * kScoreStride + keys.low);
      }
    });
  });
}

}  // namespace trivium::TRIVIUM_TIER
