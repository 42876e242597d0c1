"""Makes this process one with emulated NPUs."""

from __future__ import annotations

import atexit
import ctypes as c
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from emulated_cann.chips import VARIANTS, chip
from emulated_cann.silicon import has_cann

# Torch must not open torch-npu by itself before its libraries are there, and torch-npu must not queue operators on a thread of its
# own: views of device memory would race with it. Both are read at import.
SETTINGS = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "TASK_QUEUE_ENABLE": "0"}
BUILT = "EMULATED_CANN_LIBRARIES"  # where this process built them, for its children
_kept: list[Any] = []


def available() -> str:
    """Empty, or why this process can't have emulated NPUs."""
    if importlib.util.find_spec("torch_npu") is None:
        return "torch-npu is not installed"
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        return "the emulated CANN is for x86-64 Linux"
    return ""


@cache
def load() -> Any:
    """Builds and opens the libraries, imports torch_npu and hands plain torch operations to the CPU. Returns the Device."""
    os.environ.update(SETTINGS)
    chip()
    import torch
    from emulated_cann import aten, device, graphs, operators, runtime  # noqa: F401
    from emulated_cann.build import build, open_all
    from emulated_cann.registry import FUNCTIONS, OPERATORS

    if has_cann():
        raise RuntimeError("there is a CANN here: the emulation would stand in its way")
    if "torch_npu" in sys.modules:
        raise RuntimeError("torch_npu was imported before the emulated CANN")
    operator_names, function_names = list(OPERATORS), list(FUNCTIONS)
    spec = importlib.util.find_spec("torch_npu")
    assert spec is not None and spec.origin is not None
    folder = Path(os.environ.get(BUILT) or tempfile.mkdtemp(prefix="emulated-cann-"))
    if BUILT not in os.environ:
        build(folder, Path(torch.__file__).parent, Path(spec.origin).parent, operator_names, function_names)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ[BUILT] = str(folder)
    library = open_all(folder)
    fill_table(library, operator_names, function_names)
    device.DEVICE.fault = c.addressof(c.c_char.in_dll(library, "emulated_fault"))
    device.DEVICE.release = library.emulated_release
    library.emulated_release.restype = None
    import torch_npu  # noqa: F401

    aten.install()
    return device.DEVICE


def fill_table(library: c.CDLL, operator_names: list[str], function_names: list[str]) -> None:
    from emulated_cann import runtime
    from emulated_cann.objects import ARGUMENTS
    from emulated_cann.registry import FUNCTIONS, OPERATORS

    callbacks: list[Any] = [c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_uint64, c.c_void_p, c.c_void_p)(runtime.phase_two)]
    for name in operator_names:
        letters = [ARGUMENTS[letter] for _, letter in OPERATORS[name].parameters]
        prototype = c.CFUNCTYPE(c.c_int, *(ctype for ctype, _ in letters), c.c_void_p, c.c_void_p)
        callbacks.append(prototype(runtime.phase_one(OPERATORS[name], [convert for _, convert in letters])))
    for name in function_names:
        callbacks.append(c.CFUNCTYPE(c.c_int, *FUNCTIONS[name].types)(FUNCTIONS[name].body))
    table = (c.c_void_p * len(callbacks)).in_dll(library, "emulated_table")
    for slot, callback in enumerate(callbacks):
        table[slot] = c.cast(callback, c.c_void_p).value
    _kept.extend((library, callbacks))


def on_chip(name: str, code: str, **settings: str) -> str:
    """Runs Python source in a process with that chip ("310P", "910B", "910C" or "950"); what it prints (and not what libraries
    do). `npu`, `torch` and `torch_npu` are defined in it; settings are further environment variables. RuntimeError if it fails."""
    with tempfile.NamedTemporaryFile("r", suffix=".txt") as printed:
        environment = {**os.environ, **SETTINGS, "EMULATED_SOC": VARIANTS[name], **settings}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), *sys.path)))
        opening = f"import sys; sys.stdout = open({printed.name!r}, 'w')"
        source = f"from emulated_cann import *\nnpu = load()\nimport torch, torch_npu\n{opening}\n{code}"
        ran = subprocess.run([sys.executable, "-W", "ignore", "-c", source], capture_output=True, text=True, env=environment)
        if ran.returncode:
            raise RuntimeError(f"on {name}: exit status {ran.returncode}\n{ran.stdout}{ran.stderr}")
        return printed.read()
