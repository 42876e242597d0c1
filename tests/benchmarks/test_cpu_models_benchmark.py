"""The benchmark of experts and recurrences: it runs, and its floors follow from its sizes."""

from __future__ import annotations

import json
import sys

import cpu_models
import pytest

pytest.importorskip("trivium_cpu._native")


def test_it_prints_a_figure_for_every_size_against_a_floor_of_the_experts_that_were_chosen(monkeypatch, capsys):
    flags = ["--quick", "--json", "--rounds", "2", "--steps", "1", "--threads", "1", "--formats", "int4"]
    monkeypatch.setattr(sys, "argv", ["cpu_models.py", *flags])
    cpu_models.main()
    results = json.loads(capsys.readouterr().out)["results"]
    experts = [r for r in results if r["operator"] == "experts"]
    assert [r["tokens"] for r in experts] == [1, 8]
    assert experts[0]["experts"] == cpu_models.QUICK.top_k <= experts[1]["experts"] <= cpu_models.QUICK.experts
    assert [(r["sequences"], r["tokens"]) for r in results if r["operator"] == "gated delta rule"] == [(1, 1), (8, 8), (1, 64)]
    assert all(r["microseconds"] > 0 and r["of_floor"] > 0 for r in results)


def test_floors_are_the_longer_of_moving_and_multiplying():
    ceilings = [{"bytes": 10.0, "int8": 4.0}, {"bytes": 5.0, "int8": 4.0}]
    found = cpu_models.against_floor([2.0, 4.0], ceilings, 10.0, 6.0, "int8")
    assert found["floor_microseconds"] == pytest.approx(1e6 * (1.5 + 2.0) / 2)
    assert found["of_floor"] == pytest.approx((1.5 / 2 + 2 / 4) / 2)
