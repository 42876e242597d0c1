"""Graphs on the emulated device: capture, replay, task-group update of sequence lengths, and what a capture refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulated_cann import late_device

ops: Any = torch.ops.npu
HEADS, KV_HEADS, DIM, BLOCK = 8, 2, 128, 128
TABLE = [[3, 5], [1, 2]]


def halves(*shape: int, seed: int = 7) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half()


def test_a_graph_replays_what_was_captured_on_new_inputs(npu):
    weight, gamma, x = halves(64, 64).npu(), halves(64).npu(), torch.zeros(4, 64).half().npu()
    step = lambda x: ops.npu_swiglu(ops.npu_rms_norm(x @ weight, gamma)[0] + 1)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = step(x)
    for seed in range(2):
        x.copy_(halves(4, 64, seed=seed))
        graph.replay()
        torch.npu.synchronize()
        assert torch.equal(y.cpu(), step(x).cpu())
    assert npu.log.ran.count("aclnnSwiGlu") == 4 and npu.log.count("aclnnSwiGlu") == 3


def test_values_that_only_a_replay_can_see_are_checked_there(npu):
    slots = torch.zeros(2, dtype=torch.int32).npu()
    key, cache = halves(2, 2, 16).npu(), torch.zeros(2, 4, 2, 16).half().npu()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        ops.npu_scatter_pa_kv_cache(key, key, cache, cache.clone(), slots, cache_mode="Norm")
    slots.copy_(torch.tensor([1, 6]))
    graph.replay()
    slots.copy_(torch.tensor([3, 3]))
    with pytest.raises(RuntimeError, match="no slot twice"):
        graph.replay()


REFUSED = {
    "a number": lambda x: x.sum().item(),
    "a copy to the host": lambda x: x.cpu(),
    "a copy from the host": lambda x: x.copy_(torch.ones(4, 64)),
    "a shape from data": lambda x: torch.nonzero(x),
    "a mask": lambda x: x[x > 0],
    "a synchronisation": lambda x: torch.npu.synchronize(),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_capture_refuses_what_waits_for_the_device(npu, what):
    x = halves(4, 64).npu()
    with pytest.raises(RuntimeError, match="during graph capture"), torch.npu.graph(torch.npu.NPUGraph()):
        REFUSED[what](x)
    assert npu.capturing is None


def test_a_device_holds_a_limited_number_of_graphs(npu):
    x, alive, npu.graph_limit = halves(4, 64).npu(), [], len(npu.graphs) + 2
    try:
        for _ in range(2):
            alive.append(torch.npu.NPUGraph())
            with torch.npu.graph(alive[-1]):
                ops.npu_swiglu(x)
        with pytest.raises(RuntimeError, match="no stream resource"), torch.npu.graph(torch.npu.NPUGraph()):
            ops.npu_swiglu(x)
        alive.pop().reset()
        with torch.npu.graph(torch.npu.NPUGraph()):
            ops.npu_swiglu(x)
    finally:
        npu.graph_limit = 1 << 30


class Decode:
    """One token for each of two sequences over pages; the lengths of the sequences are numbers of the host."""

    def __init__(self) -> None:
        self.query = halves(2, HEADS, DIM).npu()
        self.key, self.value = (halves(6, BLOCK, KV_HEADS * DIM, seed=s).npu() for s in (1, 2))
        self.out, self.lse = torch.empty(2, HEADS, DIM).half().npu(), torch.empty(1).npu()
        self.workspace = torch.empty(16, dtype=torch.uint8).npu()
        self.table = torch.tensor(TABLE, dtype=torch.int32).npu()
        self.mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1).npu()

    def arguments(self, lengths: list[int]) -> dict[str, Any]:
        return {
            "num_query_heads": HEADS, "num_key_value_heads": KV_HEADS, "softmax_scale": DIM**-0.5, "input_layout": "TND",
            "block_table": self.table, "block_size": BLOCK, "actual_seq_qlen": [1, 2], "actual_seq_kvlen": lengths,
            "atten_mask": self.mask, "sparse_mode": 3,
        }  # fmt: skip

    def eager(self, lengths: list[int]) -> torch.Tensor:
        return ops.npu_fused_infer_attention_score_v2(self.query, self.key, self.value, **self.arguments(lengths))[0].cpu()

    def into_out(self, lengths: list[int]) -> None:
        ops.npu_fused_infer_attention_score_v2.out(
            self.query, self.key, self.value, **self.arguments(lengths), workspace=self.workspace, out=[self.out, self.lse]
        )

    def captured(self) -> tuple[Any, Any]:
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            stream = torch.npu.current_stream()
            torch.npu.graph_task_group_begin(stream)
            self.into_out([1, 1])
            handle = torch.npu.graph_task_group_end(stream)
        return graph, handle


def updated(handle: Any, call: Any) -> None:
    stream = torch.npu.current_stream()
    torch.npu.graph_task_update_begin(stream, handle)
    call()
    torch.npu.graph_task_update_end(stream)


def test_a_task_update_changes_the_lengths_of_a_graph(npu):
    decode = Decode()
    graph, handle = decode.captured()
    for seed, lengths in enumerate(([10, 20], [200, 130])):
        decode.query.copy_(halves(2, HEADS, DIM, seed=seed))
        graph.replay()
        torch.npu.synchronize()
        assert not torch.equal(decode.out.cpu(), decode.eager(lengths))  # lengths are part of the graph
        updated(handle, lambda lengths=lengths: decode.into_out(lengths))
        graph.replay()
        torch.npu.synchronize()
        assert torch.equal(decode.out.cpu(), decode.eager(lengths))


def test_lengths_are_updated_by_the_graph_itself(npu):
    decode = Decode()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, auto_dispatch_capture=True):
        y = ops.npu_fused_infer_attention_score_v2(decode.query, decode.key, decode.value, **decode.arguments([1, 1]))[0]
    for lengths in ([10, 20], [200, 130]):
        graph.update(cpu_update_input=[{"actual_seq_kvlen": lengths}])
        graph.replay()
        torch.npu.synchronize()
        assert torch.equal(y.cpu(), decode.eager(lengths))


def test_an_update_replaces_every_task_of_its_group_by_its_like(npu):
    decode = Decode()
    _, handle = decode.captured()
    with pytest.raises(RuntimeError, match="1 recorded tasks were not replaced"):
        updated(handle, lambda: None)
    with pytest.raises(RuntimeError, match="aclnnSwiGlu would replace aclnnFusedInferAttentionScoreV4"):
        updated(handle, lambda: ops.npu_swiglu(decode.query))
    npu.updating = None


def test_the_workspace_of_attention_can_be_asked_for(npu):
    decode = Decode()
    size = ops._npu_fused_infer_attention_score_v2_get_max_workspace(
        decode.query, decode.key, decode.value, **decode.arguments([10, 20])
    )
    assert isinstance(size, torch.Tensor) and not npu.log.ran.count("aclnnFusedInferAttentionScoreV4")


def test_two_graphs_keep_their_own_memory_apart(npu):
    x = halves(4, 64).npu()
    graphs, outputs = [], []
    for factor in (2, 3):
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            outputs.append(ops.npu_swiglu(x * factor))
        graphs.append(graph)
    for graph in graphs:
        graph.replay()
    torch.npu.synchronize()
    for factor, y in zip((2, 3), outputs):
        assert torch.equal(y.cpu(), ops.npu_swiglu(x * factor).cpu())


# ---- streams and events ----


def on_two_streams(ordered: bool) -> bool:
    """Whether a stream sees what another computed before it, on a device that runs them as unexpectedly as it may."""
    x, y = torch.zeros(64).npu(), torch.zeros(64).npu()
    first, second = torch.npu.current_stream(), torch.npu.Stream()
    second.wait_stream(first)
    with late_device():
        x.fill_(3)
        if ordered:
            second.wait_stream(first)
        with torch.npu.stream(second):
            y.copy_(x * 2)
        torch.npu.synchronize()
    return bool((y.cpu() == 6).all())


def test_a_stream_that_waits_for_no_event_runs_ahead(npu):
    assert on_two_streams(ordered=True) and not on_two_streams(ordered=False)


class Gated(Decode):
    """A decode step whose attention waits, inside the graph, for an event that is recorded behind the update of its lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.event, self.updates = torch.npu.ExternalEvent(), torch.npu.Stream()
        self.graph = torch.npu.NPUGraph()
        with torch.npu.graph(self.graph):
            stream = torch.npu.current_stream()
            self.event.wait(stream)
            self.event.reset(stream)
            torch.npu.graph_task_group_begin(stream)
            self.into_out([1, 1])
            self.handle = torch.npu.graph_task_group_end(stream)

    def update(self, lengths: list[int]) -> None:
        with torch.npu.stream(self.updates):
            torch.npu.graph_task_update_begin(self.updates, self.handle)
            self.into_out(lengths)
            torch.npu.graph_task_update_end(self.updates)
            self.event.record(self.updates)


@pytest.mark.parametrize("update_first", [False, True])
def test_a_replay_waits_for_the_event_behind_its_update(npu, update_first):
    decode = Gated()
    for lengths in ([10, 20], [200, 130]):
        if update_first:
            decode.update(lengths)
        decode.graph.replay()
        if not update_first:
            decode.update(lengths)
        torch.npu.synchronize()
        assert torch.equal(decode.out.cpu(), decode.eager(lengths))


def test_a_replay_whose_event_nobody_records_is_found(npu):
    decode = Gated()
    decode.graph.replay()
    with pytest.raises(RuntimeError, match="the device waits for ever: nobody records the event"):
        torch.npu.synchronize()


def test_an_update_that_overtakes_the_replay_before_is_found(npu):
    decode = Gated()
    found = []
    for wait in (True, False):
        with late_device():
            decode.update([10, 20])
            torch.npu.synchronize()
            decode.graph.replay()
            if wait:
                torch.npu.synchronize()
            decode.update([200, 130])
            torch.npu.synchronize()
        found.append(torch.equal(decode.out.cpu(), decode.eager([10, 20])))
        if wait:  # the second event is still to be waited for
            decode.graph.replay()
    assert found == [True, False]
