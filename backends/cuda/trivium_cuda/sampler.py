"""Sampling that is queued with the step: the ids are drawn on the device, and only they come to the host.

What trivium_torch's sampler leaves to the reference (logprobs, typical_p, top_n_sigma, XTC) is drawn from the logits on the host
when somebody waits for it.
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
from trivium_torch.sampling import draw, edited, on_device


class Pending(Protocol):
    """What is being sampled."""

    def wait(self) -> Sampled:
        """Waits for the device; to be called once."""


class DrawnIds:
    """Ids that are drawn on the device: int64[rows]. score_ids: as in SampleInputs."""

    def __init__(self, session: CudaSession, ids: Tensor, inputs: SampleInputs) -> None:
        self._ids, self._score_ids = session.download(ids), np.array(inputs.score_ids)

    def wait(self) -> Sampled:
        return Sampled(np.where(self._score_ids >= 0, self._score_ids, self._ids.wait().astype(np.int32)))


class OnHost:
    """Logits on their way to the reference: floats[rows, vocab]."""

    def __init__(self, session: CudaSession, logits: Tensor, inputs: SampleInputs, attrs: Mapping[str, Any]) -> None:
        self._logits = session.download(logits.to(torch.float32))
        self._inputs, self._attrs = copy.deepcopy(inputs), attrs

    def wait(self) -> Sampled:
        return OPERATORS["sample"](self._logits.wait(), self._inputs, **self._attrs)  # type: ignore[no-any-return]


def start(session: CudaSession, logits: Tensor, inputs: SampleInputs, attrs: Mapping[str, Any]) -> Pending:
    """Queues the sampling of logits[rows, vocab]."""
    if not on_device(session, inputs):
        return OnHost(session, logits, inputs, attrs)
    x = edited(session, logits[:, : attrs["vocab_size"]], inputs)
    ids = x.argmax(dim=-1) if len(x) else x.new_zeros(0, dtype=torch.int64)
    drawn = np.flatnonzero((inputs.temperature > 0) & (inputs.score_ids < 0))
    if len(drawn) == len(x) > 0:
        ids = draw(session, x.to(torch.float32), ids, inputs, drawn)
    elif len(drawn):
        rows = session.upload(drawn)
        ids.index_copy_(0, rows, draw(session, x[rows].to(torch.float32), ids[rows], inputs, drawn))
    return DrawnIds(session, ids, inputs)


def sample(session: CudaSession, args: Sequence[Any], attrs: Mapping[str, Any]) -> Sampled:
    """The kernel of the operator `sample`: start(), and the wait for it."""
    return start(session, args[0], args[1], attrs).wait()
