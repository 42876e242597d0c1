"""Torch is imported whatever an extension does that torch would load by itself."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

pytest.importorskip("torch")

BROKEN = """
import importlib.metadata as m, os, sys
class Extension:
    def __init__(self, name, do): self.name, self.load = name, lambda: do
loaded = []
def fails(): raise ImportError("libvendor.so: no such file")
found = [Extension("broken", fails), Extension("torch_npu", fails), Extension("fine", lambda: loaded.append(1))]
import trivium_torch.loading as loading
m.entry_points = lambda group: found if group == "torch.backends" else []
"""


def run(code, **environment):
    import os

    cleared = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    ran = subprocess.run([sys.executable, "-c", BROKEN + code], capture_output=True, text=True, env={**cleared, **environment})
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_a_broken_extension_is_left_out_and_the_others_load():
    code = "before = dict(os.environ); loading.import_torch(); assert dict(os.environ) == before; "
    code += "print('torch' in sys.modules, loaded)"
    assert run(code) == "True [1]"


def test_nothing_is_loaded_where_the_user_has_switched_it_off():
    assert run("loading.import_torch(); print(loaded)", TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "[]"


def test_reasons_name_what_is_missing():
    code = "print([loading.load(e) for e in found])"
    broken, npu, fine = ast.literal_eval(run("loading.import_torch();" + code))
    assert broken == "ImportError: libvendor.so: no such file" and "libascendcl.so" in npu and fine == ""


@pytest.mark.parametrize("backend", ["trivium_torch.plugin.TorchBackend()", "trivium_cuda.plugin.CudaBackend(lambda: ())"])
def test_backends_that_look_for_devices_first_take_torch_from_nobody(backend):
    module = backend.rpartition(".")[0]
    pytest.importorskip(module)
    assert run(f"import {module}; {backend}.probe(); print('torch' in sys.modules, loaded)") == "True [1]"


def test_without_its_driver_the_cuda_backend_imports_no_torch():
    pytest.importorskip("trivium_cuda.plugin")
    code = "import trivium_cuda.plugin as p; p.DRIVER = 'libno-such-driver.so'; found = p.CudaBackend().probe(); "
    devices, reason, imported = ast.literal_eval(run(code + "print((found.devices, found.reason, 'torch' in sys.modules))"))
    assert devices == () and "no driver" in reason and "libno-such-driver.so" in reason and not imported
