// Operations of experts, recurrences, compressed attention and encoders as Python adds them to a tape.
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bound_tape.h"
#include "ops_attention.h"
#include "ops_recurrent.h"
#include "ops_route.h"
#include "ops_sparse.h"
#include "ops_stacked.h"
#include "ops_whole.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace trivium {
namespace {

constexpr const char* kScorings[] = {"softmax", "sigmoid", "softmax_topk"};

void bind_routes(nb::class_<BoundTape>& tape) {
  tape.def("moe_route", [](BoundTape& self, Ref logits, Ref bias, Ref weights, Ref ids, int64_t experts, int64_t top_k, const std::string& scoring,
                           bool normalize, float scale, int64_t groups, int64_t top_groups, bool barrier) {
    auto op = std::make_unique<MoeRoute>(logits, weights, ids, experts, top_k);
    op->scoring = named<MoeRoute::Scoring>(kScorings, scoring);
    op->bias = bias;
    op->normalize = normalize;
    op->scale = scale;
    op->groups = groups;
    op->top_groups = top_groups;
    self.add(std::move(op), "moe route", barrier);
  }, "logits"_a, "bias"_a, "weights"_a, "ids"_a, "experts"_a, "top_k"_a, "scoring"_a, "normalize"_a, "scale"_a, "groups"_a, "top_groups"_a, "barrier"_a);
  tape.def("sparse_mixer_route", [](BoundTape& self, Ref logits, Ref weights, Ref ids, int64_t experts, int64_t top_k, float jitter, bool barrier) {
    auto op = std::make_unique<SparseMixerRoute>(logits, weights, ids, experts, top_k);
    op->jitter = jitter;
    self.add(std::move(op), "sparse mixer route", barrier);
  }, "logits"_a, "weights"_a, "ids"_a, "experts"_a, "top_k"_a, "jitter"_a, "barrier"_a);
}

void bind_stacked(nb::class_<BoundTape>& tape) {
  nb::class_<Experts::Weights>(tape, "ExpertWeights")
      .def("__init__", [](Experts::Weights* self, const linear::PackedMatrix& gate, const linear::PackedMatrix& up, const linear::PackedMatrix& down,
                          Ref gate_bias, Ref up_bias, Ref down_bias, int64_t experts) {
        new (self) Experts::Weights{{gate.view(), experts}, {up.view(), experts}, {down.view(), experts}, gate_bias, up_bias, down_bias};
      }, "gate"_a, "up"_a, "down"_a, "gate_bias"_a, "up_bias"_a, "down_bias"_a, "experts"_a, "The matrices must be kept alive.")
      .def("wide_numbers", [](const Experts::Weights& self, int64_t top_k) { return Experts::wide_numbers(self, top_k); }, "top_k"_a)
      .def("inner_numbers", [](const Experts::Weights& self, int64_t top_k) { return Experts::inner_numbers(self, top_k); }, "top_k"_a);
  tape.def("experts", [](BoundTape& self, Ref x, Ref weights, Ref ids, Ref y, const Experts::Weights& matrices, const std::array<Ref, 4>& memory,
                         const Gate& gate, int64_t experts, int64_t top_k, bool barrier) {
    const Experts::Memory places{memory[0], memory[1], memory[2], memory[3]};
    self.add(std::make_unique<Experts>(x, weights, ids, y, matrices, places, gate, experts, top_k), "experts", barrier);
  }, "x"_a, "weights"_a, "ids"_a, "y"_a, "matrices"_a, "memory"_a, "gate"_a, "experts"_a, "top_k"_a, "barrier"_a, "memory: order, wide, inner, fixed.");
  tape.def("head_linear", [](BoundTape& self, Ref x, const linear::PackedMatrix& matrix, Ref y, Ref records, int64_t heads, bool barrier) {
    self.add(std::make_unique<HeadLinear>(x, Stack(matrix.view(), heads), y, records, heads), "head linear", barrier);
  }, "x"_a, "matrix"_a, "y"_a, "records"_a, "heads"_a, "barrier"_a);
}

void bind_recurrences(nb::class_<BoundTape>& tape) {
  tape.def("gated_delta_rule", [](BoundTape& self, const std::array<Ref, 5>& inputs, Ref query_starts, Ref context_lens, Ref y, const KvLayer& layer,
                                  int64_t heads, int64_t dk, int64_t dv, float scale, bool barrier) {
    self.needs_page(layer.group);
    self.add(std::make_unique<DeltaRuleOp>(inputs, query_starts, context_lens, y, layer, heads, dk, dv, scale), "gated delta rule", barrier);
  }, "inputs"_a, "query_starts"_a, "context_lens"_a, "y"_a, "layer"_a, "heads"_a, "dk"_a, "dv"_a, "scale"_a, "barrier"_a, "inputs: q, k, v, g, beta.");
  tape.def("selective_scan", [](BoundTape& self, const std::array<Ref, 4>& inputs, Ref a, Ref d, Ref query_starts, Ref context_lens, Ref y,
                                const KvLayer& layer, const std::array<int64_t, 4>& sizes, std::pair<float, float> dt_limits, bool barrier) {
    auto op = std::make_unique<SelectiveScanOp>(inputs, a, d, query_starts, context_lens, y, layer);
    op->heads = sizes[0];
    op->groups = sizes[1];
    op->dv = sizes[2];
    op->dk = sizes[3];
    op->dt_low = dt_limits.first;
    op->dt_high = dt_limits.second;
    self.needs_page(layer.group);
    self.add(std::move(op), "selective scan", barrier);
  }, "inputs"_a, "a"_a, "d"_a, "query_starts"_a, "context_lens"_a, "y"_a, "layer"_a, "sizes"_a, "dt_limits"_a, "barrier"_a,
           "inputs: x, dt, b, c; sizes: heads, groups, dv, dk.");
  tape.def("short_conv", [](BoundTape& self, Ref x, Ref weight, Ref bias, Ref query_starts, Ref context_lens, Ref y, const KvLayer& layer, int64_t width,
                            int64_t channels, const std::string& kind, bool barrier) {
    auto op = std::make_unique<ShortConv>(x, weight, bias, query_starts, context_lens, y, layer, width, channels);
    op->has_activation = !kind.empty();
    if (op->has_activation) op->kind = named<Activation>(kActivations, kind);
    self.needs_page(layer.group);
    self.add(std::move(op), "short conv", barrier);
  }, "x"_a, "weight"_a, "bias"_a, "query_starts"_a, "context_lens"_a, "y"_a, "layer"_a, "width"_a, "channels"_a, "kind"_a, "barrier"_a,
           "weight: [width, channels]; kind: an activation, or none if empty.");
}

void bind_sparse(nb::class_<BoundTape>& tape) {
  tape.def("top_positions", [](BoundTape& self, Ref q, Ref weights, Ref query_starts, Ref context_lens, Ref positions, Ref worth, const KvLayer& layer,
                               int64_t heads, int64_t top_k, int64_t capacity, bool barrier) {
    const TopPositions::Shape shape{heads, top_k};
    self.add(std::make_unique<TopPositions>(q, weights, query_starts, context_lens, positions, worth, layer, shape, capacity), "top positions", barrier);
  }, "q"_a, "weights"_a, "query_starts"_a, "context_lens"_a, "positions"_a, "worth"_a, "layer"_a, "heads"_a, "top_k"_a, "capacity"_a, "barrier"_a,
           "worth: fixed memory for capacity * SPAN numbers.");
  tape.def("sparse_latent_attention", [](BoundTape& self, Ref q, Ref query_starts, Ref context_lens, Ref chosen, Ref y, const KvLayer& layer, int64_t heads,
                                         int64_t top_k, float scale, bool barrier) {
    const SparseLatentAttention::Shape shape{heads, top_k};
    self.add(std::make_unique<SparseLatentAttention>(q, query_starts, context_lens, chosen, y, layer, shape, scale), "sparse attention", barrier);
  }, "q"_a, "query_starts"_a, "context_lens"_a, "chosen"_a, "y"_a, "layer"_a, "heads"_a, "top_k"_a, "scale"_a, "barrier"_a);
}

void bind_whole(nb::class_<BoundTape>& tape) {
  tape.def_static("column_numbers", &BidirectionalAttention::column_numbers, "kv_heads"_a, "head_dim"_a, "Numbers a token of bidirectional_attention's columns.");
  tape.def("bidirectional_attention", [](BoundTape& self, const std::array<Ref, 3>& inputs, Ref query_starts, Ref y, Ref columns, int64_t heads,
                                         int64_t kv_heads, int64_t head_dim, float scale, int64_t window, bool barrier) {
    const BidirectionalAttention::Shape shape{heads, kv_heads, head_dim};
    auto op = std::make_unique<BidirectionalAttention>(inputs[0], inputs[1], inputs[2], query_starts, y, columns, shape);
    op->scale = scale;
    op->window = window;
    self.add(std::move(op), "bidirectional attention", barrier);
  }, "inputs"_a, "query_starts"_a, "y"_a, "columns"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "scale"_a, "window"_a, "barrier"_a,
           "inputs: q, k, v; window: < 0, none.");
  tape.def("segment_ids", [](BoundTape& self, Ref token_ids, Ref query_starts, Ref ids, int32_t separator, int64_t segments, bool barrier) {
    self.add(std::make_unique<SegmentIds>(token_ids, query_starts, ids, separator, segments), "segment ids", barrier);
  }, "token_ids"_a, "query_starts"_a, "ids"_a, "separator"_a, "segments"_a, "barrier"_a);
}

}  // namespace

void bind_model_ops(nb::class_<BoundTape>& tape) {
  bind_routes(tape);
  bind_stacked(tape);
  bind_recurrences(tape);
  bind_sparse(tape);
  bind_whole(tape);
  tape.def("latent_write", [](BoundTape& self, Ref latent, Ref rope, const KvLayer& layer, bool barrier) {
    self.add(std::make_unique<LatentWrite>(latent, rope, layer), "latent write", barrier);
  }, "latent"_a, "rope"_a, "layer"_a, "barrier"_a);
  tape.def("position_scale", [](BoundTape& self, Ref x, Ref positions, Ref y, int64_t n, float beta, int64_t period, int64_t offset, bool barrier) {
    auto op = std::make_unique<PositionScale>(x, positions, y, Extent{Space::tokens, 1}, n);
    op->beta = beta;
    op->period = period;
    op->offset = offset;
    self.add(std::move(op), "position scale", barrier);
  }, "x"_a, "positions"_a, "y"_a, "n"_a, "beta"_a, "period"_a, "offset"_a, "barrier"_a);
}

}  // namespace trivium
