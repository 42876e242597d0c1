"""The whole engine on an emulated NPU: the tokens are the reference's, the fused operators ran, and nothing else was asked of
the device.

In float32 every token must be equal, drawn ones too. In float16 the greedy ones are: these models' best logits lie further
apart than its rounding.
"""

from __future__ import annotations

import pytest
from tiny_checkpoints import make_checkpoint

from trivium import LLM, SamplingParams
from trivium.engine import RequestState

LOAD = {"progress": False, "strict": True}
PROMPTS = [[(7 * i * i + n) % 250 for i in range(n)] for n in (1, 16, 37, 130)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
DRAWN = [
    GREEDY, SamplingParams(temperature=0.9, seed=5, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=6, top_k=30, top_p=0.9, min_p=0.01, max_tokens=8, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=0.8, seed=7, repetition_penalty=1.3, logit_bias={7: 2.0}, max_tokens=8, ignore_eos=True),
]  # fmt: skip
FIA = "aclnnFusedInferAttentionScoreV4"
MODELS = {
    "wide heads": ("llama", {"head_dim": 128}),
    "narrow heads": ("llama", {"head_dim": 64}),
    "odd heads": ("qwen3", {"head_dim": 24}),
    "window": ("mistral", {"head_dim": 128, "sliding_window": 20}),
    "two windows": ("gemma3", {"head_dim": 32}),
    "soft cap": ("gemma2", {"head_dim": 32}),
    "biases": ("qwen2", {"head_dim": 32}),
    "rotated in part": ("phi3", {"head_dim": 128, "partial_rotary_factor": 0.5}),
}


def ids(outputs):
    return [[c.token_ids for c in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("models")
    return {name: make_checkpoint(home / name, family, **sizes) for name, (family, sizes) in MODELS.items()}


@pytest.fixture(scope="module")
def wanted(folders):
    """Greedy and drawn tokens by the reference; of most models by trivium_torch on the host in float32, which tests/torch holds
    to it and which takes a tenth of the time."""
    found = {}
    for name, folder in folders.items():
        oracle = "reference" if name == "window" else "torch:cpu"
        with LLM(folder, oracle, num_kv_blocks=60, block_size=16, dtype="float32", kv_dtype="float32", **LOAD) as llm:
            found[name] = ids(llm.generate(PROMPTS, GREEDY)), ids(llm.generate(PROMPTS, DRAWN))
    return found


def on_npu(folder, asked, dtype="float16", **settings):
    with LLM(folder, "ascend", **{"dtype": dtype, "kv_dtype": dtype, "num_kv_blocks": 12, **LOAD, **settings}) as llm:
        made = ids(llm.generate(PROMPTS, asked))
        llm.engine.check()
    return made


@pytest.mark.parametrize("model", MODELS)
def test_in_float32_every_token_is_the_reference_s(npu, folders, wanted, model):
    assert on_npu(folders[model], DRAWN, "float32") == wanted[model][1]
    assert npu.log.count(FIA) == 0  # attention takes 16 bits


@pytest.mark.parametrize("model", MODELS)
def test_in_float16_greedy_tokens_are_the_reference_s(npu, folders, wanted, model):
    assert on_npu(folders[model], GREEDY) == wanted[model][0]
    fused = {"aclnnRmsNorm", "aclnnScatterPaKvCache"}
    fused |= set() if model in ("odd heads", "soft cap") else {FIA}
    fused |= set() if "cap" in model or "windows" in model else {"aclnnAddRmsNorm", "aclnnSwiGlu"}
    assert fused <= set(npu.log.names)


def test_wide_heads_are_one_attention_call_a_layer_and_step(npu, folders):
    """Eight steps of two layers: all prompts together, then seven decodes; and every call of the step is a fused one or a
    product."""
    on_npu(folders["wide heads"], GREEDY, backend_options={"graphs": False})
    names = npu.log.names
    assert {name: names.count(name) for name in set(names)} == {
        FIA: 16, "aclnnAddRmsNorm": 24, "aclnnRmsNorm": 16, "aclnnRopeWithSinCosCacheV2": 16, "aclnnScatterPaKvCache": 16,
        "aclnnSwiGlu": 16,
    }  # fmt: skip
    assert not set(npu.log.aten) & {"bmm", "_softmax", "rms_norm", "pow", "rsqrt", "silu"}
    first, last = npu.log.calls[0], npu.log.last(FIA)
    assert first.name == "aclnnRmsNorm" and last.layout == "TND" and last.block_size == 128
    assert last.q_lens == [1, 2, 3, 4] and sorted(last.kv_lens) == [8, 23, 44, 137]


@pytest.mark.parametrize(
    "settings", [{"max_num_batched_tokens": 16}, {"max_num_seqs": 2}, {"enable_prefix_caching": False}], ids=str
)
@pytest.mark.parametrize("model", ["wide heads", "window", "narrow heads"])
def test_no_schedule_changes_the_tokens(npu, folders, wanted, model, settings):
    assert on_npu(folders[model], GREEDY, **settings) == wanted[model][0]


def test_requests_move_to_and_from_the_npu(npu, folders, wanted):
    """Pages leave in the neutral format in the middle of decoding and continue elsewhere."""
    for source, target in (("torch:cpu", "ascend"), ("ascend", "torch:cpu")):
        pages = {"ascend": {"num_kv_blocks": 12}, "torch:cpu": {"num_kv_blocks": 60, "block_size": 16}}
        options = {**LOAD, "dtype": "float16", "kv_dtype": "float16"}
        a, b = (LLM(folders["wide heads"], name, **options, **pages[name]) for name in (source, target))
        with a as first, b as second:
            numbers = [first.engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
            for _ in range(4):
                first.engine.step()
            states = [RequestState.from_bytes(first.engine.export_request(n).to_bytes()) for n in numbers]
            moved, done = [second.engine.import_request(state) for state in states], {}
            while second.engine.has_unfinished():
                done |= {o.request_id: o for o in second.engine.step() if o.finished}
            first.engine.check()
            second.engine.check()
        assert ids([done[n] for n in moved]) == wanted["wide heads"][0]
