"""Rope tables: both spellings, refusals, and values by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trivium.errors import CheckpointError, UnsupportedError
from trivium.ops.rope import rope_from_config

BASE = {"rope_theta": 10000.0, "max_position_embeddings": 64}
SCALINGS = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32},
}


def default(dim=8, theta=10000.0):
    return np.array([theta ** (-2 * i / dim) for i in range(dim // 2)])


@pytest.mark.faults
@pytest.mark.parametrize("kind", SCALINGS)
def test_o49_all_spellings_of_rope_scaling_give_one_table(kind):
    old, newer = (
        {**BASE, "rope_scaling": {"type": kind, **SCALINGS[kind]}},
        {**BASE, "rope_scaling": {"rope_type": kind, **SCALINGS[kind]}},
    )
    newest = {"max_position_embeddings": 64, "rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **SCALINGS[kind]}}
    tables = [rope_from_config(c, 8, max_model_len=256) for c in (old, newer, newest)]
    for table in tables:
        np.testing.assert_array_equal(table.inv_freq, tables[0].inv_freq)
        assert table.scale == tables[0].scale
    assert not np.allclose(tables[0].inv_freq, default())


@pytest.mark.faults
@pytest.mark.parametrize(
    "spelling",
    [{"rope_scaling": {"type": "foo"}}, {"rope_scaling": {"rope_type": "foo"}}, {"rope_parameters": {"rope_type": "foo"}}],
)
def test_o49_an_unknown_type_is_refused(spelling):
    with pytest.raises(UnsupportedError, match=r"'foo'.*known are default, linear"):
        rope_from_config({**BASE, **spelling}, 8)


@pytest.mark.faults
def test_o49_yarn_attention_factor_is_applied():
    yarn = {"rope_type": "yarn", **SCALINGS["yarn"]}
    scale = lambda **more: rope_from_config({**BASE, "rope_scaling": {**yarn, **more}}, 8).scale
    assert scale() == pytest.approx(0.1 * math.log(4) + 1)
    assert scale(attention_factor=1.5) == 1.5
    assert scale(mscale=0.7, mscale_all_dim=0.4) == pytest.approx((0.07 * math.log(4) + 1) / (0.04 * math.log(4) + 1))


def test_default_partial_and_overridden_theta():
    np.testing.assert_allclose(rope_from_config({}, 8).inv_freq, default(), rtol=1e-6)
    np.testing.assert_allclose(rope_from_config({"partial_rotary_factor": 0.5}, 16).inv_freq, default(), rtol=1e-6)
    np.testing.assert_allclose(rope_from_config({**BASE, "rope_theta": 500.0}, 8).inv_freq, default(theta=500.0), rtol=1e-6)


def test_explicit_divisors_of_a_gguf_file():
    rope = rope_from_config({"rope_parameters": {"rope_type": "factors", "factors": [1, 2, 4, 8]}}, 8)
    np.testing.assert_allclose(rope.inv_freq, default() / [1, 2, 4, 8], rtol=1e-6)


def test_longrope_uses_the_long_list_only_when_long_contexts_will_be_served():
    config = {**BASE, "original_max_position_embeddings": 32, "rope_scaling": {"type": "longrope", **SCALINGS["longrope"]}}
    np.testing.assert_allclose(rope_from_config(config, 8, max_model_len=32).inv_freq, default(), rtol=1e-6)
    np.testing.assert_allclose(rope_from_config(config, 8, max_model_len=33).inv_freq, default() / 2, rtol=1e-6)
    assert rope_from_config(config, 8).scale == pytest.approx(math.sqrt(1 + math.log(2) / math.log(32)))


def test_parameters_per_layer_type_are_refused():
    config = {
        "rope_parameters": {
            "full": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0},
            "sliding": {"rope_type": "default"},
        }
    }
    with pytest.raises(CheckpointError, match="full, sliding"):
        rope_from_config(config, 8)


@pytest.mark.parametrize(
    "bad",
    [
        {"type": "linear"}, {"type": "linear", "factor": 0}, {"type": "linear", "factor": "4"}, {"type": "linear", "factor": True},
        {"type": "linear", "factor": float("nan")}, {"type": "llama3", "factor": 8.0}, {"type": "longrope", "short_factor": [1.0]},
        {"type": "factors", "factors": [1, 2, 0, 4]}, {"type": "yarn", "factor": 4.0, "attention_factor": -1}, ["linear"],
    ],
)  # fmt: skip
def test_missing_or_impossible_values_are_refused(bad):
    with pytest.raises(CheckpointError):
        rope_from_config({**BASE, "rope_scaling": bad}, 8)


def test_odd_rotary_dimensions_are_refused():
    with pytest.raises(CheckpointError, match="even"):
        rope_from_config({"partial_rotary_factor": 0.4}, 8)
