"""Logits that transformers made once, kept beside the script that makes them: no torch is needed to compare."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from paged_runner import PagedRunner, Runner, SessionRunner, run_in_chunks
from tiny_checkpoints import make_weights
from trivium.models import ARCHITECTURES, build
from trivium.plugin import registry

GOLDEN = Path(__file__).parent / "golden"
ABOUT: dict[str, dict[str, Any]] = json.loads((GOLDEN / "golden.json").read_text())
LOGITS = np.load(GOLDEN / "golden.npz")


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_golden", GOLDEN / "make_golden.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(case: dict[str, Any], runner: Runner, want: np.ndarray, chunk: int) -> None:
    whole = run_in_chunks(runner, case["prompts"], chunk, decode=case["decode"])
    got = np.concatenate([logits[rows] for logits, rows in zip(whole, case["rows"])])
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_every_family_has_golden_logits() -> None:
    covered = {case["config"]["architectures"][0] for case in ABOUT.values()}
    assert covered >= ARCHITECTURES.keys()


@pytest.mark.parametrize("name", ABOUT)
def test_seeded_weights_are_the_same_everywhere(name: str) -> None:
    weights = make_weights(ABOUT[name]["config"], ABOUT[name]["seed"])
    total = sum(np.abs(w.astype(np.float64)).sum() for w in weights.values())
    assert total == pytest.approx(ABOUT[name]["weight_sum"], abs=1e-4)


@pytest.mark.parametrize("name", ABOUT)
@pytest.mark.parametrize(("page_size", "chunk"), [(4, 5), (16, 16)])
def test_operators_give_the_golden_logits(name: str, page_size: int, chunk: int) -> None:
    case = ABOUT[name]
    program = build(case["config"], max_model_len=case["max_model_len"])
    check(case, PagedRunner(program, make_weights(case["config"], case["seed"]), page_size=page_size), LOGITS[name], chunk)


@pytest.mark.parametrize("name", ABOUT)
@pytest.mark.parametrize(("page_size", "chunk"), [(4, 16), (16, 5)])
def test_reference_backend_gives_the_golden_logits(name: str, page_size: int, chunk: int) -> None:
    case = ABOUT[name]
    backend, device = registry.resolve("reference")
    session = backend.open(device, {})
    program = build(case["config"], max_model_len=case["max_model_len"])
    weights = make_weights(case["config"], case["seed"])
    check(case, SessionRunner(program, weights, session, page_size=page_size), LOGITS[name], chunk)
    session.close()


@pytest.mark.oracles
@pytest.mark.parametrize("name", ABOUT)
def test_fresh_golden_logits_equal_the_committed(name: str) -> None:
    pytest.importorskip("transformers")
    about, logits = script().make_case(name)
    assert json.loads(json.dumps(about)) == ABOUT[name]
    np.testing.assert_allclose(logits, LOGITS[name], rtol=1e-4, atol=2e-5)
