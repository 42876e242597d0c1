"""torch-npu is installed and there is no CANN: trivium says so in one line, and nothing else is the worse for it.

Plain `import torch` fails in such an environment unless TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set; trivium must not depend on that.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from wheel_schemas import installed

if installed() is None:
    pytest.skip("torch-npu is not installed", allow_module_level=True)
pytest.importorskip("trivium_ascend")


def run(*command: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """A command as a user would give it: without the settings of this test run."""
    environment = {k: v for k, v in os.environ.items() if k not in ("TORCH_DEVICE_BACKEND_AUTOLOAD", "TASK_QUEUE_ENABLE")}
    environment = {**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **changes}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def trivium(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    main = "import sys; sys.argv[0] = 'trivium'; from trivium.cli import main; sys.exit(main())"
    return run(sys.executable, "-c", main, *arguments, **changes)


@pytest.fixture(scope="module", autouse=True)
def no_cann() -> None:
    """These are tests of a machine without."""
    if run(sys.executable, "-c", "import ctypes; ctypes.CDLL('libascendcl.so')").returncode == 0:
        pytest.skip("there is a CANN here")


def rows(output: str) -> dict[str, str]:
    """The lines of `trivium backends` by the backend's name."""
    return {line.split()[0]: line for line in output.splitlines()[1:]}


def test_importing_trivium_opens_neither_torch_nor_torch_npu():
    code = "import sys, trivium; print([m for m in ('torch', 'torch_npu', 'trivium_ascend') if m in sys.modules])"
    ran = run(sys.executable, "-c", code)
    assert (ran.returncode, ran.stdout.strip()) == (0, "[]"), ran.stderr


def test_the_missing_cann_is_one_line_and_other_backends_have_their_devices():
    ran = trivium("backends")
    assert ran.returncode == 0, ran.stderr
    found = rows(ran.stdout)
    assert "none: CANN is not on the library path" in found["ascend"] and "set_env.sh" in found["ascend"]
    assert "0: numpy" in found["reference"] and "0: cpu" in found["torch"]
    assert sum("CANN" in line for line in ran.stdout.splitlines()) == 1 and "Traceback" not in ran.stdout + ran.stderr


def test_a_cann_that_is_broken_is_one_line_too(tmp_path: Path):
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to make a library without functions")
    (tmp_path / "empty.c").write_text("")
    library = tmp_path / "libascendcl.so"
    subprocess.run(["gcc", "-shared", "-Wl,-soname,libascendcl.so", tmp_path / "empty.c", "-o", library], check=True)
    ran = trivium("backends", LD_LIBRARY_PATH=str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    found = rows(ran.stdout)
    assert "none:" in found["ascend"] and "0: cpu" in found["torch"], ran.stdout
    assert "Traceback" not in ran.stdout + ran.stderr


def test_asking_for_the_backend_by_name_is_an_error_with_the_reason(tmp_path: Path):
    ran = trivium("run", str(tmp_path), "hello", "--backend", "ascend")
    [line] = ran.stderr.strip().splitlines()
    assert ran.returncode != 0 and "backend 'ascend' has no device here: CANN is not on the library path" in line


def test_torch_itself_is_open_for_the_backend_of_plain_torch():
    code = (
        "from trivium_torch.plugin import TorchBackend; found = TorchBackend().probe(); import torch, sys;"
        "print([d.name for d in found.devices], 'torch_npu' in sys.modules)"
    )
    ran = run(sys.executable, "-c", code)
    assert (ran.returncode, ran.stdout.strip()) == (0, "['cpu'] False"), ran.stderr
