"""benchmarks/soak_server.py: after hundreds of clients of every bad kind the server is as it was before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "soak_server.py"
pytest.importorskip("uvicorn")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads what a process holds from /proc")
@pytest.mark.parametrize("requests", [pytest.param(120, marks=pytest.mark.http), pytest.param(1000, marks=pytest.mark.slow)])
def test_nothing_is_left_of_clients_that_misbehave(requests):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    line = [sys.executable, str(SCRIPT), "--requests", str(requests)]
    found = json.loads(subprocess.run(line, env=env, stdout=subprocess.PIPE, check=True, text=True).stdout)
    assert found["requests"] == requests == sum(found["ends"].values())
    assert found["wrong_answers"] == found["server_errors"] == 0
    assert set(found["left"].values()) == {0}
    assert found["growth"] < max(found["memory"]) / 10
    for kind in ("whole 200", "streamed 200", "slow 200", "leaves left", "batch left", "half left", "headers 431", "stranger 401"):
        assert found["ends"][kind] > 0
