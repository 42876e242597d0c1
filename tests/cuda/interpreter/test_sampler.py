"""The sampler's ids, id for id, against the reference; logprobs within its tolerance."""

import numpy as np
import pytest
from triton_cases import OPERATORS, near, rng, tensor, tl, torch, triton

from trivium.ops.sample import exp_weights, philox4x32, plain_inputs, uniform
from trivium_cuda.kernels import sampler

SAMPLE = OPERATORS["sample"]


@triton.jit
def draws(SEED, POSITION, OUT, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(OUT + i, sampler._uniform(tl.load(SEED + i), tl.load(POSITION + i)))


@triton.jit
def weights(D, E, W, N: tl.constexpr):
    i = tl.arange(0, N)
    e, w = sampler._exp_weights(tl.load(D + i))
    tl.store(E + i, e)
    tl.store(W + i, w)


def columns(inputs):
    """SampleInputs as the launcher takes them."""
    names = set(sampler.Columns._fields) - {"seen_rows", "bias_rows", "seed", "mask"}
    every = np.arange(len(inputs.seed), dtype=np.int32)
    rows = {n: np.repeat(every, np.diff(getattr(inputs, f"{n}_starts"))) for n in ("seen", "bias")}
    return sampler.Columns(
        seed=tensor(inputs.seed.view(np.int64)), seen_rows=tensor(rows["seen"]), bias_rows=tensor(rows["bias"]),
        mask=None if inputs.mask is None else tensor(inputs.mask.view(np.int32)), **{n: tensor(getattr(inputs, n)) for n in names},
    )  # fmt: skip


def features(inputs):
    return sampler.Features(
        bool((inputs.temperature > 0).any()), bool((inputs.top_k > 0).any()), bool((inputs.top_p < 1).any()),
        bool((inputs.min_p > 0).any()),
    )  # fmt: skip


def run(logits, inputs, vocab, dtype="float32"):
    asked = {"features": features(inputs), "top_logprobs": inputs.top_logprobs}
    return sampler.sample(tensor(logits, dtype), columns(inputs), vocab_size=vocab, **asked)


def rare(inputs):
    return (inputs.typical_p < 1).any() or (inputs.top_n_sigma > 0).any() or (inputs.xtc_probability > 0).any()


@pytest.mark.parametrize("chunk", [64, 4096], ids=["many chunks", "one chunk"])
def test_every_example_without_rare_stages_is_sampled_like_the_reference(monkeypatch, chunk):
    """On the coarse grid, where many are alike; on the fine one, and in many chunks, all stages together."""
    monkeypatch.setattr(sampler, "CHUNK", chunk)
    examples, seen = list(SAMPLE.cases(rng())), 0
    for case in examples[-1:] if chunk == 64 else examples[: len(examples) // 2]:
        logits, inputs = case.args
        if len(np.unique(inputs.temperature)) > 1:
            inputs.typical_p[:], inputs.top_n_sigma[:], inputs.xtc_probability[:] = 1, 0, 0
        if rare(inputs):
            continue
        got, want = run(logits, inputs, case.attrs["vocab_size"]), SAMPLE(logits, inputs, **case.attrs)
        np.testing.assert_array_equal(got.ids, want.ids)
        seen += 1
        if want.ranks is not None:
            np.testing.assert_array_equal(got.ranks, want.ranks)
            np.testing.assert_array_equal(got.top_ids, want.top_ids)
            near(got.logprobs, want.logprobs, "float32", "sample")
            near(got.top_logprobs, want.top_logprobs, "float32", "sample")
    assert seen == (1 if chunk == 64 else 8)


def stages(seed, rows=4, vocab=150):
    """Logits, many of them alike, and each stage by itself and with the others."""
    draw = rng(seed)
    logits = np.round(draw.normal(0, 3, (rows, vocab)) * 2).astype(np.float32) / 2
    base = {"seed": draw.integers(0, 2**64, rows, np.uint64), "position": draw.integers(0, 2**40, rows), "temperature": 0.7}
    k, p, m = draw.integers(0, 40, rows), draw.choice([0.01, 0.4, 0.9, 0.999, 1], rows), draw.choice([0, 0.01, 0.5, 1], rows)
    for stage in ({}, {"top_k": k}, {"top_p": p}, {"min_p": m}, {"top_k": k, "top_p": p, "min_p": m}):
        yield logits, plain_inputs(rows, **base | stage)


@pytest.mark.parametrize(("seed", "dtype"), [(1, "float32"), (2, "float16")])
def test_ties_at_the_edge_of_top_k_and_top_p_stay_in_the_order_of_ids(monkeypatch, seed, dtype):
    """Halves are exact in float16 too."""
    monkeypatch.setattr(sampler, "CHUNK", 64)
    for logits, inputs in stages(seed):
        np.testing.assert_array_equal(run(logits, inputs, 150, dtype).ids, SAMPLE(logits, inputs, vocab_size=150).ids)


def test_rows_with_and_without_temperature_and_with_infinite_peaks_share_a_step():
    logits = np.array([[0, 3, 3, -1], [-np.inf] * 4, [1, np.inf, 5, np.inf], [-0.0, 0.0, -1, -2], [2, 1e38, 3e38, 0]], np.float32)
    for temperature in (0.0, 1.0, 1e-3):
        inputs = plain_inputs(5, temperature=temperature, seed=7, position=3, top_k=2)
        with np.errstate(invalid="ignore", over="ignore"):
            want = SAMPLE(logits, inputs, vocab_size=4).ids
        np.testing.assert_array_equal(run(logits, inputs, 4).ids, want)


def test_bits_of_a_mask_are_read_from_its_highest_too():
    logits = np.zeros((2, 70), np.float32)
    mask = np.array([[0x80000000, 0, 0], [0, 0, 0x20]], np.uint32)
    np.testing.assert_array_equal(run(logits, plain_inputs(2, mask=mask), 70).ids, [31, 69])


def test_draws_are_philoxs():
    seeds = rng(5).integers(0, 2**64, 64, np.uint64)
    positions = rng(6).integers(0, 2**62, 64)
    out = torch.empty(64, dtype=torch.int64)
    draws[(1,)](tensor(seeds.view(np.int64)), tensor(positions), out, N=64)
    np.testing.assert_array_equal(out, uniform(seeds, positions))
    known = philox4x32(np.zeros(4, np.uint32), np.zeros(2, np.uint32))[0]  # Random123's known answer: 6627e8d5
    zero = torch.empty(1, dtype=torch.int64)
    draws[(1,)](torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), zero, N=1)
    assert known == 0x6627E8D5 and int(zero) == 0x6627E8D5 >> 1


def test_weights_of_candidates_are_the_references_bit_for_bit():
    d = -np.abs(rng(7).uniform(0, 27.99, 4096)).astype(np.float32)
    d[:3] = 0, -0.34657359, -27.999998
    e, w = torch.empty(4096), torch.empty(4096, dtype=torch.int64)
    weights[(1,)](tensor(d), e, w, N=4096)
    want = exp_weights(d)
    assert torch.equal(e, tensor(want[0])) and torch.equal(w, tensor(want[1]))
