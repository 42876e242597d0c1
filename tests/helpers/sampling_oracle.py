"""The sampling pipeline once more, in plain Python without numpy's pipeline: the independent source of the published vectors.

float32 arithmetic is done in Python's float64 and rounded after each operation, which is exact for + - * / (53 >= 2 * 24 + 2).
"""

from __future__ import annotations

import math
import struct
from dataclasses import asdict, dataclass, field

import numpy as np

from trivium.ops import SampleInputs
from trivium.ops.sample import plain_inputs

INF = float("inf")
SCALARS = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold", "seed", "position",
    "repetition", "presence", "frequency",
)  # fmt: skip


def f32(x: float) -> float:
    """Rounds to float32 (ties to even), overflowing to infinity."""
    try:
        return struct.unpack("<f", struct.pack("<f", x))[0]
    except OverflowError:
        return math.copysign(INF, x)


_CONSTANTS = {
    32: ((0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)),
    64: ((0xD2E7470EE14C6C93, 0xCA5A826395121157), (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)),
}


def philox(counter: list[int], key: list[int], bits: int = 32) -> list[int]:
    """Philox4x{bits}-10 on Python integers."""
    (m0, m1), (w0, w1) = _CONSTANTS[bits]
    low = (1 << bits) - 1
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = m0 * c0, m1 * c2
        c0, c1, c2, c3 = (b >> bits) ^ c1 ^ k0, b & low, (a >> bits) ^ c3 ^ k1, a & low
        k0, k1 = (k0 + w0) & low, (k1 + w1) & low
    return [c0, c1, c2, c3]


def uniform(seed: int, position: int, stream: int = 0) -> int:
    return philox([position & 0xFFFFFFFF, position >> 32, 0, stream], [seed & 0xFFFFFFFF, seed >> 32])[0] >> 1


def weight(d: float) -> tuple[float, int]:
    """exp(d) by the published sequence of float32 operations, and its integer weight."""
    if d <= -28:
        return 0.0, 0
    k = math.floor(f32(f32(d * f32(1.44269504)) + 0.5))
    r = f32(f32(d - f32(k * 0.693359375)) - f32(k * f32(-2.12194440e-4)))
    p = f32(1 / 5040)
    for n in (720, 120, 24, 6, 2, 1, 1):
        p = f32(f32(p * r) + f32(1 / n))
    e = math.ldexp(p, k)
    return e, math.floor(e * 2**40)


@dataclass
class Row:
    """One row in plain values. seen: [id, count]; bias: [id, value or "-inf"]; mask: allowed ids or None."""

    logits: list[float]
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.0
    seed: int = 0
    position: int = 0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    seen: list[list[int]] = field(default_factory=list)
    bias: list[list[float]] = field(default_factory=list)
    mask: list[int] | None = None
    score: int = -1

    def to_json(self) -> dict:
        empty = Row([])
        return {k: v for k, v in asdict(self).items() if v != getattr(empty, k)}


def _penalised(row: Row, x: list[float]) -> None:
    rep, presence, frequency = f32(row.repetition), f32(row.presence), f32(row.frequency)
    for token, count in row.seen:
        x[token] = f32(x[token] / rep) if x[token] > 0 else f32(x[token] * rep)
        x[token] = f32(x[token] - f32(frequency * count))
        if count > 0:
            x[token] = f32(x[token] - presence)


def _order(x: list[float]) -> list[int]:
    return sorted(range(len(x)), key=lambda i: (-x[i], i))


def sample(row: Row, vocab: int) -> int:
    """The id that the pipeline chooses."""
    if row.score >= 0:
        return row.score
    x = [f32(v) for v in row.logits[:vocab]]
    _penalised(row, x)
    for token, value in row.bias:
        x[int(token)] = f32(x[int(token)] + f32(float(value)))
    if row.mask is not None:
        x = [v if i in set(row.mask) else -INF for i, v in enumerate(x)]
    temperature = f32(row.temperature)
    greedy = _order(x)[0]
    if temperature == 0:
        return greedy
    y = [f32(v / temperature) for v in x]
    if math.isinf(max(y)):
        return greedy
    return _drawn(row, x, [f32(v - max(y)) for v in y])


def _deviates(x: list[float], sigmas: float) -> list[bool]:
    """Which ids top_n_sigma takes away, in exact integers: variance and mean of the distances from the top, in 1/4096."""
    gaps = [math.floor(min(f32(max(x) - v), 512.0) * 4096) for v in x]
    finite = [g for g, v in zip(gaps, x) if v != -INF]
    mean = sum(finite) // len(finite)
    deviation = math.isqrt(sum((g - mean) ** 2 for g in finite) // len(finite))
    return [g > deviation * math.floor(f32(sigmas) * 2**16) // 2**16 for g in gaps]


def _shortest(order: list[int], w: dict[int, int], fraction: float) -> list[int]:
    target = max(1, sum(w[i] for i in order) * math.floor(f32(fraction) * 2**31) // 2**31)
    return order[: next(n for n in range(1, len(order) + 1) if sum(w[i] for i in order[:n]) >= target)]


def _typical(order: list[int], d: list[float], w: dict[int, int], fraction: float) -> list[int]:
    """Those whose surprise is nearest to the entropy; both lack the same log of the normaliser. Back in order of d."""
    shift = max(0, sum(w[i] for i in order).bit_length() - 41)
    surprise = {i: math.floor(-d[i] * 2**16) for i in order}
    mean = sum((w[i] >> shift) * surprise[i] for i in order) // sum(w[i] >> shift for i in order)
    near = _shortest(sorted(order, key=lambda i: (abs(surprise[i] - mean), i)), w, fraction)
    return [i for i in order if i in near]


def _drawn(row: Row, x: list[float], d: list[float]) -> int:
    gone = _deviates(x, row.top_n_sigma) if f32(row.top_n_sigma) > 0 else [False] * len(x)
    order = [i for i in _order(d) if d[i] > -28 and not gone[i]]
    if row.top_k > 0:
        order = order[: row.top_k]
    e, w = ({i: weight(d[i])[part] for i in order} for part in (0, 1))
    if f32(row.typical_p) < 1:
        order = _typical(order, d, w, row.typical_p)
    if f32(row.top_p) < 1:
        order = _shortest(order, w, row.top_p)
    order = [i for i in order if e[i] >= f32(f32(row.min_p) * e[order[0]])]
    if uniform(row.seed, row.position, 2) < math.floor(f32(row.xtc_probability) * 2**31):
        least = max(1, sum(w[i] for i in order) * math.floor(f32(row.xtc_threshold) * 2**31) // 2**31)
        top = [i for i in order if w[i] >= least]
        order = [i for i in order if i not in top[:-1]]
    stay = sorted(order)
    target = sum(w[i] for i in stay) * uniform(row.seed, row.position) // 2**31
    return next(i for n, i in enumerate(stay) if sum(w[j] for j in stay[: n + 1]) > target)


def logprobs(row: Row, vocab: int) -> tuple[list[float], list[int]]:
    """log softmax of the raw logits in float64, and all ids in order."""
    x = [f32(v) for v in row.logits[:vocab]]
    peak = max(x)
    total = peak + math.log(math.fsum(math.exp(v - peak) for v in x))
    return [v - total for v in x], _order(x)


def _ragged(rows: list[Row], name: str) -> tuple[np.ndarray, list[list[float]]]:
    starts = np.cumsum([0, *(len(getattr(r, name)) for r in rows)]).astype(np.int32)
    return starts, [pair for r in rows for pair in sorted(getattr(r, name))]


def _mask(rows: list[Row], width: int) -> np.ndarray | None:
    if all(r.mask is None for r in rows):
        return None
    words = np.full((len(rows), -(-width // 32)), 0xFFFFFFFF, np.uint32)
    for r, row in enumerate(rows):
        if row.mask is not None:
            bits = [0] * words.shape[1]
            for token in row.mask:
                bits[token // 32] |= 1 << (token % 32)
            words[r] = bits
    return words


def to_arrays(rows: list[Row], top_logprobs: int) -> tuple[np.ndarray, SampleInputs]:
    """The same rows as the operator takes them."""
    seen_starts, seen = _ragged(rows, "seen")
    bias_starts, bias = _ragged(rows, "bias")
    return np.array([r.logits for r in rows], np.float32), plain_inputs(
        len(rows),
        **{name: np.array([getattr(r, name) for r in rows], np.uint64 if name == "seed" else None) for name in SCALARS},
        score_ids=[r.score for r in rows],
        seen_starts=seen_starts,
        seen_ids=np.array([t for t, _ in seen], np.int32),
        seen_counts=np.array([c for _, c in seen], np.int32),
        bias_starts=bias_starts,
        bias_ids=np.array([t for t, _ in bias], np.int32),
        bias=np.array([float(v) for _, v in bias], np.float32),
        mask=_mask(rows, len(rows[0].logits)),
        top_logprobs=top_logprobs,
    )


def from_arrays(logits: np.ndarray, inputs: SampleInputs) -> list[Row]:
    """The operator's arguments as plain rows."""
    rows = []
    for r in range(len(logits)):
        seen = range(*inputs.seen_starts[r : r + 2].tolist())
        bias = range(*inputs.bias_starts[r : r + 2].tolist())
        bits = None if inputs.mask is None else [int(w) for w in inputs.mask[r]]
        rows.append(Row(
            logits[r].tolist(), **{name: getattr(inputs, name)[r].item() for name in SCALARS}, score=int(inputs.score_ids[r]),
            seen=[[int(inputs.seen_ids[i]), int(inputs.seen_counts[i])] for i in seen],
            bias=[[int(inputs.bias_ids[i]), float(inputs.bias[i])] for i in bias],
            mask=None if bits is None else [i for i in range(len(logits[r])) if bits[i // 32] >> (i % 32) & 1],
        ))  # fmt: skip
    return rows


def random_rows(rng: np.random.Generator, vocab: int, count: int, *, grid: float, spread: float = 2.5) -> list[Row]:
    """Rows with a random choice of every stage; logits are multiples of `grid`, so a coarse one makes ties."""
    return [_random_row(rng, vocab, grid, spread) for _ in range(count)]


def _random_row(rng: np.random.Generator, vocab: int, grid: float, spread: float) -> Row:
    def maybe(value, otherwise):
        return value if rng.random() < 0.5 else otherwise

    picked = rng.permutation(vocab)
    logits = (np.round(rng.normal(0, spread, vocab) / grid) * grid).tolist()
    return Row(
        logits,
        temperature=float(rng.choice([0.0, 0.5, 0.75, 1.0, 2.0], p=[0.1, 0.2, 0.2, 0.3, 0.2])),
        top_k=maybe(int(rng.integers(1, vocab + 3)), 0),
        top_p=maybe(float(rng.integers(1, 64)) / 64, 1.0),
        min_p=maybe(float(rng.integers(1, 64)) / 256, 0.0),
        typical_p=maybe(float(rng.integers(1, 64)) / 64, 1.0),
        top_n_sigma=maybe(float(rng.integers(1, 64)) / 32, 0.0),
        xtc_probability=maybe(float(rng.integers(1, 5)) / 4, 0.0),
        xtc_threshold=float(rng.integers(0, 33)) / 128,
        seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
        position=int(rng.integers(0, 2 ** int(rng.integers(1, 50)))),
        repetition=maybe(float(rng.integers(3, 9)) / 4, 1.0),
        presence=maybe(float(rng.integers(-8, 9)) / 4, 0.0),
        frequency=maybe(float(rng.integers(-8, 9)) / 4, 0.0),
        seen=maybe([[int(t), int(rng.integers(0, 4))] for t in sorted(picked[:6])], []),
        bias=maybe([[int(t), float(rng.choice([-3.0, 1.5, 4.0]))] for t in sorted(picked[-4:])], []),
        mask=maybe(sorted(int(t) for t in picked[: max(1, vocab // 2)]), None),
    )
