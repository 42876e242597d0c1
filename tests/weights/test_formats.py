"""Storage formats against the gguf package, the float formats' definitions, and torch where it is installed."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given
from hypothesis import strategies as st
from trivium.errors import CheckpointError
from trivium.weights.formats import FORMATS, SAFETENSORS_TYPES, decoder, make_weight, stored_bytes
from trivium_formats.gguf.file import GGML_TYPES
from trivium.weights.safetensors import SafetensorsFile
from weight_files import random_blocks, safetensors_bytes

PLAIN = {"float32", "float16", "bfloat16", "float64", "int8", "int16", "int32", "int64"}
BLOCKS = sorted(set(GGML_TYPES.values()) - PLAIN)


def kind_of(format: str) -> GGMLQuantizationType:
    return GGMLQuantizationType[format.upper()]


def can(action: object, kind: GGMLQuantizationType, argument: np.ndarray) -> bool:
    try:
        action(argument, kind)  # type: ignore[operator]
    except NotImplementedError:
        return False
    return True


QUANTISABLE = [f for f in BLOCKS if can(quantize, kind_of(f), np.ones((1, 256), np.float32))]


def test_the_table_has_the_packages_type_ids_and_block_sizes() -> None:
    names = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}
    names |= {f"int{n}": f"I{n}" for n in (8, 16, 32, 64)}
    for id, format in GGML_TYPES.items():
        kind = GGMLQuantizationType(id)
        assert kind.name == names.get(format, format.upper())
        assert tuple(FORMATS[format]) == GGML_QUANT_SIZES[kind]


def test_every_type_that_the_package_can_decode_is_in_the_table() -> None:
    for kind in GGMLQuantizationType:
        if kind.name not in ("F64", "I8", "I16", "I32", "I64"):
            assert can(dequantize, kind, np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8)) == (int(kind) in GGML_TYPES), kind


@pytest.mark.parametrize("format", BLOCKS)
def test_random_blocks_decode_as_in_the_package(format: str) -> None:
    raw = random_blocks(kind_of(format), (3, 2, 512))
    weight = make_weight("w", (3, 2, 512), format, raw.reshape(-1))
    with np.errstate(all="ignore"):
        want = dequantize(raw, kind_of(format))
    assert weight.decode().dtype == np.float32
    np.testing.assert_array_equal(weight.decode(), want.reshape(3, 2, 512))
    np.testing.assert_array_equal(weight.slice_rows(1, 3).decode(), want[1:3])


@pytest.mark.parametrize("format", QUANTISABLE)
def test_quantised_numbers_come_back_near(format: str) -> None:
    x = np.random.default_rng(0).standard_normal((7, 256)).astype(np.float32)
    raw = quantize(x, kind_of(format))
    weight = make_weight("w", x.shape, format, raw.reshape(-1))
    assert weight.nbytes == stored_bytes(x.shape, format) == raw.nbytes
    error = np.sqrt(np.mean((weight.decode() - x) ** 2) / np.mean(x**2))
    assert error < (0.9 if format.startswith("tq") else 0.15)  # ternary types keep little


def test_more_than_ten_types_can_be_quantised_for_this_test() -> None:
    assert {"q4_0", "q4_1", "q5_0", "q5_1", "q8_0"} <= set(QUANTISABLE)


def test_q4_1_block_by_its_definition() -> None:
    d, m, nibbles = 0.5, -2.0, list(range(16)) * 2
    low, high = nibbles[:16], nibbles[16:]
    block = struct.pack("<ee", d, m) + bytes(a | b << 4 for a, b in zip(low, high, strict=True))
    got = make_weight("w", (1, 32), "q4_1", np.frombuffer(block, np.uint8)).decode()
    assert got.tolist() == [[n * d + m for n in nibbles]]


@given(st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=20))
def test_bfloat16_is_the_upper_half_of_a_float32(bits: list[int]) -> None:
    got = decoder("bfloat16")(np.array(bits, np.uint16))
    want = [struct.unpack("<f", struct.pack("<I", b << 16))[0] for b in bits]
    np.testing.assert_array_equal(got, np.array(want, np.float32))


def e4m3(b: int) -> float:
    """OCP 8-bit floating point specification, section 5.2."""
    sign, exponent, mantissa = (-1) ** (b >> 7), b >> 3 & 15, b & 7
    if b & 127 == 127:
        return float("nan")
    return sign * (2.0**-6 * (mantissa / 8) if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8))


def e5m2(b: int) -> float:
    sign, exponent, mantissa = (-1) ** (b >> 7), b >> 2 & 31, b & 3
    if exponent == 31:
        return float("nan") if mantissa else sign * float("inf")
    return sign * (2.0**-14 * (mantissa / 4) if exponent == 0 else 2.0 ** (exponent - 15) * (1 + mantissa / 4))


def e8m0(b: int) -> float:
    return float("nan") if b == 255 else 2.0 ** (b - 127)


@pytest.mark.parametrize(("format", "define"), [("float8_e4m3", e4m3), ("float8_e5m2", e5m2), ("float8_e8m0", e8m0)])
def test_float8_by_its_definition(format: str, define) -> None:
    got = decoder(format)(np.arange(256, dtype=np.uint8).reshape(16, 16))
    np.testing.assert_array_equal(got.ravel(), np.array([define(b) for b in range(256)], np.float32))


@pytest.mark.oracles
@pytest.mark.parametrize(
    ("format", "dtype"),
    [("float8_e4m3", "float8_e4m3fn"), ("float8_e5m2", "float8_e5m2"), ("float8_e8m0", "float8_e8m0fnu"), ("bfloat16", "bfloat16")],
)
def test_small_floats_as_in_torch(format: str, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    bits = np.arange(256, dtype=np.uint8) if format != "bfloat16" else np.arange(65536, dtype=np.uint16)
    want = torch.from_numpy(bits).view(getattr(torch, dtype)).float().numpy()
    np.testing.assert_array_equal(decoder(format)(bits), want)


@pytest.mark.parametrize("format", sorted(set(SAFETENSORS_TYPES.values())))
def test_an_unaligned_tensor_is_read_right(format: str) -> None:
    size = FORMATS[format].block_bytes
    aligned = np.frombuffer(np.random.default_rng(3).bytes(6 * size), np.uint8)
    shifted = np.concatenate([np.zeros(1, np.uint8), aligned])[1:]
    want, got = (make_weight("w", (2, 3), format, raw) for raw in (aligned, shifted))
    assert got.data.flags.aligned
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got.decode(), want.decode())


def test_unaligned_tensors_are_copied_one_by_one_when_they_are_asked_for(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {f"t{i}": rng.standard_normal((64, 1024), np.float32) for i in range(8)}
    whole, each = safetensors_bytes(arrays), arrays["t0"].nbytes
    length = int.from_bytes(whole[:8], "little")
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", length + 3) + whole[8 : 8 + length] + b"   " + whole[8 + length :])
    tracemalloc.start()
    file = SafetensorsFile(tmp_path / "m.safetensors")
    weights = [file.weight(name, name) for name in arrays]
    pieces = [weight.slice_rows(8, 16).slice_rows(2, 4) for weight in weights]
    opened = tracemalloc.get_traced_memory()[1]
    aligned = [weight.data.flags.aligned for weight in weights]
    read = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert opened < each and read < 2 * each and all(aligned)
    for weight, piece, array in zip(weights, pieces, arrays.values(), strict=True):
        assert weight.nbytes == each
        np.testing.assert_array_equal(weight.data, array)
        np.testing.assert_array_equal(piece.decode(), array[10:12])
        assert (piece.shape, piece.nbytes) == ((2, 1024), 2 * 1024 * 4)
        assert piece.origin == f"{weight.origin}[8:16][2:4]"


@pytest.mark.parametrize("shape", [(), (3, 0), (0, 32)])
@pytest.mark.parametrize("format", ["float32", "q8_0"])
def test_empty_and_scalar_shapes(shape: tuple[int, ...], format: str) -> None:
    if not shape and format == "q8_0":
        with pytest.raises(CheckpointError):
            stored_bytes(shape, format)
        return
    raw = np.zeros(stored_bytes(shape, format), np.uint8)
    assert make_weight("w", shape, format, raw).decode().shape == shape


def test_rows_that_are_not_whole_blocks_are_refused() -> None:
    with pytest.raises(CheckpointError, match="rows of 100 numbers can't be q6_k"):
        stored_bytes((4, 100), "q6_k")
