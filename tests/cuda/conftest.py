"""Where there is no Triton, nothing that imports it is looked at: tests/cuda/run.sh makes an environment that has it."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("triton") else ["interpreter/*", "aot/*", "emulated/*"]
