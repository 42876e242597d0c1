"""Weights in every storage format, and plain numpy statements of what the linear kernels compute."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

FLOAT_STORAGES = ("float32", "bfloat16", "float16")
SMALL_BLOCKS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "mxfp4")
SCALES_AT = {
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
    "q3_k": (108,),
    "iq4_xs": (0,),
    "tq1_0": (52,),
    "tq2_0": (64,),
    "iq4_nl": (0,),
}
"""Where the float16 numbers of a block are; its other bytes may be anything."""
K_BLOCKS = ("q4_k", "q5_k", "q6_k", "q3_k", "iq4_xs", "tq1_0", "tq2_0")
BLOCKS = SMALL_BLOCKS + K_BLOCKS
GROUP = 32
PART = 256


def block_size(storage: str) -> int:
    return 1 if storage in FLOAT_STORAGES else gguf.GGML_QUANT_SIZES[_ggml_type(storage)][0]


def _ggml_type(storage: str) -> gguf.GGMLQuantizationType:
    names = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
    return gguf.GGMLQuantizationType[names.get(storage, storage.upper().replace("_k", "_K"))]


def stored(storage: str, out: int, in_: int, seed: int = 0) -> Bytes:
    """uint8[out, bytes a row]: random weights of a storage format; every code and scale bit pattern of blocks occurs."""
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((out, in_), dtype=np.float32) * np.float32(0.05)
    if storage not in SCALES_AT and storage != "mxfp4":
        return np.ascontiguousarray(gguf.quants.quantize(weights, _ggml_type(storage)).view(np.uint8).reshape(out, -1))
    block, size = gguf.GGML_QUANT_SIZES[_ggml_type(storage)]
    blocks = rng.integers(0, 256, (out * in_ // block, size), dtype=np.uint8)
    if storage == "mxfp4":
        blocks[:, 0] = rng.integers(112, 124, len(blocks))
    for at in SCALES_AT.get(storage, ()):
        blocks[:, at : at + 2] = rng.uniform(-2e-3, 2e-3, (len(blocks), 1)).astype(np.float16).view(np.uint8)
    return blocks.reshape(out, -1)


def decoded(storage: str, rows: Bytes) -> Floats:
    """The gguf package's own decoding: float32[out, in]."""
    kind = _ggml_type(storage)
    view = {"float32": np.float32, "float16": np.float16}.get(storage)
    data = rows.view(view) if view else rows
    return gguf.quants.dequantize(data, kind).astype(np.float32)


def quantised(x: Floats) -> tuple[npt.NDArray[np.int32], Floats, Floats]:
    """Rows as signed 8-bit codes int32[rows, groups, 32] with multipliers float32[rows, groups] and scales float32[rows] of which
    x = scale * multiplier * code, in float32 arithmetic. Multipliers: the least quarters of powers of two, 2**-10 to 1."""
    padded = np.zeros((len(x), -(-x.shape[1] // (2 * GROUP)) * 2 * GROUP), np.float32)
    padded[:, : x.shape[1]] = x
    groups = padded.reshape(len(x), -1, GROUP)
    most = np.abs(padded).max(axis=1, keepdims=True)
    live = most >= 1e-30
    safe = np.where(live, most, np.float32(1))
    share = np.maximum(np.abs(groups).max(axis=2) / safe, np.float32(2**-10))
    mantissa, exponent = np.frexp(share)
    multiplier = np.ldexp(np.ceil(mantissa * 8) / 8, exponent).astype(np.float32)
    codes = np.rint(groups * (np.float32(127) / safe / multiplier)[..., None]).astype(np.int32)
    scale = np.where(live, most / np.float32(127), np.float32(0))[:, 0]
    return np.where(live[..., None], codes, 0), np.where(live, multiplier, np.float32(2**-10)), scale.astype(np.float32)


def quantised_by_parts(x: Floats) -> npt.NDArray[np.float64]:
    """Rows in 8 bits with one scale, largest / 127, for every PART numbers: what they mean, float64[rows, in]."""
    padded = np.zeros((len(x), -(-x.shape[1] // PART), PART), np.float32)
    padded.reshape(len(x), -1)[:, : x.shape[1]] = x
    most = np.abs(padded).max(axis=2, keepdims=True)
    codes = np.rint(padded * (np.float32(127) / np.where(most < 1e-30, np.float32(np.inf), most)))
    return (codes * (most / np.float32(127)).astype(np.float64)).reshape(len(x), -1)[:, : x.shape[1]]


def product_of_quantised(x: Floats, weights: Floats, format: str = "int4") -> npt.NDArray[np.float64]:
    """x W^T with x rounded as the kernels of a format round it, otherwise in float64."""
    if format == "int4_i8":
        return quantised_by_parts(x) @ weights.astype(np.float64).T
    codes, multiplier, scale = quantised(x)
    rounded = codes * (scale[:, None] * multiplier)[..., None].astype(np.float64)
    return rounded.reshape(len(x), -1)[:, : x.shape[1]] @ weights.astype(np.float64).T


def assert_close(actual: Floats, expected: npt.NDArray[Any], relative: float) -> None:
    """Largest difference over the root mean square of the expected."""
    error = np.abs(actual - expected).max() / max(float(np.sqrt(np.mean(np.square(expected)))), 1e-30)
    assert error <= relative, f"relative error {error:.3g} > {relative:.3g}"
