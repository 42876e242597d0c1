"""The torch backend passes the kit, with and without a dtype of 16 bits, and runs nothing on the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from trivium.conformance import AREAS, run_conformance

torch = pytest.importorskip("torch")


def judged(report):
    return {(row.area, row.name): row.detail for row in report.rows if row.status in ("failed", "fallback")}


@pytest.mark.parametrize("area", AREAS)
def test_float32(area):
    report = run_conformance("torch:cpu", {"strict": True}, areas=[area])
    assert judged(report) == {} and report.count("passed")


@pytest.mark.parametrize(("dtype", "area"), [("bfloat16", "operators"), ("bfloat16", "fusions"), ("float16", "operators")])
def test_sixteen_bits(dtype, area):
    report = run_conformance("torch:cpu", {"strict": True, "dtype": dtype}, areas=[area])
    assert judged(report) == {} and report.count("passed")


def test_on_one_thread_sixteen_bits_are_the_same_in_any_batch():
    info = Path("/proc/cpuinfo")
    fp16 = info.exists() and "avx512_fp16" in info.read_text()
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or torch.cpu._is_amx_tile_supported() or fp16:
        pytest.skip("torch multiplies matrices of 16 bits another way on this processor")
    threads = torch.get_num_threads()
    try:
        report = run_conformance("torch:cpu", {"strict": True, "dtype": "bfloat16", "threads": 1}, areas=["models"])
    finally:
        torch.set_num_threads(threads)
    assert judged(report) == {} and report.count("passed")
