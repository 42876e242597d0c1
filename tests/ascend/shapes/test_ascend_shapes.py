"""Whole steps of large models on fake npu tensors: shapes and dtypes by torch-npu's own shape functions, nothing computed.

Weights are those of a 70B-class model with two of its layers, whole and as one of eight ranks has them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from trivium.kv import plan_groups
from trivium.models import build
from trivium.ops import Batch, rewrite
from trivium.plugin.select import accepts, patterns

PAGE, PAGES, MAX_LEN = 128, 4096, 32768
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 2, "vocab_size": 128256, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "70B": LLAMA,
    "70B, one rank of eight": {**LLAMA, "num_attention_heads": 8, "num_key_value_heads": 1, "intermediate_size": 3584},
    "72B with biases": {
        **LLAMA, "architectures": ["Qwen2ForCausalLM"], "intermediate_size": 29568, "vocab_size": 152064, "rope_theta": 1e6,
    },
    "32B with norms of heads": {
        **LLAMA, "architectures": ["Qwen3ForCausalLM"], "hidden_size": 5120, "intermediate_size": 25600, "vocab_size": 151936,
    },
}  # fmt: skip
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Seen(TorchDispatchMode):
    """Counts the operators of torch-npu that are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "npu":
            self.counts[function._schema.name.removeprefix("npu::")] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def backend(emulated):
    pytest.importorskip("trivium_ascend")
    from trivium_ascend.plugin import AscendBackend

    found = AscendBackend()
    return found, found.probe().devices[0]


def batch_of(queries: list[int], contexts: list[int], vocab: int) -> Batch:
    """A step of sequences with so many queries each, of pages in order."""
    starts = np.cumsum([0, *queries]).astype(np.int32)
    blocks = [-(-n // PAGE) for n in contexts]
    table = np.full((1, len(queries), max(blocks)), -1, np.int32)
    first = np.cumsum([0, *blocks])
    slots, positions = [], []
    for row, (q, context) in enumerate(zip(queries, contexts)):
        table[0, row, : blocks[row]] = np.arange(first[row], first[row + 1])
        at = np.arange(context - q, context)
        positions.append(at)
        slots.append(table[0, row, at // PAGE].astype(np.int64) * PAGE + at % PAGE)
    flat = np.concatenate(positions).astype(np.int32)
    ids = (flat * 7919 % vocab).astype(np.int32)
    return Batch(ids, flat, starts, np.array(contexts, np.int32), table, np.concatenate(slots)[None], starts[1:] - 1, None)


def fake_step(backend: Any, model: str, queries: list[int], contexts: list[int], dtype: str) -> tuple[dict[str, Any], Counter[str]]:
    """The outputs of one step on fake tensors, and the fused operators that it asked for."""
    from trivium_ascend.executor import Tape

    plugin, device = backend
    session = plugin.open(device, {"dtype": dtype, "max_model_len": MAX_LEN, "strict": True, "nz": False})
    session.memory_info = lambda: (1 << 42, 1 << 42)
    session.upload = lambda array: torch.tensor(array).to(session.device)
    program = rewrite(
        build(MODELS[model], max_model_len=MAX_LEN), patterns(session.kernels), accept=lambda call: accepts(call, session.kernels)
    )
    batch = batch_of(queries, contexts, MODELS[model]["vocab_size"])
    seen = Seen()
    with FakeTensorMode(), seen, torch.inference_mode():
        dtypes = {c.value: torch.float32 if c.array is not None else session.dtype for c in program.constants}
        weights = {v.name: torch.empty(v.shape, device=session.device, dtype=kind) for v, kind in dtypes.items()}
        session.kv_store(plan_groups(program.states, PAGE, dtype), PAGES)
        tape = Tape(session, program.only("logits"), weights, announce=False)
        session.begin_step()
        inputs = {v.name: session.put(getattr(batch, v.name)) for v in tape.program.inputs}
        states = [session.step_state(i, batch) for i in range(len(program.states))]
        outputs = tape.run(inputs, states, None)
    return outputs, seen.counts


FUSED = {
    "npu_add_rms_norm": 3, "npu_swiglu": 2, "npu_mrope": 2, "npu_scatter_pa_kv_cache": 2, "npu_fused_infer_attention_score_v2": 2,
}  # fmt: skip
"""Of two layers: each norm but the first and the last, which reads only the rows that are sampled, takes a sum."""


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("model", MODELS)
def test_a_mixed_step_has_the_shapes_of_its_model(backend, model, dtype):
    """A whole prompt, a chunk in the middle of a long one and three decodes."""
    outputs, counts = fake_step(backend, model, [1500, 512, 1, 1, 1], [1500, 20000, 31000, 1, 129], dtype)
    logits = outputs["logits"]
    assert (tuple(logits.shape), logits.device.type) == ((5, MODELS[model]["vocab_size"]), "npu")
    assert {name: counts[name] for name in FUSED} == FUSED


@pytest.mark.parametrize("size", BUCKETS)
def test_a_decode_step_of_every_graph_size(backend, size):
    outputs, counts = fake_step(backend, "70B, one rank of eight", [1] * size, [1 + 97 * i % 1500 for i in range(size)], "bfloat16")
    assert tuple(outputs["logits"].shape) == (size, 128256)
    assert {name: counts[name] for name in FUSED} == FUSED


TOKENS, IN, OUT, EXPERTS = 256, 8192, 57344, 64


def npu_empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="npu")


def test_quantised_products_of_large_layers(emulated):
    ops: Any = torch.ops.npu
    with FakeTensorMode():
        numbers, scale = ops.npu_dynamic_quant(npu_empty(TOKENS, IN))
        assert (numbers.dtype, tuple(scale.shape)) == (torch.int8, (TOKENS,))
        y = ops.npu_quant_matmul(
            numbers, npu_empty(IN, OUT, dtype=torch.int8), npu_empty(OUT, dtype=torch.float32), pertoken_scale=scale,
            output_dtype=torch.bfloat16,
        )  # fmt: skip
        assert (tuple(y.shape), y.dtype) == ((TOKENS, OUT), torch.bfloat16)
        packed, steps = npu_empty(IN, OUT // 8, dtype=torch.int32), npu_empty(IN // 128, OUT)
        y = ops.npu_weight_quant_batchmatmul(npu_empty(TOKENS, IN), packed, steps, steps, antiquant_group_size=128)
        assert (tuple(y.shape), y.dtype) == ((TOKENS, OUT), torch.bfloat16)
        with pytest.raises(RuntimeError):
            ops.npu_quant_matmul(numbers, npu_empty(IN + 1, OUT, dtype=torch.int8), npu_empty(OUT, dtype=torch.float32))


def test_many_experts_of_a_large_layer(emulated):
    ops: Any = torch.ops.npu
    with FakeTensorMode():
        rows, places, counts, _ = ops.npu_moe_init_routing_v2(
            npu_empty(TOKENS, 4096), npu_empty(TOKENS, 8, dtype=torch.int32), active_num=TOKENS * 8, expert_num=EXPERTS,
            expert_tokens_num_type=1, expert_tokens_num_flag=True, active_expert_range=[0, EXPERTS], row_idx_type=0,
        )  # fmt: skip
        assert (tuple(rows.shape), tuple(places.shape), tuple(counts.shape)) == ((TOKENS * 8, 4096), (TOKENS * 8,), (EXPERTS,))
        [y] = ops.npu_grouped_matmul(
            [rows], [npu_empty(EXPERTS, 4096, 3072)], group_list=counts, group_list_type=1, split_item=2, group_type=0
        )
        assert tuple(y.shape) == (TOKENS * 8, 3072)
