"""Two and four ranks of the emulated CUDA backend, each a process of its own that meets the others over gloo: the tokens are the
reference's. Triton's kernels run in its interpreter, as in tests/cuda/emulated, and without graphs: the emulated ones would
not wait for collectives."""

from __future__ import annotations

import os

import pytest
from tiny_checkpoints import make_checkpoint
from trivium import LLM, SamplingParams

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton's interpreter: tests/cuda/run.sh", allow_module_level=True)

PLUGIN = """
import emulated_cuda
from trivium.plugin import hookimpl

@hookimpl
def trivium_backend():
    return emulated_cuda.EmulatedBackend()
"""
LOAD = {
    "dtype": "float32", "kv_dtype": "float32", "num_kv_blocks": 40, "block_size": 16, "progress": False, "max_num_seqs": 4,
    "max_num_batched_tokens": 16, "max_model_len": 48,
}  # fmt: skip
"""Small: every rank runs the largest step once when it is loaded, in the interpreter."""
NARROW = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 48}
PROMPTS = [[5, 6, 7], [8], [(7 * i * i) % 250 for i in range(19)]]
ASKED = [
    SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=5, max_tokens=3, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=6, top_k=30, top_p=0.9, max_tokens=4, ignore_eos=True),
]  # fmt: skip


@pytest.fixture
def emulated(tmp_path, monkeypatch):
    from fake_plugins import install

    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "cuda_emulated", PLUGIN)


def ids(folder, backend, **options):
    with LLM(folder, backend, **LOAD, **options) as llm:
        found = [[c.token_ids for c in output.outputs] for output in llm.generate(PROMPTS, ASKED)]
        llm.engine.check()
        return found


@pytest.mark.parametrize(
    ("ways", "family", "layers"),
    [({"tensor_parallel": 2}, "qwen3", 1), ({"tensor_parallel": 4}, "llama", 1),
     ({"tensor_parallel": 2, "pipeline_parallel": 2}, "llama", 2)], ids=str,
)  # fmt: skip
def test_the_tokens_of_ranks_are_the_reference_s(emulated, tmp_path, ways, family, layers):
    folder = make_checkpoint(tmp_path / family, family, **{**NARROW, "num_hidden_layers": layers})
    want = ids(folder, "reference")
    assert ids(folder, "cuda_emulated", backend_options={**ways, "graph_sizes": ()}) == want


def test_pages_of_ranks_and_of_one_device_are_the_same(emulated, tmp_path):
    folder = make_checkpoint(tmp_path / "llama", "llama", **NARROW)
    two = {"backend_options": {"tensor_parallel": 2, "graph_sizes": ()}}
    assert ids(folder, "cuda_emulated", prefill="reference", **two) == ids(folder, "reference")
