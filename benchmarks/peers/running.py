"""Child processes on a machine that is quiet first: one script, one JSON line, a limit of time."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

QUIET = 0.12
"""Share of the processors that may be busy before a measurement starts."""


def processor_times(text: str) -> tuple[int, int]:
    """(busy, all) of the first line of /proc/stat, in ticks."""
    user, nice, system, idle, wait, *_ = map(int, text.split("\n")[0].split()[1:])
    return user + nice + system, user + nice + system + idle + wait


def busy_share(seconds: float = 1.0) -> float:
    """Share of all processors' time that something ran in the next so many seconds."""
    before = processor_times(Path("/proc/stat").read_text())
    time.sleep(seconds)
    busy, everything = (a - b for a, b in zip(processor_times(Path("/proc/stat").read_text()), before))
    return busy / max(everything, 1)


def wait_until_quiet(patience: float) -> float:
    """Waits so many seconds at most; returns the busy share that was seen last."""
    until = time.monotonic() + patience
    while (share := busy_share()) >= QUIET and time.monotonic() < until:
        pass
    return share


class Failed(Exception):
    """A child that gave no figures, and why."""


def last_json(output: str) -> dict[str, Any]:
    """The last line that begins with JSON; raises Failed."""
    lines = [line[5:] for line in output.splitlines() if line.startswith("JSON ")]
    if not lines:
        raise Failed("no figures were printed")
    return json.loads(lines[-1])


def figures(command: Sequence[str], folder: Path, timeout: float, more: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Runs a script that prints its figures; whatever it started ends with it. Raises Failed with the end of what it said."""
    quietly = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment = {**os.environ, **quietly, **(more or {}), "BENCH_T0": f"{time.time():.6f}"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # or every process compiles everybody's modules again
    # others on the machine should not show in the figures, unless the caller gives way to them
    priority = ["nice", "-n", "-15"] if os.geteuid() == 0 and os.nice(0) <= 0 and shutil.which("nice") else []
    with subprocess.Popen(
        [*priority, *command], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", stdin=subprocess.DEVNULL, start_new_session=True,
    ) as child:  # fmt: skip
        try:
            output, _ = child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise Failed(f"took longer than {timeout:.0f} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    try:
        return last_json(output)
    except (Failed, ValueError) as e:
        said = " | ".join(output.strip().splitlines()[-3:])[-400:]
        raise Failed(f"{e}; exit status {child.returncode}: {said}") from e
