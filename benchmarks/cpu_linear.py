"""Linear kernels of the CPU backend against this machine's ceilings, on the matrices of SmolLM2-135M.

For each resident format: one row (decode) in GB/s of packed weights against a plain read of the same memory; many rows (prefill)
in 10^12 operations a second against the ceiling of register dot products of the same instruction set. Repeats alternate between
kernel and ceiling, so that a disturbance hits both; figures are medians, ratios are medians of the ratios of neighbouring repeats.
Times are processor times of the slowest thread, so that other programs on the machine count as little as they can.
The output head is left out of prefill, which computes logits for the last row only, and the more rows the fewer layers are run, so
that kernel and ceiling take about as long.

    python benchmarks/cpu_linear.py [--json] [--isa NAME] [--threads N] [--repeats N] [--formats int4:q4_0,...]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from typing import Any

import numpy as np
from trivium_cpu import _native

linear = _native.linear

LAYERS = 30
SHAPES = ((576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536))
HEAD = (49152, 576)
ROWS = (8, 64, 256, 512)
FORMATS = "int4:q4_0,int4:q4_1,int4:q4_k,int4_i8:q4_0,int8:q8_0,bfloat16:bfloat16"
ROW_BYTES = {"q4_0": (32, 18), "q4_1": (32, 20), "q4_k": (256, 144), "q8_0": (32, 34), "bfloat16": (1, 2), "float32": (1, 4)}
DOT_ROUNDS = 500_000
DOT_OPERATIONS = 12 * 64 * 2


def random_rows(storage: str, out: int, in_: int) -> np.ndarray:
    """uint8[out, bytes a row]: any codes, scales of about 0.01. A row's last block is whole."""
    block, size = ROW_BYTES[storage]
    if storage in ("bfloat16", "float32"):
        values = np.random.default_rng(0).standard_normal((out, in_), dtype=np.float32).view(np.uint32)
        return (values >> 16).astype(np.uint16).view(np.uint8) if storage == "bfloat16" else values.view(np.uint8)
    rows = np.random.default_rng(0).integers(0, 256, (out * -(-in_ // block), size), dtype=np.uint8)
    rows[:, 0:2] = rows[:, 2:4] = np.float16([0.01]).view(np.uint8)
    return rows.reshape(out, -1)


def model(format: str, storage: str) -> list[Any]:
    """The packed matrices of every layer, inputs filled up to whole blocks, and the output head, of 8 bits if the layers have 4."""
    arena = linear.Arena()
    block = ROW_BYTES[storage][0]
    shapes = [(out, -(-in_ // block) * block) for out, in_ in SHAPES]
    sources = {shape: random_rows(storage, *shape) for shape in shapes}
    layers = [linear.pack(arena, format, storage, shape[1], sources[shape]) for _ in range(LAYERS) for shape in shapes]
    head = ("int8", "q8_0") if format == "int4" else (format, storage)
    return [*layers, linear.pack(arena, *head, HEAD[1], random_rows(head[1], *HEAD))]


def row_of_576(pair: list[str]) -> Any:
    """A matrix of 576 inputs."""
    return linear.pack(linear.Arena(), pair[0], pair[1], 576, random_rows(pair[1], 16, 576))


def alternate(kernel: Any, ceiling: Any, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds of both, taken in turns."""
    pairs = [(kernel()[0], ceiling()[0]) for _ in range(repeats)]
    return [k for k, _ in pairs], [c for _, c in pairs]


def figure(work: float, seconds: list[float], ceiling: list[float], unit: float) -> dict[str, float]:
    """Rates in units; `ceiling` holds the ceiling's own rates."""
    ratios = [work / unit / s / c for s, c in zip(seconds, ceiling, strict=True)]
    return {
        "median": work / unit / statistics.median(seconds),
        "best": work / unit / min(seconds),
        "ceiling_median": statistics.median(ceiling),
        "ceiling_best": max(ceiling),
        "of_ceiling": statistics.median(ratios),
    }


def measure(isa: str, format: str, storage: str, threads: int, repeats: int) -> dict[str, Any]:
    matrices = model(format, storage)
    nbytes = sum(m.nbytes for m in matrices)

    def dots() -> list[float]:
        return linear.measure_dots(isa, DOT_ROUNDS, threads, 1)

    def product(some: list[Any], rows: int) -> Any:
        return lambda: linear.measure_multiply(isa, some, rows, threads, 1)

    seconds, reads = alternate(product(matrices, 1), lambda: linear.measure_read(matrices, threads, 1), repeats)
    result: dict[str, Any] = {"format": format, "storage": storage, "megabytes": nbytes / 1e6}
    result["rows_1_gb_s"] = figure(nbytes, seconds, [nbytes / 1e9 / s for s in reads], 1e9)
    for rows in ROWS:
        some = matrices[: len(SHAPES) * min(LAYERS, max(2, 8 * LAYERS // rows))]
        operations = 2 * sum(m.shape[0] * m.shape[1] for m in some)
        seconds, peaks = alternate(product(some, rows), dots, repeats)
        ceiling = [DOT_OPERATIONS * DOT_ROUNDS * threads / 1e12 / s for s in peaks]
        result[f"rows_{rows}_tops"] = figure(operations * rows, seconds, ceiling, 1e12)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Linear kernels of the CPU backend against the machine's ceilings.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--isa", default=linear.isas()[0], choices=linear.isas())
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--formats", default=FORMATS, help="format:storage pairs, separated by commas")
    args = parser.parse_args()
    pairs = [pair.split(":") for pair in args.formats.split(",")]
    results = [measure(args.isa, format, storage, args.threads, args.repeats) for format, storage in pairs]
    quantise = min(linear.measure_quantise(args.isa, row_of_576(pairs[0]), 1000, args.repeats)) / 1000
    report = {"isa": args.isa, "threads": args.threads, "quantise_row_576_ns": quantise * 1e9, "formats": results}
    if args.json:
        print(json.dumps(report, indent=2))
        return
    print(f"{args.isa}, {args.threads} threads; quantising a row of 576: {quantise * 1e9:.0f} ns")
    for result in results:
        print(f"{result['format']} from {result['storage']}, {result['megabytes']:.0f} MB")
        for name, f in result.items():
            if isinstance(f, dict):
                share = f"{f['median']:7.3f} of {f['ceiling_median']:7.3f} ({f['of_ceiling']:.0%})"
                print(f"  {name:<14} {share}; best {f['best']:.3f}")


if __name__ == "__main__":
    main()
