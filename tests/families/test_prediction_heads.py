"""Heads for multi-token prediction: their logits are those of an oracle made of transformers' layers, and as drafts they change no
token; one that can't be wrong is always right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_cases import weights_of
from head_cases import HEADS, Head
from installed_backends import exact
from model_cases import make_prompts
from paged_runner import PagedRunner
from tiny_checkpoints import byte_tokenizer
from trivium import LLM, SamplingParams
from trivium.errors import UnsupportedError
from trivium.models import build
from trivium.models.decoder import HIDDEN
from trivium.ops import Batch
from trivium.weights import open_checkpoint

pytestmark = pytest.mark.oracles
pytest.importorskip("transformers")

PROMPTS = [[(37 * i + 5 * n) % 250 for i in range(n)] for n in (29, 3, 61, 16)]
DRAFTS: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}


class HeadRunner(PagedRunner):
    """Feeds each token of its one sequence with the next row of `hidden`."""

    def __init__(self, hidden: np.ndarray, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._hidden = hidden

    def forward(self, batch: Batch) -> np.ndarray:
        batch.adapters = np.arange(batch.tokens, dtype=np.int32)[::-1].copy()
        self._constants[HIDDEN][batch.adapters, 0] = self._hidden[batch.positions]
        return super().forward(batch)


@pytest.fixture(scope="module", params=HEADS)
def case(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Head, Path]:
    folder = tmp_path_factory.mktemp("head") / request.param
    head = Head(request.param, folder)
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    return head, folder


def test_a_head_s_logits_equal_the_oracle_s(case: tuple[Head, Path]) -> None:
    head, folder = case
    checkpoint = open_checkpoint(folder)
    program = build(checkpoint.config, draft=True)
    (prompt,) = make_prompts((27,), 259)
    hidden = head.hidden(prompt)
    runner = HeadRunner(hidden.numpy(), program, weights_of(program, checkpoint), page_size=4)
    got = np.concatenate([runner.step([(0, prompt[1 + at : 1 + at + n])]) for at, n in ((0, 9), (9, 16), (25, 1))])
    np.testing.assert_allclose(got, head.logits(prompt, hidden), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["reference", "cpu", "torch"])
def test_drafts_of_a_random_head_change_no_token(case: tuple[Head, Path], backend: str) -> None:
    _, folder = case
    if backend != "reference" and folder.name != "qwen3.5":
        pytest.skip("one of them on each backend is enough")
    params = [
        SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=3, n=2, max_tokens=14, ignore_eos=True),
    ]
    found = []
    for speculative in (None, DRAFTS):
        with LLM(folder, backend, progress=False, num_kv_blocks=200, speculative=speculative, **exact(backend)) as llm:
            outputs = llm.generate(PROMPTS, [params[i % 2] for i in range(len(PROMPTS))])
            again = llm.generate(PROMPTS[2:3], params[0])  # what is found in the cache has no hidden states
            found.append([[list(c.token_ids) for c in o.outputs] for o in (*outputs, *again)])
            assert llm.engine.stats.failed_drafts == 0
            llm.engine.check()
            if speculative is not None:
                assert llm.engine.stats.draft_tokens > 100 and llm.engine.stats.cached_tokens > 0
                llm.engine.speculator._drafter._kv.check_idle()
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def certain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without thoughts, token t of the first 48 followed by t + 1, around and around; and a head that turns the hidden
    state of a token into that of the next one, and sees nothing else: it is right as long as every state comes to its own token."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("head") / "certain"
    head = Head("qwen3.5", folder)
    tensors, hidden = load_file(folder / "model.safetensors"), head.model.config.hidden_size
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight")) or "norm" in name:
            tensors[name] = torch.zeros_like(tensors[name])  # norms are stored minus one
    directions = torch.linalg.qr(torch.randn(hidden, hidden, generator=torch.Generator().manual_seed(1)))[0][:48]
    following = directions.roll(-1, 0)
    embeddings, rows = (torch.zeros(259, hidden) for _ in range(2))
    embeddings[:48], rows[:48] = directions, directions.roll(1, 0) * 10
    turn = torch.cat([torch.zeros(hidden, hidden), following.T @ directions], dim=1)
    tensors |= {"model.embed_tokens.weight": embeddings, "lm_head.weight": rows, "mtp.fc.weight": turn}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    return folder


@pytest.mark.parametrize("backend", ["reference", "cpu", "torch"])
def test_drafts_of_a_head_that_can_t_be_wrong_all_come_true(certain: Path, backend: str) -> None:
    prompts = [[(n + i) % 48 for i in range(5 + 9 * n)] for n in range(5)]  # the longest are shown to the head in several steps
    options = {"num_kv_blocks": 200, "max_num_batched_tokens": 24, "speculative": DRAFTS, **exact(backend)}
    with LLM(certain, backend, progress=False, **options) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
        for prompt, output in zip(prompts, outputs):
            assert list(output.outputs[0].token_ids) == [(prompt[-1] + 1 + i) % 48 for i in range(20)]
            assert output.metrics.num_accepted_tokens == output.metrics.num_draft_tokens >= 8
        assert llm.engine.stats.failed_drafts == 0


def test_heads_go_along_with_preemption_small_steps_and_faults(certain: Path) -> None:
    prompts = [[(n + i) % 48 for i in range(3 + 7 * n)] for n in range(6)]
    options = {"num_kv_blocks": 26, "block_size": 8, "max_model_len": 80, "max_num_batched_tokens": 16, "speculative": DRAFTS}
    with LLM(certain, "reference", progress=False, enable_prefix_caching=False, **options) as llm:
        drafter, stats = llm.engine.speculator._drafter, llm.engine.stats
        run, calls = drafter._run, []

        def failing(*args: Any) -> Any:
            calls.append(args)
            if len(calls) % 7 == 3:
                raise RuntimeError("the head is out of order")
            return run(*args)

        drafter._run = failing
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
        assert [list(o.outputs[0].token_ids) for o in outputs] == [[(p[-1] + 1 + i) % 48 for i in range(30)] for p in prompts]
        assert stats.preemptions > 0 and stats.failed_drafts > 3
        assert stats.accepted_tokens == stats.draft_tokens > 20
        llm.engine.check()
        drafter._kv.check_idle()


def test_a_model_without_a_head_is_refused(certain: Path, tmp_path: Path) -> None:
    config = open_checkpoint(certain).config
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM has no head"):
        build({**config, "architectures": ["LlamaForCausalLM"]}, draft=True)
    with pytest.raises(UnsupportedError, match="mtp_num_hidden_layers"):
        build({**config, "mtp_num_hidden_layers": 2}, draft=True)
    head = Head("deepseek-v3", tmp_path)
    assert head.count == 3
    config = open_checkpoint(tmp_path).config
    with pytest.raises(UnsupportedError, match="num_nextn_predict_layers"):
        build({**config, "num_nextn_predict_layers": 0}, draft=True)
