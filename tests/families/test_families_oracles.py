"""Tiny random models of every family outside the core against transformers: logits of prefill and decode, through pages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from family_cases import CASES, PREFILL_ONLY, open_case, weights_of
from model_cases import DECODE, make_prompts, oracle_logits
from paged_runner import PagedRunner, run_in_chunks
from trivium.models import build

pytestmark = pytest.mark.oracles


@pytest.mark.parametrize("name", CASES)
def test_prefill_and_decode_logits_equal_the_oracle(name: str, tmp_path: Path) -> None:
    model, checkpoint = open_case(name, tmp_path)
    program = build(checkpoint.config)
    weights = weights_of(program, checkpoint)
    prompts = make_prompts((37, 16, 9, 21), 259)
    decode = 0 if name in PREFILL_ONLY else DECODE
    want = [oracle_logits(model, p, decode=decode) for p in prompts]
    for page_size, chunk in [(4, 5), (16, 16)]:
        got = run_in_chunks(PagedRunner(program, weights, page_size=page_size), prompts, chunk, decode=DECODE)
        for g, w in zip(got, want):
            np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4, err_msg=f"page {page_size} chunk {chunk}")
