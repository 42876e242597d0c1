"""The kit that judges every backend, on the emulated NPU: operators, fused patterns, formats, pages and the sampler in 16 bits."""

from __future__ import annotations

import pytest

from trivium.conformance import run_conformance

AREAS = ("operators", "fusions", "formats", "pages", "sampler")


@pytest.mark.parametrize("area", AREAS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # single operators are no decode step that could be captured
def test_float16(npu, area):
    report = run_conformance("ascend", {"strict": True, "dtype": "float16", "graphs": False}, areas=[area])
    assert [(row.name, row.detail) for row in report.rows if row.status in ("failed", "fallback")] == []
    assert report.count("passed")
