"""Rows are gathered before what is made row by row."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from trivium.conformance.kit import open_lab
from trivium.conformance.models import fuse, whole_model
from trivium.conformance.zoo import CONFIGS
from trivium.models import build
from trivium.ops.examples import sequences

session = pytest.importorskip("trivium_cpu.session")
STEP = sequences([3, 1, 40], [10, 33, 60])


def fused(config):
    lab = open_lab("cpu", {})
    program = build(CONFIGS[config], max_model_len=128)
    return lab, program, fuse(lab, program)


def shapes_after_attention(program):
    last = max(i for i, call in enumerate(program.calls) if call.name == "paged_attention")
    return [(call.name, value.shape[0]) for call in program.calls[last + 1 :] for value in call.results]


def test_what_follows_the_last_attention_is_made_of_rows_that_are_asked_for():
    _, _, program = fused("llama")
    moved = session.gather_early(program)
    before, after = shapes_after_attention(program), shapes_after_attention(moved)
    assert ("feed_forward", "tokens") in before and ("linear_add", "tokens") in before
    assert {name for name, rows in after if rows == "tokens"} == {"reshape"}
    assert after.count(("feed_forward", "rows")) == after.count(("feed_forward", "pooled")) == 1
    assert moved.outputs.keys() == program.outputs.keys()
    assert [v.shape for v in moved.outputs.values()] == [v.shape for v in program.outputs.values()]
    layers = [sum(call.name == "feed_forward" for call in p.calls) for p in (program, moved)]
    assert layers[1] == layers[0] + 1, "earlier layers stay as they are"


def test_what_others_read_too_stays_where_it_is():
    _, _, program = fused("llama")
    read = next(c for c in program.calls if c.name == "gather_rows").args[0]
    watched = dataclasses.replace(program, outputs={**program.outputs, "last": read})
    assert session.gather_early(watched) is watched


@pytest.mark.parametrize("config", ["llama", "gemma3", "qwen3", "llama odd"])
@pytest.mark.parametrize(("sampled", "pooled"), [([2, 3, 43], []), ([], [0, 5]), ([43], [43]), ([], [])], ids=str)
def test_the_rows_have_the_bits_that_they_had_later(config, sampled, pooled, monkeypatch):
    lab, program, calls = fused(config)
    example = whole_model(program, STEP, lab.page_size)
    rows = {"sample_rows": np.array(sampled, np.int32), "pool_rows": np.array(pooled, np.int32)}
    example = dataclasses.replace(example, inputs={**example.inputs, **rows})
    early = lab.run(example, calls, dtype="float32")
    monkeypatch.setattr(session, "gather_early", lambda program: program)
    late = lab.run(example, calls, dtype="float32")
    for name, want in late.outputs.items():
        assert early.outputs[name].shape == want.shape
        np.testing.assert_array_equal(early.outputs[name], want)
    for ours, theirs in zip(early.states, late.states, strict=True):
        np.testing.assert_array_equal(ours.k, theirs.k)
