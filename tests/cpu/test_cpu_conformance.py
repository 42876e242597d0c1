"""Every instruction set of this machine passes the conformance kit: operators with 1, 2, 3, 8 and 17 rows and odd sizes, fused
patterns, sampler vectors."""

from __future__ import annotations

import pytest
from trivium.conformance import kit
from trivium_cpu.plugin import TIERS

native = pytest.importorskip("trivium_cpu._native")


def _failures(options, *areas):
    report = kit.run_conformance("cpu", options, areas=areas)
    return [row for row in report.rows if row.status not in ("passed", "fallback", "skipped", "unavailable")]


@pytest.mark.faults
@pytest.mark.parametrize("isa", TIERS)
def test_o42_operators_equal_the_reference_on_every_instruction_set(isa):
    assert _failures({"isa": isa}, "operators") == []


@pytest.mark.parametrize("area", ["operators", "fusions"])
@pytest.mark.parametrize("isa", native.emulated_tiers())
def test_kernels_on_emulated_instructions_equal_the_reference(isa, area, monkeypatch):
    monkeypatch.setattr("trivium_cpu.plugin._tier", lambda *_: isa)
    assert _failures({}, area) == []


@pytest.mark.parametrize("isa", TIERS)
def test_fused_patterns_equal_the_reference_on_every_instruction_set(isa):
    assert _failures({"isa": isa}, "fusions") == []


@pytest.mark.parametrize("isa", TIERS)
def test_the_sampler_gives_the_published_ids_on_every_instruction_set(isa):
    assert _failures({"isa": isa}, "sampler") == []


def test_one_and_three_threads_pass_what_two_do():
    assert _failures({"threads": 1}, "operators") == []
    assert _failures({"threads": 3}, "operators", "fusions") == []
