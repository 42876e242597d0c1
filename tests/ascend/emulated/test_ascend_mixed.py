"""Prompts on one vendor's device and the rest on another's: prefill on the host and decode on the emulated NPU, and the reverse.

Pages cross in the neutral format; every token must be the one that either would have made alone.
"""

from __future__ import annotations

import pytest
from installed_backends import available
from tiny_checkpoints import make_checkpoint

from trivium import LLM, SamplingParams

PROMPTS = [[(7 * i * i + n) % 250 for i in range(n)] for n in (1, 16, 37, 130)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, seed=5, max_tokens=8, ignore_eos=True)
POOL = {"ascend": {"num_kv_blocks": 16}, "torch:cpu": {"num_kv_blocks": 80}, "cpu": {"num_kv_blocks": 80}}
PAIRS = [("torch:cpu", "ascend"), ("ascend", "torch:cpu"), ("cpu", "ascend"), ("ascend", "cpu")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("m") / "llama", "llama", head_dim=128)


def ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_prompt_here_and_its_answer_there(npu, folder, prefill, decode, dtype):
    if "cpu" in (prefill, decode) and ("cpu" not in available() or dtype == "float16"):
        pytest.skip("the cpu backend is not built here, or keeps no such pages")
    asked = GREEDY if dtype == "float16" else DRAWN
    options = {"dtype": dtype, "kv_dtype": dtype, "max_model_len": 256, "max_num_seqs": 4, "progress": False}
    with LLM(folder, "torch:cpu", **{**options, "dtype": "float32", "kv_dtype": "float32"}, **POOL["torch:cpu"]) as llm:
        wanted = ids(llm.generate(PROMPTS, asked))
    npu.log.clear()
    more = {"prefill_options": {"dtype": dtype, "kv_dtype": dtype, **POOL[prefill]}, **POOL[decode]}
    with LLM(folder, prefill=prefill, decode=decode, **options, **more) as llm:
        assert ids(llm.generate(PROMPTS, asked)) == wanted
    assert npu.log.ran.count("aclnnScatterPaKvCache") > 0  # the NPU had its share
