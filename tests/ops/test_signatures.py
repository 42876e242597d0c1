"""What operators' signatures say of their arguments beside shapes: which weights may be rounded, which activations decide."""

from __future__ import annotations

import pytest
from trivium.errors import ProgramError
from trivium.ops import OPERATORS
from trivium.ops.schema import parse_signature


def marked(mark: str) -> set[str]:
    return {f"{name}.{arg.name}" for name, op in OPERATORS.items() for arg in op.signature.args if arg.mark == mark}


def test_matrices_of_products_may_be_rounded_and_no_other_weight() -> None:
    experts = {f"moe_experts.{name}" for name in ("gate", "up", "down")}
    assert marked("*") == {"embedding.weight", "linear.weight"} | experts


def test_what_chooses_experts_or_fades_a_state_decides() -> None:
    states = {"gated_delta_rule.g", "gated_delta_rule.beta", "selective_scan.dt"}
    assert marked("!") == {"moe_route.logits", "sparse_mixer_route.logits"} | states


def test_a_mark_is_the_last_of_an_argument() -> None:
    [x, w], _ = parse_signature("x[n]!, w[n]:weight?* -> y[n]")
    assert (x.mark, w.mark, w.optional, w.dtype) == ("!", "*", True, "weight")
    with pytest.raises(ProgramError, match="can't read"):
        parse_signature("x[n]!? -> y[n]")
