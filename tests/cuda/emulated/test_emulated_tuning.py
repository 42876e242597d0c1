"""Tiles that are timed: once, for one device and its software, and never where bits must not depend on it."""

from __future__ import annotations

import json
import warnings

import emulated_cuda
import numpy as np
import pytest
import torch
from eight_bits import held, opened
from quantised_files import is_projection
from tiny_checkpoints import make_checkpoint
from triton.runtime.errors import OutOfResources
from trivium_cuda import eights, table, tuning, weights
from trivium_cuda.kernels.products import Plan, plan

from trivium import LLM, SamplingParams
from trivium.errors import InvalidRequestError
from trivium.ops import Weight


class FakeClock:
    """Takes as long for a run as its turn says; counts and runs what it is given."""

    def __init__(self, *turns: float) -> None:
        self.turns, self.runs = list(turns), 0

    def __call__(self, session, run) -> float:
        self.runs += 1
        return self.turns[(self.runs - 1) % len(self.turns)]


def weight_of(shape, format="int4_g128"):
    array = np.random.default_rng(1).standard_normal(shape, np.float32)
    return weights.make(Weight("w", shape, "float32", array, lambda data: data), format, torch.device("cpu"))


def test_what_was_timed_is_read_and_not_timed_again(tmp_path):
    session, path, clock = opened(), str(tmp_path / "deep" / "tiles.json"), FakeClock(3.0, 1.0, 2.0)
    matrices = [weight_of((48, 256)), weight_of((48, 256)), torch.zeros(4, 4), weight_of((2, 32, 128))]
    tuned = tuning.tune(session, matrices, path, clock)
    of_matrix = weights.matrix_of(matrices[0])
    sizes = [
        len(tuning.neighbours(plan(rows, of_matrix, torch.float32, session.device, invariant=False))) for rows in tuning.BUCKETS
    ]
    assert clock.runs == sum(sizes), "the matrix is timed once, floats and experts are not"
    again = tuning.tune(session, matrices, path, FakeClock())
    assert again.choices == tuned.choices
    first = tuning.neighbours(plan(1, of_matrix, torch.float32, session.device, invariant=False))
    assert tuned.tile(of_matrix, 1) == first[1] and first[0] == plan(1, of_matrix, torch.float32, session.device, invariant=False)
    [(key, entries)] = json.loads((tmp_path / "deep" / "tiles.json").read_text()).items()
    assert key.startswith("emulated, 9.0, torch ") and len(entries) == len(tuning.BUCKETS)
    assert {len(entry["seconds"]) for entry in entries.values()} == set(sizes)
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["tiles.json"], "nothing is left of writing"


@pytest.mark.parametrize("change", ["device", "software", "dtype", "shape", "candidates"])
def test_whatever_else_it_is_it_is_timed_again(tmp_path, change, monkeypatch):
    path, clock, shape = str(tmp_path / "tiles.json"), FakeClock(1.0), (48, 256)
    tuning.tune(opened(), [weight_of(shape)], path, FakeClock(1.0))
    session = opened((8, 0)) if change == "device" else opened(dtype="float16" if change == "dtype" else "float32")
    if change == "software":
        monkeypatch.setattr(tuning, "KERNELS", tuning.KERNELS + 1)
    if change == "candidates":
        real = tuning.neighbours
        monkeypatch.setattr(tuning, "neighbours", lambda p: [q._replace(stages=q.stages + 9) for q in real(p)])
    tuning.tune(session, [weight_of((48, 384) if change == "shape" else shape)], path, clock)
    assert clock.runs
    before = clock.runs
    monkeypatch.undo()
    tuning.tune(opened(), [weight_of(shape)], path, clock)
    assert (clock.runs > before) == (change == "candidates"), "what was there for others is kept"


@pytest.mark.parametrize("content", ["{", "[1]", '{"emulated": {"int4": {"chosen": 3}}}', '{"emulated": 1}', b"\xff\xfe"])
def test_a_file_that_is_no_table_is_ignored_with_a_warning_and_written_anew(tmp_path, content):
    path = tmp_path / "tiles.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.warns(RuntimeWarning, match=r"tiles\.json is ignored, and tiles are timed again"):
        tuning.tune(opened(), [weight_of((48, 256))], str(path), FakeClock(1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuning.tune(opened(), [weight_of((48, 256))], str(path), FakeClock())


def test_a_folder_that_can_not_be_written_costs_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="timings can't be kept in"):
        assert tuning.tune(opened(), [weight_of((48, 256))], str(tmp_path / "file" / "tiles.json"), FakeClock(1.0)).choices


def test_equal_times_leave_the_default_and_what_has_no_room_is_left_out():
    def no_room():
        raise OutOfResources(300, 227, "shared memory")

    runs = {"default": lambda: None, "large": no_room, "other": lambda: None}
    assert tuning.best("it", runs, {}, lambda run: run() or 1.0) == tuning.Found("default", {"default": 1.0, "other": 1.0}, False)
    with pytest.raises(OutOfResources):
        tuning.best("it", {"default": no_room, "other": lambda: None}, {}, lambda run: run() or 1.0)


def test_the_library_is_a_candidate_for_rows_of_fp8_and_is_taken_when_it_is_the_quickest(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "BUCKETS", (4, 12))
    monkeypatch.setattr(eights, "LIBRARY_FROM", 8)
    session, weight = opened(dtype="bfloat16"), held("fp8", 48, 64)
    session.tuned = tuning.tune(session, [weight], str(tmp_path / "tiles.json"), FakeClock(*range(40, 0, -1)))
    assert session.tuned.rows_choice(weight.weight, 3) == tuning.LIBRARY, "the last candidate of few rows"
    assert isinstance(session.tuned.rows_choice(weight.weight, 5000), Plan), "the last of many, of which the library is the first"
    x = torch.randn(3, 64).to(torch.bfloat16)
    got = eights.linear(session, x, weight, None)
    assert torch.equal(got, eights.by_library(eights.rounded(x, "fp8").rows, weight.weight, None, torch.bfloat16))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_any_candidate_gives_the_product(kind):
    session = opened()
    weight = held("int8", 48, 1100) if kind == "int8" else weight_of((48, 1152))
    x = torch.randn(2, weight.shape[1])
    given = x if kind == "int4" else (rows := eights.rounded(x, kind).rows).numbers.float() * rows.scales
    want = given @ weight.to(torch.float32).T
    candidates = tuning._candidates(session, weight, 1)
    assert len(candidates) > 4
    for p, _ in candidates.values():
        session.tuned = tuning.Tuned({(tuning._signature(weight), 16): p})
        torch.testing.assert_close(table.linear(session, (x, weight, None), {}), want, rtol=1e-4, atol=1e-3)


def test_the_clock_is_of_a_graph_s_replays(monkeypatch):
    session = opened()
    device, ran = session.api, []
    times = iter([0.0, 9.0, 10.0, 12.0, 20.0, 21.0, 30.0, 33.0])
    monkeypatch.setattr(tuning.time, "perf_counter", lambda: next(times))
    assert tuning.graph_seconds(session, lambda: ran.append(1)) == 1.0 / tuning.REPEATS
    assert (device.captures, device.replays, len(ran)) == (1, 1 + tuning.TRIALS, 1 + tuning.REPEATS)


def test_a_model_is_tuned_when_it_is_loaded_and_explain_tells(tmp_path, emulated, monkeypatch):
    """By the option alone; its tokens stay."""
    from trivium.models import build
    from trivium.plugin import select_kernels

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "BUCKETS", (16,))
    clock = FakeClock(2.0, 1.0)
    monkeypatch.setattr(tuning.tune, "__defaults__", (clock,))
    folder = make_checkpoint(tmp_path / "llama", "llama", num_hidden_layers=1)
    load = {
        "kv_dtype": "float32", "block_size": 16, "progress": False, "max_model_len": 32, "num_kv_blocks": 8, "max_num_seqs": 1,
        "max_num_batched_tokens": 4, "quantize": "linear=int8",
    }  # fmt: skip
    asked = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    found = []
    for options in ({}, {"autotune": True}):
        with LLM(folder, "cuda_emulated", **load, backend_options={"dtype": "float32", "graph_sizes": (), **options}) as llm:
            found.append(llm.generate([[5, 6, 7]], asked)[0].outputs[0].token_ids)
            assert {r.resident for r in llm.loaded.routes if is_projection(r.name)} == {"int8"}
        assert bool(clock.runs) == bool(options)
    assert found[0] == found[1]
    backend = emulated_cuda.backend()
    [device] = backend.probe().devices
    config = json.loads((folder / "config.json").read_text())
    kernels = backend.kernels(device)
    notes = {c.call.name: c.kernel.note(c.call) for c in select_kernels(build(config), kernels) if c.kernel is not None}
    assert notes["linear"].startswith("with autotune int8 ") and "16 rows: 16x" in notes["linear"]
    assert notes["rms_norm"] == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"autotune": True, "batch_invariant": True}, "batch_invariant wants the same bits always"),
        ({"autotune": 3}, "autotune must be True, False or the path"),
    ],
)
def test_what_makes_no_sense_is_refused(options, message):
    with pytest.raises(InvalidRequestError, match=message):
        opened(**options)
