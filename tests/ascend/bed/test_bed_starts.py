"""The bed itself: npu tensors, the call log, limits, un-emulated calls, graphs, a late device, chips."""

from __future__ import annotations

import pytest
import torch


def halves(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7)).half()


def test_a_fused_operator_lands_in_its_reference_and_in_the_log(npu):
    x, gamma = halves(4, 64), halves(64)
    y, rstd = torch.ops.npu.npu_rms_norm(x.npu(), gamma.npu(), 1e-6)
    expected = torch.nn.functional.rms_norm(x.float(), (64,), gamma.float(), 1e-6)
    torch.testing.assert_close(y.cpu().float(), expected, atol=2e-3, rtol=2e-3)
    assert rstd.shape == (4, 1)
    assert npu.log.names == ["aclnnRmsNorm"]
    assert npu.log.last("aclnnRmsNorm").epsilon == 1e-6
    assert not npu.log.aten


def test_a_violated_limit_is_an_error_that_names_it(npu):
    x = halves(4, 64).npu()
    with pytest.raises(RuntimeError, match="LimitError: gamma .* must be the trailing dimensions"):
        torch.ops.npu.npu_rms_norm(x, halves(32).npu(), 1e-6)


def test_a_device_call_that_is_not_emulated_fails_with_its_name(npu):
    with pytest.raises(RuntimeError, match="aclnnLinalgVectorNorm|aclnnGeGluV3"):
        torch.ops.npu.npu_geglu(halves(4, 64).npu())


def test_plain_torch_operations_run_on_the_device_and_are_counted(npu):
    a, b = halves(3, 5), halves(5, 2)
    y = (a.npu() @ b.npu()).float() * 2.5
    torch.testing.assert_close(y.cpu(), (a @ b).float() * 2.5)
    assert npu.log.aten["mm"] == 1 and not npu.log.names


def test_a_graph_replays_what_was_captured_on_new_inputs(npu):
    weight, gamma, x = halves(64, 64).npu(), halves(64).npu(), torch.zeros(4, 64).half().npu()
    step = lambda x: torch.ops.npu.npu_swiglu(torch.ops.npu.npu_rms_norm(x @ weight, gamma)[0])
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = step(x)
    for seed in range(2):
        x.copy_(torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)).half())
        graph.replay()
        torch.npu.synchronize()
        assert torch.equal(y.cpu(), step(x).cpu())
    assert npu.log.ran.count("aclnnSwiGlu") == 4 and npu.log.count("aclnnSwiGlu") == 3


def test_reading_a_result_during_capture_is_refused(npu):
    x = halves(4, 64).npu()
    with pytest.raises(RuntimeError, match="during graph capture"), torch.npu.graph(torch.npu.NPUGraph()):
        x.sum().item()
