"""Whole models on an emulated 310P, in a process of its own: attention and products of 8 bits by the operators that it has."""

from __future__ import annotations

import json

import pytest
from emulated_cann import on_chip
from modelslim_files import modelslim_pair
from tiny_checkpoints import make_checkpoint

from trivium import LLM, SamplingParams

PROMPTS = [[(7 * i * i + n) % 250 for i in range(n)] for n in (1, 16, 37, 130)]
OPTIONS = {"progress": False, "strict": True, "num_kv_blocks": 12, "max_model_len": 256, "max_num_batched_tokens": 64}
ASKED = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
RUN = """
import json
from collections import Counter
from trivium import LLM, SamplingParams
for folder, options in {models!r}:
    npu.log.clear()
    with LLM(folder, "ascend", **{common!r}, **options) as llm:
        made = llm.generate({prompts!r}, SamplingParams(**{asked!r}))
        llm.engine.check()
        about = llm.loaded.device.details["soc"], llm.loaded.kv_spec.dtype
    calls = Counter(call.name for call in npu.log.calls)
    print(json.dumps([about, [o.outputs[0].token_ids for o in made], calls, npu.log.aten["bmm"]]))
"""
PROMPT, SINGLE = "aclnnPromptFlashAttentionV3", "aclnnIncreFlashAttentionV4"


def on_card(*models):
    """(chip and KV dtype, ids, calls of operators by name, batched products of torch) of each (folder, options)."""
    run = RUN.format(models=[(str(folder), options) for folder, options in models], common=OPTIONS, prompts=PROMPTS, asked=ASKED)
    return [json.loads(line) for line in on_chip("310P", run).splitlines()]


def on_host(folder):
    options = {**OPTIONS, "num_kv_blocks": 60, "block_size": 16, "dtype": "float32", "kv_dtype": "float32"}
    with LLM(folder, "torch:cpu", **options) as llm:
        return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, SamplingParams(**ASKED))]


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_prompts_and_decodes_are_fused_and_the_ids_are_those_of_float32(npu, tmp_path):
    """Heads of 24 numbers are none of the operators'; single queries with a window that hides keys are plain torch's."""
    wide = make_checkpoint(tmp_path / "wide", "llama", head_dim=64)
    window = make_checkpoint(tmp_path / "window", "mistral", head_dim=32, sliding_window=20)
    narrow = make_checkpoint(tmp_path / "narrow", "qwen3", head_dim=24)
    found = on_card((wide, {}), (window, {}), (narrow, {}))
    for folder, (about, tokens, calls, _) in zip((wide, window, narrow), found, strict=True):
        assert about == ["Ascend310P3", "float16"] and tokens == on_host(folder)
        assert calls["aclnnScatterNdUpdate"] >= 2 * 2 * 6  # keys and values, layers, steps
    assert [bool(calls.get(PROMPT)) for _, _, calls, _ in found] == [True, True, False]
    assert found[0][2][SINGLE] and SINGLE not in found[2][2]
    assert [products > 0 for *_, products in found] == [False, True, True]


def test_w8a8_is_fused_where_the_checkpoint_has_scales_for_inputs(npu, tmp_path):
    how = {"sizes": {"hidden_size": 64, "intermediate_size": 128, "head_dim": 64}, "step": 0.04}
    static, plain, *_ = modelslim_pair(tmp_path / "static", "W8A8", **how)
    dynamic, *_ = modelslim_pair(tmp_path / "dynamic", "W8A8_DYNAMIC", **how)
    eight, four = {"quantize": "w8a8"}, {"quantize": "int4"}
    by_scale, by_token, of_four = on_card((static, eight), (dynamic, eight), (plain, four))
    for _, tokens, _, _ in (by_scale, by_token, of_four):
        assert [len(t) for t in tokens] == [6] * 4
    assert by_scale[2]["aclnnQuantMatmulV5"] and by_scale[2]["aclnnQuantize"] and by_scale[2]["aclnnAddRmsNormQuantV2"]
    for _, _, calls, _ in (by_token, of_four):  # rounding token by token and 4 bits are not there: inputs stay as they are
        assert calls["aclnnWeightQuantBatchMatmulV2"] and "aclnnQuantMatmulV5" not in calls
    assert by_token[1] == on_host(dynamic)
