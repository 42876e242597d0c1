"""`trivium conformance NAME --performance`: what is counted, whose ceilings hold, what is refused: nothing depends on speed."""

from __future__ import annotations

import json

import pytest
from judged_backends import Backend, Session

from trivium.cli import main
from trivium.conformance import performance
from trivium.conformance.lab import Lab
from trivium.conformance.performance import measure, share, works
from trivium.errors import InvalidRequestError
from trivium.ops.examples import sequences
from trivium.plugin import EagerExecutable, OperatorTime, Profile

SMALL = {"HIDDEN": 32, "INTER": 48, "HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": 8, "VOCAB": 64, "CONTEXT": 20}
CEILINGS = {"bytes": 1e9, "float32": 1e9}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in SMALL.items():
        monkeypatch.setattr(performance, name, value)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    monkeypatch.setattr(performance, "MODEL", {**performance.MODEL, **sizes, "vocab_size": 64})


def lab(backend):
    device = backend.probe().devices[0]
    return Lab(backend, device, backend.capabilities(device), backend.kernels(device))


class Timed(EagerExecutable):
    """Says that one operation takes a tenth of a second in each step."""

    steps = 0

    def run(self, batch):
        self.steps += 1
        return super().run(batch)

    def profile(self, on):
        steps, self.steps = self.steps, 0
        return Profile((OperatorTime("everything", steps, 0.1 * steps, 10**7 * steps, 10**6, 0.05 * steps),), {"bytes": 2e8})


class Profiling(Session):
    def compile(self, program, weights):
        return Timed(self, program, weights, self._kernels, self._spec, backend="test")


def test_bytes_and_operations_follow_from_the_shapes():
    found = {work.name: (work.bytes, work.operations) for _, work in works(sequences([1] * 3, [20] * 3))}
    assert found["linear 32 to 48"] == (4 * (32 * 48 + 3 * 32 + 3 * 48), 2 * 3 * 32 * 48)
    keys_and_values = 3 * 20 * 2 * 8 * 2 * 4  # sequences, tokens, heads, head_dim, keys and values, bytes
    assert found["paged_attention"] == (keys_and_values + 2 * 4 * 3 * 32, 3 * 20 * 4 * 8 * 4)
    assert found["add"] == (3 * 3 * 32 * 4, 3 * 32)


def test_a_backend_without_a_profile_is_timed_operator_by_operator():
    found = measure(lab(Backend()), CEILINGS, 2)
    assert found.source == "timed" and found.ceilings == CEILINGS
    names = {o.name for o in found.operators}
    assert names >= {
        "linear 32 to 48",
        "linear 48 to 32",
        "linear 32 to 64",
        "rms_norm",
        "add",
        "gated",
        "kv_write",
        "paged_attention",
    }
    by = {o.name: o for o in found.operators}
    assert by["linear 32 to 48"].floor_s == pytest.approx(by["linear 32 to 48"].bytes / 1e9)
    assert str(found).count("| linear ") == 3


def test_a_profile_and_its_ceilings_are_taken_and_stated_ceilings_win():
    found = measure(lab(Backend(session=Profiling)), {}, 2)
    assert (found.source, dict(found.ceilings)) == ("profile", {"bytes": 2e8})
    assert [share(o) for o in found.operators] == [pytest.approx(0.5)]
    assert found.operators[0].calls == performance.REPEATS  # the first step warms up
    stated = measure(lab(Backend(session=Profiling)), {"bytes": 4e8}, 2)
    assert [share(o) for o in stated.operators] == [pytest.approx(0.25)]


def test_ceilings_must_be_there_and_make_sense():
    with pytest.raises(InvalidRequestError, match="state them: --ceiling bytes="):
        measure(lab(Backend()), {}, 2)
    for bad in (0, -1, float("nan"), float("inf"), "fast", True):
        with pytest.raises(InvalidRequestError, match="above 0"):
            measure(lab(Backend()), {"bytes": bad}, 2)
    with pytest.raises(InvalidRequestError, match="more than the backend's steps"):
        measure(lab(Backend(max_batched_tokens=1)), CEILINGS, 2)


def test_the_command_prints_markdown_or_json(capsys):
    argv = ["conformance", "reference", "--performance", "--ceiling", "bytes=1e9", "--ceiling", "float32=1e9", "--tokens", "2"]
    assert main(argv) == 0
    assert "| operator | calls |" in capsys.readouterr().out
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["source"] == "timed" and {"name", "seconds", "bytes", "share"} <= set(found["operators"][0])
    assert main(["conformance", "reference", "--performance"]) == 2
    assert "state them" in capsys.readouterr().err
