"""Patterns: what is matched, what is refused, and that a fused Program means what the plain one means."""

from __future__ import annotations

import numpy as np
import ops_programs
import pytest
from fused_patterns import PATTERNS
from hypothesis import given, settings
from hypothesis import strategies as st

from trivium import ops
from trivium.errors import ProgramError
from trivium.ops import Pattern, rewrite
from trivium.ops.patterns import trace


def count(program):
    names = [c.name for c in program.calls]
    return {n: names.count(n) for n in set(names)}


def same(one, two):
    for seed in (0, 1):
        (a, states_a), (b, states_b) = ops_programs.run(one, seed), ops_programs.run(two, seed)
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])
        for s, t in zip(states_a, states_b):
            np.testing.assert_array_equal(s.k, t.k)
            np.testing.assert_array_equal(s.v, t.v)


@pytest.mark.parametrize(
    ("name", "times"),
    [
        ("qkv", 3),
        ("gated_mlp", 3),
        ("add_norm", 6),
        ("norm_qkv", 3),
        ("norm_gated", 3),
        ("qk_norm_rope_write", 3),
        ("linear_add", 6),
    ],
)
def test_each_pattern_of_a_decoder_is_found_in_every_layer(name, times):
    program = ops_programs.decoder(3)
    fused = rewrite(program, [PATTERNS[name]])
    assert count(fused)[name] == times
    ops_programs.check_order(fused)
    same(program, fused)


def test_larger_patterns_win_whatever_order_they_are_given_in():
    program = ops_programs.decoder(2)
    patterns = [p for p in PATTERNS.values() if p.name != "linear_add"]  # as large as add_norm: there the order given decides
    fused = rewrite(program, patterns)
    assert str(fused) == str(rewrite(program, patterns[::-1])) == str(rewrite(program, patterns))
    counts = count(fused)
    assert counts["norm_qkv"] == counts["norm_gated"] == counts["qk_norm_rope_write"] == 2
    assert "qkv" not in counts and "linear" in counts
    ops_programs.check_order(fused)
    same(program, fused)


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_what_accept_refuses_stays_apart(keep):
    seen = []
    accept = lambda call: seen.append(call) or len(seen) % keep == 0
    program = ops_programs.decoder(3)
    fused = rewrite(program, list(PATTERNS.values()), accept)
    ops_programs.check_order(fused)
    same(program, fused)
    assert not any(isinstance(c.op, Pattern) for c in rewrite(program, list(PATTERNS.values()), lambda call: False).calls)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(sorted(PATTERNS)), min_size=1, max_size=7, unique=True), st.randoms(use_true_random=False))
def test_any_selection_of_patterns_and_acceptances_keeps_the_meaning(names, random):
    program = ops_programs.decoder(2)
    fused = rewrite(program, [PATTERNS[n] for n in names], lambda call: random.random() < 0.7)
    ops_programs.check_order(fused)
    same(program, fused)


UNARY = ["softcap", "scale", "activation", "rms_norm"]


@st.composite
def random_programs(draw):
    """A random net of elementwise calls: values are read any number of times, and several are outputs."""
    b = ops.new_builder()
    values = [b.embedding(b.input("token_ids"), b.weight("embed", (ops_programs.VOCAB, ops_programs.HIDDEN)))]
    for _ in range(draw(st.integers(3, 14))):
        pick = lambda: values[-1 - draw(st.integers(0, min(3, len(values) - 1)))]
        match draw(st.sampled_from(["add", "mul", *UNARY])):
            case "softcap":
                values.append(b.softcap(pick(), cap=draw(st.sampled_from([1.0, 2.0]))))
            case "scale":
                values.append(b.scale(pick(), factor=0.5))
            case "activation":
                values.append(b.activation(pick(), kind="tanh"))
            case "rms_norm":
                values.append(b.rms_norm(pick(), eps=draw(st.sampled_from([1e-6, 1e-5]))))
            case binary:
                values.append(b.call(binary, pick(), pick()))
    outputs = {f"o{i}": v for i, v in enumerate(draw(st.lists(st.sampled_from(values), min_size=1, max_size=3, unique=True)))}
    return b.finish({"logits": values[-1], **outputs})


NETS = [
    Pattern("norm_cap", lambda b, x, *, cap: b.softcap(b.rms_norm(x), cap=cap)),
    Pattern("sum_norm", lambda b, x, y: (s := b.add(x, y), b.rms_norm(s))),
    Pattern("two_norms", lambda b, x, *, eps: (b.rms_norm(x, eps=eps), b.activation(x, kind="tanh"))),
    Pattern("mul_add", lambda b, x, y, z: b.add(b.mul(x, y), z)),
    Pattern("diamond", lambda b, x, *, factor: b.mul(b.scale(x, factor=factor), b.activation(x, kind="tanh"))),
    Pattern("shared", lambda b, x, y, z: (b.add(x, y), b.mul(x, z))),
]


@settings(max_examples=150, deadline=None)
@given(random_programs(), st.lists(st.sampled_from(range(len(NETS))), min_size=1, unique=True))
def test_random_nets_keep_their_meaning(program, chosen):
    fused = rewrite(program, [NETS[i] for i in chosen])
    ops_programs.check_order(fused)
    same(program, fused)


def net(make):
    b = ops.new_builder()
    x = b.embedding(b.input("token_ids"), b.weight("embed", (ops_programs.VOCAB, ops_programs.HIDDEN)))
    outputs = make(b, x)
    return b.finish({"logits": outputs[-1], **{f"o{i}": v for i, v in enumerate(outputs)}})


def fused_names(make, pattern):
    program = net(make)
    fused = rewrite(program, [pattern])
    ops_programs.check_order(fused)
    same(program, fused)
    return count(fused)


PAIR = Pattern("pair", lambda b, x, y, z: (b.softcap(x, cap=1.0), b.add(x, b.mul(y, z))))


def test_a_match_that_would_need_its_own_result_is_refused():
    def through_outside(b, x):
        first = b.softcap(x, cap=1.0)
        return [b.add(x, b.mul(b.scale(first, factor=2.0), first))]

    assert "pair" not in fused_names(through_outside, PAIR)
    assert fused_names(lambda b, x: [b.softcap(x, cap=1.0), b.add(x, b.mul(b.scale(x, factor=2.0), x))], PAIR)["pair"] == 1


def test_two_matches_that_are_sound_alone_but_circular_together_are_not_both_made():
    def crossed(b, x):
        one, two = b.rms_norm(x, eps=1e-5), b.rms_norm(x, eps=1e-6)
        u, v = b.softcap(one, cap=1.0), b.softcap(two, cap=2.0)
        return [b.mul(b.activation(one, kind="tanh"), v), b.mul(b.activation(two, kind="tanh"), u)]

    left = Pattern("left", lambda b, x, z, *, cap: (b.softcap(x, cap=cap), b.mul(b.activation(x, kind="tanh"), z)))
    assert fused_names(crossed, left)["left"] == 1


def test_a_value_read_outside_is_not_swallowed():
    chain = Pattern("chain", lambda b, x: b.scale(b.softcap(x, cap=1.0), factor=2.0))
    make = lambda b, x: [(s := b.softcap(x, cap=1.0)), b.scale(s, factor=2.0)]
    assert "chain" not in fused_names(make, chain)
    assert "chain" not in fused_names(lambda b, x: [b.add(b.scale((s := b.softcap(x, cap=1.0)), factor=2.0), s)], chain)
    assert fused_names(lambda b, x: [b.scale(b.softcap(x, cap=1.0), factor=2.0)], chain)["chain"] == 1


def test_attributes_must_agree_and_unmentioned_ones_must_be_default():
    pattern = Pattern("two", lambda b, x, *, eps: b.rms_norm(b.rms_norm(x, eps=eps), eps=eps))
    assert fused_names(lambda b, x: [b.rms_norm(b.rms_norm(x, eps=1e-3), eps=1e-3)], pattern)["two"] == 1
    assert "two" not in fused_names(lambda b, x: [b.rms_norm(b.rms_norm(x, eps=1e-3), eps=1e-4)], pattern)
    assert "two" not in fused_names(lambda b, x: [b.rms_norm(b.rms_norm(x, offset=1.0, eps=1e-3), eps=1e-3)], pattern)


def test_sums_match_in_either_order_and_parameters_keep_their_place():
    pattern = Pattern("sum", lambda b, x, y: b.add(b.softcap(x, cap=1.0), y))
    for make in (lambda b, x: [b.add(b.softcap(x, cap=1.0), x)], lambda b, x: [b.add(x, b.softcap(x, cap=1.0))]):
        assert fused_names(make, pattern)["sum"] == 1


def test_an_absent_argument_matches_only_an_optional_parameter():
    with_bias = lambda b, x, w, bias: b.linear(x, w, bias)
    make = lambda b, x: [b.linear(x, b.weight("w", (5, ops_programs.HIDDEN)))]
    assert "p" not in fused_names(make, Pattern("p", with_bias))
    assert fused_names(make, Pattern("p", with_bias, frozenset({"bias"})))["p"] == 1
    without = Pattern("p", lambda b, x, w: b.linear(x, w))
    assert "p" not in fused_names(lambda b, x: [b.linear(x, b.weight("w", (5, ops_programs.HIDDEN)), b.weight("v", (5,)))], without)


def test_the_same_value_may_fill_two_parameters():
    assert fused_names(lambda b, x: [b.add(b.mul(x, x), x)], NETS[3])["mul_add"] == 1


@pytest.mark.parametrize(
    "fn",
    [
        lambda b, x, y: b.softcap(x, cap=1.0),
        lambda b, x, *, eps: b.softcap(x, cap=1.0),
        lambda b, x, y: (b.softcap(x, cap=1.0), b.softcap(y, cap=1.0)),
        lambda b, x: b.softcap(x),
        lambda b, x: b.no_such(x),
        lambda b, x: b.softcap(x, cap=1.0, cup=2),
    ],
)
def test_malformed_patterns_are_refused(fn):
    with pytest.raises(ProgramError):
        trace(Pattern("bad", fn))


def test_the_printer_shows_values_constants_states_attributes_and_fused_calls():
    text = str(rewrite(ops_programs.decoder(1), [PATTERNS["add_norm"]]))
    assert "inputs %token_ids[tokens]: int32" in text
    assert "state $kv.0: PagedKV(kv_heads=2, head_dim=6, window=None)" in text
    assert "[add_norm](" in text and "eps=1e-06" in text
    assert "= embedding(%token_ids, @embed[11, 12])" in text
    assert "$kv.0'1 = kv_write($kv.0, " in text
    assert text.endswith("output logits = %y" + text.rsplit("%y", 1)[1])
