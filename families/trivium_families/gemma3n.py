"""Gemma 3n (text): several streams of hidden states, of which each layer computes one and predicts the others from it (AltUp);
low-rank residuals beside attention (LAuReL); embeddings of each layer's own; feed-forward blocks in which only the loudest gates
speak; upper layers that read the keys and values of lower ones.

Sources: Google DeepMind 2025, model card of Gemma 3n; Baykal et al. 2023, "Alternating Updates for Efficient Transformers";
Menghani, Kumar and Kumar 2024, "LAuReL: Learned Augmented Residual Layer"; You et al. 2025, "Spark Transformer"; keys as in their
config.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from trivium.errors import CheckpointError
from trivium.models import Decoder, Family, ModelInfo, RawConfig, count, flag, read_info
from trivium.models.decoder import Rotation
from trivium.ops import Program, Value

from trivium_families.gemma import cap_of, gemma3_rotations
from trivium_families.gemma4 import Layer, layer_inputs, own_input, shared_attention, sources_of
from trivium_families.pieces import layer_kinds, per_layer, rearranged, row_mean, spread
from trivium_families.plugin import Hook
from trivium_families.stacked import Make

DEFAULTS: RawConfig = {
    "hidden_activation": "gelu_tanh", "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "sliding_window": 512, "head_dim": 256,
    "num_attention_heads": 8, "num_key_value_heads": 2, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "vocab_size": 262400,
    "max_position_embeddings": 32768, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144,
    "altup_active_idx": 0, "altup_num_inputs": 4, "num_kv_shared_layers": 15, "laurel_rank": 64, "final_logit_softcapping": 30.0,
}  # fmt: skip
_KINDS = ("full_attention", "sliding_attention")
_SPARSE_LAYERS, _SPARSITY = 10, 0.95
_TINY = 1e-30
"""An epsilon that only keeps a row of zeros from being divided by zero."""
_QUIET = 1e-5
"""The mean square below which a stream is not made louder any more."""


class Block(NamedTuple):
    """A layer: its attention and the width of its feed-forward block, and which part of its gates stays silent."""

    layer: Layer
    sparsity: float


def read(architecture: str, config: RawConfig) -> ModelInfo:
    """`intermediate_size` may be a list, one width a layer."""
    widths = config.get("intermediate_size")
    widest = max(widths) if isinstance(widths, list | tuple) and widths and all(isinstance(w, int) for w in widths) else widths
    info = read_info(architecture, {**config, "intermediate_size": widest})
    return info._replace(config=config)


def _blocks(info: ModelInfo) -> list[Block]:
    """Each layer as the configuration says. Raises CheckpointError by the key that can't be true."""
    kinds = layer_kinds(info, _KINDS, lambda i: _KINDS[(i + 1) % 5 > 0])
    window, found = count(info.config, "sliding_window"), list[Block]()
    columns = zip(kinds, sources_of(info, kinds), _widths(info), _sparsities(info), strict=True)
    for kind, reads, width, sparsity in columns:
        seen = None if kind == "full_attention" else window
        found.append(Block(Layer(info.head_dim, info.kv_heads, seen, reads, False, width, kind), sparsity))
    return found


def _widths(info: ModelInfo) -> Sequence[int]:
    if isinstance(info.config["intermediate_size"], list | tuple):
        return [count({"intermediate_size": w}, "intermediate_size") for w in per_layer(info, "intermediate_size", lambda i: None)]
    return [info.intermediate_size] * info.layers


def _sparsities(info: ModelInfo) -> Sequence[float]:
    """One number for all layers, or one each; without any, the ten lowest of a deep model are sparse."""
    key, found = "activation_sparsity_pattern", info.config.get("activation_sparsity_pattern")
    if isinstance(found, int | float):
        found = [found] * info.layers
    else:
        found = per_layer(info, key, lambda i: _SPARSITY if i < _SPARSE_LAYERS < info.layers else 0.0)
    if odd := [part for part in found if isinstance(part, bool) or not isinstance(part, int | float) or not 0 <= part < 1]:
        message = f"the configuration's {key!r} must hold numbers from 0 to below 1, not {odd[0]!r}"
        raise CheckpointError(message, param=key)
    return [float(part) for part in found]


def build(info: ModelInfo, max_model_len: int | None) -> Program:
    """Gemma 3n (text): alternating updates of several streams, low-rank residuals, embeddings of each layer's own, keys and values
    shared between layers, sparse gates."""
    d, rows = AltUp(info, max_model_len), count(info.config, "vocab_size_per_layer_input")
    rotations = dict(zip(_KINDS, gemma3_rotations(d)))
    x = d.embed(scale=info.hidden_size**0.5)
    inputs, streams, stored = layer_inputs(d, x), d.streams(x), dict[int, Value]()
    if inputs is None:
        key = "hidden_size_per_layer_input"
        raise CheckpointError(f"the configuration's {key!r} must be above 0", param=key)
    for i, block in enumerate(_blocks(info)):
        predicted = d.predict(i, streams)
        y = _layer(d, i, predicted[d.active], block, rotations[block.layer.kind], stored)
        streams = d.correct(i, predicted, y)
        more = own_input(d, i, d.scaled(i, streams[d.active]), inputs)
        streams = [streams[0], *(d.op("add", stream, more) for stream in streams[1:])]
    program = d.finish(d.joined(streams), softcap=cap_of(info, "final_logit_softcapping"))
    return replace(program, vocab_size=min(info.vocab_size, rows))  # tokens beyond stand for pictures and sound


def _layer(d: Decoder, i: int, x: Value, block: Block, rotate: Rotation, stored: dict[int, Value]) -> Value:
    """What layer `i` makes of the active stream x."""
    at, hidden, rank = f"model.layers.{i}", d.info.hidden_size, count(d.info.config, "laurel_rank")
    y = d.norm(x, f"{at}.input_layernorm")
    low = d.linear(d.linear(y, f"{at}.laurel.linear_left", rank), f"{at}.laurel.linear_right", hidden)
    low = d.op("add", y, d.norm(low, f"{at}.laurel.post_laurel_norm"))
    attended = d.norm(shared_attention(d, i, y, block.layer, rotate, stored), f"{at}.post_attention_layernorm")
    x = d.op("scale", d.op("add", d.op("add", x, attended), low), factor=2**-0.5)
    y = _feed_forward(d, d.norm(x, f"{at}.pre_feedforward_layernorm"), f"{at}.mlp", block)
    return d.op("add", x, d.norm(y, f"{at}.post_feedforward_layernorm"))


def _feed_forward(d: Decoder, x: Value, mlp: str, block: Block) -> Value:
    gate, up = (d.linear(x, f"{mlp}.{name}_proj", block.layer.inter) for name in ("gate", "up"))
    gate = _loudest(d, gate, block.sparsity) if block.sparsity else gate
    return d.linear(d.op("gated", gate, up, kind=d.info.activation), f"{mlp}.down_proj", d.info.hidden_size)


def _loudest(d: Decoder, x: Value, sparsity: float) -> Value:
    """relu(x - cutoff) by rows: `sparsity` of a normal distribution with the row's mean and deviation is below the cutoff."""
    width, above = int(x.shape[-1]), NormalDist().inv_cdf(sparsity)
    deviation = row_mean(d, d.op("mul", x, d.op("layer_norm", x, None, None, eps=_TINY)))
    cutoff = d.op("add", row_mean(d, x), d.op("scale", deviation, factor=above))
    return d.op("activation", d.op("add", x, spread(d, d.op("scale", cutoff, factor=-1.0), width)), kind="relu")


class AltUp(Decoder):
    """A Decoder whose hidden states are `altup_num_inputs` streams [tokens, hidden], one of them `active`."""

    def __init__(self, info: ModelInfo, max_model_len: int | None) -> None:
        super().__init__(info, max_model_len)
        self._count = count(info.config, "altup_num_inputs")
        active = info.config["altup_active_idx"]
        if active not in range(self._count):
            message = f"the configuration's 'altup_active_idx' must be from 0 to {self._count - 1}, not {active!r}"
            raise CheckpointError(message, param="altup_active_idx")
        self.active = int(active)

    def streams(self, x: Value) -> list[Value]:
        """x, the embeddings, and a projection of it for each further stream, as loud as x."""
        loudness, nothing = self._loudness(x), np.zeros((1, self.info.hidden_size), np.float32)
        self._ones = self.op("linear", x, self.b.array("nothing", nothing), self.b.array("one", np.ones(1)))
        names = [f"model.altup_projections.{i}" for i in range(self._count - 1)]
        return [x, *(self._as_loud(self.linear(x, name, self.info.hidden_size), loudness) for name in names)]

    def joined(self, streams: Sequence[Value]) -> Value:
        """The mean of the streams, all but the first projected and as loud as that."""
        first, loudness = streams[0], self._loudness(streams[0])
        for i, stream in enumerate(streams[1:]):
            y = self.linear(stream, f"model.altup_unembed_projections.{i}", self.info.hidden_size)
            first = self.op("add", first, self._as_loud(y, loudness))
        return self.op("scale", first, factor=1 / self._count)

    def predict(self, i: int, streams: Sequence[Value]) -> list[Value]:
        """Layer `i`'s guess of each stream: itself and a mixture of all, by factors that the active one gives."""
        n, at = self._count, f"model.layers.{i}.altup"
        factors = self.linear(self._modalities(streams[self.active], at), f"{at}.prediction_coefs", n * n)
        mixed = list[Value]()
        for s, stream in enumerate(streams):
            terms = [self.op("mul", other, self._picked(factors, s * n + o)) for o, other in enumerate(streams)]
            mixed.append(reduce(lambda a, b: self.op("add", a, b), terms, stream))
        return mixed

    def correct(self, i: int, predicted: Sequence[Value], y: Value) -> list[Value]:
        """The streams once layer `i` has made y of the active one: each moves by what was not predicted, times 1 + its factor."""
        at = f"model.layers.{i}.altup"
        factors = self.linear(self._modalities(y, at), f"{at}.correction_coefs", self._count)
        news = self.op("add", y, self.op("scale", predicted[self.active], factor=-1.0))
        moved = [self.op("add", stream, news) for stream in predicted]
        return [self.op("add", m, self.op("mul", news, self._picked(factors, s))) for s, m in enumerate(moved)]

    def scaled(self, i: int, x: Value) -> Value:
        """x times a number of each of its dimensions, with `altup_correct_scale`."""
        if not flag(self.info.config, "altup_correct_scale", True):
            return x
        factors = self.b.weight(f"model.layers.{i}.altup.correct_output_scale", (self.info.hidden_size, 1))
        return self.op("mul", x, self.op("linear", self._ones, factors, None))

    def _modalities(self, x: Value, at: str) -> Value:
        routed = self.op("scale", self.norm(x, f"{at}.router_norm"), factor=1 / self.info.hidden_size)
        return self.op("activation", self.linear(routed, f"{at}.modality_router", self._count), kind="tanh")

    def _picked(self, x: Value, column: int) -> Value:
        """x[tokens, n] as [tokens, hidden], all of them number `column` of the row."""
        columns = int(x.shape[-1])
        weight = np.zeros((self.info.hidden_size, columns), np.float32)
        weight[:, column] = 1
        return self.op("linear", x, self.b.array(f"column.{column}.of.{columns}", weight), None)

    def _loudness(self, x: Value) -> Value:
        """sqrt(mean(x²)) of each row, [tokens, 1]."""
        return row_mean(self, self.op("mul", x, self.op("rms_norm", x, None, eps=_TINY)))

    def _as_loud(self, x: Value, loudness: Value) -> Value:
        """x · loudness / sqrt(max(mean(x²), _QUIET)): the unit row times min(1, its own loudness / sqrt(_QUIET))."""
        unit = self.op("rms_norm", x, None, eps=_TINY)
        own = self.op("scale", row_mean(self, self.op("mul", x, unit)), factor=_QUIET**-0.5)
        lacking = self.op("activation", self._one_minus(own), kind="relu")
        return self.op("mul", unit, spread(self, self.op("mul", loudness, self._one_minus(lacking)), self.info.hidden_size))

    def _one_minus(self, x: Value) -> Value:
        minus, one = self.b.array("minus.one", np.full((1, 1), -1)), self.b.array("one", np.ones(1))
        return self.op("linear", x, minus, one)


def arrange(config: RawConfig, tensors: Mapping[str, Make]) -> Mapping[str, Make]:
    """correct_output_scale as a column."""
    return {name: _each(name, make) if name.endswith(".correct_output_scale") else make for name, make in tensors.items()}


def _each(name: str, make: Make) -> Make:
    return rearranged(name, make, lambda a: a[:, None])


gemma3n = Hook(Family(build, DEFAULTS, read, arrange))
