"""Tiny random models of every family against transformers: logits of prefill and decode, through pages."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from model_cases import CASES, DECODE, MAX_MODEL_LEN, make_prompts, oracle_logits, oracle_model
from paged_runner import PagedRunner, run_in_chunks
from trivium.models import build

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
