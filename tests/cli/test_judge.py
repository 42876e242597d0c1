"""`trivium conformance`: rows, JSON, exit codes."""

from __future__ import annotations

import json

import pytest

from trivium import conformance
from trivium.cli import main
from trivium.conformance import Report, Row

FAILED = Report("chip", "chip 0", (Row("operators", "add", "passed"), Row("operators", "mul", "failed", "off by one")))


def test_a_backend_is_judged_and_reported(capsys):
    assert main(["conformance", "reference", "--area", "sampler", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["backend"] == "reference" and found["failed"] == 0 and found["passed"] == len(found["rows"]) > 5
    assert main(["conformance", "reference", "--area", "sampler"]) == 0
    assert "passed" in capsys.readouterr().out


def test_a_failure_is_told_at_once_and_is_code_1(monkeypatch, capsys):
    def judge(name, options, *, areas, progress):
        assert (name, options, areas) == ("chip", {"isa": "portable", "threads": 2, "tile": 8, "mode": "fast"}, None)
        for row in FAILED.rows:
            progress(row)
        return FAILED

    monkeypatch.setattr(conformance, "run_conformance", judge)
    flags = ["--isa", "portable", "--threads", "2", "--option", "tile=8", "--option", "mode=fast"]
    assert main(["conformance", "chip", *flags, "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["failed"] == 1 and err == "failed: operators mul: off by one\n"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["referense"], "did you mean 'reference'"),
        (["reference", "--area", "sampling"], "sampler"),
        (["reference", "--isa", "x"], "isa"),
    ],
)
def test_what_is_not_there_is_one_line_and_code_2(argv, words, capsys):
    assert main(["conformance", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and words in err
