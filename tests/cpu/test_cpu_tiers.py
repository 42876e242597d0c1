"""Tiers of kernels that a machine lacks are refused with the reason, and the kit says so."""

from __future__ import annotations

import json

import pytest
from trivium.cli.main import main
from trivium.errors import BackendUnavailableError
from trivium.plugin import resolve
from trivium_cpu.plugin import TIERS

native = pytest.importorskip("trivium_cpu._native")
LACKING = [tier for tier in TIERS if tier not in native.tiers()]


def test_tiers_of_this_machine_are_known_and_miss_nothing() -> None:
    assert set(native.tiers()) <= set(TIERS)
    assert [native.missing(tier) for tier in native.tiers()] == [""] * len(native.tiers())


@pytest.mark.parametrize("tier", LACKING)
def test_a_tier_that_the_machine_lacks_is_refused_with_the_reason(tier: str) -> None:
    backend, device = resolve("cpu")
    with pytest.raises(BackendUnavailableError, match="processor") as refusal:
        backend.open(device, {"isa": tier})
    assert native.missing(tier) in str(refusal.value)


@pytest.mark.parametrize("tier", LACKING)
def test_conformance_of_a_tier_that_the_machine_lacks_is_unavailable(tier: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "cpu", "--isa", tier, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["unavailable"] == 1
    (row,) = report["rows"]
    assert row["status"] == "unavailable"
    assert native.missing(tier) in row["detail"]
