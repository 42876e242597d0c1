// The row-wise and attention kernels of one instruction set, as a table of functions chosen once at run time.
//
// All of them work on one row, or on rows of one sequence, and use no memory but what they are given. The bits of a result depend
// on the operands only: never on the number of rows that are worked on together.
#pragma once

#include <cstdint>
#include <string>

namespace trivium {

enum class Activation : int { silu, gelu, gelu_tanh, relu, relu2, quick_gelu, sigmoid, tanh, softplus };

// gated: y = f(gate) * (up + up_offset). limit < 0: no limit. alpha != 1: f(g) = g * sigmoid(alpha * g).
struct Gate {
  Activation kind = Activation::silu;
  float limit = -1;
  float alpha = 1;
  float up_offset = 0;
};

enum class KvType : int { float32, bfloat16, float16, int8 };

inline constexpr int64_t kKeyRun = 16;     // keys that always lie in one page
inline constexpr int64_t kSpan = 256;      // keys that the softmax looks at together; spans start at multiples of it
inline constexpr int64_t kProductSums = 12;
inline constexpr int64_t kSpanRows = 32;   // rows whose scores are made together by matrix tiles, at most
inline constexpr int64_t kTileRows = 96;   // the same for vectors; also those of a kv head that are worked on together, if one token's are no more
inline constexpr int64_t kPanelRows = 24;  // from so many rows on keys and values are copied for all of them
inline constexpr int64_t kFewRows = 16;    // up to so many wait for memory rather than for arithmetic
inline constexpr int64_t kScoreStride = kSpan + 16;  // numbers from one row of scores to the next: a power of two would crowd a few sets of the cache
inline constexpr int64_t kKeyBlock = 64;   // keys of a sequence without pages that lie together as columns
inline constexpr int64_t kValueAlign = 16; // value heads are padded to a multiple of this many numbers

// Where the keys and values of one layer lie in a page: keys [kv_heads][K block], then values [kv_heads][V block].
//   K block: float32, float16: [head_dim][page_size]; bfloat16, int8: [head_dim / 2][page_size][2], pairs of dimensions side by side.
//   V block: float32, float16: [page_size][padded dim]; bfloat16, int8: [page_size / 2][padded dim][2], pairs of tokens side by side.
// int8: a scale for each token, bfloat16[page_size], ends either block; a number is its byte times the scale (see scale_of in kv_pages.h).
// LatentKV: one kv head, the same rows for keys and values, as they lie in a neutral page: [page_size][latent], then [page_size][head_dim - latent];
//   int8: a scale for each row behind either part. Values are the first `latent` numbers of keys.
// An odd head_dim is padded with a dimension of zeros in keys. Keys are read as columns, so that a vector holds the same dimension of many keys and
// no sum runs across lanes; the pairs are what dot products of 16 bits and matrix tiles take.
struct KvLayout {
  KvType type = KvType::float32;
  int64_t page_size = 16;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t latent = 0;  // > 0: LatentKV

  int64_t item() const { return type == KvType::float32 ? 4 : type == KvType::int8 ? 1 : 2; }
  int64_t scale_bytes() const { return type == KvType::int8 ? 2 * page_size : 0; }
  int64_t key_dim() const { return (head_dim + 1) / 2 * 2; }
  int64_t value_size() const { return latent > 0 ? latent : head_dim; }
  int64_t value_dim() const { return (value_size() + kValueAlign - 1) / kValueAlign * kValueAlign; }
  int64_t key_bytes() const { return key_dim() * page_size * item() + scale_bytes(); }
  int64_t value_bytes() const { return value_dim() * page_size * item() + scale_bytes(); }
  int64_t latent_bytes() const { return page_size * latent * item() + scale_bytes(); }
  int64_t bytes() const { return latent > 0 ? page_size * head_dim * item() + 2 * scale_bytes() : kv_heads * (key_bytes() + value_bytes()); }
  // Keys are rows of dimensions, values rows of tokens; with pairs two of them side by side are one row. Where a token begins in each row
  // of keys, and its row of values: bytes.
  int64_t per_row() const { return type == KvType::bfloat16 || type == KvType::int8 ? 2 : 1; }
  int64_t key_rows() const { return key_dim() / per_row(); }
  int64_t key_row_bytes() const { return page_size * per_row() * item(); }
  int64_t key_at(int64_t token) const { return token * per_row() * item(); }
  int64_t value_row_bytes() const { return value_dim() * per_row() * item(); }
  int64_t value_at(int64_t token) const { return token / per_row() * value_row_bytes(); }
  int64_t key_offset(int64_t head) const { return head * key_bytes(); }
  int64_t value_offset(int64_t head) const { return kv_heads * key_bytes() + head * value_bytes(); }
  // From one row of prepared queries (Kernels::queries) to the next.
  int64_t query_bytes() const { return (head_dim + kValueAlign - 1) / kValueAlign * kValueAlign * 4 + 64; }
};

// Keys [begin, end) of a sequence, of the kv head at key_offset.
struct KeySpan {
  const int32_t* blocks = nullptr;
  int64_t begin = 0, end = 0;  // begin: a multiple of kSpan
  int64_t key_offset = 0;
};

// One span of attention: `rows` query rows (tokens x heads of one kv head) against keys [begin, end) of one sequence.
struct AttentionSpan {
  const uint8_t* q = nullptr;         // rows from Kernels::queries
  int64_t rows = 0;
  int64_t group = 1;                  // query heads to a kv head: row r belongs to token r / group
  int64_t first_position = 0;         // position of the first token; the next tokens follow
  int64_t begin = 0, end = 0;         // keys of this span; begin a multiple of kSpan
  int64_t context = 0;                // keys that exist
  int64_t window = 0;                 // 0: none
  int64_t chunk = 0;                  // 0: none; else keys before a query's chunk are not seen
  bool causal = true;
  float softcap = 0;                  // 0: none
  const int32_t* chosen = nullptr;    // LatentKV: the positions that are the keys, in their place; null: all, in order
  const int32_t* blocks = nullptr;    // the sequence's row of the block table
  const uint8_t* pages = nullptr;     // page p's keys of this head are at pages + p * page_bytes + key_offset
  int64_t page_bytes = 0;
  int64_t key_offset = 0;
  int64_t value_offset = 0;
  KvLayout layout;
  float* scores = nullptr;            // scratch [kTileRows][kScoreStride]
  KeySpan next;                       // what is asked of memory meanwhile: the keys that will be read next
};

// The same of a sequence whose keys and values lie beside the queries, seen from both sides. span: without what belongs to pages; its layout is
// float32, its positions count from the sequence's first token.
struct WholeSpan {
  AttentionSpan span;
  const float* keys = nullptr;    // of one kv head: blocks of kKeyBlock tokens [head_dim][tokens of the block], then 15 numbers that may be anything
  const float* values = nullptr;  // the first token's
  int64_t value_step = 0;         // numbers from one token's value to the next one's
  int64_t reach = 0;              // a query sees keys that are no farther from it
};

// The state of a softmax over some keys: maximum of the scores (times log2 e), sum of the weights and weighted values of each row. Values are
// padded to value_dim.
struct Partial {
  float* peak = nullptr;    // [rows]; -infinity: no key so far
  float* total = nullptr;   // [rows]
  float* values = nullptr;  // [rows][value_dim]
};

// The gated delta rule (see the operator) for one head of one sequence and some columns of its state [dk][stride]; pointers are those of the first
// token and of the first column, *_step numbers lie from one token to the next.
struct DeltaRule {
  const float *q = nullptr, *k = nullptr, *v = nullptr, *g = nullptr, *beta = nullptr;
  int64_t qk_step = 0, v_step = 0, head_step = 0;
  float* state = nullptr;
  int64_t dk = 0, stride = 0, columns = 0, tokens = 0;
  float scale = 1;
  float* y = nullptr;  // v_step apart
};

// The selective scan (see the operator) for some rows of one head's state [rows][dk] of one sequence.
struct SelectiveScan {
  const float *x = nullptr, *dt = nullptr, *b = nullptr, *c = nullptr;
  int64_t x_step = 0, dt_step = 0, bc_step = 0;
  float a = 0, d = 0, dt_low = 0, dt_high = 0;
  float* state = nullptr;
  int64_t rows = 0, dk = 0, tokens = 0;
  float* y = nullptr;  // x_step apart
};

struct Kernels {
  const char* name;

  void (*add)(const float* a, const float* b, float* y, int64_t n);
  void (*mul)(const float* a, const float* b, float* y, int64_t n);
  void (*scale)(const float* x, float factor, float* y, int64_t n);
  void (*softcap)(const float* x, float cap, float* y, int64_t n);
  void (*activation)(const float* x, Activation kind, float* y, int64_t n);
  void (*gated)(const float* gate, const float* up, const Gate& how, float* y, int64_t n);
  // weight (and bias) may be null. y may be x.
  void (*rms_norm)(const float* x, const float* weight, float eps, float offset, float* y, int64_t n);
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, float* y, int64_t n);
  // Rotates the first 2 * half numbers of one head by cos[half], sin[half]; y may be x.
  void (*rope)(const float* x, const float* cosine, const float* sine, int64_t half, bool interleaved, float* y, int64_t n);
  float (*max)(const float* x, int64_t n);
  void (*exp)(const float* x, float* y, int64_t n);  // y may be x
  float (*dot)(const float* a, const float* b, int64_t n);
  void (*add_scaled)(const float* x, float factor, float* y, int64_t n);  // y += factor * x

  void (*add_product)(const float* a, const float* b, float* y, int64_t n);  // y += a * b
  void (*delta_rule)(const DeltaRule& rule);
  void (*selective_scan)(const SelectiveScan& scan);

  // Writes `count` tokens' keys and values of one head, k_stride and v_stride numbers apart, into one page from token `offset` on. key, value: that
  // head's blocks.
  void (*write_kv)(const KvLayout& layout, int64_t offset, int64_t count, const float* k, int64_t k_stride, const float* v, int64_t v_stride,
                   uint8_t* key, uint8_t* value);
  // Writes one token's row latent[layout.latent], rope[head_dim - latent] of a LatentKV layer whose part of the page begins at `page`.
  void (*write_latent)(const KvLayout& layout, int64_t offset, const float* latent, const float* rope, uint8_t* page);
  // One token back.
  void (*read_kv)(const KvLayout& layout, int64_t offset, const uint8_t* key, const uint8_t* value, float* k, float* v);
  // q[rows][head_dim] times factor, rounded to what `attend` multiplies keys of the format with. factor: scale, times log2 e without softcap.
  void (*queries)(const KvLayout& layout, const float* q, int64_t rows, float factor, uint8_t* out);
  // Fills `out` with the softmax state of one span, from nothing.
  void (*attend)(const AttentionSpan& span, const Partial& out);
  void (*attend_whole)(const WholeSpan& span, const Partial& out);
  // worth[i] = sum over the span's rows r, heads of one token, of weights[r] * max(0, q[r] . key i), for the keys that the token sees.
  void (*worth)(const AttentionSpan& span, const float* weights, float* worth);
  // total := total merged with part, for `rows` rows. A part without keys changes nothing; a total without keys becomes the part.
  void (*merge)(const Partial& total, const Partial& part, int64_t rows, int64_t value_dim);
  // For measurements: `rounds` times kProductSums vectors of sums of two products of the format.
  float (*products)(KvType type, int64_t rounds);
  int64_t lanes;  // of a vector of sums
  // y[head_dim] = values / total of one row. sink: one more score without a value, or null.
  void (*finish)(float peak, float total, const float* values, const float* sink, float* y, int64_t head_dim);
};

// The table of a tier this machine can run (see available_tiers); null for an unknown one.
const Kernels* find_kernels(const std::string& tier);

}  // namespace trivium
