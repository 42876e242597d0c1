"""Pages in OpenVINO's layouts, packed weights, options, and what stays small in a compiled model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trivium.errors import InvalidRequestError, UnsupportedError
from trivium.plugin import Device, resolve
from trivium_openvino.pages import decode, encode
from trivium_openvino.plugin import OpenVinoBackend

ov = pytest.importorskip("openvino")


def quantised(rng: np.random.Generator, rows: int, width: int, offset: float) -> Any:
    """Rows as OpenVINO's kernel makes them: scale = (max - min) / 255, zero point = -min / scale, nearest integer."""
    x = rng.standard_normal((rows, width), dtype=np.float32) * np.exp(rng.normal(0, 2, (rows, 1))).astype(np.float32)
    x += np.float32(offset) * np.abs(x).max(axis=1, keepdims=True)
    low, high = x.min(axis=1, keepdims=True), x.max(axis=1, keepdims=True)
    scale = ((high - low) / np.float32(255)).astype(np.float32)
    zero = (-low / scale).astype(np.float32)
    whole = np.clip(np.rint(x * (np.float32(1) / scale) + zero), 0, 255).astype(np.uint8)
    return np.concatenate([scale.view(np.uint8), zero.view(np.uint8), whole], axis=1)


@pytest.mark.parametrize("width", [8, 64, 128])
@pytest.mark.parametrize("offset", [0.0, 0.5, -0.8])
def test_numbers_of_u8_rows_become_the_same_numbers_again(width: int, offset: float) -> None:
    rows = quantised(np.random.default_rng(width), 3000, width, offset)
    numbers = decode(rows, "u8")
    assert np.array_equal(decode(encode(numbers, "u8"), "u8"), numbers)


def test_other_numbers_are_kept_within_half_a_step() -> None:
    x = np.random.default_rng(0).standard_normal((200, 64), dtype=np.float32)
    step = (x.max(axis=1) - x.min(axis=1)) / 255
    assert (np.abs(decode(encode(x, "u8"), "u8") - x).max(axis=1) <= step * 0.5001).all()
    assert np.array_equal(decode(encode(np.full((2, 64), 3.0, np.float32), "u8"), "u8").round(3), np.full((2, 64), 3.0))


def test_bfloat16_rows_round_to_even() -> None:
    x = np.array([1.0 + 2**-8, 1.0 + 3 * 2**-8, -2.5], np.float32)
    assert decode(encode(x, "bfloat16"), "bfloat16").tolist() == [1.0, 1.015625, -2.5]


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"threads": 0}, InvalidRequestError, "positive whole number"),
        ({"hint": "fast"}, InvalidRequestError, "latency or throughput"),
        ({"dtype": "float16"}, UnsupportedError, "float32 or bfloat16"),
        ({"speed": 1}, InvalidRequestError, "no option speed"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(options: dict[str, Any], error: Any, match: str) -> None:
    backend, device = OpenVinoBackend(), OpenVinoBackend().probe().devices[0]
    with pytest.raises(error, match=match):
        backend.open(device, options)


def test_a_device_whose_page_layout_is_unknown_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedError, match="lays out its pages; openvino:CPU is possible"):
        OpenVinoBackend().open(Device(1, "GPU.0", 0, {"kind": "GPU"}), {})


def test_pages_that_do_not_go_with_the_activations_are_refused_at_the_door(tmp_path: Path) -> None:
    from tiny_checkpoints import make_checkpoint
    from trivium import LLM

    folder = make_checkpoint(tmp_path / "m", "llama")
    with pytest.raises(InvalidRequestError, match="attends over u8 or float32 or float16 pages when it computes in float32"):
        LLM(folder, backend="openvino", dtype="float32", kv_dtype="bfloat16", progress=False)


def test_a_device_is_asked_for_by_openvinos_name() -> None:
    assert resolve("openvino:CPU")[1].name == "CPU"


def test_finding_the_plugin_imports_no_openvino() -> None:
    load = "import sys; from trivium.plugin import find_plugins; find_plugins()['openvino'].load()"
    script = f"{load}; assert 'openvino' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("format", "kept"), [("int4", "i4"), ("int4_g64", "i4"), ("int4_asym", "u4"), ("int8", "i8"), ("int8_channel", "i8")]
)
def test_weights_stay_small_in_the_compiled_model(format: str, kept: str) -> None:
    from openvino import opset15 as ops
    from trivium.ops import Weight
    from trivium_openvino.weights import load

    numbers = np.random.default_rng(0).standard_normal((64, 128), dtype=np.float32)
    resident = load(Weight("w", numbers.shape, "float32", numbers, lambda data: data), format)
    x = ops.parameter([-1, 128], np.float32)
    y = ops.matmul(x, resident.node(lambda array: None), False, True)
    compiled = ov.Core().compile_model(ov.Model([ops.result(y)], [x], "m"), "CPU")
    inputs = [n for n in compiled.get_runtime_model().get_ops() if n.get_rt_info()["layerType"].astype(str) == "FullyConnected"]
    assert inputs[0].input(1).get_element_type().get_type_name() == kept


def test_the_kit_finds_nothing_wrong() -> None:
    from trivium.conformance import run_conformance

    report = run_conformance("openvino", areas=["rules", "fusions", "pages", "sampler"])
    assert report.ok, str(report)


def test_a_probe_reports_to_nobody_and_forks_nothing():
    script = (
        "import os, sys, threading\n"
        "os.register_at_fork(before=lambda: print('forked'))\n"
        "from trivium_openvino.plugin import OpenVinoBackend\n"
        "assert OpenVinoBackend().probe().devices\n"
        "print('openvino_telemetry' in sys.modules, threading.active_count())\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    made = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert made.stdout == "False 1\n"
