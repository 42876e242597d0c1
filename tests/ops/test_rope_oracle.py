"""Rope tables against those that transformers computes."""

from __future__ import annotations

import numpy as np
import pytest

from trivium.ops.rope import rope_from_config

pytestmark = [pytest.mark.oracles, pytest.mark.faults]

LONG = {"short_factor": [1.0 + 0.1 * i for i in range(16)], "long_factor": [1.0 + i for i in range(16)]}
CASES = {
    "linear": {"factor": 2.5},
    "dynamic": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 2048},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 2048},
    "yarn-mscale": {
        "factor": 40.0,
        "original_max_position_embeddings": 1024,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "beta_fast": 16.0,
    },
    "yarn-smooth": {"factor": 32.0, "original_max_position_embeddings": 1024, "truncate": False, "attention_factor": 1.25},
    "longrope": {"original_max_position_embeddings": 2048, **LONG},
    "longrope-factor": {"original_max_position_embeddings": 2048, "factor": 32.0, **LONG},
}


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("length", [1024, 8192, 16384])
@pytest.mark.parametrize("spelling", ["type", "rope_type"])
@pytest.mark.parametrize("case", CASES)
def test_o49_frequencies_equal_those_of_transformers(case, spelling, length, theta):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = case.partition("-")[0]
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 8192}
    theirs = transformers.LlamaConfig(**sizes, rope_parameters={"rope_type": kind, "rope_theta": theta, **CASES[case]})
    want, scale = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu", seq_len=length)
    got = rope_from_config(
        {**sizes, "rope_theta": theta, "rope_scaling": {spelling: kind, **CASES[case]}}, 32, max_model_len=length
    )
    np.testing.assert_allclose(got.inv_freq, want.numpy(), rtol=1e-6, atol=0)
    assert got.scale == pytest.approx(scale, rel=1e-7)
