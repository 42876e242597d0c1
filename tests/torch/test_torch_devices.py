"""Which devices are found and how they are asked for; a vendor's device in one subclass; nothing imports torch too early."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fake_plugins import install

from trivium.conformance import run_conformance
from trivium.conformance.lab import as_weight
from trivium.errors import BackendNotFoundError, CapacityError, InvalidRequestError, UnsupportedError
from trivium.ops import Group, KVSpec, PagedKV
from trivium.plugin import resolve
from trivium_torch.plugin import TorchBackend

torch = pytest.importorskip("torch")


@pytest.fixture
def session():
    backend, device = resolve("torch:cpu")
    session = backend.open(device, {})
    yield session
    session.close()


def test_the_core_and_the_list_of_plugins_import_no_torch():
    code = "import sys, trivium, trivium_torch.plugin; from trivium.plugin import find_plugins; find_plugins()['torch'].load()"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print('torch' in sys.modules)"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_without_torch_the_probe_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    probe = TorchBackend().probe()
    assert probe.devices == () and probe.reason == "torch is not installed: pip install trivium[torch]"


def test_a_torch_that_can_not_be_loaded_says_why(monkeypatch):
    class Broken:
        def find_spec(self, name, *_):
            if name == "torch":
                raise OSError("libc10.so: cannot open shared object file")

    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    assert "libc10.so" in TorchBackend().probe().reason


def test_the_processor_is_always_there():
    backend, device = resolve("torch:cpu")
    assert (backend.name, device.name) == ("torch", "cpu") and device.memory_bytes > 0


def test_accelerators_stand_first_and_are_asked_for_by_type_or_number(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr("trivium_torch.devices.about", lambda device: "a card")
    monkeypatch.setattr("trivium_torch.devices.memory_info", lambda device: (1 << 30, 1 << 34))
    assert [d.name for d in TorchBackend().probe().devices] == ["xpu:0", "xpu:1", "cpu"]
    assert [resolve(f"torch{which}")[1].name for which in ("", ":xpu", ":xpu:1", ":cpu")] == ["xpu:0", "xpu:0", "xpu:1", "cpu"]
    with pytest.raises(BackendNotFoundError, match="no device 'cuda'"):
        resolve("torch:cuda")


def test_accelerators_compute_in_bfloat16_by_default(monkeypatch):
    device = TorchBackend().probe().devices[-1]
    assert TorchBackend().capabilities(device).dtypes[0] == "float32"
    monkeypatch.setattr(TorchBackend, "torch_device", lambda self, device: "xpu:0")
    can = TorchBackend().capabilities(device)
    assert (can.dtypes[0], can.kv_dtypes[0], can.weight_formats[0].name) == ("bfloat16",) * 3


def test_a_vendor_s_device_is_the_subclass_of_the_guide_and_passes_the_kit(tmp_path, monkeypatch):
    guide = (Path(__file__).parents[2] / "docs" / "torch.md").read_text()
    source = next(block.split("```")[0] for block in guide.split("```python\n") if "class ChipBackend" in block)
    assert len(source.splitlines()) < 50
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the kit also opens it in a process of its own
    install(tmp_path, "chip", source)
    assert [d.name for d in resolve("chip")[0].probe().devices] == ["lane:0", "lane:1"]
    report = run_conformance("chip:lane:1", {"strict": True})
    assert [row for row in report.rows if row.status in ("failed", "fallback")] == []
    assert "chip linear" in next(row.detail for row in report.rows if row.name == "linear")


def test_options_are_checked_at_the_door():
    backend, device = resolve("torch:cpu")
    with pytest.raises(UnsupportedError, match=r"'float8'.*float32, bfloat16, float16"):
        backend.open(device, {"dtype": "float8"})
    for threads in (0, True, "2"):
        with pytest.raises(InvalidRequestError, match="threads"):
            backend.open(device, {"threads": threads})


def test_threads_are_torch_s_own():
    backend, device = resolve("torch:cpu")
    before = torch.get_num_threads()
    try:
        backend.open(device, {"threads": 2}).close()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_int8_weights_take_a_quarter_of_the_memory(session):
    table = np.random.default_rng(0).standard_normal((512, 256), dtype=np.float32)
    held = [session.memory().weights]
    for format in ("float32", "bfloat16", "int8"):
        session.load(as_weight(f"in {format}", table), format)
        held.append(session.memory().weights)
    assert np.diff(held).tolist() == [4 * table.size, 2 * table.size, table.size + 4 * 512]


def test_a_tied_matrix_is_kept_once_and_slots_that_are_written_are_not_shared(session):
    table, slots = np.ones((8, 16), np.float32), np.zeros((2, 3, 4), np.float32)
    assert session.load(as_weight("embed", table), "float32") is session.load(as_weight("head", table), "float32")
    first, second = (session.load(as_weight(name, slots), "float32") for name in "ab")
    session.assign(first, 1, np.ones((3, 4), np.float32))
    assert session.read_weight(first).sum() == 12 and session.read_weight(second).sum() == 0


def test_an_unknown_weight_format_is_refused_by_name(session):
    with pytest.raises(UnsupportedError, match="w can't be held as int3"):
        session.load(as_weight("w", np.ones((2, 2), np.float32)), "int3")


def test_memory_that_the_device_does_not_give_is_a_capacity_error(session, monkeypatch):
    def refuse(shape, dtype):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(session, "allocate", refuse)
    spec = KVSpec(16, "float32", (Group(PagedKV(2, 16), (0,)),))
    with pytest.raises(CapacityError, match=f"3 pages of {session.page_bytes(spec)} bytes"):
        session.kv_store(spec, 3)
