"""Which provider a session runs on, and what is said of CUDA devices; onnxruntime's own surface stands in where there is no GPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from trivium.conformance.kit import collect_checks
from trivium.conformance.lab import Lab
from trivium.errors import BackendUnavailableError, UnsupportedError
from trivium.plugin import Device

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")

import onnxruntime
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
    assert "has cuda:0, cuda:1, but" in about_cuda()


def test_where_none_is_listed_the_first_is_tried_and_no_other(provider):
    opening = provider(0)
    assert cuda_devices() == (("cuda:0",), "")
    assert opening.asked == [([1], np.float16, "cuda", 0)]


def test_a_library_that_does_not_load_gives_its_reason_and_the_cpu_stays(provider):
    provider(0, "libcublasLt.so.13: cannot open shared object file")
    [device] = OnnxBackend().probe().devices
    assert device.name == "cpu" and "libcublasLt.so.13" in device.details["cuda"]
    assert OnnxBackend().capabilities(device).unsupported["cuda"] == device.details["cuda"]


def test_a_cuda_device_is_never_opened_as_the_cpu(provider):
    provider(1)
    assert [d.name for d in OnnxBackend().probe().devices] == ["cpu"]
    with pytest.raises(UnsupportedError, match=r"cuda:0.*no lowering.*float16.*onnxruntime:cpu"):
        OnnxBackend().open(Device(1, "cuda:0"), {})


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
    [cache] = [i.description for i in schema.inputs if i.name == "key_cache"]
    assert "(num_blocks, block_size, kv_num_heads, cache_head_size)" in cache
    held = {k.provider for k in state.get_all_opkernel_def() if k.op_name == "PagedAttention"}
    assert CPU not in held
