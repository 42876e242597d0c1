"""Beam search on tiny models of both backends: against the plain search over their own log probabilities, and transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_cases import load_oracle
from plain_beams import Next, plain_search
from tiny_checkpoints import make_checkpoint
from trivium import LLM, SamplingParams

PROMPTS = [[104, 101, 108, 108, 111], [7], [(31 * i) % 250 for i in range(33)]]
ENDS = [*range(100, 140), 257]
EXACT: dict[str, dict[str, Any]] = {"reference": {}, "cpu": {"dtype": "float32", "kv_dtype": "float32"}}


@pytest.fixture(scope="module", params=["llama", "mistral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("m") / request.param, request.param, seed=3, vocab_size=259)


@pytest.fixture(scope="module", params=EXACT)
def llm(request: pytest.FixtureRequest, folder: Path) -> Iterator[LLM]:
    with LLM(folder, backend=request.param, progress=False, num_kv_blocks=300, max_model_len=128, **EXACT[request.param]) as model:
        yield model


def next_of(llm: LLM, prompt: list[int]) -> Next:
    everything = SamplingParams(max_tokens=1, temperature=0, logprobs=-1, ignore_eos=True)
    known: dict[tuple[int, ...], np.ndarray] = {}

    def row(tokens: list[int]) -> np.ndarray:
        if tuple(tokens) not in known:
            [logprobs] = llm.generate([[*prompt, *tokens]], everything)[0].outputs[0].logprobs or []
            known[tuple(tokens)] = np.array([logprobs[i].logprob for i in range(llm.loaded.vocab_size)])
        return known[tuple(tokens)]

    return row


@pytest.mark.faults
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_o03_beams_of_a_model_are_those_of_the_plain_search(llm: LLM, width: int, penalty: float) -> None:
    params = SamplingParams(
        beam_width=width, n=width, length_penalty=penalty, max_tokens=5, stop_token_ids=ENDS, logprobs=2, early_stopping="never"
    )
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params)):
        want = plain_search(next_of(llm, prompt), width, set(ENDS), 5, penalty, "never")
        assert [c.token_ids for c in output.outputs] == [tokens for _, _, tokens in want]
        np.testing.assert_allclose([c.cumulative_logprob for c in output.outputs], [total for _, total, _ in want], rtol=1e-5)
        for c in output.outputs:
            assert c.finish_reason == ("stop" if c.token_ids[-1] in ENDS else "length")
            assert c.text == llm.tokenizer.decode(c.token_ids[:-1] if c.finish_reason == "stop" else c.token_ids)
            got = [next(iter(row.values())).logprob for row in c.logprobs or []]
            rows = [next_of(llm, prompt)(c.token_ids[:i])[t] for i, t in enumerate(c.token_ids)]
            np.testing.assert_allclose(got, rows, rtol=1e-5)


@pytest.mark.faults
def test_o03_scores_divide_by_the_generated_length_and_the_search_ends(llm: LLM) -> None:
    params = SamplingParams(beam_width=4, n=4, length_penalty=2.0, max_tokens=10, stop_token_ids=ENDS)
    for prompt in ("a", "a much longer prompt, which must not count"):
        [output] = llm.generate([prompt], params)
        scores = [(c.cumulative_logprob or 0.0) / len(c.token_ids) ** 2.0 for c in output.outputs]
        assert scores == sorted(scores, reverse=True) and len(scores) == 4
        assert max(len(c.token_ids) for c in output.outputs) <= 10
    with pytest.raises(TypeError, match="use_beam_search"):
        SamplingParams(use_beam_search=True)  # type: ignore[call-arg]


def test_beams_share_a_batch_with_others_and_ten_tokens_come_to_an_end(llm: LLM) -> None:
    beams = SamplingParams(beam_width=4, n=4, max_tokens=10)
    greedy = SamplingParams(max_tokens=8, temperature=0, logprobs=1, ignore_eos=True)
    want = [llm.generate([PROMPTS[2]], asked)[0].outputs for asked in (beams, greedy)]
    outputs = llm.generate([PROMPTS[2], PROMPTS[0], PROMPTS[2]], [greedy, beams, beams])
    assert [outputs[2].outputs, outputs[0].outputs] == want
    assert len(outputs[1].outputs) == 4


@pytest.mark.oracles
@pytest.mark.parametrize("width", [2, 5])
@pytest.mark.parametrize(("penalty", "early"), [(0.0, False), (1.0, True), (1.0, False), (2.0, "never"), (-1.0, False)])
def test_transformers_finds_the_same_beams(llm: LLM, folder: Path, width: int, penalty: float, early: bool | str) -> None:
    oracle = load_oracle(folder)
    import torch

    params = SamplingParams(
        beam_width=width, n=width, length_penalty=penalty, early_stopping=early, max_tokens=12, stop_token_ids=ENDS[:-1]
    )
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params)):
        with torch.no_grad():
            found = oracle.generate(
                torch.tensor([prompt]), num_beams=width, num_return_sequences=width, length_penalty=penalty, early_stopping=early,
                max_new_tokens=12, do_sample=False, eos_token_id=ENDS, pad_token_id=258, return_dict_in_generate=True,
                output_scores=True, attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            )  # fmt: skip
        theirs = found.sequences[:, len(prompt) :].tolist()
        assert [c.token_ids + [258] * (len(theirs[0]) - len(c.token_ids)) for c in output.outputs] == theirs
        scores = [(c.cumulative_logprob or 0.0) / len(c.token_ids) ** penalty for c in output.outputs]
        np.testing.assert_allclose(scores, found.sequences_scores.numpy(), rtol=1e-4)
