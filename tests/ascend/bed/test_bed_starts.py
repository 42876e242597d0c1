"""The bed itself: npu tensors, the call log, un-emulated calls, memory, devices, chips, and a device that is late."""

from __future__ import annotations

import pytest
import torch
from emulated_cann import host, late_device, on_chip, recorded


def halves(*shape: int, seed: int = 7) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half()


# ---- the log ----


def test_a_fused_operator_lands_in_its_reference_and_in_the_log(npu):
    x, gamma = halves(4, 64), halves(64)
    y, rstd = torch.ops.npu.npu_rms_norm(x.npu(), gamma.npu(), 1e-6)
    expected = torch.nn.functional.rms_norm(x.float(), (64,), gamma.float(), 1e-6)
    torch.testing.assert_close(y.cpu().float(), expected, atol=2e-3, rtol=2e-3)
    assert rstd.shape == (4, 1)
    assert npu.log.names == ["aclnnRmsNorm"]
    assert npu.log.last("aclnnRmsNorm").epsilon == 1e-6
    assert not npu.log.aten


def test_plain_torch_operations_run_on_the_device_and_are_counted(npu):
    a, b = halves(3, 5), halves(5, 2)
    y = (a.npu() @ b.npu()).float() * 2.5
    torch.testing.assert_close(y.cpu(), (a @ b).float() * 2.5)
    assert npu.log.aten["mm"] == 1 and not npu.log.names


def test_a_block_can_have_a_log_of_its_own(npu):
    x = halves(4, 64).npu()
    with recorded() as log:
        torch.ops.npu.npu_swiglu(x)
    assert log.names == ["aclnnSwiGlu"] and not npu.log.names


# ---- what is not emulated ----


def test_a_fused_operator_that_is_not_emulated_fails_with_its_name(npu):
    with pytest.raises(RuntimeError, match="aclnnGeGluV3"):
        torch.ops.npu.npu_geglu(halves(4, 64).npu())


def test_a_runtime_call_that_is_not_emulated_fails_with_its_name(npu, capfd):
    with pytest.raises(RuntimeError, match="emulated CANN has no aclopCompileAndExecute"):
        torch.ops.npu.npu_format_cast(halves(2, 16, 4, 4).npu(), 3)
    assert "emulated CANN has no aclopCompileAndExecute" in capfd.readouterr().err


# ---- memory and devices ----


def test_memory_that_nobody_wrote_holds_a_visible_pattern(npu):
    torch.npu.empty_cache()  # what is kept for reuse holds what was there before
    fresh = host(torch.empty(1 << 27, dtype=torch.uint8, device="npu"))
    assert all((fresh[at : at + 4096] == 0xCD).all() for at in (0, 1 << 26, (1 << 27) - 4096))


def test_copies_keep_strides_views_and_dtypes(npu):
    x = torch.arange(24).reshape(2, 3, 4)
    on_npu = x.npu()
    assert torch.equal(on_npu.transpose(0, 2).contiguous().cpu(), x.transpose(0, 2))
    assert torch.equal(on_npu[:, 1:, ::2].to(torch.float32).cpu(), x[:, 1:, ::2].float())
    on_npu[1, :, 2] = 7
    x[1, :, 2] = 7
    assert torch.equal(on_npu.cpu(), x)


def test_there_are_two_devices(npu):
    assert torch.npu.device_count() == 2
    x = halves(4, 64)
    second = x.to("npu:1")
    with torch.npu.device(1):
        assert torch.equal(torch.ops.npu.npu_swiglu(second).cpu(), torch.ops.npu.npu_swiglu(x.to("npu:1")).cpu())
    assert torch.equal(second.to("npu:0").cpu(), x)


def test_a_device_runs_out_of_memory(npu):
    code = """
try:
    torch.empty(1 << 28, dtype=torch.uint8, device="npu")
except torch.OutOfMemoryError:
    print("out of memory")
print(torch.npu.mem_get_info()[1])
"""
    assert on_chip("910B", code, EMULATED_MEMORY=str(1 << 27)).split("\n")[:2] == ["out of memory", str(1 << 27)]


# ---- chips ----


@pytest.mark.parametrize("chip", ["310P", "910C", "950"])
def test_every_other_chip_starts_and_runs_a_norm(npu, chip):
    code = """
y = torch.ops.npu.npu_rms_norm(torch.ones(2, 64).half().npu(), torch.ones(64).half().npu(), 0.0)[0]
print(torch.npu.get_device_name(), y.cpu().sum().item(), npu.log.names)
"""
    name, total, names = on_chip(chip, code).split(maxsplit=2)
    assert name.startswith({"310P": "Ascend310P", "910C": "Ascend910_93", "950": "Ascend950"}[chip])
    assert total == "128.0" and "aclnnRmsNorm" in names


CHIP_LIMITS = [
    ("310P", "npu_rms_norm(torch.ones(2, 64).bfloat16().npu(), torch.ones(64).bfloat16().npu())", "no bfloat16 on 310P"),
    ("310P", "npu_rms_norm(torch.ones(2, 8).half().npu(), torch.ones(8).half().npu())", "at least 32 bytes"),
    ("310P", "npu_rms_norm(torch.ones(2, 64).half().npu(), torch.ones(64).npu())", "gamma and x have one dtype on 310P"),
    ("310P", "npu_dynamic_quant(torch.ones(2, 64).half().npu())", "is not documented for 310P"),
    (
        "310P",
        "npu_quant_matmul(torch.ones(2, 64, dtype=torch.int8).npu(), torch.ones(64, 8, dtype=torch.int8).npu(), "
        "torch.ones(8).npu(), pertoken_scale=torch.ones(2).npu(), output_dtype=torch.float16)",
        "no documented row",
    ),
    (
        "310P",
        "npu_weight_quant_batchmatmul(torch.ones(2, 64).half().npu(), torch.ones(64, 8, dtype=torch.int32).npu(), "
        "torch.ones(1, 64).half().npu())",
        "weight is int8 on 310P",
    ),
]


def test_limits_of_a_chip_are_enforced_on_it(npu):
    calls = [call for _, call, _ in CHIP_LIMITS]
    code = f"""
for call in {calls!r}:
    try:
        eval("torch.ops.npu." + call)
        print("no error")
    except RuntimeError as e:
        print(str(e).splitlines()[-1])
"""
    said = on_chip("310P", code).splitlines()  # in one process: each takes seconds to start
    for line, (_, _, message) in zip(said, CHIP_LIMITS, strict=True):
        assert message in line


def test_an_unknown_chip_is_refused(npu):
    with pytest.raises(RuntimeError, match="EMULATED_SOC=Ascend42: one of"):
        on_chip("910B", "", EMULATED_SOC="Ascend42")


# ---- a late device ----


def test_a_late_device_computes_the_same(npu):
    x, gamma = halves(4, 64), halves(64)
    run = lambda: torch.ops.npu.npu_swiglu(torch.ops.npu.npu_rms_norm(x.npu() + 1, gamma.npu())[0] * 2)
    wanted = run().cpu()
    with late_device():
        assert torch.equal(run().cpu(), wanted)


def test_a_late_device_shows_a_result_that_is_read_too_early(npu):
    x = halves(4, 64).npu()
    pinned = torch.zeros(4, 64, dtype=torch.float16).pin_memory()
    with late_device():
        pinned.copy_(x * 2, non_blocking=True)
        early = pinned.clone()
        torch.npu.synchronize()
        assert not early.any() and torch.equal(pinned, x.cpu() * 2)


def test_a_late_device_shows_pinned_memory_that_is_reused_too_early(npu):
    pinned = torch.ones(64).pin_memory()
    with late_device():
        copied = pinned.to("npu", non_blocking=True)
        pinned.fill_(5)
        assert (copied.cpu() == 5).all()  # the device read what the host wrote afterwards
        event = torch.npu.Event()
        copied = pinned.to("npu", non_blocking=True)
        event.record()
        assert not event.query()
        event.synchronize()
        pinned.fill_(7)
        assert (copied.cpu() == 5).all()


def test_a_fault_of_a_late_task_arrives_with_the_synchronisation(npu):
    k = torch.tensor([99], dtype=torch.int32).npu()
    with late_device():
        torch.ops.npu.npu_top_k_top_p(torch.zeros(1, 50).npu(), None, k)
        with pytest.raises(RuntimeError, match=r"aclnnApplyTopKTopP: LimitError: k lies in 1\.\.50"):
            torch.npu.synchronize()
