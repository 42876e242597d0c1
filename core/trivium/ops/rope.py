"""Rotary frequencies: what a checkpoint's configuration says about positions, as one table and one factor for `rope`.

Everything is float32, as the tables that models are trained with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trivium.errors import CheckpointError, UnsupportedError

Array = npt.NDArray[Any]


class Rope(NamedTuple):
    """inv_freq: float32[half], radians a position of each rotated pair; scale: the factor on cosine and sine."""

    inv_freq: Array
    scale: float


class _Settings(NamedTuple):
    """One table's parameters. `positions`: max_position_embeddings of the model; `length`: the longest context to be served."""

    parameters: Mapping[str, Any]
    theta: float
    dim: int
    positions: float
    length: float

    def number(self, name: str, default: float | None = None) -> float:
        value = self.parameters.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            message = f"rope parameters of type {self.parameters['rope_type']!r} need a positive number {name}"
            raise CheckpointError(f"{message}; the model says {value!r}", param=name)
        return float(value)

    def list_of(self, name: str) -> Array:
        values = self.parameters.get(name)
        half = self.dim // 2
        if not isinstance(values, list | tuple | np.ndarray) or len(values) != half:
            raise CheckpointError(f"rope parameters need a list {name} of {half} numbers, one a rotated pair", param=name)
        array = np.asarray(values, np.float32)
        if not (np.isfinite(array).all() and (array > 0).all()):
            raise CheckpointError(f"rope parameters: {name} must hold positive numbers", param=name)
        return array

    def wavelengths(self, theta: float | None = None) -> Array:
        """theta^(2i/dim), float32[half]: positions a radian."""
        exponents = np.arange(0, self.dim, 2, dtype=np.float32) / np.float32(self.dim)
        return np.float32(self.theta if theta is None else theta) ** exponents


def _linear(s: _Settings) -> Rope:
    """Positions divided by `factor` (Chen et al., "Extending Context Window", 2023)."""
    return Rope(1 / s.wavelengths() / np.float32(s.number("factor")), 1.0)


def _dynamic(s: _Settings) -> Rope:
    """NTK-aware base change. The growing table is held fixed at the one for the longest context to be served, so that cached keys
    stay valid; up to max_position_embeddings it is the default table."""
    factor, ratio = s.number("factor"), max(s.length, s.positions) / s.positions
    theta = s.theta * (factor * ratio - (factor - 1)) ** (s.dim / (s.dim - 2))
    return Rope(1 / s.wavelengths(theta), 1.0)


def _llama3(s: _Settings) -> Rope:
    """Long waves divided by `factor`, short ones kept, a linear blend between (Llama 3.1 model card)."""
    inv_freq, factor = 1 / s.wavelengths(), np.float32(s.number("factor"))
    low, high = s.number("low_freq_factor"), s.number("high_freq_factor")
    turns = np.float32(s.number("original_max_position_embeddings", s.positions) / (2 * math.pi)) * inv_freq
    kept = np.clip((turns - np.float32(low)) / np.float32(high - low), 0, 1)
    return Rope((1 - kept) * inv_freq / factor + kept * inv_freq, 1.0)


def _yarn(s: _Settings) -> Rope:
    """NTK by parts with an attention factor (Peng et al., "YaRN", 2023); mscale and mscale_all_dim as in DeepSeek-V2."""
    original = s.number("original_max_position_embeddings", s.positions)
    factor = s.number("factor", s.positions / original)

    def pair_with(turns: float) -> float:
        return s.dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(s.theta))

    low, high = pair_with(s.number("beta_fast", 32.0)), pair_with(s.number("beta_slow", 1.0))
    if s.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, s.dim - 1)
    width = high - low or 0.001  # an empty ramp becomes a step
    ramp = np.clip((np.arange(s.dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(width), 0, 1)
    waves = s.wavelengths()
    return Rope(ramp / (np.float32(factor) * waves) + (1 - ramp) / waves, _yarn_scale(s, factor))


def _yarn_scale(s: _Settings, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    natural = mscale(1.0)
    if s.parameters.get("mscale") and s.parameters.get("mscale_all_dim"):
        natural = mscale(s.number("mscale")) / mscale(s.number("mscale_all_dim"))
    return s.number("attention_factor", natural)


def _longrope(s: _Settings) -> Rope:
    """Searched divisors per pair (Ding et al., "LongRoPE", 2024): the long list if the longest context to be served exceeds
    original_max_position_embeddings, else the short one; fixed for all requests, so that cached keys stay valid."""
    original = s.number("original_max_position_embeddings", s.positions)
    factor = s.number("factor", s.positions / original)
    natural = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    divisors = s.list_of("long_factor" if s.length > original else "short_factor")
    return Rope(1 / (divisors * s.wavelengths()), s.number("attention_factor", natural))


def _factors(s: _Settings) -> Rope:
    """Explicit divisors per pair, as GGUF files carry them (tensor rope_freqs.weight)."""
    return Rope(1 / s.wavelengths() / s.list_of("factors"), s.number("attention_factor", 1.0))


_KINDS: Mapping[str, Callable[[_Settings], Rope]] = {
    "default": lambda s: Rope(1 / s.wavelengths(), 1.0), "linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn,
    "longrope": _longrope, "su": _longrope, "factors": _factors,
}  # fmt: skip


def rope_from_config(config: Mapping[str, Any], head_dim: int, *, max_model_len: int | None = None) -> Rope:
    """The table that a configuration asks for, whichever spelling it uses (rope_parameters, or rope_scaling and rope_theta;
    rope_type or type).

    `max_model_len`: the longest context that will be served (default: max_position_embeddings). Raises UnsupportedError for an
    unknown type and CheckpointError for a missing or impossible value, or parameters that differ by the type of the layer.
    """
    parameters = _parameters(config)
    kind = parameters["rope_type"] = parameters.get("rope_type") or parameters.get("type") or "default"
    make = _KINDS.get(kind) if isinstance(kind, str) else None
    if make is None:
        raise UnsupportedError(f"rope type {kind!r} is not known; known are {', '.join(_KINDS)}", param="rope_type")
    s = _Settings(parameters, 0, 0, 0, 0)
    dim, positions = int(head_dim * s.number("partial_rotary_factor")), s.number("max_position_embeddings")
    if dim < 2 or dim % 2:
        raise CheckpointError(f"{dim} rotated numbers a head is not a positive even number", param="partial_rotary_factor")
    inv_freq, scale = make(_Settings(parameters, s.number("rope_theta"), dim, positions, max_model_len or positions))
    return Rope(np.asarray(inv_freq, np.float32), scale)


def _parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rope parameters under whichever key the configuration has them."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, Mapping):
        raise CheckpointError(f"rope parameters must be a table of names and values, not {found!r}", param="rope_parameters")
    if nested := [name for name, value in found.items() if isinstance(value, Mapping)]:
        raise CheckpointError(f"rope parameters are given for {', '.join(nested)}, not for all layers", param="rope_parameters")
    original = config.get("original_max_position_embeddings")
    parameters = {**found, "original_max_position_embeddings": original} if original else dict(found)
    for name, default in (("rope_theta", 10000.0), ("partial_rotary_factor", 1.0), ("max_position_embeddings", 2048)):
        parameters.setdefault(name, config.get(name, default))
    return parameters
