"""The built-in backends pass the kit."""

from __future__ import annotations

import pytest

from trivium.conformance import AREAS, run_conformance
from trivium.plugin import find_backends

HERE = {status.name for status in find_backends() if status.devices}


def failures(report):
    return {(row.area, row.name): row.detail for row in report.rows if row.status == "failed"}


def test_reference_generates_the_same_under_every_schedule():
    assert failures(run_conformance("reference", areas=["models"])) == {}


@pytest.mark.skipif("cpu" not in HERE, reason="the cpu backend is not built here")
@pytest.mark.parametrize("area", AREAS)
def test_cpu(area):
    report = run_conformance("cpu", areas=[area])
    assert failures(report) == {} and report.count("passed")


@pytest.mark.slow
@pytest.mark.skipif("cpu" not in HERE, reason="the cpu backend is not built here")
@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512", "avx512vnni", "avx512bf16"])
def test_cpu_with_each_instruction_set(isa):
    assert failures(run_conformance("cpu", {"isa": isa})) == {}
