"""The sampler: greedy rows on the device; everything else by the reference on the host, whose ids are the definition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trivium.ops import OPERATORS, Sampled, SampleInputs
from trivium_torch.session import TorchSession


def is_greedy(inputs: SampleInputs) -> bool:
    """Whether every row wants the largest of its logits as they are, and nothing about them is to be reported."""
    edited = len(inputs.seen_ids) or len(inputs.bias_ids) or inputs.mask is not None
    chosen = (inputs.temperature > 0) | (inputs.score_ids >= 0)
    return not edited and inputs.top_logprobs < 0 and not chosen.any()


def sample(session: TorchSession, args: Sequence[Any], attrs: Mapping[str, Any]) -> Sampled:
    """logits[rows, vocab], SampleInputs -> Sampled. torch.argmax gives the first of equal numbers, as the reference does."""
    logits, inputs = args
    if is_greedy(inputs) and len(logits):
        ids = logits[:, : attrs["vocab_size"]].argmax(dim=-1)
        return Sampled(ids.cpu().numpy().astype(np.int32))
    return OPERATORS["sample"](session.get(logits), inputs, **attrs)  # type: ignore[no-any-return]
