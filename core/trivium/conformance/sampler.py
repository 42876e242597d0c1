"""The sampler: the same ids as the reference for the same logits, and logprobs within the tolerance."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from trivium.conformance.examples import make_example
from trivium.conformance.lab import Lab
from trivium.conformance.numbers import expect_close
from trivium.conformance.operators import SEED
from trivium.conformance.report import Check, Mismatch, Verdict
from trivium.ops import OPERATORS, Case, Sampled, SampleInputs
from trivium.ops.sample import plain_inputs

LARGE = 50000
SAMPLE = OPERATORS["sample"]


def checks(lab: Lab) -> Iterator[Check]:
    """One check for each of the operator's cases."""
    for number, case in enumerate(SAMPLE.cases(np.random.default_rng(SEED))):
        yield Check("sampler", f"vector {number}", lambda case=case: judge_case(lab, case))  # type: ignore[misc]
    for name, case in large_cases():
        yield Check("sampler", name, lambda case=case: judge_case(lab, case))  # type: ignore[misc]


def large_cases() -> Iterator[tuple[str, Case]]:
    """A vocabulary of a real model's size, flat and peaked logits."""
    rng = np.random.default_rng(SEED)
    filters: dict[str, dict[str, Any]] = {
        "no filter": {}, "top_k 50": {"top_k": 50}, "top_p 0.95": {"top_p": 0.95}, "min_p 0.02": {"min_p": 0.02},
        "typical_p 0.8": {"typical_p": 0.8}, "top_n_sigma 1.5": {"top_n_sigma": 1.5},
        "XTC": {"xtc_probability": 0.5, "xtc_threshold": 0.001},
        "all filters": {"top_k": 1000, "top_p": 0.9, "min_p": 0.001, "typical_p": 0.95, "top_n_sigma": 3, "xtc_probability": 0.5},
        "greedy": {"temperature": 0.0},
    }  # fmt: skip
    for name, chosen in filters.items():
        spread = np.array([[0.5], [2], [5], [1]], np.float32)
        logits = rng.standard_normal((4, LARGE), dtype=np.float32) * spread
        draw = {"temperature": 0.9, "seed": rng.integers(0, 2**64, 4, np.uint64), "position": rng.integers(0, 2**20, 4)}
        yield f"{LARGE} ids, {name}", Case((logits, plain_inputs(4, **{**draw, **chosen})), {"vocab_size": LARGE - 3})


def used(inputs: SampleInputs) -> frozenset[str]:
    """The parameters of a request that would ask for this."""
    drawn = np.asarray(inputs.temperature) > 0
    asked = {
        "temperature": drawn, "seed": drawn, "top_k": drawn & (inputs.top_k > 0), "top_p": drawn & (inputs.top_p < 1),
        "min_p": drawn & (inputs.min_p > 0), "typical_p": drawn & (inputs.typical_p < 1),
        "top_n_sigma": drawn & (inputs.top_n_sigma > 0), "xtc_probability": drawn & (inputs.xtc_probability > 0),
        "repetition_penalty": inputs.repetition != 1,
        "presence_penalty": inputs.presence != 0, "frequency_penalty": inputs.frequency != 0, "logit_bias": inputs.bias_ids >= 0,
        "allowed_token_ids": inputs.mask is not None, "logprobs": inputs.top_logprobs >= 0,
        "prompt_logprobs": inputs.score_ids >= 0,
    }  # fmt: skip
    return frozenset(name for name, where in asked.items() if np.any(where))


def judge_case(lab: Lab, case: Case) -> Verdict:
    """The backend's choice for the case's logits against the reference's."""
    able = lab.capabilities.sampling
    lacking = [] if able is None else sorted(used(case.args[1]) - able)
    if lacking or len(case.args[0]) > lab.step_tokens:
        return Verdict(f"the backend does not declare {', '.join(lacking)}" if lacking else "more rows than in a step", "skipped")
    got, seen = draw(lab, case)
    return _compare(got, SAMPLE(seen, case.args[1], **case.attrs))


def draw(lab: Lab, case: Case) -> tuple[Sampled, np.ndarray[Any, np.dtype[np.float32]]]:
    """Samples the case's logits at the end of a one-call Program; returns the logits as the backend holds them, too."""
    logits, inputs = case.args
    dtype = "float32" if "float32" in lab.dtypes else lab.dtypes[0]
    unchanged = Case((logits,), {"factor": 1.0})
    example = make_example(OPERATORS["scale"], unchanged, dtype=dtype, page_size=lab.page_size)
    program = dataclasses.replace(example.program, vocab_size=case.attrs["vocab_size"])
    outcome = lab.run(example, program, dtype=dtype, sampling=inputs)
    return outcome.sampled, outcome.outputs["logits"]


def _compare(got: Sampled, want: Sampled) -> Verdict:
    wrong = np.flatnonzero(np.asarray(got.ids) != want.ids)
    if len(wrong):
        row = int(wrong[0])
        raise Mismatch(f"{len(wrong)} of {len(want.ids)} ids differ; row {row} is {int(got.ids[row])}, not {int(want.ids[row])}")
    for name in ("ranks", "top_ids"):
        theirs, mine = getattr(got, name), getattr(want, name)
        if mine is not None and (theirs is None or not np.array_equal(theirs, mine)):
            raise Mismatch(f"{name} differ from the reference's")
    for name in ("logprobs", "top_logprobs"):
        theirs, mine = getattr(got, name), getattr(want, name)
        if mine is not None:
            if theirs is None:
                raise Mismatch(f"{name} were asked for and are missing")
            expect_close(name, np.asarray(theirs), mine, SAMPLE.tolerances["float32"])
    return Verdict(f"{len(want.ids)} rows")
