"""What a model's configuration (config.json keys, Hugging Face spelling) says, checked: every fault names its key."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple

from trivium.errors import CheckpointError, UnsupportedError

RawConfig = Mapping[str, Any]
MAX_LAYERS = 4096
_INT32_MAX = 2**31 - 1
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "quick_gelu")
_ACTIVATION_ALIASES = {"swish": "silu", "gelu_new": "gelu_tanh"}


def flatten(config: RawConfig, defaults: RawConfig) -> RawConfig:
    """The configuration with a nested text_config on top and the family's defaults below."""
    return {**defaults, **config, **table(config, "text_config"), "architectures": config.get("architectures")}


def table(config: RawConfig, key: str) -> RawConfig:
    """A nested object, empty if it is missing; CheckpointError names the key if it is anything else."""
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise _refuse(key, "an object", value)
    return value or {}


def _lookup(config: RawConfig, key: str, default: Any) -> Any:
    value = default if config.get(key) is None else config[key]
    if value is None:
        raise CheckpointError(f"the configuration has no {key!r}, which this architecture needs", param=key)
    return value


def _refuse(key: str, wanted: str, value: Any) -> CheckpointError:
    return CheckpointError(f"the configuration's {key!r} must be {wanted}, not {value!r}", param=key)


def count(config: RawConfig, key: str, default: int | None = None, *, limit: int = _INT32_MAX) -> int:
    """A whole number from 1 to `limit`; CheckpointError names the key if it is missing or anything else."""
    value = _lookup(config, key, default)
    if isinstance(value, bool) or not isinstance(value, Integral) or not 1 <= int(value) <= limit:
        raise _refuse(key, f"a whole number from 1 to {limit}", value)
    return int(value)


def number(config: RawConfig, key: str, default: float | None = None) -> float:
    """A finite number above zero; CheckpointError names the key if it is missing or anything else."""
    value = _lookup(config, key, default)
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < math.inf:
        raise _refuse(key, "a finite number above 0", value)
    return float(value)


def flag(config: RawConfig, key: str, default: bool) -> bool:
    """True or false; CheckpointError names the key if it is anything else."""
    value = _lookup(config, key, default)
    if not isinstance(value, bool):
        raise _refuse(key, "true or false", value)
    return value


class ModelInfo(NamedTuple):
    """A decoder's configuration, checked. Sizes are in elements, `max_positions` in tokens; `config` is the flattened
    configuration for what only one family reads. `activation` is a kind of the operator `gated`; `tied`: the output
    projection is the embedding matrix."""

    architecture: str
    vocab_size: int
    max_positions: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    tied: bool
    config: RawConfig

    def windows(self, sliding: Callable[[int], bool]) -> tuple[int | None, ...]:
        """Each layer's attention window in tokens (None: all positions): `layer_types` decides, else `sliding(layer)`."""
        kinds = self.config.get("layer_types")
        if kinds is None:
            kinds = ["sliding_attention" if sliding(i) else "full_attention" for i in range(self.layers)]
        if not isinstance(kinds, list | tuple) or len(kinds) != self.layers:
            raise _refuse("layer_types", f"a list of {self.layers} names", kinds)
        if unknown := [kind for kind in kinds if kind not in ("sliding_attention", "full_attention")]:
            message = f"layer type {unknown[0]!r} is not supported; possible are sliding_attention and full_attention"
            raise UnsupportedError(message, param="layer_types")
        if self.config.get("sliding_window") is None or "sliding_attention" not in kinds:
            return (None,) * self.layers
        window = count(self.config, "sliding_window")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def read_info(architecture: str, config: RawConfig) -> ModelInfo:
    """Reads and checks what all decoder families share. Raises CheckpointError, or UnsupportedError for the activation."""
    hidden, heads = count(config, "hidden_size"), count(config, "num_attention_heads")
    kv_heads = count(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(f"the configuration's 'num_attention_heads' ({heads}) must be a multiple of "
                              f"'num_key_value_heads' ({kv_heads})", param="num_key_value_heads")  # fmt: skip
    if config.get("head_dim") is None and hidden % heads:
        raise CheckpointError(f"the configuration has no 'head_dim' and its 'hidden_size' ({hidden}) is not a multiple of "
                              f"'num_attention_heads' ({heads})", param="hidden_size")  # fmt: skip
    return ModelInfo(
        architecture, vocab_size=count(config, "vocab_size"), max_positions=count(config, "max_position_embeddings"),
        hidden_size=hidden, intermediate_size=count(config, "intermediate_size"),
        layers=count(config, "num_hidden_layers", limit=MAX_LAYERS), heads=heads, kv_heads=kv_heads,
        head_dim=count(config, "head_dim", hidden // heads or None), norm_eps=number(config, "rms_norm_eps"),
        activation=_activation(config), tied=flag(config, "tie_word_embeddings", False), config=config,
    )  # fmt: skip


def _activation(config: RawConfig) -> str:
    key = "hidden_activation" if config.get("hidden_activation") is not None else "hidden_act"
    name = re.sub(r"gelu_\w+_tanh", "gelu_tanh", str(_lookup(config, key, None)))  # the middle names a library
    name = _ACTIVATION_ALIASES.get(name, name)
    if name not in _ACTIVATIONS:
        raise UnsupportedError(f"activation {name!r} is not supported; possible are {', '.join(_ACTIVATIONS)}", param=key)
    return name
