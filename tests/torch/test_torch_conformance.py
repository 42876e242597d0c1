"""The torch backend passes the kit, with and without a dtype of 16 bits, and runs nothing on the host."""

from __future__ import annotations

import pytest

from trivium.conformance import AREAS, run_conformance

pytest.importorskip("torch")


def judged(report):
    return {(row.area, row.name): row.detail for row in report.rows if row.status in ("failed", "fallback")}


@pytest.mark.parametrize("area", AREAS)
def test_float32(area):
    report = run_conformance("torch:cpu", {"strict": True}, areas=[area])
    assert judged(report) == {} and report.count("passed")


@pytest.mark.parametrize(
    ("dtype", "area"), [("bfloat16", "operators"), ("bfloat16", "fusions"), ("bfloat16", "models"), ("float16", "operators")]
)
def test_sixteen_bits(dtype, area):
    report = run_conformance("torch:cpu", {"strict": True, "dtype": dtype}, areas=[area])
    assert judged(report) == {} and report.count("passed")
