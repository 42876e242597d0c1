"""State along sequences against the operators' references: token by token, and in chunks."""

import numpy as np
import pytest
from triton_cases import DTYPES, OPERATORS, cases, near, rng, rounded, tensor, torch

from trivium.ops.state import RecurrentState
from trivium_cuda.kernels import recurrent

DELTA = OPERATORS["gated_delta_rule"]


def longest(starts):
    return int(np.diff(starts).max())


def delta(args, dtype="float32", **attrs):
    """(y, the states afterwards) by the kernels."""
    *rows, s, starts, contexts = args
    state = torch.from_numpy(s.data.copy())
    where = tensor(s.table), tensor(starts), tensor(contexts)
    y = recurrent.gated_delta_rule(*(tensor(a, dtype) for a in rows), state, *where, **attrs, max_queries=longest(starts))
    return y, state


@pytest.mark.parametrize("few", [0, recurrent.FEW])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_delta_rule_of_every_example_is_the_references(dtype, few, monkeypatch):
    monkeypatch.setattr(recurrent, "FEW", few)
    for args, attrs in cases("gated_delta_rule", dtype):
        y, state = delta(args, dtype, **attrs)
        want, after = DELTA(*args, **attrs)
        near(y, want, dtype, "gated_delta_rule")
        near(state, after.data, "float32", "gated_delta_rule")


def mixed(lengths=(40, 1, 0, 65, 17, 3), heads=2, dk=20, dv=40, dtype="float32"):
    """Prompts of some chunks, decodes and a sequence without tokens; some begin, some go on."""
    draw, tokens = rng(7), sum(lengths)
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    contexts = (np.array(lengths) + np.array([0, 9, 5, 30, 0, 2])).astype(np.int32)
    q, v = (draw.normal(size=(tokens, heads, n)) for n in (dk, dv))
    k = draw.normal(size=(tokens, heads, dk))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    k[7:20] = k[7:8]  # equal keys: the system is then as far from diagonal as it gets
    g, beta = -draw.uniform(0, 0.4, (tokens, heads)), draw.uniform(0.2, 1, (tokens, heads))
    arrays = (rounded(a.astype(np.float32), dtype) for a in (q, k, v, g, beta))
    table = np.array([4, 0, 6, 2, 5, 1], np.int32)
    return *arrays, RecurrentState(draw.normal(size=(7, heads, dk, dv)).astype(np.float32), table), starts, contexts


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_of_prompts_beside_decodes_are_the_reference_s(dtype):
    args = mixed(dtype=dtype)
    y, state = delta(args, dtype, scale=0.3)
    want, after = DELTA(*args, scale=0.3)
    near(y, want, dtype, "gated_delta_rule")
    near(state, after.data, "float32", "gated_delta_rule")
    assert torch.equal(state[[3, 6]], torch.from_numpy(args[5].data[[3, 6]])), "pages of nobody, and of who has no tokens, stay"


def test_a_sequence_of_the_delta_rule_has_the_same_bits_alone():
    args = mixed()
    *rows, s, starts, contexts = args
    together, _ = delta(args, scale=0.5)
    for i in (1, 3):
        begin, end = int(starts[i]), int(starts[i + 1])
        lone = RecurrentState(s.data, s.table[i : i + 1])
        own = [r[begin:end] for r in rows]
        alone, _ = delta((*own, lone, np.array([0, end - begin], np.int32), contexts[i : i + 1]), scale=0.5)
        assert torch.equal(together[begin:end], alone)
