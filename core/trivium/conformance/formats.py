"""Every resident weight format that a backend declares: from each storage format, exact or within its error budget, and used."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trivium.conformance.examples import Example, make_example
from trivium.conformance.lab import Lab, as_weight
from trivium.conformance.numbers import Array, expect_close, expect_relative, round_to, tolerance
from trivium.conformance.operators import SEED
from trivium.conformance.report import Check, Mismatch, Verdict
from trivium.errors import UnsupportedError
from trivium.ops import OPERATORS, Case, Weight
from trivium.plugin import WeightFormat
from trivium.weights.formats import FORMATS, make_weight, stored_bytes

SHAPES = ((48, 512), (33, 256))
"""(out, in) of the matrices that are loaded."""
ROWS = (1, 5, 33)
"""Tokens that they are used with."""
PLAIN = ("float32", "float16", "bfloat16")
WIDE = (256, 512)
"""A matrix that needs no padding, for its size in memory."""
LARGER = 1.5
"""Times the declared bits that it may take."""


def checks(lab: Lab) -> Iterator[Check]:
    """For each resident format: from each storage format, then a projection and a table look-up with such weights."""
    for resident in lab.capabilities.weight_formats:
        for storage in sources(resident):
            name = f"{resident.name} from {storage}"
            yield Check("formats", name, lambda r=resident, s=storage: judge_format(lab, r, s))  # type: ignore[misc]
    yield Check("formats", "assign", lambda: judge_assign(lab))


def judge_assign(lab: Lab) -> Verdict:
    """Overwrites entries of a weight with three dimensions; the others must stay."""
    rng = np.random.default_rng(SEED)
    want, other = (rng.standard_normal((3, 5, 40), dtype=np.float32) for _ in range(2))
    with lab.session() as session:
        tensor = session.load(as_weight("slots", want), "float32")
        try:
            for index in (1, 0, 1):
                session.assign(tensor, index, other[index])
        except UnsupportedError as e:
            return Verdict(f"{e}; adapters are refused", "skipped")
        got = np.asarray(session.read_weight(tensor))
    want[:2] = other[:2]
    expect_relative("two of three entries overwritten", got, want, 0.0)
    return Verdict("entries of a loaded weight are overwritten, others stay")


def sources(resident: WeightFormat) -> list[str]:
    """Storage formats to load from: those it promises to hold exactly, and the plain floats if it has a budget for rounding."""
    lossy = PLAIN if resident.error_budget > 0 or resident.name == "float32" else ()
    return list(dict.fromkeys([*lossy, *sorted(resident.lossless_from)]))


def judge_format(lab: Lab, resident: WeightFormat, storage: str) -> Verdict:
    """Loads matrices and compares what the backend holds; then what its kernels make of them."""
    if storage not in FORMATS:
        return Verdict(f"the kit can't make weights stored as {storage}", "skipped")
    exact = storage in resident.lossless_from or resident.name == "float32"
    rng = np.random.default_rng(SEED)
    _judge_size(lab, random_weight(rng, WIDE, storage), resident)
    errors = []
    for shape in SHAPES:
        weight = random_weight(rng, shape, storage)
        want = weight.decode()
        with lab.session() as session:
            got = np.asarray(session.read_weight(session.load(weight, resident.name))).reshape(-1)
        what = f"{list(shape)} read back"
        if exact and not np.array_equal(got, want.reshape(-1)):
            expect_relative(what, got, want.reshape(-1), 0.0)
        errors.append(expect_relative(what, got, want.reshape(-1), 0.0 if exact else resident.error_budget))
    used = [
        _judge_use(lab, random_weight(rng, shape, storage), resident, rows)
        for shape in SHAPES
        for rows in ROWS
        if rows <= lab.step_tokens
    ]
    held = "exact" if exact else f"error {max(errors):.2g} of {resident.error_budget:g}"
    return Verdict(f"{held}; projections within {max(used):.2g}")


def _judge_size(lab: Lab, weight: Weight, resident: WeightFormat) -> None:
    """A format that takes half as much again as it says misleads whoever reckons with it."""
    with lab.session() as session:
        before = session.memory().weights
        session.load(weight, resident.name)
        bits = 8 * (session.memory().weights - before) / (WIDE[0] * WIDE[1])
    if bits > LARGER * resident.bits:
        raise Mismatch(f"{list(WIDE)} takes {bits:.3g} bits a weight by memory(); capabilities() says {resident.bits:g}")


def _judge_use(lab: Lab, weight: Weight, resident: WeightFormat, rows: int) -> float:
    """linear and embedding with the weight; returns the relative error of the projection against the numbers held."""
    rng = np.random.default_rng(rows)
    n_out, n_in = weight.shape
    x = rng.standard_normal((rows, n_in), dtype=np.float32)
    linear = _run(lab, "linear", Case((x, weight.decode(), None)), weight, resident)
    look_up = _run(lab, "embedding", Case((rng.permutation(n_out)[:rows].astype(np.int32), weight.decode())), weight, resident)
    dtype = lab.dtypes[0]
    expect_close("embedding", look_up[0], round_to(look_up[1], dtype), tolerance(OPERATORS["embedding"], [dtype]))
    if resident.bits >= 16:
        coarser = [dtype, resident.name if resident.name in PLAIN else "bfloat16"]
        expect_close("linear", *linear, tolerance(OPERATORS["linear"], coarser))
    return expect_relative("linear", *linear, resident.activation_budget)


def _run(lab: Lab, name: str, case: Case, weight: Weight, resident: WeightFormat) -> tuple[Array, Array]:
    example: Example = make_example(OPERATORS[name], case, dtype=lab.dtypes[0], page_size=lab.page_size)
    constant = next(c for c in example.constants if c.startswith("weight."))
    outcome = lab.run(example, example.program, dtype=lab.dtypes[0], weights={constant: (weight, resident.name)})
    return outcome.outputs["logits"], outcome.want["logits"]


def random_weight(rng: np.random.Generator, shape: tuple[int, int], storage: str) -> Weight:
    """A matrix in a storage format, its numbers of the size of a model's weights."""
    elements, size = FORMATS[storage]
    if storage in PLAIN:
        return _plain(rng, shape, storage)
    if elements == 1:
        raise Mismatch(f"the kit makes no weights stored as {storage}")
    count = stored_bytes(shape, storage) // size
    blocks = np.concatenate(list(_blocks(rng, storage, count)))[:count]
    return make_weight("weight", shape, storage, blocks.reshape(-1))


def _plain(rng: np.random.Generator, shape: tuple[int, int], storage: str) -> Weight:
    numbers = (rng.standard_normal(shape) * 0.05).astype(np.float32)
    if storage == "bfloat16":
        stored: Array = (round_to(numbers, storage).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    else:
        stored = numbers.astype(storage)
    return make_weight("weight", shape, storage, np.ascontiguousarray(stored).reshape(-1).view(np.uint8))


def _blocks(rng: np.random.Generator, storage: str, count: int) -> Iterator[Array]:
    """Random bytes, block by block, of which those are kept that stand for numbers of a sensible size: no layout is assumed."""
    elements, size = FORMATS[storage]
    kept = 0
    while kept < count:
        raw = rng.integers(0, 256, (16 * count, size), dtype=np.uint8)
        with np.errstate(all="ignore"):
            numbers = np.abs(make_weight("blocks", (len(raw), elements), storage, raw.reshape(-1)).decode())
        top = numbers.max(axis=1)
        good = raw[np.isfinite(numbers).all(axis=1) & (top < 1) & (top > 0.01)]
        kept += len(good)
        yield good
