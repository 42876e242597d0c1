"""Captured decode steps: one NPU graph for each batch size, replayed with the numbers of the step.

Everything a graph reads from the step lies in one device tensor that is overwritten before each replay. The one exception is
the attention operator, which takes the sequences' lengths on the host: each of its calls is a task group, whose parameters are
updated on a stream of its own, and which waits in the graph for an event that is recorded behind the update.

The padding up to the captured size is sequences of one token that read and write scratch pages behind the pool.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trivium.errors import BackendError
from trivium.ops import Batch, PagedKV, Program
from trivium.plugin import Executable, Step
from trivium_ascend.executor import AscendExecutable, AscendStep, Tape, sample
from trivium_ascend.kernels.attention import PIECE
from trivium_ascend.operators import npu
from trivium_ascend.pages import Reads, host_table
from trivium_ascend.session import AscendSession
from trivium_torch.pages import GroupStep

CAPTURABLE = frozenset({
    "embedding", "linear", "head_linear", "add", "mul", "scale", "softcap", "rms_norm", "layer_norm", "activation", "gated", "rope",
    "reshape", "slice", "concat", "gather_rows", "text_ids", "media_rows", "kv_write", "latent_write", "add_norm", "gate_up",
    "rope_write", "moe_route",
})  # fmt: skip
"""Operators and patterns of which every kernel keeps to the device. Attention and experts: only the fused kernels."""
FUSED_ONLY = frozenset({"paged_attention", "latent_attention", "moe_experts"})


def not_capturable(tape: Tape) -> str:
    """Why a Program's steps can't be captured; "" if they can."""
    for line in tape.lines:
        name, kernel = line.choice.call.name, line.choice.kernel
        fused = name in FUSED_ONLY and kernel is not None and kernel.priority > 1
        if kernel is None or not (name in CAPTURABLE or fused):
            return f"{name} is not one fused operator here"
    return ""


def sends(program: Program) -> str:
    """Why the steps of a stage that hands on activations can't be captured: what is sent, no output of the Program needs."""
    return "send is not one fused operator here" if any(call.name == "send" for call in program.calls) else ""


class Attention(NamedTuple):
    """A captured call: its task group, the event that it waits for, and what it was called with. Lists of lengths are filled
    anew."""

    handle: Any
    event: Any
    args: tuple[Tensor, ...]
    options: dict[str, Any]


class Recorder:
    """Stands in the place of the attention operator while a step is captured."""

    def __init__(self, module: Any) -> None:
        self.module, self.calls = module, list[Attention]()
        self._workspaces: dict[Any, Tensor] = {}

    def attention(self, *args: Tensor, **options: Any) -> Tensor:
        stream, event = self.module.current_stream(), self.module.ExternalEvent()
        y, lse = torch.empty_like(args[0]), torch.empty(1, dtype=torch.float32, device=args[0].device)
        options = {**options, "workspace": self._workspace(args, options), "out": [y, lse]}
        event.wait(stream)
        event.reset(stream)
        self.module.graph_task_group_begin(stream)
        npu.npu_fused_infer_attention_score_v2.out(*args, **options)
        self.calls.append(Attention(self.module.graph_task_group_end(stream), event, args, options))
        return y

    def _workspace(self, args: tuple[Tensor, ...], options: Mapping[str, Any]) -> Tensor:
        """Scratch memory for the longest sequences, shared by the layers."""
        key = (args[0].shape, options.get("sparse_mode"), options.get("input_layout"))
        if key not in self._workspaces:
            self._workspaces[key] = npu._npu_fused_infer_attention_score_v2_get_max_workspace(*args, **options)
        return self._workspaces[key]

    def update(self, stream: Any) -> None:
        """The step's lengths for every call, in the order in which the graph comes to them."""
        with self.module.stream(stream):
            for call in self.calls:
                self.module.graph_task_update_begin(stream, call.handle)
                npu.npu_fused_infer_attention_score_v2.out(*call.args, **call.options)
                self.module.graph_task_update_end(stream)
                call.event.record(stream)


class Fields:
    """int32 arrays of fixed sizes in one device tensor and one pinned host array, copied together."""

    def __init__(self, sizes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        counts = [int(np.prod(shape)) for shape in sizes.values()]
        self._pinned = torch.zeros(sum(counts), dtype=torch.int32, pin_memory=True)
        self._device = torch.zeros(sum(counts), dtype=torch.int32, device=device)
        ends = np.cumsum([0, *counts])
        places = {name: (slice(int(a), int(b)), sizes[name]) for name, a, b in zip(sizes, ends[:-1], ends[1:], strict=True)}
        whole = self._pinned.numpy()
        self.host: dict[str, npt.NDArray[np.int32]] = {n: whole[at].reshape(shape) for n, (at, shape) in places.items()}
        self.device = {name: self._device[at].view(shape) for name, (at, shape) in places.items()}

    def upload(self) -> None:
        self._device.copy_(self._pinned, non_blocking=True)


class Group:
    """What the layers of one group read in a captured step of `size` sequences."""

    def __init__(self, session: AscendSession, index: int, size: int) -> None:
        spec = session.spec.groups[index].spec
        self.index, self.size, self.page = index, size, session.spec.page_size
        self.window = spec.window if isinstance(spec, PagedKV) else None
        longest = session.max_len if self.window is None else min(session.max_len, self.window + self.page)
        self.columns = -(-longest // self.page) + 1
        self.zero, self.scratch = session.pages, session.pages + 1
        self.lengths = [1] * size
        self.mask: Tensor | None = None

    def sizes(self) -> dict[str, tuple[int, ...]]:
        names = {"slots": (self.size,), "hidden": (self.size,), "table": (self.size, self.columns)}
        return {f"{name}{self.index}": shape for name, shape in names.items()}

    def step(self, fields: Fields) -> GroupStep:
        """A step whose reads and writes are the fields on the device."""
        slots, hidden, table = (fields.device[f"{name}{self.index}"] for name in ("slots", "hidden", "table"))
        nothing = np.zeros(0, np.int32)
        step = GroupStep(nothing, nothing.astype(np.int64), nothing, nothing, self.page, self.zero * self.page, torch.from_numpy)
        seen = Reads(None, list(range(1, self.size + 1)), self.lengths, table, None if self.window is None else hidden, 1)
        step.once("writes", lambda: (None, slots))
        step.once(("whole", self.window), lambda: [seen])
        step.once(("by length", self.window), lambda: [seen])
        step.once(("pieces", PIECE), lambda: [seen])
        if self.window is not None:
            self.mask = torch.zeros((self.size, self.columns * self.page), dtype=torch.bool, device=table.device)
            step.once(("single", id(seen)), lambda: self.mask)
        return step

    def fits(self, batch: Batch) -> bool:
        """Whether all tables together are no longer than the pool, which the operator wants."""
        pages = -(-batch.context_lens // self.page)
        return int(np.minimum(pages, self.columns).sum()) + self.size - batch.seqs <= self.zero

    def fill(self, fields: Fields, batch: Batch, session: AscendSession) -> None:
        """The numbers of a step, and of its padding."""
        count, pad = batch.seqs, np.arange(self.size - batch.seqs)
        slots, hidden, table = (fields.host[f"{name}{self.index}"] for name in ("slots", "hidden", "table"))
        slots[:count], slots[count:] = batch.slot_mapping[self.index], self.scratch * self.page + pad
        step = GroupStep.of(batch, self.index, self.page, self.zero, torch.from_numpy)
        contexts = batch.context_lens.astype(np.int64)
        first = np.zeros_like(contexts) if self.window is None else np.maximum(0, contexts - self.window)
        found = host_table(step, np.arange(count), first, contexts)
        table[:] = self.zero
        table[:count, : found.shape[1]], table[count:, 0] = found, self.scratch + pad // self.page
        hidden[:count], hidden[count:] = first % self.page, 0
        self.lengths[:] = [*(contexts - first // self.page * self.page).tolist(), *[1] * len(pad)]

    def cover(self, fields: Fields) -> None:
        """The mask of a window, on the device."""
        if self.mask is not None:
            keys = torch.arange(self.mask.shape[1], dtype=torch.int32, device=self.mask.device)
            self.mask.copy_(keys < fields.device[f"hidden{self.index}"][:, None])


class Captured:
    """One batch size."""

    def __init__(self, session: AscendSession, tape: Tape, size: int, pool: Any) -> None:
        self.size, self._session = size, session
        self._groups = [Group(session, i, size) for i in range(len(session.spec.groups))]
        sizes: dict[str, tuple[int, ...]] = dict.fromkeys(("token_ids", "positions", "context_lens"), (size,))
        self._fields = Fields(sizes | {k: v for group in self._groups for k, v in group.sizes().items()}, session.device)
        rows = torch.arange(size + 1, dtype=torch.int32, device=session.device)
        self._inputs = {**self._fields.device, "query_starts": rows, "sample_rows": rows[:size]}
        self._module = torch.get_device_module("npu")
        self._recorder, self.graph = Recorder(self._module), self._module.NPUGraph()
        self._stream = self._module.Stream(session.device)
        self._capture(tape, pool)

    def _capture(self, tape: Tape, pool: Any) -> None:
        session = self._session
        session.begin_step()
        steps = [group.step(self._fields) for group in self._groups]
        states = [session.state_of(i, steps) for i in range(len(tape.program.states))]
        self._prepare(_empty(session))
        tape.run(self._inputs, states, None)  # once before, so that what is made once is not made in the graph
        session.forget_step()
        session.recorder = self._recorder
        try:
            with self._module.graph(self.graph, pool=pool):
                self.logits = tape.run(self._inputs, states, None)["logits"]
        finally:
            session.recorder = None
            session.begin_step()
        session.graphs.append(self.graph)

    def _prepare(self, batch: Batch) -> None:
        host, count = self._fields.host, batch.seqs
        for name, padding in (("token_ids", 0), ("positions", 0), ("context_lens", 1)):
            host[name][:count], host[name][count:] = getattr(batch, name), padding
        for group in self._groups:
            group.fill(self._fields, batch, self._session)
        self._fields.upload()
        for group in self._groups:
            group.cover(self._fields)

    def fits(self, batch: Batch) -> bool:
        return all(group.fits(batch) for group in self._groups)

    def replay(self, batch: Batch) -> Tensor:
        """logits[size, vocab]; those of the padding mean nothing. The step before must be over: its numbers are overwritten."""
        self._session.synchronize()
        self._prepare(batch)
        self._recorder.update(self._stream)
        self.graph.replay()
        return self.logits


class GraphExecutable(Executable):
    """Steps of one token a sequence by the next larger graph, all others call by call."""

    def __init__(self, session: AscendSession, program: Program, weights: Mapping[str, Any], sizes: tuple[int, ...]) -> None:
        self._session, self._vocab_size = session, program.vocab_size
        self._eager = AscendExecutable(session, program, weights)
        tape = Tape(session, program.only("logits"), weights, announce=False)
        self.graphs = self._captured(tape, sizes, sends(program) or not_capturable(tape))

    def _captured(self, tape: Tape, sizes: tuple[int, ...], reason: str) -> list[Captured]:
        """The largest first, so that the others find their memory in its pool; none where there is a reason."""
        if sizes and reason:
            warnings.warn(f"decode steps are not captured but run call by call: {reason}", RuntimeWarning, stacklevel=4)
            return []
        made, pool = list[Captured](), torch.get_device_module("npu").graph_pool_handle() if sizes else None
        for size in sorted(sizes, reverse=True):
            try:
                with torch.inference_mode():
                    made.append(Captured(self._session, tape, size, pool))
            except (RuntimeError, BackendError) as e:
                message = f"batch size {size} could not be captured and runs eagerly: {e}"
                warnings.warn(message, RuntimeWarning, stacklevel=4)
                pool = torch.get_device_module("npu").graph_pool_handle()  # the one before is left in the middle of a capture
        return made[::-1]

    def run(self, batch: Batch) -> Step:
        graph = next((g for g in self.graphs if g.size >= batch.seqs), None)
        if (
            graph is None
            or not graph.fits(batch)
            or batch.tokens != batch.seqs
            or len(batch.pool_rows)
            or (np.diff(batch.query_starts) != 1).any()
        ):
            return self._eager.run(batch)
        with torch.inference_mode():
            self._session.begin_step()
            logits = graph.replay(batch)
            rows = batch.sample_rows
            chosen = logits[: len(rows)] if len(rows) == batch.seqs else logits[self._session.upload(rows)]
            return AscendStep(self._session, {"logits": chosen}, sample(self._session, chosen, batch.sampling, self._vocab_size))


def _empty(session: AscendSession) -> Batch:
    """A step of nothing but padding."""
    none, groups = np.zeros(0, np.int32), len(session.spec.groups)
    table, slots = np.zeros((groups, 0, 1), np.int32), np.zeros((groups, 0), np.int64)
    return Batch(none, none, np.zeros(1, np.int32), none, table, slots, none, None)  # type: ignore[arg-type]
