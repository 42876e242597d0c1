"""On a real NPU (`pytest -m npu`): the kit that judges every backend, and a tiny model's answers, call by call and captured."""

from __future__ import annotations

import ctypes

import pytest
from tiny_checkpoints import make_checkpoint

from trivium import LLM, SamplingParams
from trivium.conformance import run_conformance

PROMPTS = [[(7 * i * i + n) % 250 for i in range(n)] for n in (1, 16, 37, 130)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def device():
    from trivium_ascend.plugin import AscendBackend

    found = AscendBackend().probe()
    if not found.devices:
        pytest.skip(found.reason)
    if hasattr(ctypes.CDLL("libascendcl.so"), "emulated_release"):
        pytest.skip("this process has emulated NPUs")


@pytest.mark.npu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("area", ["operators", "fusions", "formats", "pages", "sampler", "models", "serving"])
def test_the_kit(dtype, area):
    report = run_conformance("ascend", {"strict": True, "dtype": dtype}, areas=[area])
    assert [(row.name, row.detail) for row in report.rows if row.status in ("failed", "fallback")] == []


@pytest.mark.npu
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_greedy_tokens_are_those_of_the_host(tmp_path, graphs, head_dim):
    folder = make_checkpoint(tmp_path / "llama", "llama", head_dim=head_dim)
    found = []
    for backend, dtype in (("torch:cpu", "float32"), ("ascend", "float16")):
        more = {"backend_options": {"graphs": graphs}} if backend == "ascend" else {}
        options = {"dtype": dtype, "kv_dtype": dtype, "num_kv_blocks": 80, "max_model_len": 256, "progress": False}
        with LLM(folder, backend, max_num_seqs=4, **options, **more) as llm:
            found.append([output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)])
    assert found[0] == found[1]
