"""`trivium run` as a conversation: history, slash commands, Ctrl-C, and a real process."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from chat_models import make_chat_model

from trivium import LLM
from trivium.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_chat_model(tmp_path_factory.mktemp("models") / "chat")


@pytest.fixture
def talk(folder, monkeypatch, capsys):
    """Runs a conversation over standard input: (exit code, the prompts that the model saw, output, errors)."""
    seen = []
    stream = LLM.stream

    def spy(self, prompt, params, **template):
        seen.append(bytes(prompt).decode())
        return stream(self, prompt, params, **template)

    monkeypatch.setattr(LLM, "stream", spy)

    def run(text: str, *flags: str):
        seen.clear()
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        code = main(["run", str(folder), "--backend", "reference", "--max-tokens", "4", *flags])
        return code, seen, *capsys.readouterr()

    return run


def test_a_conversation_keeps_its_history_until_cleared(talk):
    code, prompts, _, _ = talk("one\n\ntwo\n/clear\nthree\n", "--system", "S", "--stop", "nothing")
    assert code == 0 and len(prompts) == 3
    assert prompts[0] == "[system]S[user]one[assistant]"
    assert re.fullmatch(r"\[system\]S\[user\]one\[assistant\].+\[user\]two\[assistant\]", prompts[1], re.DOTALL)
    assert prompts[2] == "[system]S[user]three[assistant]"


def test_slash_commands(talk):
    code, prompts, out, err = talk("/help\n/nonsense now\n/bye\nnever read\n")
    assert code == 0 and prompts == [] and out == ""
    assert err.count("/clear") == 2 and "no command /nonsense;" in err


def test_raw_lines_are_completed_one_by_one(talk):
    assert talk("one\ntwo\n", "--raw")[1] == ["one", "two"]


def test_bytes_that_the_locale_does_not_know_are_read_as_utf8(talk):
    escaped = "日本".encode().decode("ascii", "surrogateescape")
    code, prompts, _, err = talk(f"{escaped}\n\udcff!\n")
    assert (
        code == 0
        and "[user]日本[assistant]" in prompts[0]
        and prompts[1].endswith("[user]\ufffd![assistant]")
        and "trivium:" not in err
    )


def test_a_question_too_long_is_told_and_forgotten(talk):
    code, prompts, _, err = talk("x" * 600 + "\nshort\n")
    assert code == 0 and "prompt and output together" in err and prompts[1:] == ["[user]short[assistant]"]


def test_the_default_length_is_what_the_context_leaves(folder, capsys):
    assert main(["run", str(folder), "x" * 480, "--raw", "--backend", "reference", "--ignore-eos"]) == 0
    assert "[32 tokens, " in capsys.readouterr().err


def interrupting(monkeypatch, after: int, times: int = 1):
    """The stream sends Ctrl-C to its own process after some pieces."""
    stream = LLM.stream

    def pressed(self, prompt, params, **template):
        for i, news in enumerate(stream(self, prompt, params, **template), 1):
            if i == after:
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)
            yield news

    monkeypatch.setattr(LLM, "stream", pressed)


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(talk, monkeypatch):
    interrupting(monkeypatch, after=2)
    before = signal.getsignal(signal.SIGINT)
    code, _, out, err = talk("one\ntwo\n", "--max-tokens", "50", "--ignore-eos")
    assert code == 0 and err.count("interrupted]") == 2 and "[2 tokens" in err and out.count("\n") >= 2
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_in_a_single_answer_is_code_130(folder, monkeypatch, capsys):
    interrupting(monkeypatch, after=2)
    assert main(["run", str(folder), "hi", "--backend", "reference", "--max-tokens", "50"]) == 130
    assert "interrupted]" in capsys.readouterr().err


def test_a_second_ctrl_c_leaves_at_once(folder, monkeypatch):
    interrupting(monkeypatch, after=2, times=2)
    assert main(["run", str(folder), "hi", "--backend", "reference"]) == 130


def start(folder, *argv: str, **options) -> subprocess.Popen:
    command = [sys.executable, "-m", "trivium.cli", "run", str(folder), "--backend", "reference", *argv]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
    return subprocess.Popen(command, **{**pipes, **options})


def test_a_real_process_answers_from_a_pipe(folder):
    out, err = start(folder, "--max-tokens", "4").communicate("hi\n", timeout=60)
    assert out.endswith("\n") and "tokens" in err and "Traceback" not in err


def test_a_real_process_ends_on_ctrl_c_without_a_traceback(folder):
    process = start(folder, "hi", "--max-tokens", "400", "--ignore-eos")
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err and "interrupted" in err


def test_ctrl_c_while_loading_is_code_130_without_a_traceback(folder, monkeypatch, capsys):
    import trivium.api

    monkeypatch.setattr(trivium.api, "load", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        assert main(["run", str(folder), "hi", "--backend", "reference"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert "Traceback" not in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_error(folder):
    read, write = os.pipe()
    os.close(read)
    process = start(folder, "hi", "--max-tokens", "4", stdout=write)
    os.close(write)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 141 and err.strip() == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("argv", [("backends", "--json"), ("backends",)])
def test_a_full_disk_is_one_line(argv):
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "trivium.cli", *argv]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "No space left" in done.stderr
