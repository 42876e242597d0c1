"""Router and experts against plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trivium import ops
from trivium.errors import ProgramError

ROUTE, EXPERTS = ops.OPERATORS["moe_route"], ops.OPERATORS["moe_experts"]


def scores(logits, scoring):
    if scoring == "sigmoid":
        return [1 / (1 + math.exp(-x)) for x in logits]
    if scoring == "softmax_topk":
        return list(logits)
    total = sum(math.exp(x) for x in logits)
    return [math.exp(x) / total for x in logits]


def route(logits, bias, top_k, scoring="softmax", normalize=True, scale=1.0, groups=1, top_groups=1):
    p = scores(logits, scoring)
    choice = [a + b for a, b in zip(p, bias)]
    size = len(p) // groups
    members = [range(g * size, (g + 1) * size) for g in range(groups)]
    worth = [sum(sorted((choice[e] for e in m), reverse=True)[: 2 if scoring == "sigmoid" else 1]) for m in members]
    best = sorted(range(groups), key=lambda g: (-worth[g], g))[:top_groups]
    allowed = [e for g in best for e in members[g]]
    ids = sorted(allowed, key=lambda e: (-choice[e], e))[:top_k]
    w = [p[e] for e in ids]
    if scoring == "softmax_topk":
        w = [math.exp(x) / sum(map(math.exp, w)) for x in w]
    elif normalize:
        w = [x / sum(w) for x in w]
    return [x * scale for x in w], ids


def test_routing_equals_plain_python_in_every_case():
    for case in ROUTE.cases(np.random.default_rng(5)):
        logits, bias = case.args
        weights, ids = ROUTE(*case.args, **case.attrs)
        for t in range(len(logits)):
            want, want_ids = route(logits[t].tolist(), [0.0] * 16 if bias is None else bias.tolist(), **case.attrs)
            assert ids[t].tolist() == want_ids
            np.testing.assert_allclose(weights[t], want, rtol=1e-5)


def test_equal_scores_go_to_the_lower_id():
    _, ids = ROUTE(np.zeros((1, 6), np.float32), top_k=3)
    assert ids.tolist() == [[0, 1, 2]]


def test_a_bias_changes_the_choice_but_not_the_weights():
    logits = np.array([[0.0, 1.0, 2.0]], np.float32)
    weights, ids = ROUTE(logits, np.array([5, 0, 0], np.float32), top_k=1, scoring="sigmoid", normalize=False)
    assert ids.tolist() == [[0]] and weights[0, 0] == pytest.approx(0.5)


@pytest.mark.parametrize(
    "attrs", [{"top_k": 9}, {"top_k": 2, "scoring": "best"}, {"top_k": 1, "groups": 3}, {"top_k": 5, "groups": 2}]
)
def test_routing_that_does_not_fit_is_refused(attrs):
    b = ops.new_builder()
    with pytest.raises(ProgramError, match="moe_route"):
        b.moe_route(b.embedding(b.input("token_ids"), b.weight("w", (4, 8))), **attrs)


def test_experts_equal_one_dense_network_a_choice():
    gated, linear = ops.OPERATORS["gated"], ops.OPERATORS["linear"]
    for case in EXPERTS.cases(np.random.default_rng(6)):
        x, weights, ids, gate, up, down, *biases = case.args
        bias = lambda i, e, biases=biases: None if biases[i] is None else biases[i][e]
        want = np.zeros((len(x), down.shape[1]))
        for t in range(len(x)):
            for w, e in zip(weights[t], ids[t]):
                h = gated(linear(x[t], gate[e], bias(0, e)), linear(x[t], up[e], bias(1, e)), **{"kind": "silu", **case.attrs})
                want[t] += w * linear(h, down[e], bias(2, e))
        np.testing.assert_allclose(EXPERTS(*case.args, **case.attrs), want, rtol=2e-4, atol=2e-4)
