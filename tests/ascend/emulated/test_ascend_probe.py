"""What a machine says that has no NPU, or has torch-npu without what it needs: one line, and torch for everybody else."""

from __future__ import annotations

import subprocess
import sys

from trivium_ascend import plugin
from trivium_ascend.chips import CHIPS, OTHER, chip_of


def run(code, **environment):
    """What a fresh process prints that has torch-npu and no CANN."""
    import os

    cleared = {k: v for k, v in os.environ.items() if k not in ("TORCH_DEVICE_BACKEND_AUTOLOAD", "LD_LIBRARY_PATH")}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**cleared, **environment})
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_without_cann_one_line_says_so_and_torch_still_works():
    out = run(
        "import os, trivium\n"
        "before = dict(os.environ)\n"
        "from trivium.plugin import find_backends\n"
        "found = {s.name: s for s in find_backends()}\n"
        "assert dict(os.environ) == before\n"
        "print(found['ascend'].reason)\n"
        "import torch; print(found['torch'].devices[0].name, int(torch.ones(3).sum()))\n"
    )
    reason, rest = out.strip().splitlines()
    assert "set_env.sh" in reason or "not installed" in reason
    assert rest == "cpu 3"


def test_an_install_of_other_versions_is_named(monkeypatch):
    monkeypatch.setattr(plugin, "_version", lambda name: {"torch": "2.13.0+cpu", "torch-npu": "2.12.0.post3"}[name])
    assert plugin.unavailable() == "torch-npu 2.12.0.post3 was built for torch 2.12; torch is 2.13.0+cpu"
    monkeypatch.setattr(plugin, "_version", lambda name: "")
    assert plugin.unavailable() == "torch and torch-npu not installed: pip install trivium[ascend]"


def test_a_driver_that_is_not_there_is_named(npu, monkeypatch):
    import torch

    monkeypatch.setattr(torch.npu, "device_count", lambda: 0)
    found = plugin.AscendBackend().probe()
    assert not found.devices and "sees no device: is the driver loaded" in found.reason


def test_devices_say_their_chip(npu):
    first, *_ = plugin.AscendBackend().probe().devices
    assert first.name == "npu:0" and first.details["soc"].startswith("Ascend910B")
    assert "Atlas A2" in first.details["about"]


def test_every_chip_is_found_by_its_devices_names():
    names = {
        "Ascend310P3": "310P",
        "Ascend910B1": "910B",
        "Ascend910B4-1": "910B",
        "Ascend910_9391": "910C",
        "Ascend950PR_9589": "950",
    }
    assert {name: chip_of(name).name for name in names} == names
    assert chip_of("Ascend910A") is OTHER and not OTHER.operators


def test_what_a_chip_lacks_is_a_reason_and_falls_to_the_next_kernel():
    """On the inference card no attention operator is used: plain torch runs, and `explain` can say why."""
    from trivium_ascend.kernels import kernels_for

    by_name = {kernel.name: kernel for kernel in kernels_for(CHIPS["310P"])}
    attention = by_name["npu_fused_infer_attention_score_v2 (TND)"]
    assert attention.supports(None) == "Atlas inference (310P) has no npu_fused_infer_attention_score_v2"
    can = plugin.AscendBackend().capabilities(plugin.Device(0, "npu:0", 0, {"soc": "Ascend310P3"}))
    assert can.dtypes == ("float16", "float32") and not can.graph_capture
    assert can.unsupported["bfloat16"] == "Atlas inference (310P) has no bfloat16"


def test_explain_names_the_operators_and_what_would_be_next(npu, tmp_path, capsys):
    from tiny_checkpoints import make_checkpoint

    from trivium.cli import main

    folder = make_checkpoint(tmp_path / "llama", "llama", head_dim=64)
    assert main(["explain", str(folder), "--backend", "ascend", "--json"]) == 0
    out = capsys.readouterr().out
    assert "npu_fused_infer_attention_score_v2 (BSH)" in out
    assert "the layout TND takes heads of 128 numbers, not 64" in out
    assert "npu_add_rms_norm" in out and "linear, npu_swiglu" in out and "npu_mrope, npu_scatter_pa_kv_cache" in out
