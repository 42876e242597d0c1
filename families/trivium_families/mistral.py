"""Mistral 3 and 4 (text): queries are scaled by their position; Mistral 4 has DeepSeek's latent attention and experts.

Sources: Mistral AI 2025-2026, model cards of Mistral Small 3.1, Ministral 3 and Mistral Small 4; keys as in their config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trivium.errors import UnsupportedError
from trivium.models import Decoder, Family, ModelInfo, RawConfig, count, flag, number, table
from trivium.models.decoder import Rotation
from trivium.ops import Program, Value

from trivium_families.deepseek import absorb, latent_layers, read_deepseek
from trivium_families.experts import shared_and_routed
from trivium_families.pieces import as_is, refuse_unless, split_experts
from trivium_families.plugin import Hook
from trivium_families.stacked import Make

DEFAULTS: RawConfig = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8}
MINISTRAL_DEFAULTS: RawConfig = {**DEFAULTS, "sliding_window": 4096}
MISTRAL4_DEFAULTS: RawConfig = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e4, "first_k_dense_replace": 0, "n_shared_experts": 1,
    "rope_interleave": True, "norm_topk_prob": True,
}  # fmt: skip


def sharpening(d: Decoder) -> Rotation:
    """Queries times 1 + beta · ln(1 + floor(position / original_max_position_embeddings)), if the rope parameters have a beta."""
    rope = table(d.info.config, "rope_parameters") or table(d.info.config, "rope_scaling")
    if not rope.get("llama_4_scaling_beta"):
        return as_is
    beta, period = number(rope, "llama_4_scaling_beta"), count(rope, "original_max_position_embeddings")
    return lambda q: d.op("position_scale", q, d.b.input("positions"), beta=beta, period=period)


class SharpeningDecoder(Decoder):
    """Queries are scaled by their position once they are rotated."""

    def attend(self, i: int, q: Value, k: Value, v: Value, **options: Any) -> Value:
        """As Decoder.attend."""
        return super().attend(i, sharpening(self)(q), k, v, **options)


def build_mistral3(info: ModelInfo, max_model_len: int | None) -> Program:
    """Mistral Small 3, Ministral 3 (text): Mistral, where far queries are scaled by their position if the configuration says so."""
    if (kind := info.config.get("model_type")) not in (None, "mistral", "mistral3", "ministral3"):
        raise UnsupportedError(f"{info.architecture} with a text model {kind!r} is not supported; mistral and ministral3 are",
                               param="model_type")  # fmt: skip
    return SharpeningDecoder(info, max_model_len).pre_norm(info.windows(lambda layer: True))


def build_ministral(info: ModelInfo, max_model_len: int | None) -> Program:
    """Ministral 8B: Mistral, where layers see all positions or a window, as `layer_types` says."""
    return Decoder(info, max_model_len).pre_norm(info.windows(lambda layer: True))


def build_mistral4(info: ModelInfo, max_model_len: int | None) -> Program:
    """Mistral 4: DeepSeek's latent attention and experts (by softmax); far queries are scaled by their position."""
    refuse_unless(info, "n_group", (1,), "moe_route has no groups whose worth is the sum of two softmax scores")
    d, normalize = Decoder(info, max_model_len), flag(info.config, "norm_topk_prob", True)
    feed_forward = shared_and_routed(d, scoring="softmax", normalize=normalize, correction=False)
    return latent_layers(d, feed_forward, sharpening(d))


def read_mistral4(architecture: str, config: RawConfig) -> ModelInfo:
    """What is rotated counts as the head, all of it: the configuration's share is that of the whole query."""
    rope = {k: v for k, v in table(config, "rope_parameters").items() if k != "partial_rotary_factor"}
    whole = {k: v for k, v in config.items() if k != "partial_rotary_factor"}
    return read_deepseek(architecture, {**whole, "rope_parameters": rope})


def arrange_mistral4(config: RawConfig, tensors: Mapping[str, Make]) -> Mapping[str, Make]:
    """As DeepSeek's; experts may be stored as one tensor."""
    return absorb(config, split_experts(tensors))


ministral = Hook(Family(build_ministral, MINISTRAL_DEFAULTS))
mistral3 = Hook(Family(build_mistral3, DEFAULTS))
mistral4 = Hook(Family(build_mistral4, MISTRAL4_DEFAULTS, read_mistral4, arrange_mistral4))
