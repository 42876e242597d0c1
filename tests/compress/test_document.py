"""The commands of docs/compress.md that name a model of the reader's own, or take hours, run on tiny ones."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from chat_models import make_chat_model
from weight_files import whole_blocks_gguf

from trivium.cli import main
from trivium_compress.recipe import FORMATS, METHODS, PRUNINGS

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "compress.md").read_text("utf-8")
BLOCKS = "".join(re.findall(r"^```text\n(.*?)^```", DOCUMENT, re.M | re.S))
LINES = re.sub(r"\\\n\s*", "", BLOCKS).splitlines()
COMMANDS, FIGURES = ([line for line in LINES if line.split()[0] == name] for name in ("trivium", "python"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reader")
    make_chat_model(path / "my-model")
    whole_blocks_gguf(path / "my-model.gguf")
    (path / "notes.txt").write_text("it was the best of times, it was the worst of times; " * 60)
    chat = {"messages": [{"role": "user", "content": "how?"}, {"role": "assistant", "content": "so."}]}
    (path / "chats.jsonl").write_text(json.dumps(chat) + "\n")
    return path


def test_every_command_of_the_document_runs(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(folder)
    assert len(COMMANDS) == 9 == len(LINES) - len(FIGURES)
    for command in COMMANDS:
        name, *argv = shlex.split(command)
        small = ["--window", "64", "--max-windows", "3"] if argv[0] == "eval" else ["--window", "32", "--windows", "4"]
        assert name == "trivium" and main([*argv, *small]) == 0, command
        assert capsys.readouterr().out.strip()
    made = {"my-model-int4", "my-model-int4.gguf", "my-model-sparse", "my-model-sparse-int4", "report.html"}
    made |= {"my-folder-int4", "my-folder", "my-file.gguf"}
    assert made <= {path.name for path in folder.iterdir()}


def test_the_commands_of_the_figures_run(tmp_path: Path):
    for name in ("tiny.gguf", "peer.q4_0.gguf"):
        whole_blocks_gguf(tmp_path / name, positions=512)
    small = "--windows 4 --window 64 --max-windows 2"
    made, judged = (line.replace("python ", f"{sys.executable} {ROOT}/") for line in FIGURES)
    script = made.replace("smollm2-135m", "tiny.gguf") + " && " + judged.replace("--windows 32", small)
    script = script.replace(" *.iq*.gguf *.tq*.gguf", "")
    done = subprocess.run(["bash", "-ec", script], cwd=tmp_path, check=True, capture_output=True, text=True, timeout=600)
    found = json.loads(done.stdout)["found"]
    assert len(found) == 4 + 7 + 1 and "peer peer.q4_0.gguf" in found and "resident int4_asym" in found
    assert found["resident bfloat16"]["kl_mean"]["value"] < 1e-3 < found["q4_0 rtn, no text"]["kl_mean"]["value"]


def test_every_format_method_and_pruning_is_in_the_document():
    assert [name for name in (*FORMATS, *METHODS, *PRUNINGS) if f"`{name}`" not in DOCUMENT] == []
