"""The kit as a pytest plugin, and the support matrix."""

from __future__ import annotations

import os
import subprocess
import sys

from trivium.conformance import Report, Row
from trivium.conformance.matrix import judge, main, render
from trivium.errors import PluginError

# The plugin by its module: an installed trivium would offer it a second time, under its entry point's name.
ENVIRONMENT = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
PYTEST = [sys.executable, "-m", "pytest", "-p", "trivium.conformance.pytest_plugin", "-p", "no:cacheprovider"]


def test_each_check_is_a_test(tmp_path):
    command = [*PYTEST, "--trivium-backend=reference", "-k", "operators or pages", "-v", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "reference:operators:paged_attention PASSED" in done.stdout
    assert "reference:operators:all_reduce SKIPPED" in done.stdout
    assert "reference:models" not in done.stdout


def test_a_word_of_k_chooses_rows_and_serving_is_among_them(tmp_path):
    command = [*PYTEST, "--trivium-backend=reference", "-k", "cancelled", "-v", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "reference:serving:cancelled while prefilling PASSED" in done.stdout and "2 passed" in done.stdout


def test_an_unknown_backend_stops_the_run(tmp_path):
    command = [*PYTEST, "--trivium-backend=refrence", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 4 and "did you mean 'reference'" in done.stderr and "INTERNALERROR" not in done.stdout


def test_the_matrix_has_a_column_for_each_backend():
    one = Report("one", "d", (Row("operators", "add", "passed"), Row("operators", "mul", "fallback"), Row("pages", "p", "failed")))
    two = Report("two", "d", (Row("operators", "add", "skipped"),))
    page = render([one, two])
    assert "| operators | one | two |\n| --- | --- | --- |\n| add | yes | - |\n| mul | on the host | - |" in page
    assert "| p | FAILS | - |" in page


def test_the_matrix_says_why_a_backend_was_not_judged(monkeypatch, tmp_path):
    def fails(name):
        if name == "broken":
            raise PluginError("capabilities() says page_sizes = (): it must list something")
        return Report(name, "d", (Row("operators", "add", "passed"),))

    monkeypatch.setattr("trivium.conformance.matrix.run_conformance", fails)
    page = render([judge("right"), judge("broken")])
    assert "broken was not judged: capabilities() says page_sizes" in page and "| operators | right |" in page
    assert main(["right", "broken", "-o", str(tmp_path / "m.md")]) == 1
    assert main(["right", "-o", str(tmp_path / "m.md")]) == 0


def test_the_plugin_costs_other_test_runs_next_to_nothing():
    code = "import sys, trivium.conformance.pytest_plugin; print('numpy' in sys.modules, 'trivium.engine' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
