"""The sampling pipeline and its random numbers: the one definition that every backend repeats, id for id."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trivium.ops.batch import COLUMNS, F32, I32, I64, U64, Sampled, SampleInputs
from trivium.ops.examples import operator
from trivium.ops.schema import Case

U32 = npt.NDArray[np.uint32]
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = np.array([0x9E3779B9, 0xBB67AE85], np.uint32)
_SHIFT, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
_LOG2E, _LN2_HIGH, _LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
_EXP_SERIES = tuple(np.float32(1 / n) for n in (5040, 720, 120, 24, 6, 2, 1, 1))
# exp(-28) * 2**40 < 1: such a candidate has the weight 0.
_VANISHING = np.float32(-28)
_FRACTION_BITS = 31


def philox4x32(counter: U32, key: U32) -> U32:
    """Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC11).

    counter: uint32[..., 4], key: uint32[..., 2]; returns the four output words, uint32[..., 4].
    """
    c0, c1, c2, c3 = (counter[..., i] for i in range(4))
    for _ in range(10):
        p0, p1 = c0.astype(np.uint64) * _MULTIPLIERS[0], c2.astype(np.uint64) * _MULTIPLIERS[1]
        hi0, hi1 = (p0 >> _SHIFT).astype(np.uint32), (p1 >> _SHIFT).astype(np.uint32)
        c0, c2 = hi1 ^ c1 ^ key[..., 0], hi0 ^ c3 ^ key[..., 1]
        c1, c3 = (p1 & _LOW).astype(np.uint32), (p0 & _LOW).astype(np.uint32)
        key = key + _WEYL
    return np.stack([c0, c1, c2, c3], axis=-1)


def _halves(x: U64) -> tuple[U32, U32]:
    return (x & _LOW).astype(np.uint32), (x >> _SHIFT).astype(np.uint32)


def uniform(seed: U64, position: I64, stream: int = 0) -> I64:
    """A draw for a token: int64[R] in [0, 2**31), from seed uint64[R], position int64[R] and the draw's purpose alone.

    Philox key = (seed low, seed high), counter = (position low, position high, 0, stream), u = first word >> 1. Streams: 0 chooses
    the token, 2 decides about XTC (1 is derive_seed's).
    """
    low, high = _halves(position.astype(np.uint64))
    counter = np.stack([low, high, np.zeros_like(low), np.full_like(low, stream)], axis=-1)
    words = philox4x32(counter, np.stack(_halves(seed.astype(np.uint64)), axis=-1))
    return (words[..., 0] >> np.uint32(1)).astype(np.int64)


def exp_weights(d: F32) -> tuple[F32, I64]:
    """(e, w) of d float32[n], -28 < d <= 0: e = exp(d) as float32 by a fixed sequence of float32 operations, w = floor(e * 2**40).

    k = floor(d * 1.44269504 + 0.5); r = (d - k * 0.693359375) - k * -2.12194440e-4; p = the series of exp(r) to degree 7 by
    Horner's rule from the highest coefficient, p = p * r + 1/n!; e = p * 2**k. Each product and each sum is rounded to float32 by
    itself (the two-part reduction is Cody and Waite's). Within 2 units in the last place of exp.
    """
    k = np.floor(d * _LOG2E + np.float32(0.5))
    r = (d - k * _LN2_HIGH) - k * _LN2_LOW
    p = np.full_like(r, _EXP_SERIES[0])
    for coefficient in _EXP_SERIES[1:]:
        p = p * r + coefficient
    e = np.ldexp(p, k.astype(np.int32))
    return e, np.ldexp(e, 40).astype(np.int64)


def _fixed(fraction: np.float32) -> int:
    return int(fraction * np.float32(2**_FRACTION_BITS))


def _part(total: int, fraction: int) -> int:
    """floor(total * fraction / 2**31); a 64-bit integer holds every step if it is computed in two halves."""
    return (total * fraction) >> _FRACTION_BITS


def derive_seed(seed: int, index: int) -> int:
    """Seed of the `index`-th of n samples of one request: `seed` itself for 0, else the first two words of Philox with
    counter (index, 0, 0, 1), whose last word keeps it apart from every draw."""
    if index == 0:
        return seed
    words = philox4x32(np.array([index, 0, 0, 1], np.uint32), np.stack(_halves(np.array(seed, np.uint64))))
    return int(words[0]) | int(words[1]) << 32


def plain_inputs(rows: int, **fields: Any) -> SampleInputs:
    """SampleInputs of `rows` greedy rows without penalties, biases or logprobs; `fields` replaces some (scalars are repeated)."""
    neutral = {"top_p": 1.0, "typical_p": 1.0, "repetition": 1.0, "score_ids": -1}
    given = {name: fields.pop(name, neutral.get(name, 0)) for name in COLUMNS}
    made: dict[str, Any] = {k: np.array(np.broadcast_to(np.asarray(given[k], dtype), rows)) for k, dtype in COLUMNS.items()}
    made |= {name: np.zeros(0, np.int32) for name in ("seen_ids", "seen_counts", "bias_ids")}
    made |= {name: np.zeros(rows + 1, np.int32) for name in ("seen_starts", "bias_starts")}
    return SampleInputs(**{**made, "bias": np.zeros(0, np.float32), **fields})


def _row_of(starts: I32) -> npt.NDArray[np.intp]:
    return np.repeat(np.arange(len(starts) - 1), np.diff(starts))


def adjust(logits: F32, inputs: SampleInputs) -> F32:
    """Stages 2 to 4 (penalties, bias, mask) on logits float32[R, vocab]; returns a new array, or `logits` if there are none."""
    if not len(inputs.seen_ids) and not len(inputs.bias_ids) and inputs.mask is None:
        return logits
    x = logits.copy()
    if len(inputs.seen_ids):
        row, ids, count = _row_of(inputs.seen_starts), inputs.seen_ids, inputs.seen_counts.astype(np.float32)
        v, penalty = x[row, ids], inputs.repetition[row]
        v = np.where(v > 0, v / penalty, v * penalty)
        v = v - inputs.frequency[row] * count
        x[row, ids] = v - inputs.presence[row] * (count > 0)
    if len(inputs.bias_ids):
        x[_row_of(inputs.bias_starts), inputs.bias_ids] += inputs.bias
    if inputs.mask is not None:
        octets = np.ascontiguousarray(inputs.mask, "<u4").view(np.uint8)
        allowed = np.unpackbits(octets, axis=1, bitorder="little", count=x.shape[1])
        x[allowed == 0] = -np.inf
    return x


def _sort_keys(values: F32, ids: npt.NDArray[np.intp]) -> U64:
    """uint64 keys whose ascending order is (value descending, id ascending). Adding 0 makes -0 equal to 0."""
    bits = (values + np.float32(0)).view(np.uint32)
    ascending = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    return (~ascending).astype(np.uint64) << _SHIFT | ids.astype(np.uint64)


def largest(values: F32, k: int) -> npt.NDArray[np.intp]:
    """Ids of the k largest of values[n] in the order (value descending, id ascending); no full sort where k is small."""
    ids = np.arange(len(values))
    if k < len(values):
        edge = np.partition(values, len(values) - k)[len(values) - k]
        above, tied = np.flatnonzero(values > edge), np.flatnonzero(values == edge)
        ids = np.concatenate([above, tied[: k - len(above)]])
    return (np.sort(_sort_keys(values[ids], ids)) & _LOW).astype(np.intp)


class _Left(NamedTuple):
    """The candidates that stay, ids ascending, with d, e and w as in sample()."""

    ids: npt.NDArray[np.intp]
    d: F32
    e: F32
    w: I64

    def keep(self, where: npt.NDArray[Any]) -> _Left:
        return _Left(*(column[where] for column in self))

    def prefix(self, order: npt.NDArray[np.intp], fraction: np.float32) -> _Left:
        """The shortest prefix of `order` that has at least `fraction` of the weight."""
        sums = np.cumsum(self.w[order])
        target = max(_part(int(sums[-1]), _fixed(fraction)), 1)
        return self.keep(np.sort(order[: int(np.searchsorted(sums, target)) + 1]))

    def by_typicality(self) -> npt.NDArray[np.intp]:
        surprise = np.floor(self.d * np.float32(-(2**16))).astype(np.int64)
        v = self.w >> max(int(self.w.sum()).bit_length() - 41, 0)
        order: npt.NDArray[np.intp] = np.abs(surprise - (v * surprise).sum() // v.sum()).argsort(kind="stable")
        return order

    def exclude_top(self, threshold: np.float32) -> _Left:
        top = np.flatnonzero(self.w >= max(_part(int(self.w.sum()), _fixed(threshold)), 1))
        stays = np.ones(len(self.w), bool)
        stays[top[largest(self.d[top], len(top))[:-1]]] = False
        return self.keep(stays)


def _near_the_top(x: F32, sigmas: np.float32) -> npt.NDArray[np.bool_]:
    """Stage 7 on all logits of a row."""
    gap = np.floor(np.minimum(x.max() - x, np.float32(512)) * np.float32(4096)).astype(np.int64)
    real = gap[x > -np.inf]
    variance = ((real - real.sum() // len(real)) ** 2).sum() // len(real)
    near: npt.NDArray[np.bool_] = gap <= math.isqrt(int(variance)) * int(sigmas * np.float32(2**16)) >> 16
    return near


def _draw(x: F32, inputs: SampleInputs, row: int, u: int) -> int:
    """Stages 6 to 13 for x[vocab], the edited logits of a row with temperature > 0."""
    with np.errstate(over="ignore"):
        y = x / inputs.temperature[row]
    peak = y.max()
    if not np.isfinite(peak):
        return int(x.argmax())
    d = y - peak
    stays = d > _VANISHING
    if inputs.top_n_sigma[row] > 0:
        stays &= _near_the_top(x, inputs.top_n_sigma[row])
    ids = np.flatnonzero(stays)
    left = _Left(ids, d[ids], *exp_weights(d[ids]))
    if 0 < inputs.top_k[row] < len(ids):
        left = left.keep(np.sort(largest(left.d, int(inputs.top_k[row]))))
    if inputs.typical_p[row] < 1:
        left = left.prefix(left.by_typicality(), inputs.typical_p[row])
    if inputs.top_p[row] < 1:
        left = left.prefix(largest(left.d, len(left.d)), inputs.top_p[row])
    if inputs.min_p[row] > 0:
        left = left.keep(left.e >= inputs.min_p[row] * left.e[left.d.argmax()])
    if inputs.xtc_probability[row] > 0:
        at = slice(row, row + 1)
        if uniform(inputs.seed[at], inputs.position[at], 2)[0] < _fixed(inputs.xtc_probability[row]):
            left = left.exclude_top(inputs.xtc_threshold[row])
    sums = np.cumsum(left.w)
    return int(left.ids[np.searchsorted(sums, _part(int(sums[-1]), u), side="right")])


def _report(logits: F32, ids: I32, k: int) -> Sampled:
    """Adds logprobs, ranks and k alternatives to chosen ids, from raw logits float32[R, vocab]."""
    k = min(k, logits.shape[1])
    logprobs, ranks = np.empty((len(ids), k + 1), np.float32), np.empty(len(ids), np.int32)
    top = np.empty((len(ids), k), np.int32)
    for r, (row, chosen) in enumerate(zip(logits, ids, strict=True)):
        peak = row.max()
        normaliser = peak + np.log(np.exp(row - peak).sum(dtype=np.float64))
        ranks[r] = 1 + np.count_nonzero(row > row[chosen]) + np.count_nonzero(row[:chosen] == row[chosen])
        top[r] = largest(row, k) if k else ()
        logprobs[r] = np.append(row[chosen], row[top[r]]) - normaliser
    return Sampled(ids, logprobs[:, 0], ranks, top, logprobs[:, 1:])


def _cases(rng: np.random.Generator) -> Iterator[Case]:
    """Greedy, each stage alone, all together; ties (logits on a coarse grid), padded vocabulary, words of the mask that are cut."""
    rows, width, vocab = 12, 160, 150
    for grid in (0.5, 2.0**-12):
        logits = (np.round(rng.normal(0, 2.5, (rows, width)) / grid) * grid).astype(np.float32)
        logits[:, vocab:] = 50.0
        draw = {"seed": rng.integers(0, 2**64, rows, np.uint64), "position": rng.integers(0, 2**40, rows), "temperature": 0.8}
        stages: list[dict[str, Any]] = [{}, {"top_k": rng.integers(0, 200, rows)}, {"top_p": rng.uniform(0.05, 1, rows)},
                                        {"min_p": rng.uniform(0, 1, rows)}, {"typical_p": rng.uniform(0.05, 1, rows)},
                                        {"top_n_sigma": rng.uniform(0, 2, rows)}, _xtc(rng, rows),
                                        _edits(rng, rows, vocab)]  # fmt: skip
        mixed = {k: v for stage in stages for k, v in stage.items()} | {"temperature": rng.choice([0, 0.3, 1, 2], rows)}
        score = np.where(np.arange(rows) % 2, -1, rng.integers(0, vocab, rows))
        logprobs = {"top_logprobs": 5, "score_ids": score}
        for stage in ({"temperature": 0}, *stages, mixed, mixed | logprobs):
            yield Case((logits, plain_inputs(rows, **draw | stage)), {"vocab_size": vocab})


def _xtc(rng: np.random.Generator, rows: int) -> dict[str, Any]:
    return {"xtc_probability": rng.choice([0.3, 0.7, 1], rows), "xtc_threshold": rng.uniform(0, 0.3, rows)}


def _edits(rng: np.random.Generator, rows: int, vocab: int) -> dict[str, Any]:
    starts = np.arange(rows + 1, dtype=np.int32) * 8
    ids = np.concatenate([np.sort(rng.choice(vocab, 8, replace=False)) for _ in range(rows)]).astype(np.int32)
    bias = rng.choice([-np.inf, -3.0, 2.0, 5.0], 8 * rows).astype(np.float32)
    return {"seen_starts": starts, "seen_ids": ids, "seen_counts": rng.integers(0, 4, 8 * rows, np.int32), "bias_starts": starts,
            "bias_ids": np.concatenate([(ids[:8] + r) % vocab for r in range(rows)]).astype(np.int32), "bias": bias,
            "mask": rng.integers(0, 2**32, (rows, -(-vocab // 32)), np.uint32), "repetition": rng.uniform(0.8, 1.5, rows),
            "presence": rng.uniform(-1, 1, rows), "frequency": rng.uniform(-1, 1, rows)}  # fmt: skip


@operator("logits[rows, vocab], inputs:SampleInputs -> sampled:Sampled", cases=_cases)
def sample(logits: F32, inputs: SampleInputs, *, vocab_size: int) -> Sampled:
    """Chooses one token a row. Ids and ranks must equal the reference's; the tolerances are for logprobs.

    Every operation below is one IEEE operation rounded to the named type: no fused multiply-add, no reciprocals. Logits are
    float32 and not NaN. "In order" means value descending, at equal values (-0 equals 0) id ascending. For each row:

    1. x = logits[:vocab_size], float32. Ids beyond vocab_size do not exist. Logprobs, ranks and alternatives (when top_logprobs
       >= 0) come from this x: logprob = x - log(sum(exp(x))); rank = 1 + how many ids stand before this one in order.
    2. For each (id, count) of seen: x = x / repetition if x > 0 else x * repetition; then x = x - frequency * count; then, if
       count > 0, x = x - presence. float32; count is converted to float32.
    3. For each (id, bias): x = x + bias, float32 (-inf bans).
    4. If there is a mask: x = -inf where its bit is 0.
    5. If score_ids >= 0 that is the id. If temperature is 0 the id is the first in order: stages 6 to 13 don't take place.
    6. y = x / temperature, float32; m = max(y). If m is infinite, the id is chosen as in 5 (from x). d = y - m, float32. Ids with
       d <= -28 are gone. (e, w) = exp_weights(d), see there: from here on all sums are of int64, so no order of adding matters.
    7. If top_n_sigma > 0 (Tang, Liu, Xu, Huang, "Top-n sigma: not all logits are you need", 2024; temperature makes no difference):
       g = floor(min(max(x) - x, 512) * 4096), an integer, for each of the n ids of x > -inf; a = floor(sum(g) / n), v =
       floor(sum((g - a)**2) / n). Only ids with g <= floor(floor(sqrt(v)) * floor(top_n_sigma * 2**16) / 2**16) stay.
    8. If top_k > 0, only the first top_k in order of d stay (all, if there are fewer).
    9. If typical_p < 1 (Meister, Pimentel, Wiher, Cotterell, "Locally typical sampling", TACL 2023; the normaliser cancels out of
       the distance of a surprise from the entropy): D = floor(-d * 2**16); W = sum of the w that stay; v = w >> max(0, bits of W
       - 41); a = floor(sum(v * D) / sum(v)). In order of abs(D - a) ascending, at equal values id ascending, only the shortest
       prefix whose w add up to at least max(1, part(W, floor(typical_p * 2**31))) stays. part(a, f) = floor(a * f / 2**31).
    10. If top_p < 1: likewise the shortest prefix in order of d, with W = sum of the w that stay now.
    11. Only those with e >= min_p * (e of the first in order of those that stay), float32, stay.
    12. If xtc_probability > 0 and uniform(seed, position, 2) < floor(xtc_probability * 2**31) (XTC, "exclude top choices", first in
        text-generation-webui): of the ids with w >= max(1, part(W, floor(xtc_threshold * 2**31))) only the last in order stays.
    13. With W = sum of the w that stay now and u = uniform(seed, position), the id is the first, ids ascending, at which the sum
        of the w that stay exceeds part(W, u).

    The stages follow each other as in llama.cpp, but for the temperature, which comes first as in vLLM and Transformers.
    Nothing here depends on a library's exp or on the order of a sum: backends that are given the same logits give the same ids.
    """
    x = np.asarray(logits[:, :vocab_size], np.float32)
    edited = adjust(x, inputs)
    ids = edited.argmax(axis=1).astype(np.int32)
    drawn = np.flatnonzero((inputs.temperature > 0) & (inputs.score_ids < 0))
    if len(drawn):
        u = uniform(inputs.seed[drawn], inputs.position[drawn])
        for row, chance in zip(drawn, u, strict=True):
            ids[row] = _draw(edited[row], inputs, int(row), int(chance))
    ids = np.where(inputs.score_ids >= 0, inputs.score_ids, ids)
    return Sampled(ids) if inputs.top_logprobs < 0 else _report(x, ids, inputs.top_logprobs)
