"""What tests of the CPU backend's operators share: instruction sets, and one operator on the conformance kit's bench."""

from __future__ import annotations

from typing import Any

import pytest
from trivium.conformance.examples import make_example
from trivium.conformance.kit import open_lab
from trivium.conformance.lab import Outcome
from trivium.ops import OPERATORS, Case

native = pytest.importorskip("trivium_cpu._native")

ISAS = ["portable", "avx2", "avx512", "auto", *native.emulated_tiers()]


def run_case(name: str, case: Case, kv_dtype: str = "float32", **options: Any) -> Outcome:
    """One operator by its kernel: a host call in its place is refused."""
    lab = open_lab("cpu", {"strict": True, **options})
    example = make_example(OPERATORS[name], case, dtype="float32", page_size=lab.page_size)
    return lab.run(example, example.program, dtype="float32", kv_dtype=kv_dtype)
