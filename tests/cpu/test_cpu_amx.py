"""Matrix tiles: the emulated instructions (and the processor's, where it has them) against numpy statements of the manual, and the
linear kernels on them against the vector kernels, bit for bit."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_cases import stored

native = pytest.importorskip("trivium_cpu._native")
linear = native.linear

Bytes = npt.NDArray[np.uint8]
TILES = ["emulated", pytest.param("amx", marks=pytest.mark.skipif("amx" not in native.tiers(), reason="no AMX here"))]
KERNELS = [name for name in ("amx_emulated", "amx") if name in linear.emulated_isas() + linear.isas()]
needs_kernels = pytest.mark.skipif(not KERNELS, reason="the kernels' vectors need AVX-512 with VNNI")
SIGNS = {0: (np.int8, np.int8), 1: (np.int8, np.uint8), 2: (np.uint8, np.int8)}
BFLOAT16 = 3


def config(rows: int, depth: int, columns: int) -> Bytes:
    """The operand of LDTILECFG for c[rows, columns] (tile 0), a[rows, depth] (1) and b[depth, columns] (2), in dwords."""
    bytes_ = np.zeros(64, np.uint8)
    bytes_[0] = 1
    bytes_[16:32].view(np.uint16)[:3] = 4 * columns, 4 * depth, 4 * columns
    bytes_[48:51] = rows, rows, depth
    return bytes_


def integer_dot(kind: int, rows: int, depth: int, columns: int, a: Bytes, b: Bytes, c: Bytes) -> npt.NDArray[np.int32]:
    """c[m, n] + sum over k and i of a[m, k, i] b[k, n, i], wrapping."""
    first, second = SIGNS[kind]
    x = a.view(first).reshape(16, 16, 4)[:rows, :depth].astype(np.int64)
    y = b.view(second).reshape(16, 16, 4)[:depth, :columns].astype(np.int64)
    sums = c.view(np.int32)[:rows, :columns] + np.einsum("mki,kni->mn", x, y)
    return (sums & 0xFFFFFFFF).astype(np.uint32).view(np.int32)


def flushed(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Subnormal numbers become zero of their sign."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x).astype(np.float32)


def bfloat16_dot(rows: int, depth: int, columns: int, a: Bytes, b: Bytes, c: Bytes) -> npt.NDArray[np.float32]:
    """Even and odd products summed apart by fused multiply-adds (in float64: exact products, and sums that the tests keep within
    its 53 bits), then added, then added to c."""
    wide = [flushed((t.view(np.uint16).astype(np.uint32) << 16).view(np.float32)).reshape(16, 16, 2) for t in (a, b)]
    parts = np.zeros((rows, columns, 2), np.float32)
    for k in range(depth):
        exact = wide[0][:rows, None, k].astype(np.float64) * wide[1][None, k, :columns].astype(np.float64) + parts
        parts = flushed(exact.astype(np.float32))
    return flushed(flushed(c.view(np.float32)[:rows, :columns]) + flushed(parts[..., 0] + parts[..., 1]))


def random_tiles(seed: int) -> list[Bytes]:
    return list(np.random.default_rng(seed).integers(0, 256, (3, 16, 64), dtype=np.uint8))


def bfloat16_tiles(seed: int, low: int, high: int) -> list[Bytes]:
    """Three tiles of numbers with exponents [low, high); the third in float32."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 2**32, (3, 16, 32), dtype=np.uint64).astype(np.uint32) & 0x807FFFFF
    words |= rng.integers(low + 127, high + 127, words.shape).astype(np.uint32) << 23
    halves = (words[:2] >> 16).astype(np.uint16).view(np.uint8).reshape(2, 16, 64)
    return [halves[0], halves[1], np.ascontiguousarray(words[2, :, :16]).view(np.uint8).reshape(16, 64)]


SHAPES = [(16, 16, 16), (16, 8, 16), (1, 1, 1), (5, 4, 7), (16, 1, 3)]


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("kind", SIGNS)
@pytest.mark.parametrize("shape", SHAPES)
def test_integer_dots_equal_the_manual(tiles: str, kind: int, shape: tuple[int, int, int]) -> None:
    rows, _, columns = shape
    a, b, c = random_tiles(seed=kind)
    result = native.amx.dot(tiles, kind, config(*shape), a, b, c).view(np.int32)
    np.testing.assert_array_equal(result[:rows, :columns], integer_dot(kind, *shape, a, b, c))
    np.testing.assert_array_equal(result[rows:], c.view(np.int32)[rows:])
    np.testing.assert_array_equal(result[:, columns:], c.view(np.int32)[:, columns:])


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("exponents", [(-3, 3), (-70, -57), (-127, -120), (60, 63)], ids=["plain", "tiny", "subnormal", "huge"])
@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_dots_equal_the_manual(tiles: str, exponents: tuple[int, int], shape: tuple[int, int, int]) -> None:
    rows, _, columns = shape
    a, b, c = bfloat16_tiles(1, *exponents)
    result = native.amx.dot(tiles, BFLOAT16, config(*shape), a, b, c)[:rows].view(np.uint32)[:, :columns]
    np.testing.assert_array_equal(result, bfloat16_dot(*shape, a, b, c).view(np.uint32))


def edit(**bytes_: int) -> Bytes:
    c = config(16, 16, 16)
    for name, value in bytes_.items():
        c[int(name[1:])] = value
    return c


FAULTS = {
    "palette": edit(_0=2), "start row": edit(_1=1), "reserved": edit(_9=1), "tile that does not exist": edit(_57=1, _34=4),
    "larger than": edit(_48=17), "rows without bytes": edit(_51=3), "that is not configured": edit(_50=0, _20=0),
    "whole dwords": edit(_16=62, _20=62), "rows of the sums": edit(_48=8), "columns of the sums": edit(_16=32),
    "columns of the first factor": edit(_18=32),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_configuration_ends_the_emulation(fault: str) -> None:
    code = (
        "import sys, numpy as np\nfrom trivium_cpu import _native\nt = np.zeros((16, 64), np.uint8)\n"
        "_native.amx.dot('emulated', 0, np.frombuffer(bytes.fromhex(sys.argv[1]), np.uint8), t, t, t)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, FAULTS[fault].tobytes().hex()], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert fault in done.stderr


# Every integer layout: (format, storage).
LAYOUTS = [
    ("int8", "q8_0"), ("int8", "q5_1"), ("int8", "q5_k"), ("int8", "q6_k"), ("int4", "q4_0"), ("int4", "q4_1"), ("int4", "q4_k"),
    ("int8", "float32"), ("int4", "float32"), ("int4", "q3_k"), ("int8_channel", "float32"), ("int4_g64", "float32"),
    ("int4_g128", "float32"), ("int4_asym_g64", "float32"), ("int4_asym_g128", "float32"), ("int4_i8", "float32"),
]  # fmt: skip


def product(isa: str, m: object, x: npt.NDArray[np.float32], **options: object) -> npt.NDArray[np.uint32]:
    y = np.zeros((len(x), m.shape[0]), np.float32)
    linear.multiply(isa, m, x, y, **options)
    return y.view(np.uint32)


@needs_kernels
@pytest.mark.parametrize("isa", KERNELS)
@pytest.mark.parametrize(("format", "storage"), LAYOUTS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_tiles_give_the_bits_of_the_vector_kernel(isa: str, format: str, storage: str, data: st.DataObject) -> None:
    out, rows = data.draw(st.integers(1, 100)), data.draw(st.integers(1, 60) | st.sampled_from([144, 150, 260]))
    in_ = 256 * data.draw(st.integers(1, 2)) if storage.endswith("k") else 32 * data.draw(st.integers(1, 19))
    m = linear.pack(linear.Arena(), format, storage, in_, stored(storage, out, in_, seed=out))
    x = np.random.default_rng(rows).standard_normal((rows, in_), dtype=np.float32)
    begin, first = data.draw(st.integers(0, rows)), 16 * data.draw(st.integers(0, (out - 1) // 16))
    bias = x[0, :1].repeat(out)
    options = {"ranges": [begin, rows, first, out], "bias": bias, "accumulate": data.draw(st.booleans())}
    np.testing.assert_array_equal(product(isa, m, x, **options), product("avx512_vnni", m, x, **options))


@needs_kernels
@pytest.mark.parametrize("isa", KERNELS)
@pytest.mark.parametrize("format", ["int8", "int4", "int4_i8"])
def test_tiles_take_inputs_that_are_no_whole_number_of_groups(isa: str, format: str) -> None:
    m = linear.pack(linear.Arena(), format, "float32", 77, stored("float32", 40, 77))
    x = np.random.default_rng(1).standard_normal((33, 77), dtype=np.float32)
    np.testing.assert_array_equal(product(isa, m, x), product("avx512_vnni", m, x))


@needs_kernels
@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")
def test_the_module_holds_the_tile_instructions() -> None:
    command = ["objdump", "-d", "--no-show-raw-insn", pathlib.Path(native.__file__)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for instruction in ("ldtilecfg", "tileloadd", "tilezero", "tdpbssd", "tdpbsud", "tdpbf16ps", "tilestored", "tilerelease"):
        assert f"\t{instruction}" in text, instruction
