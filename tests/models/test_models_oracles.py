"""Tiny random models of every family against transformers: logits of prefill and decode, through pages."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from model_cases import CASES, DECODE, MAX_MODEL_LEN, load_oracle, make_prompts, oracle_logits, oracle_model, random_case
from paged_runner import PagedRunner, run_in_chunks
from tiny_checkpoints import FAMILIES, make_checkpoint, make_weights, tiny_config
from trivium.models import build
from trivium.weights import open_checkpoint

pytestmark = pytest.mark.oracles


@pytest.mark.parametrize("name", CASES)
def test_prefill_and_decode_logits_equal_the_oracle(name: str, tmp_path: Path) -> None:
    model = oracle_model(name, tmp_path / "hub")
    model.save_pretrained(tmp_path / "saved")
    weights = pytest.importorskip("safetensors.numpy").load_file(tmp_path / "saved" / "model.safetensors")
    prompts = make_prompts((37, 16, 9, 21))
    want = [oracle_logits(model, p) for p in prompts]
    for spelling, page_size, chunk in [("hub", 4, 5), ("saved", 4, 16), ("saved", 16, 5), ("hub", 16, 16)]:
        config = json.loads((tmp_path / spelling / "config.json").read_text())
        program = build(config, max_model_len=MAX_MODEL_LEN.get(name))
        got = run_in_chunks(PagedRunner(program, weights, page_size=page_size), prompts, chunk, decode=DECODE)
        for g, w in zip(got, want):
            np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4, err_msg=f"{spelling} page {page_size} chunk {chunk}")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_random_sizes_equal_the_oracle(family: str, seed: int, tmp_path: Path) -> None:
    sizes = random_case(family, seed)
    config = tiny_config(family, **sizes)
    model = load_oracle(make_checkpoint(tmp_path, family, seed, tokenizer=False, **sizes))
    prompts = make_prompts((27, 8, 40), sizes["vocab_size"])
    runner = PagedRunner(build(config), make_weights(config, seed), page_size=3 + seed)
    for got, prompt in zip(run_in_chunks(runner, prompts, 7, decode=DECODE), prompts):
        np.testing.assert_allclose(got, oracle_logits(model, prompt), rtol=1e-4, atol=1e-4, err_msg=str(sizes))


def test_text_part_of_a_multimodal_checkpoint_equals_the_oracle(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    text = {k: v for k, v in tiny_config("gemma3").items() if k not in ("architectures", "model_type", "torch_dtype")}
    vision = {
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14,
    }  # fmt: skip
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    torch.manual_seed(5)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    program = build(checkpoint.config)
    weights = {c.source: checkpoint.tensor(c.source).decode() for c in program.constants if c.array is None}
    (prompt,) = make_prompts((23,))
    (got,) = run_in_chunks(PagedRunner(program, weights, page_size=4), [prompt], 9, decode=DECODE)
    np.testing.assert_allclose(got, oracle_logits(model, prompt), rtol=1e-4, atol=1e-4)
