"""Which provider a session runs on, and what is said of CUDA devices; onnxruntime's own surface stands in where there is no GPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from trivium.conformance.kit import collect_checks
from trivium.conformance.lab import Lab
from trivium.errors import BackendUnavailableError
from trivium.plugin import Device

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")

import onnxruntime
from trivium_onnxruntime import driver
from trivium_onnxruntime.plugin import OnnxBackend
from trivium_onnxruntime.providers import CPU, CUDA, about_cuda, cuda_devices, taken


class Opening:
    """OrtValue of an onnxruntime whose CUDA provider opens a device, or says why not."""

    def __init__(self, reason: str) -> None:
        self.reason, self.asked = reason, []

    def ortvalue_from_shape_and_type(self, shape, dtype, device, index):
        self.asked.append((shape, dtype, device, index))
        if self.reason:
            raise RuntimeError(self.reason)


@pytest.fixture
def provider(monkeypatch):
    """Puts an onnxruntime with a CUDA provider in place, which lists so many devices."""

    def make(listed: int, reason: str = "") -> Opening:
        opening = Opening(reason)
        devices = [SimpleNamespace(ep_name=name) for name in (CPU, *[CUDA] * listed)]
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
        monkeypatch.setattr(onnxruntime, "get_ep_devices", lambda: devices)
        monkeypatch.setattr(onnxruntime, "OrtValue", opening)
        return opening

    return make


def test_without_the_provider_its_absence_is_said_and_nothing_is_tried(monkeypatch):
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CPU])
    monkeypatch.setattr(onnxruntime, "OrtValue", None)
    [device] = OnnxBackend().probe().devices
    assert device.name == "cpu" and "no CUDA provider" in device.details["cuda"] and "onnxruntime-gpu" in device.details["cuda"]


def test_listed_devices_are_named_without_opening_any(provider):
    opening = provider(2)
    assert cuda_devices() == (("cuda:0", "cuda:1"), "") and not opening.asked
    assert "has cuda:0, cuda:1; nothing of this plugin was ever run on a GPU" in about_cuda()


def test_where_none_is_listed_the_first_is_tried_and_the_driver_counts(provider, monkeypatch):
    opening = provider(0)
    monkeypatch.setattr(driver, "count", lambda: 3)
    assert cuda_devices() == (("cuda:0", "cuda:1", "cuda:2"), "")
    assert opening.asked == [([1], np.float16, "cuda", 0)]


def test_a_library_that_does_not_load_gives_its_reason_and_the_cpu_stays(provider):
    provider(0, "libcublasLt.so.13: cannot open shared object file")
    [device] = OnnxBackend().probe().devices
    assert device.name == "cpu" and "libcublasLt.so.13" in device.details["cuda"]
    assert OnnxBackend().capabilities(device).unsupported["cuda"] == device.details["cuda"]


def test_devices_follow_the_cpu_and_say_that_none_was_ever_tried(provider, monkeypatch):
    provider(2)
    monkeypatch.setattr(driver, "total_bytes", lambda index: 80 << 30)
    backend = OnnxBackend()
    first, *cards = backend.probe().devices
    assert first.name == "cpu" and [(d.index, d.name, d.memory_bytes) for d in cards] == [
        (1, "cuda:0", 80 << 30),
        (2, "cuda:1", 80 << 30),
    ]
    assert all("ever run on a GPU" in d.details["about"] for d in cards)
    can = backend.capabilities(cards[0])
    assert can.dtypes == can.kv_dtypes == ("float16",) and "ever run on a GPU" in can.unsupported["a run on a card"]


def test_an_onnxruntime_that_is_too_old_for_the_cpu_may_have_devices_of_cuda(provider, monkeypatch):
    provider(1)
    monkeypatch.setattr(driver, "total_bytes", lambda index: 0)
    monkeypatch.setattr(onnxruntime, "__version__", "1.31.1")
    [card] = OnnxBackend().probe().devices
    assert (card.index, card.name) == (1, "cuda:0") and "1.31.1 is too old for its CPU provider" in card.details["cpu"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CPU])
    probe = OnnxBackend().probe()
    assert not probe.devices and "too old" in probe.reason and "onnxruntime-gpu" in probe.reason
    monkeypatch.setattr(onnxruntime, "__version__", "1.30.0")
    provider(1)
    assert not OnnxBackend().probe().devices


def test_a_driver_that_says_nothing_leaves_the_memory_unknown(provider, monkeypatch):
    provider(1)
    monkeypatch.setattr(driver, "LIBRARY", "libno-such-driver.so.1")
    driver._library.cache_clear()
    assert [d.memory_bytes for d in OnnxBackend().probe().devices[1:]] == [0]
    with pytest.raises(BackendUnavailableError, match="libno-such-driver"):
        driver.count()


def test_a_device_that_the_provider_lacks_is_not_opened(provider, monkeypatch):
    provider(1)
    with pytest.raises(BackendUnavailableError, match="has cuda:0, not cuda:1"):
        OnnxBackend().open(Device(2, "cuda:1"), {})
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CPU])
    with pytest.raises(BackendUnavailableError, match="onnxruntime-gpu"):
        OnnxBackend().open(Device(1, "cuda:0"), {})


class Driver:
    """CUDA's driver library with two devices; records what is called."""

    def __init__(self, failing=""):
        self.failing, self.calls = failing, []

    def __getattr__(self, name):
        def call(*args):
            self.calls.append(name)
            for pointer, number in zip(
                args, {"cuDeviceGetCount": (2,), "cuMemGetInfo_v2": (5, 9), "cuDeviceTotalMem_v2": (9,)}.get(name, ())
            ):
                pointer._obj.value = number
            return 100 if name == self.failing else 0

        return call


def test_the_driver_counts_devices_and_leaves_no_context_behind(monkeypatch):
    library = Driver()
    monkeypatch.setattr(driver, "_library", lambda: library)
    assert (driver.count(), driver.total_bytes(0), driver.free_bytes(1)) == (2, 9, 5)
    kept = [name for name in library.calls if "Ctx" in name]
    assert kept == ["cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2"]


def test_a_failing_driver_is_named_and_the_context_is_given_back(monkeypatch):
    library = Driver("cuMemGetInfo_v2")
    monkeypatch.setattr(driver, "_library", lambda: library)
    with pytest.raises(BackendUnavailableError, match="cuMemGetInfo_v2 with error 100"):
        driver.free_bytes(0)
    assert library.calls[-2:] == ["cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2"]


@pytest.mark.parametrize("found", [[CPU], [], [CPU, CUDA]])
def test_a_session_on_another_provider_is_refused(found):
    class Session:
        def get_providers(self):
            return found

    with pytest.raises(BackendUnavailableError, match=CUDA):
        taken(Session(), CUDA)


def test_every_session_is_asked_for_the_cpu_alone_and_checked(monkeypatch):
    from trivium_onnxruntime import session as module

    asked, real = [], onnxruntime.InferenceSession

    def recording(model, settings, providers):
        asked.append(providers)
        return real(model, settings, providers=providers)

    backend = OnnxBackend()
    device = backend.probe().devices[0]
    monkeypatch.setattr(onnxruntime, "InferenceSession", recording)
    monkeypatch.setattr(module, "taken", lambda made, provider: asked.append(provider) or taken(made, provider))
    lab = Lab(backend, device, backend.capabilities(device), backend.kernels(device), {})
    [check, *_] = collect_checks(lab, ["fusions"])
    assert check.run().status == "passed"
    assert asked and asked == [[CPU], CPU] * (len(asked) // 2)


def test_paged_attention_has_the_schema_that_the_readme_names_and_no_kernel_on_the_cpu():
    state = onnxruntime.capi.onnxruntime_pybind11_state
    [schema] = [s for s in state.get_all_operator_schema() if (s.domain, s.name) == ("com.microsoft", "PagedAttention")]
    allowed = {t.type_param_str: set(t.allowed_type_strs) for t in schema.type_constraints}
    types = {i.name: i.typeStr for i in schema.inputs}
    assert allowed["T"] == {"tensor(float16)", "tensor(bfloat16)"} and "tensor(float)" not in allowed["T_CACHE"]
    assert {types[name] for name in ("cumulative_sequence_length", "past_seqlens", "block_table", "slot_mapping")} == {"S"}
    assert allowed["S"] == {"tensor(int32)"}
    assert [i.name for i in schema.inputs][10:12] == ["slot_mapping", "head_sink"] and schema.inputs[
        16
    ].name == "attention_metadata"
    [cache] = [i.description for i in schema.inputs if i.name == "key_cache"]
    assert "(num_blocks, block_size, kv_num_heads, cache_head_size)" in cache
    held = {k.provider for k in state.get_all_opkernel_def() if k.op_name == "PagedAttention"}
    assert CPU not in held
