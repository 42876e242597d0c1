"""What tests of the CPU backend's operators share: instruction sets, one operator on the conformance kit's bench, and the
least Program with its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from trivium.conformance.examples import make_example
from trivium.conformance.kit import open_lab
from trivium.conformance.lab import Outcome
from trivium.ops import OPERATORS, Batch, Case, Program, new_builder
from trivium.ops.sample import plain_inputs

native = pytest.importorskip("trivium_cpu._native")

ISAS = ["portable", "avx2", "avx512", "auto", *native.emulated_tiers()]


def run_case(name: str, case: Case, kv_dtype: str = "float32", **options: Any) -> Outcome:
    """One operator by its kernel: a host call in its place is refused."""
    lab = open_lab("cpu", {"strict": True, **options})
    example = make_example(OPERATORS[name], case, dtype="float32", page_size=lab.page_size)
    return lab.run(example, example.program, dtype="float32", kv_dtype=kv_dtype)


def embedding_program(vocab: int = 8, hidden: int = 5) -> Program:
    """Rows of a table as the logits of tokens."""
    b = new_builder()
    y = b.embedding(b.input("token_ids"), b.weight("table", (vocab, hidden)))
    return b.finish({"logits": b.gather_rows(y, b.input("sample_rows"))}, vocab_size=hidden)


def batch_of(ids: Sequence[int], rows: Sequence[int] | None = None) -> Batch:
    """A step of one sequence without state; rows: those to sample, by default all."""
    ids = np.asarray(ids, np.int32)
    rows = np.arange(len(ids), dtype=np.int32) if rows is None else np.asarray(rows, np.int32)
    return Batch(
        ids, np.arange(len(ids), dtype=np.int32), np.array([0, len(ids)], np.int32), np.array([len(ids)], np.int32),
        np.zeros((0, 1, 0), np.int32), np.zeros((0, len(ids)), np.int64), rows, plain_inputs(len(rows)),
    )  # fmt: skip
