"""The fused feed-forward block: its inner rows go from one projection to the next as they leave the gate, and nobody can tell."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cpu_cases import ISAS, batch_of
from trivium.conformance.lab import as_weight
from trivium.ops import Program, new_builder
from trivium.ops.dense import apply_gate
from trivium_cpu.plugin import CpuBackend

native = pytest.importorskip("trivium_cpu._native")

VOCAB, WIDTH, INNER = 50, 80, 1096  # the inner rows end within a part


def program(kind: str = "silu", biases: bool = False) -> Program:
    b = new_builder()
    x = b.embedding(b.input("token_ids"), b.weight("table", (VOCAB, WIDTH)))
    for layer in range(2):
        h = b.rms_norm(x, b.weight(f"norm{layer}", (WIDTH,)), eps=1e-5)

        def linear(x: Any, name: str, out: int, in_: int, layer: int = layer) -> Any:
            bias = b.weight(f"{name}{layer}.bias", (out,)) if biases else None
            return b.linear(x, b.weight(f"{name}{layer}", (out, in_)), bias)

        inner = b.gated(linear(h, "gate", INNER, WIDTH), linear(h, "up", INNER, WIDTH), kind=kind)
        x = b.add(x, linear(inner, "down", WIDTH, INNER))
    return b.finish({"logits": b.gather_rows(x, b.input("sample_rows"))}, vocab_size=WIDTH)


def compiled(built: Program, format: str, isa: str, threads: int = 1) -> Any:
    backend = CpuBackend()
    session = backend.open(backend.probe().devices[0], {"threads": threads, "isa": isa, "strict": True})
    rng, weights = np.random.default_rng(5), {}
    for constant in built.constants:
        array = rng.standard_normal(constant.value.shape, dtype=np.float32) * np.float32(0.2)
        kept = format if len(array.shape) == 2 and constant.value.name != "table" else "float32"
        weights[constant.value.name] = session.load(as_weight(constant.value.name, array), kept)
    return session.compile(built, weights)


def logits(executable: Any, ids: np.ndarray) -> np.ndarray:
    return executable.run(batch_of(ids)).output("logits").copy()


@pytest.mark.parametrize("isa", ISAS, indirect=True)
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("format", ["int4_i8", "int4"])
def test_a_row_has_the_bits_that_it_has_alone_however_inner_rows_are_handed_on(isa: str, biases: bool, format: str) -> None:
    executable = compiled(program(biases=biases), format, isa)
    ids = np.random.default_rng(1).integers(0, VOCAB, 150)
    alone = np.stack([logits(executable, ids[i : i + 1])[0] for i in range(len(ids))])
    for rows in (2, 3, 9, 40, 128, 150):
        np.testing.assert_array_equal(logits(executable, ids[:rows]).view(np.uint32), alone[:rows].view(np.uint32))


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_few_rows_on_many_threads_and_many_on_few_agree(threads: int) -> None:
    """More threads need more pieces before rows are handed on."""
    ids = np.random.default_rng(2).integers(0, VOCAB, 300)
    one, many = (compiled(program(), "int4_i8", "auto", n) for n in (1, threads))
    for rows in (1, 3, 20, 300):
        np.testing.assert_array_equal(logits(one, ids[:rows]), logits(many, ids[:rows]))


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_the_block_is_the_reference_up_to_the_rounding_of_its_inputs(kind: str) -> None:
    """Against numpy in float64 on the numbers that are held."""
    executable = compiled(program(kind), "int4_i8", "auto")
    ids = np.random.default_rng(3).integers(0, VOCAB, 200)
    held = {name: held_numbers(array) for name, array in numbers(program(kind)).items()}
    x = held["table"][ids]
    for layer in range(2):
        h = x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5) * held[f"norm{layer}"]
        gate, up = h @ held[f"gate{layer}"].T, h @ held[f"up{layer}"].T
        inner = apply_gate(gate.astype(np.float32), up.astype(np.float32), kind, None, 1.0, 0.0)
        x = x + inner @ held[f"down{layer}"].T
    error = logits(executable, ids) - x
    assert np.sqrt((error**2).mean() / (x**2).mean()) < 0.04


def numbers(built: Program) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {c.value.name: rng.standard_normal(c.value.shape, dtype=np.float32) * np.float32(0.2) for c in built.constants}


def held_numbers(array: np.ndarray) -> np.ndarray:
    """float64: a matrix of products as int4_i8 holds it."""
    if array.ndim == 1 or array.shape == (VOCAB, WIDTH):
        return array.astype(np.float64)
    linear = native.linear
    return linear.pack(linear.Arena(), "int4_i8", "float32", array.shape[1], array.view(np.uint8)).unpack().astype(np.float64)
