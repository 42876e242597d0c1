// The tape as Python builds it and runs it.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <optional>
#include <stdexcept>

#include "bound_tape.h"
#include "ops_attention.h"
#include "ops_linear.h"
#include "ops_lora.h"
#include "ops_rows.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace trivium {
namespace {

constexpr const char* kElementwise[] = {"add", "mul", "scale", "softcap", "activation", "gated", "copy"};
constexpr const char* kNorms[] = {"none", "rms", "layer"};

// Token ids, and positions of models that learned theirs, must be rows of their tables.
void check_rows(const BoundTape& self, const Step& step, Input input, const std::string& what) {
  const int64_t rows = self.table_rows[static_cast<size_t>(input)];
  for (int64_t t = 0; rows > 0 && t < step.tokens; ++t) {
    const int32_t id = step.inputs[static_cast<size_t>(input)][t];
    if (id < 0 || id >= rows) throw std::out_of_range(what + " " + std::to_string(id) + " is outside the model's " + std::to_string(rows) + " embeddings");
  }
}

void check_step(const BoundTape& self, const Step& step, int64_t groups) {
  check_rows(self, step, Input::token_ids, "token id");
  check_rows(self, step, Input::positions, "position");
  for (int64_t t = 0; self.slots > 0 && t < step.tokens; ++t) {
    if (step.inputs[6][t] >= self.slots) throw std::out_of_range("the step names an adapter beyond the " + std::to_string(self.slots) + " there are");
  }
  if (self.pool == nullptr) return;
  const int64_t slots = self.pool->pages() * self.pool->page_size();
  bool bad = false;
  for (int64_t i = 0; i < groups * step.tokens; ++i) bad |= step.slot_mapping[i] >= slots;
  for (int64_t i = 0; i < groups * step.seqs * step.blocks; ++i) bad |= step.block_tables[i] >= self.pool->pages();
  if (bad) throw std::out_of_range("the step names a page beyond the pool's " + std::to_string(self.pool->pages()));
  for (const int64_t group : self.recurrent) {
    for (int64_t s = 0; s < step.seqs; ++s) {
      if (step.inputs[2][s + 1] == step.inputs[2][s]) continue;
      if (group >= groups || step.blocks == 0 || step.block_tables[(group * step.seqs + s) * step.blocks] < 0) {
        throw std::out_of_range("sequence " + std::to_string(s) + " of the step has no page for its recurrent state");
      }
    }
  }
}

// Points the tape at a Batch.
void begin(BoundTape& self, const nb::object& batch) {
  self.held.clear();
  Step step;
  const char* const names[] = {"token_ids", "positions", "query_starts", "context_lens", "sample_rows", "pool_rows", "adapters"};
  for (size_t i = 0; i < kInputs; ++i) step.inputs[i] = self.take<int32_t>(batch, names[i]);
  step.tokens = static_cast<int64_t>(nb::len(nb::object(batch.attr("token_ids"))));
  step.seqs = static_cast<int64_t>(nb::len(nb::object(batch.attr("context_lens"))));
  step.rows = static_cast<int64_t>(nb::len(nb::object(batch.attr("sample_rows"))));
  step.pooled = static_cast<int64_t>(nb::len(nb::object(batch.attr("pool_rows"))));
  if (self.slots > 0 && static_cast<int64_t>(nb::len(nb::object(batch.attr("adapters")))) != step.tokens) {
    throw std::out_of_range("the step does not say which adapter each of its tokens has");
  }
  auto tables = nb::cast<Array<int32_t>>(batch.attr("block_tables"));
  step.block_tables = tables.data();
  step.blocks = tables.ndim() == 3 ? static_cast<int64_t>(tables.shape(2)) : 0;
  self.held.push_back(nb::cast(tables));
  step.slot_mapping = self.take<int64_t>(batch, "slot_mapping");
  self.sampling = batch.attr("sampling");
  check_step(self, step, static_cast<int64_t>(tables.shape(0)));
  self.tape.begin(step);
}

void run_range(BoundTape& self, int64_t first, int64_t last) {
  nb::gil_scoped_release release;
  self.tape.run_range(first, last);
}

SampleArrays sample_arrays(BoundTape& self) {
  const nb::object& s = self.sampling;
  SampleArrays in;
  in.temperature = self.take<float>(s, "temperature");
  in.top_p = self.take<float>(s, "top_p");
  in.min_p = self.take<float>(s, "min_p");
  in.typical_p = self.take<float>(s, "typical_p");
  in.top_n_sigma = self.take<float>(s, "top_n_sigma");
  in.xtc_probability = self.take<float>(s, "xtc_probability");
  in.xtc_threshold = self.take<float>(s, "xtc_threshold");
  in.repetition = self.take<float>(s, "repetition");
  in.presence = self.take<float>(s, "presence");
  in.frequency = self.take<float>(s, "frequency");
  in.top_k = self.take<int32_t>(s, "top_k");
  in.seed = self.take<uint64_t>(s, "seed");
  in.position = self.take<int64_t>(s, "position");
  in.seen_starts = self.take<int32_t>(s, "seen_starts");
  in.seen_ids = self.take<int32_t>(s, "seen_ids");
  in.seen_counts = self.take<int32_t>(s, "seen_counts");
  in.bias_starts = self.take<int32_t>(s, "bias_starts");
  in.bias_ids = self.take<int32_t>(s, "bias_ids");
  in.bias = self.take<float>(s, "bias");
  in.score_ids = self.take<int32_t>(s, "score_ids");
  nb::object mask = s.attr("mask");
  if (!mask.is_none()) {
    auto words = nb::cast<Array<uint32_t>>(mask);
    in.mask = words.data();
    in.mask_words = static_cast<int64_t>(words.shape(1));
    self.held.push_back(nb::cast(words));
  }
  in.top_logprobs = nb::cast<int64_t>(s.attr("top_logprobs"));
  return in;
}

// (ids,) or (ids, logprobs, ranks, top_ids, top_logprobs) of the current step.
nb::tuple sample(BoundTape& self, const Ref& logits, int64_t width, int64_t vocab_size) {
  const SampleArrays in = sample_arrays(self);
  const auto rows = static_cast<size_t>(self.tape.step().rows);
  SampledArrays out;
  out.alternatives = std::clamp<int64_t>(in.top_logprobs, 0, vocab_size);
  const auto k = static_cast<size_t>(out.alternatives);
  IntArray ids = new_array<int32_t>({rows});
  out.ids = ids.data();
  if (in.top_logprobs < 0) {
    nb::gil_scoped_release release;
    self.tape.sample(logits, width, in, vocab_size, out);
  } else {
    FloatArray logprobs = new_array<float>({rows}), top_logprobs = new_array<float>({rows, k});
    IntArray ranks = new_array<int32_t>({rows}), top_ids = new_array<int32_t>({rows, k});
    out.logprobs = logprobs.data();
    out.top_logprobs = top_logprobs.data();
    out.ranks = ranks.data();
    out.top_ids = top_ids.data();
    {
      nb::gil_scoped_release release;
      self.tape.sample(logits, width, in, vocab_size, out);
    }
    return nb::make_tuple(ids, logprobs, ranks, top_ids, top_logprobs);
  }
  return nb::make_tuple(ids);
}

size_t elements(const std::vector<int64_t>& dims) {
  size_t n = 1;
  for (const int64_t d : dims) n *= static_cast<size_t>(d);
  return n;
}

template <typename T>
nb::ndarray<nb::numpy, T> read(const BoundTape& self, const Ref& ref, const std::vector<int64_t>& dims) {
  const size_t n = elements(dims);
  T* memory = new T[n];
  nb::capsule owner(memory, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  const void* from = ref.space == Space::input ? static_cast<const void*>(self.tape.step().ints(ref)) : self.tape.step().floats(ref);
  std::memcpy(memory, from, n * sizeof(T));
  const std::vector<size_t> shape(dims.begin(), dims.end());
  return nb::ndarray<nb::numpy, T>(memory, shape.size(), shape.data(), owner);
}

template <typename T>
void write(BoundTape& self, const Ref& ref, const Array<T>& values) {
  std::memcpy(self.tape.step().floats(ref), values.data(), values.size() * sizeof(T));
}

void bind_values(nb::module_& m) {
  nb::class_<Ref>(m, "Ref")
      .def(nb::init<>())
      .def_static("tokens", [](int64_t offset) { return Ref{Space::tokens, offset, nullptr}; })
      .def_static("rows", [](int64_t offset) { return Ref{Space::rows, offset, nullptr}; })
      .def_static("pooled", [](int64_t offset) { return Ref{Space::pooled, offset, nullptr}; })
      .def_static("fixed", [](int64_t offset) { return Ref{Space::fixed, offset, nullptr}; })
      .def_static("input", [](int64_t index) { return Ref{Space::input, index, nullptr}; })
      .def_static("floats", [](const Array<float>& array) { return Ref{Space::constant, 0, array.data()}; }, "A constant; the array must be kept alive.")
      .def_static("ints", [](const Array<int32_t>& array) { return Ref{Space::constant, 0, array.data()}; }, "A constant; the array must be kept alive.");
  nb::class_<Extent>(m, "Extent")
      .def_static("tokens", [](int64_t factor) { return Extent{Space::tokens, factor}; })
      .def_static("rows", [](int64_t factor) { return Extent{Space::rows, factor}; })
      .def_static("pooled", [](int64_t factor) { return Extent{Space::pooled, factor}; })
      .def_static("fixed", [](int64_t factor) { return Extent{Space::fixed, factor}; });
  nb::class_<NormSpec>(m, "NormSpec")
      .def("__init__", [](NormSpec* self, const std::string& kind, Ref weight, Ref bias, float eps, float offset) {
        new (self) NormSpec{named<NormSpec::Kind>(kNorms, kind), weight, bias, eps, offset};
      }, "kind"_a, "weight"_a, "bias"_a, "eps"_a, "offset"_a);
  nb::class_<Gate>(m, "Gate")
      .def("__init__", [](Gate* self, const std::string& kind, std::optional<float> limit, float alpha, float up_offset) {
        new (self) Gate{named<Activation>(kActivations, kind), limit.value_or(-1.0f), alpha, up_offset};
      }, "kind"_a, "limit"_a.none() = nb::none(), "alpha"_a = 1.0f, "up_offset"_a = 0.0f);
  nb::class_<Target>(m, "Target")
      .def("__init__", [](Target* self, const linear::PackedMatrix& matrix, Ref bias, Ref y) { new (self) Target{matrix.view(), bias, y}; },
           "matrix"_a, "bias"_a, "y"_a, "The matrix must be kept alive.");
}

void bind_row_ops(nb::class_<BoundTape>& tape) {
  tape.def("elementwise", [](BoundTape& self, const std::string& kind, Ref a, Ref b, Ref y, Extent count, float factor, Gate gate, bool barrier) {
    auto op = std::make_unique<Elementwise>(named<Elementwise::Kind>(kElementwise, kind), a, b, y, count);
    op->factor = factor;
    op->gate = gate;
    self.add(std::move(op), kind, barrier);
  }, "kind"_a, "a"_a, "b"_a, "y"_a, "count"_a, "factor"_a, "gate"_a, "barrier"_a);
  tape.def("norm", [](BoundTape& self, const NormSpec& norm, Ref x, Ref other, Ref sum, Ref residual, Ref y, Extent rows, int64_t n, bool barrier) {
    auto op = std::make_unique<Norm>(norm, x, other, sum, y, rows, n);
    op->residual = residual;
    self.add(std::move(op), other.present() ? "add+norm" : residual.present() ? "norm+add" : "norm", barrier);
  }, "norm"_a, "x"_a, "other"_a, "sum"_a, "residual"_a, "y"_a, "rows"_a, "n"_a, "barrier"_a);
  tape.def("embedding", [](BoundTape& self, Ref ids, const linear::PackedMatrix& table, float factor, Ref y, Extent rows, bool barrier) {
    if (ids.space == Space::input) {
      int64_t& known = self.table_rows[static_cast<size_t>(ids.offset)];
      known = known == 0 ? table.view().out : std::min(known, table.view().out);
    }
    self.add(std::make_unique<Embedding>(ids, table.view(), factor, y, rows), "embedding", barrier);
  }, "ids"_a, "table"_a, "factor"_a, "y"_a, "rows"_a, "barrier"_a);
  tape.def("rope_table", [](BoundTape& self, Ref positions, Ref inv_freq, int64_t half, float scale, Ref y, Extent tokens, bool barrier) {
    self.add(std::make_unique<RopeTable>(positions, inv_freq, half, scale, y, tokens), "rope table", barrier);
  }, "positions"_a, "inv_freq"_a, "half"_a, "scale"_a, "y"_a, "tokens"_a, "barrier"_a);
  tape.def("rope", [](BoundTape& self, Ref x, Ref table, int64_t half, bool interleaved, Ref y, Extent tokens, int64_t heads, int64_t dim, bool barrier) {
    self.add(std::make_unique<Rope>(x, table, half, interleaved, y, tokens, heads, dim), "rope", barrier);
  }, "x"_a, "table"_a, "half"_a, "interleaved"_a, "y"_a, "tokens"_a, "heads"_a, "dim"_a, "barrier"_a);
  tape.def("copy_columns", [](BoundTape& self, Ref x, std::pair<int64_t, int64_t> from, Ref y, std::pair<int64_t, int64_t> to, int64_t n, Extent rows, bool barrier) {
    self.add(std::make_unique<CopyColumns>(x, from.first, from.second, y, to.first, to.second, n, rows), "copy", barrier);
  }, "x"_a, "source"_a, "y"_a, "target"_a, "n"_a, "rows"_a, "barrier"_a, "source and target: (width, first column).");
  tape.def("gather_rows", [](BoundTape& self, Ref x, Ref index, Ref y, Extent count, int64_t n, bool barrier) {
    self.add(std::make_unique<GatherRows>(x, index, y, count, n), "gather rows", barrier);
  }, "x"_a, "index"_a, "y"_a, "count"_a, "n"_a, "barrier"_a);
}

void bind_large_ops(nb::class_<BoundTape>& tape) {
  tape.def("project", [](BoundTape& self, const std::string& name, Ref x, int64_t in, Extent rows, const std::vector<Target>& targets, const NormSpec& norm,
                         Ref other, Ref sum, Ref normed, Ref quantised, bool accumulate, std::optional<Gate> gate, Ref handed, bool takes_over,
                         bool barrier) {
    auto op = std::make_unique<Project>(x, in, rows);
    op->targets = targets;
    op->norm = norm;
    op->other = other;
    op->sum = sum;
    op->normed = normed;
    op->quantised = quantised;
    op->accumulate = accumulate;
    op->is_gated = gate.has_value();
    op->gate = gate.value_or(Gate{});
    op->handed = handed;
    op->takes_over = takes_over;
    self.add(std::move(op), name, barrier);
  }, "name"_a, "x"_a, "in"_a, "rows"_a, "targets"_a, "norm"_a, "other"_a, "sum"_a, "normed"_a, "quantised"_a, "accumulate"_a, "gate"_a.none(), "handed"_a,
     "takes_over"_a, "barrier"_a);
  tape.def("rope_write", [](BoundTape& self, Ref q, Ref k, Ref v, Ref q_out, const KvLayer& layer, int64_t heads, Extent tokens, Ref table, int64_t half,
                            bool interleaved, const NormSpec& q_norm, const NormSpec& k_norm, bool barrier) {
    auto op = std::make_unique<RopeWrite>(q, k, v, q_out, layer, heads, tokens);
    op->table = table;
    op->half = half;
    op->interleaved = interleaved;
    op->q_norm = q_norm;
    op->k_norm = k_norm;
    self.add(std::move(op), table.present() ? "rope+kv write" : "kv write", barrier);
  }, "q"_a, "k"_a, "v"_a, "q_out"_a, "layer"_a, "heads"_a, "tokens"_a, "table"_a, "half"_a, "interleaved"_a, "q_norm"_a, "k_norm"_a, "barrier"_a);
  tape.def("attention", [](BoundTape& self, Ref q, Ref query_starts, Ref context_lens, Ref sinks, Ref y, const KvLayer& layer, int64_t heads, float scale,
                           float softcap, int64_t window, int64_t chunk, bool causal, Ref partials, int64_t partial_capacity, bool barrier) {
    if (query_starts.space != Space::input || context_lens.space != Space::input) throw std::invalid_argument("attention reads the step's own arrays");
    auto op = std::make_unique<Attention>(q, query_starts, context_lens, sinks, y, layer, heads, partial_capacity);
    op->scale = scale;
    op->softcap = softcap;
    op->window = window;
    op->chunk = chunk;
    op->causal = causal;
    op->partials = partials;
    self.add(std::move(op), "attention", barrier);
  }, "q"_a, "query_starts"_a, "context_lens"_a, "sinks"_a, "y"_a, "layer"_a, "heads"_a, "scale"_a, "softcap"_a, "window"_a, "chunk"_a, "causal"_a, "partials"_a,
      "partial_capacity"_a, "barrier"_a);
  tape.def("lora", [](BoundTape& self, Ref y, Ref x, Ref a, Ref b, Ref adapters, Ref inner, int64_t slots, int64_t rank, int64_t in, int64_t out, bool barrier) {
    self.slots = self.slots == 0 ? slots : std::min(self.slots, slots);
    self.add(std::make_unique<Lora>(y, x, a, b, adapters, inner, rank, in, out), "lora", barrier);
  }, "y"_a, "x"_a, "a"_a, "b"_a, "adapters"_a, "inner"_a, "slots"_a, "rank"_a, "in"_a, "out"_a, "barrier"_a);
  tape.def_static("partial_numbers", [](const KvLayer& layer, int64_t heads) {
    return Attention({}, {}, {}, {}, {}, layer, heads, 0).partial_numbers();
  }, "layer"_a, "heads"_a, "Numbers that one shared-out span of a tile needs.");
}

nb::tuple run(BoundTape& self, const nb::object& batch, const Ref& logits, int64_t width, int64_t vocab_size) {
  begin(self, batch);
  run_range(self, 0, self.tape.size());
  return sample(self, logits, width, vocab_size);
}

}  // namespace

void bind_tape(nb::module_& m) {
  bind_values(m);
  nb::class_<BoundTape> tape(m, "Tape");
  tape.def(nb::init<std::shared_ptr<Runtime>, std::shared_ptr<KvPool>>(), "runtime"_a, "kv"_a.none());
  bind_row_ops(tape);
  bind_large_ops(tape);
  bind_model_ops(tape);
  tape.def("set_arenas", [](BoundTape& self, int64_t tokens, int64_t rows, int64_t pooled, int64_t fixed, int64_t max_tokens, int64_t max_rows) {
    self.tape.set_arenas({tokens, rows, pooled, fixed}, max_tokens, max_rows);
  }, "tokens"_a, "rows"_a, "pooled"_a, "fixed"_a, "max_tokens"_a, "max_rows"_a);
  tape.def("makes_rows", [](BoundTape& self, const Ref& y) { self.tape.makes_rows(y.space); }, "y"_a, "The operation added last makes rows of y's arena.");
  tape.def("__len__", [](const BoundTape& self) { return self.tape.size(); });
  tape.def("begin", &begin, "batch"_a);
  tape.def("run_range", &run_range, "first"_a, "last"_a);
  tape.def("sample", &sample, "logits"_a, "width"_a, "vocab_size"_a);
  tape.def("run", &run, "batch"_a, "logits"_a, "width"_a, "vocab_size"_a, "begin, run_range of everything and sample in one call.");
  tape.def("read_floats", &read<float>, "ref"_a, "shape"_a);
  tape.def("read_ints", &read<int32_t>, "ref"_a, "shape"_a);
  tape.def("write_floats", &write<float>, "ref"_a, "values"_a);
  tape.def("write_ints", &write<int32_t>, "ref"_a, "values"_a);
  tape.def("set_profile", [](BoundTape& self, bool on) { self.tape.set_profile(on); }, "on"_a);
  tape.def("profile", [](const BoundTape& self) {
    std::vector<std::pair<std::string, double>> seconds;
    for (int64_t i = 0; i < self.tape.size(); ++i) seconds.emplace_back(self.tape.name(i), self.tape.seconds()[static_cast<size_t>(i)]);
    return seconds;
  }, "(name, seconds) of each operation since set_profile(True).");
}

}  // namespace trivium
