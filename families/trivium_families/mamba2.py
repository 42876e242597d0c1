"""The Mamba-2 block that hybrid families share: a convolution over x, B and C, the state-space scan, a gate and a norm.

Source: Dao and Gu 2024, "Transformers are SSMs".
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from trivium.errors import CheckpointError
from trivium.models import Decoder, RawConfig
from trivium.ops import Recurrent, Value, Weight

from trivium_families.pieces import Computed, Floats, computed, rearranged
from trivium_families.stacked import Make

_BLOCK = re.compile(r"(.*\.layers\.\d+\.(?:mamba|mixer))\.(A_log|dt_bias|conv1d\.weight|in_proj\.bias)")


class Mamba2(NamedTuple):
    """Sizes and options of the blocks of a model. heads of head_dim numbers and `groups` of B and C, each of `state` numbers;
    width: tokens that the convolution sees; bias, out_bias: of the projections; norm: "after" the gate, "before" it, or "none";
    in_scale, gate_scale, dt_scale: constant factors on the block's input, its gate and its time steps."""

    heads: int
    head_dim: int
    groups: int
    state: int
    width: int
    conv_bias: bool
    bias: bool
    out_bias: bool
    dt_limits: tuple[float, float] = (0.0, math.inf)
    norm: str = "after"
    in_scale: float = 1.0
    gate_scale: float = 1.0
    dt_scale: float = 1.0

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def mixed(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state


def mamba2(d: Decoder, i: int, x: Value, at: str, s: Mamba2) -> Value:
    """The block `at` of layer `i` on x[tokens, hidden]."""
    b, starts, lengths = d.b, d.b.input("query_starts"), d.b.input("context_lens")
    x = scaled(d, x, s.in_scale)
    both = d.linear(x, f"{at}.mix_proj", s.inner + s.mixed, bias=s.bias, part=(f"{at}.in_proj", 0))
    dt = d.linear(scaled(d, x, s.dt_scale), f"{at}.dt_proj", s.heads, bias=True, part=(f"{at}.in_proj", s.inner + s.mixed))
    conv = d.op("slice", both, start=s.inner, stop=s.inner + s.mixed)
    kernel = b.weight(f"{at}.conv1d.weight", (s.mixed, s.width))
    bias = b.weight(f"{at}.conv1d.bias", (s.mixed,)) if s.conv_bias else None
    conv, _ = b.short_conv(
        conv, kernel, bias, b.state(f"conv.{i}", Recurrent((s.width - 1, s.mixed))), starts, lengths, kind="silu"
    )
    parts = _pieces(d, conv, ((s.heads, s.head_dim), (s.groups, s.state), (s.groups, s.state)))
    rates, skip = (b.weight(f"{at}.{name}", (s.heads,)) for name in ("rates", "D"))
    state = b.state(f"ssm.{i}", Recurrent((s.heads, s.head_dim, s.state)))
    step = d.op("activation", dt, kind="softplus")
    y, _ = b.selective_scan(parts[0], step, rates, *parts[1:], skip, state, starts, lengths, dt_limits=s.dt_limits)
    y = d.op("reshape", y, shape=("tokens", s.inner))
    y = _gated(d, y, scaled(d, d.op("slice", both, start=0, stop=s.inner), s.gate_scale), at, s)
    return d.linear(y, f"{at}.out_proj", d.info.hidden_size, bias=s.out_bias)


def scaled(d: Decoder, x: Value, factor: float) -> Value:
    """factor · x."""
    return x if factor == 1 else d.op("scale", x, factor=factor)


def _pieces(d: Decoder, x: Value, shapes: Sequence[tuple[int, int]]) -> list[Value]:
    """Consecutive pieces of the last dimension, each as [tokens, *shape]."""
    found, first = list[Value](), 0
    for rows, columns in shapes:
        piece = d.op("slice", x, start=first, stop=first + rows * columns)
        found.append(d.op("reshape", piece, shape=("tokens", rows, columns)))
        first += rows * columns
    return found


def _gated(d: Decoder, y: Value, z: Value, at: str, s: Mamba2) -> Value:
    if s.norm == "before":
        return d.op("gated", z, _group_norm(d, y, f"{at}.norm.weight", s.groups), kind="silu")
    y = d.op("gated", z, y, kind="silu")
    return y if s.norm == "none" else _group_norm(d, y, f"{at}.norm.weight", s.groups)


def _group_norm(d: Decoder, x: Value, name: str, groups: int) -> Value:
    """RMS norm of each of `groups` equal pieces, with its part of one weight."""
    size, found = int(x.shape[-1]) // groups, list[Value]()
    for g in range(groups):
        first, last = g * size, (g + 1) * size
        weight = d.b.weight(f"{name}.{g}" if groups > 1 else name, (size,), source=name, rows=(first, last) if groups > 1 else None)
        piece = d.op("slice", x, start=first, stop=last) if groups > 1 else x
        found.append(d.op("rms_norm", piece, weight, eps=d.info.norm_eps))
    whole = found[0]
    for piece in found[1:]:
        whole = d.op("concat", whole, piece)
    return whole


def limits(config: RawConfig, default: tuple[float, float] = (0.0, math.inf)) -> tuple[float, float]:
    """`time_step_limit`, two numbers of which the second may be infinite ({"__float__": "Infinity"} in strict JSON). They hold in
    decode as in prefill."""
    value = config.get("time_step_limit")
    value = default if value is None else value
    value = [math.inf if v == {"__float__": "Infinity"} else v for v in value] if isinstance(value, list | tuple) else value
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(isinstance(v, int | float) for v in value):
        raise CheckpointError(f"the configuration's 'time_step_limit' must be two numbers, not {value!r}", param="time_step_limit")
    return float(value[0]), float(value[1])


def arrange_mamba2(tensors: Mapping[str, Make], s: Mamba2, *, conv_factors: Floats | None = None) -> Mapping[str, Make]:
    """A_log as `rates`, -exp(A_log); convolutions [channels, width], times conv_factors[channels]; dt_bias and the bias of in_proj
    as the biases of its two pieces, mix_proj and dt_proj."""
    arranged = dict[str, Make]()
    for name, make in tensors.items():
        found = _BLOCK.fullmatch(name)
        arranged |= {name: make} if found is None else _parts(tensors, found[1], found[2], make, s, conv_factors)
    return arranged


def _parts(
    tensors: Mapping[str, Make], at: str, rest: str, make: Make, s: Mamba2, conv_factors: Floats | None
) -> Mapping[str, Make]:
    """What a tensor of the block becomes."""
    if rest == "A_log":
        return {f"{at}.rates": computed(f"{at}.rates", make, lambda a: -np.exp(a))}
    if rest == "in_proj.bias":
        return {f"{at}.mix_proj.bias": rearranged(f"{at}.mix_proj.bias", make, lambda a: a[: s.inner + s.mixed])}
    if rest == "dt_bias":
        return {f"{at}.dt_proj.bias": partial(_step_bias, f"{at}.dt_proj.bias", make, tensors.get(f"{at}.in_proj.bias"))}
    kernel = f"{at}.conv1d.weight"
    if conv_factors is None:
        return {kernel: rearranged(kernel, make, lambda a: a[:, 0])}
    return {kernel: computed(kernel, make, lambda a: a[:, 0] * conv_factors[:, None])}


def _step_bias(name: str, make: Make, projection: Make | None) -> Weight:
    """dt_bias, with the last numbers of the projection's own bias if it has one."""
    weight = make()
    return weight if projection is None else Computed(name, weight, lambda a: a + projection().decode()[-len(a) :])
