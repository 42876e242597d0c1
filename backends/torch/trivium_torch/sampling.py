"""The sampler on the device, in the arithmetic that ops.sample prescribes: single float32 operations and sums of integers.

No operation here is fused with another, and no sum is of floats, so the ids are the reference's on every device whose float32
arithmetic is IEEE's. Steps that ask for typical_p, top_n_sigma, XTC or logprobs are sampled by the reference on the host, and so
are all draws where the session does not want them on its device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trivium.ops import OPERATORS, Sampled, SampleInputs
from trivium.ops.sample import uniform
from trivium_torch.session import TorchSession

LOG2E, LN2_HIGH, LN2_LOW = 1.44269504, 0.693359375, -2.12194440e-4
SERIES = tuple(float(np.float32(1 / n)) for n in (5040, 720, 120, 24, 6, 2, 1, 1))
VANISHING = -28.0
BITS = 31


def sample(session: TorchSession, args: Sequence[Any], attrs: Mapping[str, Any]) -> Sampled:
    """logits[rows, vocab], SampleInputs -> Sampled."""
    logits, inputs = args
    if not on_device(session, inputs):
        return OPERATORS["sample"](session.get(logits), inputs, **attrs)  # type: ignore[no-any-return]
    x = edited(session, logits[:, : attrs["vocab_size"]], inputs)
    ids = x.argmax(dim=-1) if len(x) else x.new_zeros(0, dtype=torch.int64)  # of equal numbers the first
    drawn = np.flatnonzero((inputs.temperature > 0) & (inputs.score_ids < 0))
    if len(drawn):
        rows = session.upload(drawn)
        ids[rows] = draw(session, x[rows].to(torch.float32), ids[rows], inputs, drawn)
    chosen = ids.cpu().numpy().astype(np.int32)
    return Sampled(np.where(inputs.score_ids >= 0, inputs.score_ids, chosen))


def on_device(session: TorchSession, inputs: SampleInputs) -> bool:
    """Whether the step asks for nothing but what is computed here: largest logits always, draws where the session wants them."""
    rare = (inputs.typical_p < 1) | (inputs.top_n_sigma > 0) | (inputs.xtc_probability > 0)
    drawn = inputs.temperature > 0
    return inputs.top_logprobs < 0 and not (drawn & (rare if session.draws() else drawn)).any()


def edited(session: TorchSession, x: Tensor, inputs: SampleInputs) -> Tensor:
    """Stages 2 to 4: penalties, bias, mask, in float32; x itself if there are none."""
    if not len(inputs.seen_ids) and not len(inputs.bias_ids) and inputs.mask is None:
        return x
    x = x.to(torch.float32, copy=True)
    if len(inputs.seen_ids):
        _penalise(session, x, inputs)
    if len(inputs.bias_ids):
        at = _places(session, inputs.bias_starts, inputs.bias_ids)
        x[at] = x[at] + session.upload(inputs.bias)
    if inputs.mask is not None:
        words = session.upload(np.ascontiguousarray(inputs.mask).view(np.int32))
        bits = words[..., None] >> torch.arange(32, device=x.device, dtype=torch.int32) & 1
        x.masked_fill_(bits.flatten(1)[:, : x.shape[1]] == 0, -torch.inf)
    return x


def _places(session: TorchSession, starts: npt.NDArray[np.int32], ids: npt.NDArray[np.int32]) -> tuple[Tensor, Tensor]:
    rows = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    return session.upload(rows), session.upload(ids.astype(np.int64))


def _penalise(session: TorchSession, x: Tensor, inputs: SampleInputs) -> None:
    at = _places(session, inputs.seen_starts, inputs.seen_ids)
    columns = inputs.repetition, inputs.frequency, inputs.presence
    repetition, frequency, presence = (session.upload(column)[at[0]] for column in columns)
    count = session.upload(inputs.seen_counts).to(torch.float32)
    v = x[at]
    v = torch.where(v > 0, v / repetition, v * repetition)
    lost = frequency * count
    v = v - lost
    x[at] = v - presence * (count > 0)


def exp_weights(d: Tensor) -> tuple[Tensor, Tensor]:
    """(e, w) of d <= 0 as ops.sample.exp_weights defines them; zero where d is so small that the candidate is gone."""
    k = torch.floor(d * LOG2E + 0.5)
    r = d - k * LN2_HIGH
    r = r - k * LN2_LOW
    p = torch.full_like(r, SERIES[0])
    for coefficient in SERIES[1:]:
        p = p * r
        p = p + coefficient
    stays = d > VANISHING
    two_to_k = ((torch.where(stays, k, 0.0).to(torch.int32) + 127) << 23).view(torch.float32)
    e = torch.where(stays, p * two_to_k, 0.0)
    return e, (e * 2.0**40).to(torch.int64)


def fixed(fraction: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """A fraction of 1 as a whole number of 2**-31."""
    return (fraction * np.float32(2**BITS)).astype(np.int64)


def is_number(x: Tensor) -> Tensor:
    """Neither infinite nor NaN, in operations that every device has compiled."""
    return x.abs() < torch.inf


def part(total: Tensor, fraction: Tensor) -> Tensor:
    """floor(total * fraction / 2**31), in two halves that 64 bits hold."""
    high, low = total >> BITS, total & (2**BITS - 1)
    return torch.add(high * fraction, low * fraction >> BITS)


def draw(session: TorchSession, x: Tensor, best: Tensor, inputs: SampleInputs, rows: npt.NDArray[np.intp]) -> Tensor:
    """Stages 6 to 13 for x[rows, vocab], the edited logits of rows with temperature > 0; `best`: the first in order of each."""
    y = x / session.upload(inputs.temperature[rows])[:, None]
    peak = y.amax(dim=-1, keepdim=True)
    d = torch.where(is_number(peak), y - peak, -torch.inf)
    e, w = exp_weights(d)
    top_k, top_p, min_p = inputs.top_k[rows], inputs.top_p[rows], inputs.min_p[rows]
    if (top_k > 0).any() or (top_p < 1).any():
        w = first_in_order(session, d, w, top_k, top_p)
    if (min_p > 0).any():
        w = torch.where(e >= session.upload(min_p)[:, None], w, 0)  # e of the first in order is 1
    sums = w.cumsum(dim=-1)
    u = session.upload(uniform(inputs.seed[rows], inputs.position[rows]))
    ids = torch.searchsorted(sums, part(sums[:, -1], u)[:, None], right=True)[:, 0]
    return torch.where(is_number(peak[:, 0]), ids, best)


def first_in_order(
    session: TorchSession, d: Tensor, w: Tensor, top_k: npt.NDArray[np.int32], top_p: npt.NDArray[np.float32]
) -> Tensor:
    """Stages 8 and 10: the weights, with 0 for those that do not stay."""
    order = torch.sort(d, dim=-1, descending=True, stable=True).indices
    ordered = w.gather(-1, order)
    count = session.upload(np.where(top_k > 0, top_k, d.shape[1]).astype(np.int64))[:, None]
    ordered = torch.where(torch.arange(d.shape[1], device=d.device) < count, ordered, 0)
    sums = ordered.cumsum(dim=-1)
    total = sums[:, -1:]
    wanted = part(total, session.upload(fixed(top_p))[:, None]).clamp(min=1)
    wanted = torch.where(session.upload(top_p < 1)[:, None], wanted, total)
    ordered = torch.where(sums - ordered < wanted, ordered, 0)
    return torch.zeros_like(w).scatter_(-1, order, ordered)
