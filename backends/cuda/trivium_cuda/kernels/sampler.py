"""The sampler in the arithmetic that ops.sample prescribes: single float32 operations and sums of whole numbers, so that ids are
the reference's, bit for bit.

A row of the vocabulary is cut into chunks that are worked on side by side. Nothing is sorted: top-k and top-p look for the last
candidate that stays, four bits of its distance from the peak in a pass, by counting, or weighing, the candidates of each of the 16
next digits in each chunk. Those at the same distance stay in the order of their ids. Compiled without fused multiply-adds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trivium_cuda.kernels.common import power

CHUNK = 4096
LEVELS = 8
"""Digits of a distance's 32 bits."""


class Columns(NamedTuple):
    """SampleInputs on the device, a number a row: float32[R] (temperature, top_p, min_p, repetition, presence, frequency), int32[R]
    (top_k, score_ids), int64[R] (seed, the bits of the uint64; position). Lists with the row of each entry, int32: seen_rows,
    seen_ids, seen_counts; bias_rows, bias_ids, and bias float32. mask: int32[R, words], the bits of uint32, or None."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    score_ids: Tensor
    seen_rows: Tensor
    seen_ids: Tensor
    seen_counts: Tensor
    bias_rows: Tensor
    bias_ids: Tensor
    bias: Tensor
    mask: Tensor | None = None


class Features(NamedTuple):
    """What any row of a step asks for, known on the host: a temperature, top_k > 0, top_p < 1, min_p > 0."""

    draws: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False


class Chosen(NamedTuple):
    """Sampled on the device: ids int32[R]; logprobs float32[R], ranks int32[R], top_ids int32[R, k], top_logprobs float32[R, k]."""

    ids: Tensor
    logprobs: Tensor | None = None
    ranks: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None


class Search(NamedTuple):
    """A search for the last candidate that stays. states int64[LEVELS, R, 3]: (digits found before the level, what stands before
    them, target); sums int64[LEVELS, R, chunks, 16]. limit: int32[R] for top-k, float32[R] for top-p."""

    states: Tensor
    sums: Tensor
    limit: Tensor
    counts: bool


@triton.jit
def _sort_key(x, ids):
    """int64 whose descending order is (value descending, id ascending); -0 equals 0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0xFFFFFFFF - ids.to(tl.int64))


@triton.jit
def _id_of(key):
    return 0xFFFFFFFF - (key & 0xFFFFFFFF)


@triton.jit
def _value_of(key):
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


# Reads a chunk of the vocabulary and writes its K largest: 2 * K operations a number.
@triton.jit
def _largest_in_chunks(X, OUT, vocab, x_row, K: tl.constexpr, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(X + row * x_row + ids, mask=ids < vocab, other=0.0).to(tl.float32)
    keys = tl.where(ids < vocab, _sort_key(x, ids), -0x7FFFFFFFFFFFFFFF)
    out = OUT + (row * tl.num_programs(1) + chunk) * K
    for j in range(K):
        top = tl.max(keys, 0)
        tl.store(out + j, top)
        keys = tl.where(keys == top, -0x7FFFFFFFFFFFFFFF, keys)


# Reads the largest of each chunk, 8 bytes each, and writes the largest of the row.
@triton.jit
def _largest_of_chunks(FOUND, OUT, count, K: tl.constexpr, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    keys = tl.load(FOUND + row * count + i, mask=i < count, other=-0x7FFFFFFFFFFFFFFF)
    for j in range(K):
        top = tl.max(keys, 0)
        tl.store(OUT + row * K + j, top)
        keys = tl.where(keys == top, -0x7FFFFFFFFFFFFFFF, keys)


# Reads a number of the vocabulary and 1/32 word and writes 4 bytes.
@triton.jit
def _copy(X, OUT, vocab, x_row, CHUNK: tl.constexpr):
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    tl.store(OUT + row * vocab + c, tl.load(X + row * x_row + c, mask=c < vocab, other=0.0).to(tl.float32), mask=c < vocab)


@triton.jit
def _forbid(X, mask, vocab, words, CHUNK: tl.constexpr):
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    word = tl.load(mask + row * words + c // 32, mask=c < vocab, other=0)
    banned = ((word >> (c % 32)) & 1) == 0
    tl.store(X + row * vocab + c, tl.full([CHUNK], float("-inf"), tl.float32), mask=(c < vocab) & banned)


# Reads and writes one number of the vocabulary for each entry of the list.
@triton.jit
def _penalise(X, rows, ids, counts, repetition, presence, frequency, size, vocab, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, count = tl.load(rows + i, mask=i < size, other=0), tl.load(counts + i, mask=i < size, other=0)
    at = row.to(tl.int64) * vocab + tl.load(ids + i, mask=i < size, other=0)
    v, penalty = tl.load(X + at, mask=i < size, other=0.0), tl.load(repetition + row, mask=i < size, other=1.0)
    v = tl.where(v > 0.0, tl.div_rn(v, penalty), v * penalty)
    v = v - tl.load(frequency + row, mask=i < size, other=0.0) * count.to(tl.float32)
    v = v - tl.where(count > 0, tl.load(presence + row, mask=i < size, other=0.0), 0.0)
    tl.store(X + at, v, mask=i < size)


@triton.jit
def _add_bias(X, rows, ids, bias, size, vocab, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(rows + i, mask=i < size, other=0).to(tl.int64) * vocab + tl.load(ids + i, mask=i < size, other=0)
    tl.store(X + at, tl.load(X + at, mask=i < size, other=0.0) + tl.load(bias + i, mask=i < size, other=0.0), mask=i < size)


@triton.jit
def _exp_weights(d):
    """ops.sample.exp_weights of -28 < d <= 0."""
    k = tl.floor(d * 1.44269504 + 0.5)
    r = d - k * 0.693359375
    r = r - k * -2.12194440e-4
    p = tl.full(d.shape, 0.0001984127, tl.float32)
    p = p * r + 0.0013888889
    p = p * r + 0.008333334
    p = p * r + 0.041666668
    p = p * r + 0.16666667
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    e = p * ((k.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return e, (e * 1099511627776.0).to(tl.int64)


@triton.jit
def _part(total, fraction):
    """floor(total * fraction / 2**31), in two halves that 64 bits hold."""
    return (total >> 31) * fraction + (((total & 0x7FFFFFFF) * fraction) >> 31)


@triton.jit
def _uniform(seed, position):
    """ops.sample.uniform, stream 0: the first word of Philox4x32-10 without its lowest bit."""
    c0, c1 = (position & 0xFFFFFFFF).to(tl.uint32), ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c2, c3 = (position * 0).to(tl.uint32), (position * 0).to(tl.uint32)
    k0, k1 = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(10):
        a, b = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c2 = (b >> 32).to(tl.uint32) ^ c1 ^ k0, (a >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = b.to(tl.uint32), a.to(tl.uint32)
        k0, k1 = (k0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32), (k1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    return (c0 >> 1).to(tl.int64)


@triton.jit
def _candidates(X, best, temperature, row, chunk, vocab, x_row, CHUNK: tl.constexpr):
    """(distance from the peak as the bits of a float, e, w) of a chunk's ids; w is 0 and the distance 2**31 - 1 where one left."""
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    t = tl.load(temperature + row) + tl.zeros([CHUNK], tl.float32)
    t = tl.where(t > 0.0, t, 1.0)
    peak = tl.div_rn(_value_of(tl.load(best + row)) + tl.zeros([CHUNK], tl.float32), t)
    x = tl.load(X + row * x_row + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    d = tl.where(tl.abs(peak) == float("inf"), 0.0, tl.div_rn(x, t) - peak)
    stays = (d > -28.0) & (ids < vocab)
    d = tl.where(stays, d, 0.0)
    e, w = _exp_weights(d)
    distance = tl.where(stays, tl.abs(d).to(tl.int32, bitcast=True), 0x7FFFFFFF)
    return distance, tl.where(stays, e, 0.0), tl.where(stays, w, 0)


@triton.jit
def _advance(states, sums, limit, row, chunks, FIRST: tl.constexpr, COUNTS: tl.constexpr, CHUNKS: tl.constexpr):
    """What a level has found: (digits up to it, what stands before them, target, what each chunk has of the digit). Where all
    that there is does not reach the target, each digit is 15: more than any distance has."""
    i, j = tl.arange(0, CHUNKS), tl.arange(0, 16)
    h = tl.load(sums + (row * chunks + i)[:, None] * 16 + j[None, :], mask=(i < chunks)[:, None], other=0)
    of_digit = tl.sum(h, 0)
    if FIRST:
        digits, before, total = row * 0, row * 0, tl.sum(of_digit, 0)
        if COUNTS:
            k = tl.load(limit + row).to(tl.int64)
            target = tl.where(k > 0, k, total + 1)
        else:
            p = tl.load(limit + row)
            wanted = _part(total, (p * 2147483648.0).to(tl.int64))
            target = tl.where(p < 1.0, tl.maximum(wanted, 1), total + 1)
    else:
        digits, before, target = tl.load(states + row * 3), tl.load(states + row * 3 + 1), tl.load(states + row * 3 + 2)
    short = (before + tl.cumsum(of_digit, 0) < target).to(tl.int64)
    digit = tl.minimum(tl.sum(short, 0), 15)
    before += tl.sum(tl.where(j < digit, of_digit, 0), 0)
    return digits * 16 + digit, before, target, tl.sum(tl.where(j[None, :] == digit, h, 0), 1)


@triton.jit
def _staying(distance, w, states, sums, limit, row, chunk, chunks, COUNTS: tl.constexpr, CHUNKS: tl.constexpr):
    """Which of a chunk's candidates a finished search lets stay."""
    last, before, target, mine = _advance(states, sums, limit, row, chunks, False, COUNTS, CHUNKS)
    tied = (distance.to(tl.int64) == last) & (distance != 0x7FFFFFFF)
    earlier = tl.sum(tl.where(tl.arange(0, CHUNKS) < chunk, mine, 0), 0)
    allowed = target - before
    if not COUNTS:
        weight = tl.maximum(tl.max(tl.where(tied, w, 0), 0), 1)
        earlier, allowed = earlier // weight, (allowed + weight - 1) // weight
    rank = tl.cumsum(tied.to(tl.int64), 0) - tied.to(tl.int64)
    return (distance.to(tl.int64) < last) | (tied & (rank + earlier < allowed))


# Reads a chunk of the vocabulary and writes 16 sums; about 25 operations a number for its weight and 50 for the digits.
@triton.jit
def _digits(
    X, best, temperature, states, sums, limit, next_states, next_sums, k_states, k_sums, top_k, vocab, x_row, chunks, shift,
    FIRST: tl.constexpr, SECOND: tl.constexpr, COUNTS: tl.constexpr, AFTER_K: tl.constexpr, CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    distance, _, w = _candidates(X, best, temperature, row, chunk, vocab, x_row, CHUNK)
    counted = distance != 0x7FFFFFFF
    if AFTER_K:
        counted = counted & _staying(distance, w, k_states, k_sums, top_k, row, chunk, chunks, True, CHUNKS)
    if not FIRST:
        digits, before, target, _ = _advance(states, sums, limit, row, chunks, SECOND, COUNTS, CHUNKS)
        if chunk == 0:
            tl.store(next_states + row * 3, digits)
            tl.store(next_states + row * 3 + 1, before)
            tl.store(next_states + row * 3 + 2, target)
        counted = counted & ((distance >> shift >> 4).to(tl.int64) == digits)
    digit = (distance >> shift) & 15
    size = tl.where(counted, 1, 0).to(tl.int64) if COUNTS else tl.where(counted, w, 0)
    for j in tl.static_range(16):
        tl.store(next_sums + (row * chunks + chunk) * 16 + j, tl.sum(tl.where(digit == j, size, 0), 0))


@triton.jit
def _left(
    X, best, temperature, k_states, k_sums, top_k, p_states, p_sums, top_p, min_p, row, chunk, chunks, vocab, x_row,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The weights of a chunk's candidates that stay after all stages; 0 for the others."""
    distance, e, w = _candidates(X, best, temperature, row, chunk, vocab, x_row, CHUNK)
    if TOP_K:
        stays = _staying(distance, w, k_states, k_sums, top_k, row, chunk, chunks, True, CHUNKS)
        distance, w = tl.where(stays, distance, 0x7FFFFFFF), tl.where(stays, w, 0)
    if TOP_P:
        w = tl.where(_staying(distance, w, p_states, p_sums, top_p, row, chunk, chunks, False, CHUNKS), w, 0)
    if MIN_P:  # e of the first in order is 1
        w = tl.where(e >= tl.load(min_p + row), w, 0)
    return w


# Reads a chunk of the vocabulary and writes a sum.
@triton.jit
def _weigh(
    X, best, temperature, k_states, k_sums, top_k, p_states, p_sums, top_p, min_p, WEIGHTS, chunks, vocab, x_row,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    w = _left(
        X, best, temperature, k_states, k_sums, top_k, p_states, p_sums, top_p, min_p, row, chunk, chunks, vocab, x_row, TOP_K,
        TOP_P, MIN_P, CHUNKS, CHUNK,
    )  # fmt: skip
    tl.store(WEIGHTS + row * chunks + chunk, tl.sum(w, 0))


# Reads a row's sums and one chunk of the vocabulary, and writes an id.
@triton.jit
def _choose(
    X, best, temperature, k_states, k_sums, top_k, p_states, p_sums, top_p, min_p, WEIGHTS, seed, position, score_ids, IDS, chunks,
    vocab, x_row, TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, DRAWS: tl.constexpr, CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(best + row)
    id = _id_of(first)
    t = tl.load(temperature + row)
    if DRAWS:
        peak = tl.div_rn(_value_of(first), tl.where(t > 0.0, t, 1.0))
        if (t > 0.0) & (tl.abs(peak) != float("inf")):
            i = tl.arange(0, CHUNKS)
            sums = tl.load(WEIGHTS + row * chunks + i, mask=i < chunks, other=0)
            upto = tl.cumsum(sums, 0)
            wanted = _part(tl.sum(sums, 0), _uniform(tl.load(seed + row), tl.load(position + row)))
            chunk = tl.sum(((upto <= wanted) & (i < chunks)).to(tl.int32), 0)
            before = tl.sum(tl.where(i < chunk, sums, 0), 0)
            w = _left(
                X, best, temperature, k_states, k_sums, top_k, p_states, p_sums, top_p, min_p, row, chunk, chunks, vocab, x_row,
                TOP_K, TOP_P, MIN_P, CHUNKS, CHUNK,
            )  # fmt: skip
            passed = (before + tl.cumsum(w, 0) <= wanted).to(tl.int64)
            id = chunk.to(tl.int64) * CHUNK + tl.sum(passed, 0)
    score = tl.load(score_ids + row)
    tl.store(IDS + row, tl.where(score >= 0, score, id.to(tl.int32)))


# Reads a chunk of the vocabulary and writes two sums.
@triton.jit
def _report(X, best, ids, SUMS, RANKS, vocab, x_row, K, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(X + row * x_row + c, mask=c < vocab, other=float("-inf")).to(tl.float32)
    chosen = tl.load(ids + row)
    mine = tl.load(X + row * x_row + chosen).to(tl.float32)
    at = row * tl.num_programs(1) + chunk
    tl.store(SUMS + at, tl.sum(tl.exp(x - _value_of(tl.load(best + row * K))), 0))
    tl.store(RANKS + at, tl.sum(((x > mine) | ((x == mine) & (c < chosen))).to(tl.int32), 0))


def largest(x: Tensor, vocab: int, k: int) -> Tensor:
    """Sort keys int64[R, k] of the k largest of x[R, :vocab], in order."""
    rows, chunks = len(x), triton.cdiv(vocab, CHUNK)
    found = torch.empty((rows, chunks, k), dtype=torch.int64, device=x.device)
    out = torch.empty((rows, k), dtype=torch.int64, device=x.device)
    _largest_in_chunks[(rows, chunks)](x, found, vocab, x.stride(0), K=k, CHUNK=CHUNK, num_warps=8)
    _largest_of_chunks[(rows,)](found, out, chunks * k, K=k, BLOCK=power(chunks * k), num_warps=4)
    return out


def edited(x: Tensor, c: Columns, vocab: int) -> Tensor:
    """Stages 2 to 4 of logits x[R, width]: x itself if there are none, else float32[R, vocab]."""
    seen, biased = len(c.seen_ids), len(c.bias_ids)
    if not seen and not biased and c.mask is None:
        return x
    y = torch.empty((len(x), vocab), dtype=torch.float32, device=x.device)
    grid = len(x), triton.cdiv(vocab, 1024)
    _copy[grid](x, y, vocab, x.stride(0), CHUNK=1024, num_warps=4)
    if seen:
        _penalise[(triton.cdiv(seen, 256),)](
            y, c.seen_rows, c.seen_ids, c.seen_counts, c.repetition, c.presence, c.frequency, seen, vocab, BLOCK=256, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    if biased:
        _add_bias[(triton.cdiv(biased, 256),)](y, c.bias_rows, c.bias_ids, c.bias, biased, vocab, BLOCK=256, num_warps=4)
    if c.mask is not None:
        _forbid[grid](y, c.mask, vocab, c.mask.stride(0), CHUNK=1024, num_warps=4)
    return y


def _search(x: Tensor, best: Tensor, c: Columns, vocab: int, limit: Tensor, after: Search | None) -> Search:
    """`after`: the search whose candidates alone are looked at; without one this is top-k if the limit is of whole numbers."""
    rows, chunks = len(x), triton.cdiv(vocab, CHUNK)
    counts = not limit.is_floating_point()
    found = Search(
        torch.empty((LEVELS, rows, 3), dtype=torch.int64, device=x.device),
        torch.empty((LEVELS, rows, chunks, 16), dtype=torch.int64, device=x.device), limit, counts,
    )  # fmt: skip
    first = after or found
    for level in range(LEVELS):
        past = max(level - 1, 0)
        _digits[(rows, chunks)](
            x, best, c.temperature, found.states[past], found.sums[past], limit, found.states[level], found.sums[level],
            first.states[-1], first.sums[-1], first.limit, vocab, x.stride(0), chunks, 28 - 4 * level, FIRST=level == 0,
            SECOND=level == 1, COUNTS=counts, AFTER_K=after is not None, CHUNKS=power(chunks), CHUNK=CHUNK, num_warps=8,
            enable_fp_fusion=False,
        )  # fmt: skip
    return found


def _end(found: Search | None, limit: Tensor, none: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What _staying needs of a finished search."""
    return (found.states[-1], found.sums[-1], limit) if found else (none, none, limit)


def choose(x: Tensor, c: Columns, vocab: int, features: Features) -> Tensor:
    """Stages 5 to 13 of edited logits x[R, >= vocab]: int32[R]."""
    rows, chunks, f = len(x), triton.cdiv(vocab, CHUNK), features
    best = largest(x, vocab, 1)
    ids = torch.empty(rows, dtype=torch.int32, device=x.device)
    weights = torch.empty((rows, chunks), dtype=torch.int64, device=x.device)
    k = _search(x, best, c, vocab, c.top_k, None) if f.draws and f.top_k else None
    p = _search(x, best, c, vocab, c.top_p, k) if f.draws and f.top_p else None
    ends = [*_end(k, c.top_k, best), *_end(p, c.top_p, best)]
    shared: dict[str, Any] = {"TOP_K": f.top_k, "TOP_P": f.top_p, "MIN_P": f.min_p, "CHUNKS": power(chunks), "CHUNK": CHUNK}
    compiled: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": False}
    if f.draws:
        _weigh[(rows, chunks)](x, best, c.temperature, *ends, c.min_p, weights, chunks, vocab, x.stride(0), **shared, **compiled)
    _choose[(rows,)](
        x, best, c.temperature, *ends, c.min_p, weights, c.seed, c.position, c.score_ids, ids, chunks, vocab, x.stride(0),
        DRAWS=f.draws, **shared, **compiled,
    )  # fmt: skip
    return ids


def report(x: Tensor, ids: Tensor, vocab: int, k: int) -> Chosen:
    """Logprobs and ranks of ids, and k alternatives, from raw logits x[R, width]."""
    rows, chunks, k = len(x), triton.cdiv(vocab, CHUNK), min(k, vocab)
    best = largest(x, vocab, max(k, 1))
    sums = torch.empty((rows, chunks), dtype=torch.float32, device=x.device)
    ranks = torch.empty((rows, chunks), dtype=torch.int32, device=x.device)
    _report[(rows, chunks)](x, best, ids, sums, ranks, vocab, x.stride(0), max(k, 1), CHUNK=CHUNK, num_warps=8)
    top_ids = 0xFFFFFFFF - (best & 0xFFFFFFFF)
    peak, of_top = x.gather(1, top_ids[:, :1]).to(torch.float64), x.gather(1, top_ids[:, :k]).to(torch.float64)
    normaliser = peak + sums.sum(dim=1, keepdim=True, dtype=torch.float64).log()
    logprobs = x.gather(1, ids[:, None].to(torch.int64)).to(torch.float64) - normaliser
    before = ranks.sum(dim=1, dtype=torch.int32)
    return Chosen(ids, logprobs[:, 0].float(), before + 1, top_ids[:, :k].to(torch.int32), (of_top - normaliser).float())


def sample(logits: Tensor, columns: Columns, *, vocab_size: int, features: Features, top_logprobs: int = -1) -> Chosen:
    """The operator sample of logits[R, width] without typical_p, top_n_sigma and XTC, which the caller must not ask for."""
    if not len(logits):
        return Chosen(torch.empty(0, dtype=torch.int32, device=logits.device))
    ids = choose(edited(logits, columns, vocab_size), columns, vocab_size, features)
    return Chosen(ids) if top_logprobs < 0 else report(logits, ids, vocab_size, top_logprobs)
