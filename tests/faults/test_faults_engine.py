"""Faults of metrics and KV formats, as the engine can have them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_runs import engine_of, generate, greedy, prompts_of, run_all
from drafters import Knowing
from fake_model import Clock
from tiny_checkpoints import make_checkpoint, read_safetensors, write_safetensors
from trivium import LLM
from trivium.errors import InvalidRequestError
from trivium.sampling import SamplingParams

pytestmark = pytest.mark.faults


def test_o40_totals_are_the_sum_of_what_the_requests_report() -> None:
    """Twenty requests, some with several outputs, some given up while they wait or run."""
    engine = engine_of(max_num_seqs=4)
    prompts = prompts_of(20, 30)
    numbers = [engine.add_request(p, greedy(8, n=1 + i % 3 // 2, temperature=0.7, seed=i)) for i, p in enumerate(prompts)]
    ended = [engine.abort(numbers[17])]
    for _ in range(6):
        ended += [o for o in engine.step() if o.finished]
    ended += [engine.abort(n) for n in numbers[::5]]
    outputs = [o for o in ended if o is not None] + list(run_all(engine).values())
    assert len(outputs) == 20 and sum(o.outputs[0].finish_reason == "abort" for o in outputs) >= 3
    assert engine.stats.prompt_tokens == sum(map(len, prompts))
    assert engine.stats.generated_tokens == sum(len(c.token_ids) for o in outputs for c in o.outputs)
    assert engine.stats.preemptions == sum(o.metrics.num_preemptions for o in outputs)


@pytest.mark.parametrize(("tokens", "chunks"), [(1, 1), (3, 2), (31, 11)])
def test_o41_time_per_token_is_not_the_gap_between_chunks(tokens: int, chunks: int) -> None:
    """Steps of 30 ms yield one token, then three each."""
    clock, prompt = Clock(), [5, 6, 7]
    ids = generate(prompt, greedy(60)).outputs[0].token_ids
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "adaptive": False}
    engine = engine_of(drafter=Knowing([prompt + ids], 1.0), clock=clock, speculative=drafts)

    def hook(at: str, batch: Any) -> None:
        clock.now += 0.03 if batch is not None else 0.0

    engine.model.executable.hook = hook
    metrics = generate(prompt, greedy(tokens), engine).metrics
    assert metrics is not None
    assert engine.stats.steps == chunks
    assert metrics.mean_itl == (None if tokens == 1 else pytest.approx(0.03))
    want = None if tokens == 1 else pytest.approx((metrics.e2e_time - metrics.time_to_first_token) / (tokens - 1))
    assert metrics.time_per_output_token == want
    if tokens == 31:
        assert metrics.time_per_output_token == pytest.approx(0.01)


@pytest.mark.parametrize(("backend", "kv_dtype"), [("reference", "fp8_e4m3"), ("cpu", "fp8_e4m3"), ("cpu", "int4")])
def test_o45_a_cache_in_8_bits_is_refused_where_nothing_scales_it(tmp_path: Any, backend: str, kv_dtype: str) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    with pytest.raises(InvalidRequestError, match="kv_dtype") as refused:
        LLM(str(folder), backend=backend, kv_dtype=kv_dtype)
    assert refused.value.param == "kv_dtype"
    with LLM(str(folder), backend=backend) as llm:
        assert len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 3


@pytest.mark.parametrize("size", [1.0, 5.0])
def test_o45_int8_scales_each_tokens_key_and_value(tmp_path: Any, size: float) -> None:
    """Larger keys and values, too: no scale is fixed at 1. Both backends keep the same numbers."""
    folder = make_checkpoint(tmp_path, "llama")
    weights = folder / "model.safetensors"
    tensors = read_safetensors(weights)
    write_safetensors(
        weights, {name: t * np.float32(size if "k_proj" in name or "v_proj" in name else 1) for name, t in tensors.items()}
    )
    prompt = [(7 * i + 3) % 250 for i in range(90)]
    found = {}
    for kv_dtype in ("float32", "bfloat16", "int8"):
        with LLM(str(folder), backend="cpu", kv_dtype=kv_dtype) as llm:
            [out] = llm.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=1))
            found[kv_dtype] = np.array([entry[token].logprob for token, entry in zip(prompt[1:], out.prompt_logprobs[1:])])
    with LLM(str(folder), backend="reference", kv_dtype="int8") as llm:
        [out] = llm.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=1))
        want = [entry[token].logprob for token, entry in zip(prompt[1:], out.prompt_logprobs[1:])]
    np.testing.assert_allclose(found["int8"], want, atol=0.05)
    off = {kv_dtype: np.abs(logprobs - found["float32"]).mean() for kv_dtype, logprobs in found.items()}
    assert 0 < off["int8"] < min(0.05, 4 * off["bfloat16"])
    assert np.exp(-found["int8"].mean()) < 1.01 * np.exp(-found["float32"].mean())
