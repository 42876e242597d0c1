"""A backend that captures graphs names its budget; the core chooses the batch sizes that fit."""

from __future__ import annotations

import dataclasses
import warnings

import graph_chip
import pytest
from fake_plugins import install
from tiny_checkpoints import make_checkpoint

from trivium import LLM, SamplingParams
from trivium.conformance import collect_checks, open_lab
from trivium.engine.loader import _graph_sizes

PROMPTS = [[7 * n % 250 + i for i in range(3 + n)] for n in range(5)]


def greedy(count):
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "graphchip", "from graph_chip import trivium_backend")
    return tmp_path


def ids(llm):
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, [greedy(2 + n) for n in range(5)])]


def opened(model, backend, **options):
    return LLM(str(model), backend, progress=False, num_kv_blocks=40, **{"max_num_seqs": 16, **options})


@pytest.mark.faults
@pytest.mark.parametrize(
    "layers, seqs, sizes",
    [
        (40, 16, (1, 16)),
        (34, 64, (1, 64)),
        (51, 16, (16,)),
        (101, 16, ()),
        (20, 16, (1, 2, 4, 8, 16)),
        (30, 13, (1, 4, 13)),
        (2, 1, (1,)),
    ],
)
def test_o54_the_batch_sizes_to_capture_are_thinned_out_to_the_budget(layers, seqs, sizes):
    chip = graph_chip.GraphChip()
    capabilities = chip.capabilities(chip.probe().devices[0])
    assert _graph_sizes(capabilities, layers, seqs) == sizes
    assert len(sizes) * layers <= 100


@pytest.mark.faults
def test_o54_sizes_between_are_padded_up_and_nothing_else_changes(site):
    model = make_checkpoint(
        site / "deep", "llama", num_hidden_layers=40, hidden_size=16, num_attention_heads=2, num_key_value_heads=1
    )
    with opened(model, "reference") as llm:
        expected = ids(llm)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        llm = opened(model, "graphchip")
    with llm:
        assert ids(llm) == expected
        log = llm.loaded.executable.log
    assert [size for what, size in log if what == "capture"] == [1, 16]
    assert {size for what, size in log if what == "replay"} == {1, 16}


@pytest.mark.faults
def test_o54_a_capture_that_raises_leaves_the_eager_path_with_a_warning(site):
    model = make_checkpoint(site / "tiny", "llama")
    with opened(model, "reference") as llm:
        expected = ids(llm)
    with pytest.warns(RuntimeWarning, match="could not be captured and runs eagerly"):
        llm = opened(model, "graphchip", backend_options={"capture_fails": True})
    with llm:
        assert ids(llm) == expected
        assert {what for what, _ in llm.loaded.executable.log} == {"eager"}


def test_the_kit_runs_captured_steps_and_wants_a_budget(site, monkeypatch):
    replayed = []
    run = graph_chip.Captured.run
    monkeypatch.setattr(graph_chip.Captured, "run", lambda self, batch: replayed.append(len(self.log)) or run(self, batch))
    lab = open_lab("graphchip")
    rows = [check.run() for check in collect_checks(lab, ["models"]) if "llama" in check.name]
    assert rows and replayed and {row.status for row in rows} == {"passed"}
    poor = dataclasses.replace(lab, capabilities=dataclasses.replace(lab.capabilities, max_graphs=0))
    row = next(check for check in collect_checks(poor, ["rules"]) if check.name == "capabilities").run()
    assert row.status == "failed" and "max_graphs is 0" in row.detail
