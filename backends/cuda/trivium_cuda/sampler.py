"""Sampling that is queued with the step: the ids are drawn on the device, and only they come to the host.

What the kernels leave to the reference (typical_p, top_n_sigma, XTC; on old devices logprobs, too) is drawn from the logits on the
host when somebody waits for it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from trivium.ops import OPERATORS, Sampled, SampleInputs
from trivium_cuda.session import CudaSession
from trivium_cuda.staging import SAMPLING, Array
from trivium_torch.sampling import draw, edited, on_device

Arrays = Mapping[str, Tensor]


class Pending(Protocol):
    """What is being sampled."""

    def wait(self) -> Sampled:
        """Waits for the device; to be called once."""


class Drawn:
    """Ids that are drawn on the device, int[rows], and what is said `about` them: logprobs, ranks, top_ids and top_logprobs, or
    nothing."""

    def __init__(self, session: CudaSession, inputs: SampleInputs, ids: Tensor, *about: Tensor | None) -> None:
        self._ids, self._score_ids = session.download(ids), np.array(inputs.score_ids)
        self._about = [session.download(t) for t in about if t is not None]

    def wait(self) -> Sampled:
        ids = np.where(self._score_ids >= 0, self._score_ids, self._ids.wait().astype(np.int32))
        return Sampled(ids, *(download.wait() for download in self._about))


class OnHost:
    """Logits on their way to the reference: floats[rows, vocab]."""

    def __init__(self, session: CudaSession, logits: Tensor, inputs: SampleInputs, attrs: Mapping[str, Any]) -> None:
        self._logits = session.download(logits.to(torch.float32))
        self._inputs, self._attrs = copy.deepcopy(inputs), attrs

    def wait(self) -> Sampled:
        return OPERATORS["sample"](self._logits.wait(), self._inputs, **self._attrs)  # type: ignore[no-any-return]


def start(
    session: CudaSession, logits: Tensor, inputs: SampleInputs, attrs: Mapping[str, Any], arrays: Arrays | None = None
) -> Pending:
    """Queues the sampling of logits[rows, vocab]. arrays: where the columns of `inputs` lie on the device already, if they do."""
    drawn = (inputs.temperature > 0) & (inputs.score_ids < 0)
    rare = (inputs.typical_p < 1) | (inputs.top_n_sigma > 0) | (inputs.xtc_probability > 0)
    if (drawn & rare).any() or not (session.has_triton or on_device(session, inputs)):
        return OnHost(session, logits, inputs, attrs)
    return (_by_triton if session.has_triton else _by_torch)(session, logits, inputs, attrs, arrays)


def _by_triton(
    session: CudaSession, logits: Tensor, inputs: SampleInputs, attrs: Mapping[str, Any], arrays: Arrays | None
) -> Pending:
    from trivium_cuda.kernels import sampler as kernels

    if arrays is None:
        arrays = session.upload_all({f"sampling.{name}": getattr(inputs, name) for name in SAMPLING})
    columns = {name: arrays[f"sampling.{name}"][: len(logits)] for name in SAMPLING}
    drawn = inputs.temperature > 0
    asked = (drawn, drawn & (inputs.top_k > 0), drawn & (inputs.top_p < 1), drawn & (inputs.min_p > 0))
    chosen = kernels.sample(
        logits, kernels.Columns(**columns, **_lists(session, inputs), mask=_mask(session, inputs)), vocab_size=attrs["vocab_size"],
        features=kernels.Features(*(bool(a.any()) for a in asked)), top_logprobs=inputs.top_logprobs,
    )  # fmt: skip
    return Drawn(session, inputs, *chosen)


_LISTS = ("seen_rows", "seen_ids", "seen_counts", "bias_rows", "bias_ids", "bias")


def _mask(session: CudaSession, inputs: SampleInputs) -> Tensor | None:
    return None if inputs.mask is None else session.upload_all({"mask": inputs.mask})["mask"]


def _lists(session: CudaSession, inputs: SampleInputs) -> dict[str, Tensor]:
    """Penalties and biases, which have no fixed size: by a copy of their own in the steps that have any."""
    arrays: dict[str, Array] = {
        "seen_rows": _rows(inputs.seen_starts), "bias_rows": _rows(inputs.bias_starts),
        **{name: getattr(inputs, name) for name in ("seen_ids", "seen_counts", "bias_ids", "bias")},
    }  # fmt: skip
    if any(len(a) for a in arrays.values()):
        return session.upload_all(arrays)
    none = torch.empty(0, dtype=torch.int32, device=session.device)
    return {**dict.fromkeys(_LISTS, none), "bias": none.view(torch.float32)}


def _rows(starts: Array) -> Array:
    return np.repeat(np.arange(len(starts) - 1, dtype=np.int32), np.diff(starts))


def _by_torch(
    session: CudaSession, logits: Tensor, inputs: SampleInputs, attrs: Mapping[str, Any], arrays: Arrays | None
) -> Pending:
    x = edited(session, logits[:, : attrs["vocab_size"]], inputs)
    ids = x.argmax(dim=-1) if len(x) else x.new_zeros(0, dtype=torch.int64)
    drawn = np.flatnonzero((inputs.temperature > 0) & (inputs.score_ids < 0))
    if len(drawn) == len(x) > 0:
        ids = draw(session, x.to(torch.float32), ids, inputs, drawn)
    elif len(drawn):
        rows = session.upload(drawn)
        ids.index_copy_(0, rows, draw(session, x[rows].to(torch.float32), ids[rows], inputs, drawn))
    return Drawn(session, inputs, ids)


def sample(session: CudaSession, args: Sequence[Any], attrs: Mapping[str, Any]) -> Sampled:
    """The kernel of the operator `sample`: start(), and the wait for it."""
    return start(session, args[0], args[1], attrs).wait()
