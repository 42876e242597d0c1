"""What a request asks of sampling, and the arrays a step hands to the sampler. The pipeline itself is ops.sample."""

from __future__ import annotations

from trivium.sampling.beams import BeamSearch, Hypothesis
from trivium.sampling.dry import Dry, breaker_ids
from trivium.sampling.params import BACKEND_PARAMS, SamplingParams, bad_word_ids, check_ids
from trivium.sampling.state import SamplerState, build_inputs, fresh_seed
from trivium.sampling.structured import StructuredOutputs

__all__ = [
    "BACKEND_PARAMS", "BeamSearch", "Dry", "Hypothesis", "SamplerState", "SamplingParams", "StructuredOutputs", "bad_word_ids",
    "breaker_ids", "build_inputs", "check_ids", "fresh_seed",
]  # fmt: skip
