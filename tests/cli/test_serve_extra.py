"""`trivium serve` and `trivium bench serve` where the server's own packages are not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("words", [["serve", "tiny"], ["bench", "serve"]], ids=" ".join)
def test_a_missing_extra_is_named_in_one_line(words):
    code = f"import sys; sys.modules['msgspec'] = None; from trivium.cli import main; sys.exit(main({words}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "msgspec is missing" in done.stderr and "trivium[server]" in done.stderr
