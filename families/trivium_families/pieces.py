"""What several families share beyond `trivium.models`: kinds of layers, one number for a row, tensors that are computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from trivium.errors import CheckpointError, UnsupportedError
from trivium.models import Decoder, ModelInfo
from trivium.ops import Value, Weight
from trivium_formats.lazy import Lazy

from trivium_families.stacked import Make, Rearranged

Floats = npt.NDArray[np.float32]


def per_layer(info: ModelInfo, key: str, default: Callable[[int], Any]) -> Sequence[Any]:
    """One entry a layer under `key`, else `default(layer)`; CheckpointError names the key if there are not as many as layers."""
    found = info.config.get(key)
    found = [default(i) for i in range(info.layers)] if found is None else found
    if not isinstance(found, list | tuple) or len(found) != info.layers:
        raise CheckpointError(f"the configuration's {key!r} must be a list of {info.layers} entries, not {found!r}", param=key)
    return found


def layer_kinds(info: ModelInfo, possible: Sequence[str], default: Callable[[int], str]) -> Sequence[str]:
    """`layer_types`, else `default(layer)`. Raises CheckpointError, or UnsupportedError for a kind that is not `possible`."""
    found = per_layer(info, "layer_types", default)
    if unknown := [kind for kind in found if kind not in possible]:
        message = f"layer type {unknown[0]!r} is not supported; possible are {', '.join(possible)}"
        raise UnsupportedError(message, param="layer_types")
    return found


def refuse_unless(info: ModelInfo, key: str, wanted: Sequence[Any], why: str) -> None:
    """UnsupportedError that names `key` unless it is absent, null or one of `wanted`."""
    value = info.config.get(key)
    if value is not None and value not in wanted:
        raise UnsupportedError(f"{info.architecture} with {key!r} {value!r} is not supported: {why}", param=key)


def as_is(x: Value) -> Value:
    """x: where another layer rotates or normalises."""
    return x


def spread(d: Decoder, x: Value, width: int) -> Value:
    """x[..., 1] as y[..., width]: every number `width` times, by a product with a column of ones."""
    return d.op("linear", x, d.b.array(f"ones.{width}", np.ones((width, 1), np.float32)), None)


def row_mean(d: Decoder, x: Value) -> Value:
    """The mean of each row, x[..., n] as y[..., 1]."""
    n = int(x.shape[-1])
    return d.op("linear", x, d.b.array(f"mean.{n}", np.full((1, n), 1 / n)), None)


def half(d: Decoder, x: Value, part: int, parts: int = 2) -> Value:
    """The `part`-th of `parts` equal pieces of the last dimension."""
    size = int(x.shape[-1]) // parts
    return d.op("slice", x, start=part * size, stop=(part + 1) * size)


class Computed(Lazy):
    """float32 numbers that are computed from those of a weight."""

    def __init__(self, name: str, weight: Weight, compute: Callable[[Floats], Floats]) -> None:
        shape = compute(np.zeros(weight.shape, np.float32)).shape
        origin = weight.origin and f"{weight.origin} computed to {name}"
        nbytes = 4 * int(np.prod(shape))
        super().__init__(name, shape, "float32", lambda: compute(weight.decode()), _same, origin, nbytes)


def _same(data: npt.NDArray[Any]) -> Floats:
    return data


def computed(name: str, make: Make, compute: Callable[[Floats], Floats]) -> Make:
    """The tensor `name`, computed from another when it is asked for."""
    return partial(_computed, name, make, compute)


def _computed(name: str, make: Make, compute: Callable[[Floats], Floats]) -> Weight:
    return Computed(name, make(), compute)


def rearranged(name: str, make: Make, take: Callable[[npt.NDArray[Any]], npt.NDArray[Any]], *, whole_rows: bool = False) -> Make:
    """The tensor `name`: the numbers of another in another order, see `Rearranged`."""
    return partial(_rearranged, name, make, take, whole_rows)


def _rearranged(name: str, make: Make, take: Callable[[npt.NDArray[Any]], npt.NDArray[Any]], whole_rows: bool) -> Weight:
    return Rearranged(name, make(), take, whole_rows=whole_rows)


def decay_rates(a_log: Floats) -> Floats:
    """A_log[heads] as the rates -exp(A_log), [heads, 1, 1]: for `head_linear`, a product of one number with one number a head."""
    rates: Floats = -np.exp(a_log.reshape(-1, 1, 1))
    return rates


def split_experts(tensors: Mapping[str, Make]) -> Mapping[str, Make]:
    """EXPERTS.gate_up_proj[experts, 2 * inter, hidden] as gate_proj and up_proj; both may stand with or without ".weight"."""
    arranged = dict[str, Make]()
    for name, make in tensors.items():
        stem = name.removesuffix(".weight")
        if stem.endswith(".experts.gate_up_proj"):
            for part, piece in (("gate_proj", 0), ("up_proj", 1)):
                target = f"{stem.removesuffix('gate_up_proj')}{part}.weight"
                arranged[target] = rearranged(target, make, partial(_half_of_rows, piece), whole_rows=True)
        elif stem.endswith(".experts.down_proj"):
            arranged[f"{stem}.weight"] = make
        else:
            arranged[name] = make
    return arranged


def _half_of_rows(piece: int, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    size = array.shape[1] // 2
    return array[:, piece * size : (piece + 1) * size]
