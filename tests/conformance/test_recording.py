"""Record on one backend, replay on another: nothing may differ, and what differs must be seen."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import make_recording
import numpy as np
import pytest
from tiny_checkpoints import FAMILIES, tiny_config, make_checkpoint
from trivium import LLM, SamplingParams
from trivium.cli.main import main
from trivium.conformance.recording import Recorder, program_from_json, program_to_json, replay
from trivium.errors import CheckpointError, InvalidRequestError
from trivium.models import build
from trivium.plugin import find_backends


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "mistral")


@pytest.fixture(scope="module")
def recorded(model: Path, tmp_path_factory: Any) -> Path:
    """16 requests through a pool that forces preemption, with every kind of sampling, on the reference."""
    folder = tmp_path_factory.mktemp("recording") / "run"
    params = [SamplingParams(temperature=t, max_tokens=12, ignore_eos=True, logprobs=2, seed=3) for t in (0.0, 0.9)] * 8
    prompts = [[1 + i, 7, 9, 4 + i] * (3 + i % 5) for i in range(16)]
    with LLM(str(model), backend="reference", num_kv_blocks=24, max_num_batched_tokens=32) as llm:
        recorder = Recorder(llm.loaded, folder, logits=True)
        llm.engine.model = recorder.model
        llm.generate(prompts, params)
        recorder.close()
    return folder


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_program_survives_json(family: str) -> None:
    program = build(tiny_config(family))
    arrays = {c.value.name: c.array for c in program.constants if c.array is not None}
    again = program_from_json(json.loads(json.dumps(program_to_json(program))), arrays)
    assert str(again) == str(program) and again.vocab_size == program.vocab_size
    assert [(c.source, c.rows) for c in again.constants] == [(c.source, c.rows) for c in program.constants]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_replay_samples_the_recorded_ids(recorded: Path, backend: str) -> None:
    options = {"dtype": "float32", "kv_dtype": "float32"} if backend == "cpu" else {}
    done = replay(recorded, backend, **options)
    report = done.to_json()
    assert report["different"] == 0 and report["rows"] >= 16 * 12 and not done.program_changed
    assert report["max_difference"]["logits"] <= (0.0 if backend == "reference" else 1e-3)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_what_was_recorded_before_a_change_of_code_still_comes_out(tmp_path: Path, backend: str) -> None:
    """The refactoring test: made by make_recording.py, to be made again only where a change of behaviour is intended."""
    model = make_checkpoint(tmp_path / "model", make_recording.FAMILY)
    options = {"dtype": "float32", "kv_dtype": "float32"} if backend == "cpu" else {}
    done = replay(make_recording.FOLDER, backend, model=str(model), **options)
    report = done.to_json()
    assert report["different"] == 0 and report["rows"] >= 90 and not done.program_changed
    assert report["max_difference"]["logprobs"] < 1e-4


def test_a_changed_kernel_is_seen(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trivium.ops import OPERATORS

    gated = OPERATORS["gated"]
    monkeypatch.setattr("trivium_reference.plugin.OPERATORS", {
        **OPERATORS, "gated": gated._replace(reference=lambda gate, up, **attrs: gated(up, gate, **attrs)),
    })  # fmt: skip
    report = replay(recorded, "reference").to_json()
    assert report["different"] > 0 and report["differing_steps"] and report["max_difference"]["logits"] > 1e-3


def test_damaged_recordings_and_other_checkpoints_are_refused(recorded: Path, model: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="another checkpoint"):
        replay(recorded, "reference", model=str(make_checkpoint(tmp_path / "other", "mistral", seed=5)))
    with pytest.raises(CheckpointError, match="holds no recording"):
        replay(model, "reference")
    for break_it in (
        lambda f: f.joinpath("000003.npz").write_bytes(b"PK"),
        lambda f: f.joinpath("000000.npz").unlink(),
        lambda f: np.savez(f / "000001.npz", token_ids=np.array([{}], object), allow_pickle=True),
        lambda f: f.joinpath("recording.json").write_text(
            f.joinpath("recording.json").read_text().replace('"rms_norm"', '"rm_norm"')
        ),
    ):
        folder = Path(shutil.copytree(recorded, tmp_path / "copy", dirs_exist_ok=True))
        break_it(folder)
        with pytest.raises(Exception) as caught:
            replay(folder, "reference")
        assert getattr(caught.value, "code", None) in ("bad_checkpoint", "bad_program"), caught.value
    with LLM(str(model), backend="reference", num_kv_blocks=32) as llm, pytest.raises(InvalidRequestError, match="not empty"):
        Recorder(llm.loaded, recorded)


def test_the_commands_record_and_replay(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "run")
    assert (
        main(["record", str(model), "hello", "and bye", "--backend", "reference", "-o", folder, "--max-tokens", "5", "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["events"] >= 5
    for backend in find_backends():
        if backend.name in ("reference", "cpu"):
            assert main(["replay", folder, "--backend", backend.name, "--dtype", "float32", "--kv-dtype", "float32", "--json"]) == 0
            assert json.loads(capsys.readouterr().out)["different"] == 0
    assert main(["replay", str(tmp_path / "nothing"), "--backend", "reference"]) == 2
