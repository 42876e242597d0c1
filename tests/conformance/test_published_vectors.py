"""The published sampling vectors, made by plain Python, through whole backends."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import sampling_oracle as oracle
from trivium.conformance.kit import open_lab
from trivium.conformance.sampler import draw
from trivium.ops import Case
from trivium.plugin import find_backends

VECTORS = json.loads((Path(__file__).parents[1] / "sampling" / "vectors.json").read_text())
HERE = [s.name for s in find_backends() if s.devices and s.name in ("reference", "cpu")]


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("vector", VECTORS["cases"], ids=lambda v: v["name"])
def test_a_backend_gives_the_published_ids(backend, vector):
    arrays = oracle.to_arrays([oracle.Row(**row) for row in vector["rows"]], vector["top_logprobs"])
    got, _ = draw(open_lab(backend), Case(arrays, {"vocab_size": vector["vocab_size"]}))
    assert np.asarray(got.ids).tolist() == vector["ids"]
    if vector["top_logprobs"] >= 0:
        assert np.asarray(got.ranks).tolist() == vector["ranks"]
        assert np.asarray(got.top_ids).tolist() == vector["top_ids"]
