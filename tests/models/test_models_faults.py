"""Faults of the catalogue that concern models: what a file says about rotary frequencies must reach the logits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from paged_runner import PagedRunner
from tiny_checkpoints import make_weights, tiny_config
from trivium.errors import UnsupportedError
from trivium.models import build
from trivium.ops import Program

pytestmark = pytest.mark.faults

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
ONE_HEAD = {
    "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "hidden_size": 32, "intermediate_size": 16,
    "rope_theta": 500000.0, "max_position_embeddings": 65536,
}  # fmt: skip


def llama3_divisors(half: int, theta: float) -> list[float]:
    """Divisors of the frequencies as converters write them into rope_freqs.weight, case by case from Llama 3.1's model card."""
    low, high, original, factor = 1.0, 4.0, 8192.0, 8.0
    divisors = []
    for i in range(half):
        wavelength = 2 * math.pi * theta ** (i / half)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors


def factors(divisors: list[float]) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "factors", "factors": divisors}}


def logits_at(positions: list[int], **overrides: Any) -> np.ndarray:
    """Logits[positions, vocab] of one long prompt, in chunks."""
    config = tiny_config("llama", **{**ONE_HEAD, **overrides})
    runner = PagedRunner(build(config), make_weights(config), page_size=16, pages=600)
    ids = [i * i % 251 for i in range(positions[-1] + 1)]
    parts = [runner.step([(0, ids[at : at + 750])]) for at in range(0, len(ids), 750)]
    return np.concatenate(parts)[positions]


def test_o44_frequency_factors_of_one_change_nothing() -> None:
    plain = build(tiny_config("llama"))
    ones = build(tiny_config("llama", **factors([1.0] * 8)))
    weights = make_weights(tiny_config("llama"))
    tokens = [(0, list(range(30, 60)))]
    a, b = (PagedRunner(program, weights, page_size=16).step(tokens) for program in (plain, ones))
    np.testing.assert_array_equal(a, b)


def test_o44_llama3_factors_of_a_gguf_file_equal_rope_scaling_near_and_far() -> None:
    where = [100, 9000]
    want = logits_at(where, rope_scaling=LLAMA3)
    got = logits_at(where, **factors(llama3_divisors(16, 500000.0)))
    ignored = logits_at(where)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    assert np.abs(ignored[1] - want[1]).max() > 1e-2, "the prompt does not tell scaled from unscaled frequencies"


SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": {k: v for k, v in LLAMA3.items() if k != "rope_type"},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [2.0 + i for i in range(8)], "original_max_position_embeddings": 64},
}


def rotations(program: Program) -> tuple[np.ndarray, set[float]]:
    array = next(c.array for c in program.constants if c.value.name == "rope.inv_freq")
    return array, {c.attrs["scale"] for c in program.calls if c.name == "rope"}


@pytest.mark.parametrize("kind", SCALINGS)
def test_o49_every_spelling_of_rope_scaling_reaches_the_program(kind: str) -> None:
    config = {k: v for k, v in tiny_config("llama").items() if k != "rope_theta"}
    values = SCALINGS[kind]
    spellings = [
        {"rope_theta": 5000.0, "rope_scaling": {"type": kind, **values}},
        {"rope_theta": 5000.0, "rope_scaling": {"rope_type": kind, **values}},
        {"rope_parameters": {"rope_theta": 5000.0, "rope_type": kind, **values}},
        {"rope_parameters": {"rope_theta": 5000.0, "type": kind, **values}, "rope_scaling": None},
    ]
    found = [rotations(build({**config, **s}, max_model_len=2048)) for s in spellings]
    plain, _ = rotations(build({**config, "rope_theta": 5000.0}))
    for array, scales in found:
        np.testing.assert_array_equal(array, found[0][0])
        assert scales == found[0][1]
        assert not np.array_equal(array, plain)


def test_o49_attention_factor_of_yarn_reaches_the_program() -> None:
    _, scales = rotations(build(tiny_config("llama", rope_scaling={"rope_type": "yarn", **SCALINGS["yarn"]})))
    assert list(scales) == [pytest.approx(0.1 * math.log(4.0) + 1.0)]


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_o49_unknown_rope_type_is_an_error_that_names_it(key: str) -> None:
    with pytest.raises(UnsupportedError, match="'foo'"):
        build(tiny_config("llama", **{key: {"rope_type": "foo", "factor": 2.0}}))
