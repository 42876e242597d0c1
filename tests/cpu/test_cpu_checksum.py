"""The checksum of packed weights on disk, and what becomes of a file that is read into a matrix."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from trivium_cpu import _native
from trivium_cpu.weight_cache import WeightCache

Bytes = npt.NDArray[np.uint8]
ISAS = _native.crc32c_isas()


def by_bits(data: bytes) -> int:
    """CRC-32C bit by bit, from its definition: the reflected polynomial 0x82F63B78, all ones before and after."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def noise(count: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "data, value",
    [
        (b"123456789", 0xE3069283),  # the check value of the catalogue of parametrised CRC algorithms (CRC-32/ISCSI)
        (bytes(32), 0x8A9136AA),  # RFC 3720, appendix B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"", 0),
    ],
)
def test_the_checksum_has_the_published_values(isa: str, data: bytes, value: int) -> None:
    assert by_bits(data) == value
    assert _native.crc32c(np.frombuffer(data, np.uint8), isa=isa) == value


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("count", [1, 7, 8, 63, 4099, 8191, 8192, 8193, 8215, 16 * 1024 + 5])
def test_any_length_and_alignment_has_the_checksum_of_its_bits(isa: str, count: int) -> None:
    data = noise(count + 3, count)
    expected = by_bits(data[3:].tobytes())
    assert _native.crc32c(data[3:], isa=isa) == expected
    assert _native.crc32c(data[3:].copy(), isa=isa) == expected


def test_every_way_to_compute_it_gives_the_portable_ones_value() -> None:
    data = noise(3 << 20)
    assert ISAS[-1] == "portable"
    assert len({_native.crc32c(data, isa=isa) for isa in ISAS}) == 1
    with pytest.raises(ValueError, match="lacks abacus"):
        _native.crc32c(data, isa="abacus")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cut", [0, 1, 5000, 8192, 30000])
def test_parts_join_to_the_checksum_of_the_whole(isa: str, cut: int) -> None:
    data = noise(30000)
    first, second = data[:cut], data[cut:]
    whole = _native.crc32c(data)
    assert _native.crc32c(second, before=_native.crc32c(first, isa=isa), isa=isa) == whole
    assert _native.join_crc32c(_native.crc32c(first), _native.crc32c(second), len(second)) == whole


def kept(folder: Path, shape: tuple[int, int], seed: int = 0) -> tuple[Path, Bytes]:
    """A file of the cache with random bytes for an int8 matrix."""
    cache = WeightCache(folder, ())
    matrix = _native.Runtime(1, "portable").allocate("int8", "float32", *shape)
    path, data = cache.path(shape, seed), noise(matrix.nbytes, seed)
    cache.write(path, data)
    return path, data


def read(path: Path, shape: tuple[int, int], threads: int = 2) -> tuple[Any, Bytes]:
    """What became of reading the file, and the matrix' bytes."""
    runtime = _native.Runtime(threads, "portable")
    matrix = runtime.allocate("int8", "float32", *shape)
    found = runtime.read(matrix, str(path))
    runtime.finish_packing()
    return found, np.array(matrix.packed)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("shape", [(256, 512), (4112, 1024)])  # one piece, and several of several threads
def test_a_file_is_read_and_checked_in_pieces_by_all_threads(tmp_path: Path, shape: tuple[int, int], threads: int) -> None:
    path, data = kept(tmp_path, shape)
    found, packed = read(path, shape, threads)
    assert WeightCache.is_whole(found, len(data))
    assert found.crc32c == _native.crc32c(data, isa="portable")
    np.testing.assert_array_equal(packed, data)


def test_files_that_are_read_together_keep_their_own_checksums(tmp_path: Path) -> None:
    shapes = [(256, 512), (16, 32 * 4096), (2048, 1024), (512, 256)]
    files = [kept(tmp_path, shape, seed) for seed, shape in enumerate(shapes)]
    runtime = _native.Runtime(2, "portable")
    matrices = [runtime.allocate("int8", "float32", *shape) for shape in shapes]
    found = [runtime.read(matrix, str(path)) for matrix, (path, _) in zip(matrices, files)]
    runtime.finish_packing()
    for one, matrix, (_, data) in zip(found, matrices, files):
        assert WeightCache.is_whole(one, len(data))
        np.testing.assert_array_equal(matrix.packed, data)


@pytest.mark.parametrize("shape", [(256, 512), (2064, 1024)])
def test_a_change_of_any_byte_is_found(tmp_path: Path, shape: tuple[int, int]) -> None:
    path, data = kept(tmp_path, shape)
    content = path.read_bytes()
    rng = np.random.default_rng(1)
    edges = [0, len(data) - 1, *range(len(data), len(content))]  # all of the footer
    for place in [*edges, *map(int, rng.integers(0, len(data), 12))]:
        damaged = bytearray(content)
        damaged[place] ^= int(1 << rng.integers(8))
        path.write_bytes(damaged)
        assert not WeightCache.is_whole(read(path, shape)[0], len(data)), f"byte {place} of {len(content)}"


@pytest.mark.parametrize("length", [0, 1, 4096, -21, -20, -1])
def test_a_file_of_another_length_is_not_taken(tmp_path: Path, length: int) -> None:
    path, data = kept(tmp_path, (256, 512))
    content = path.read_bytes()
    path.write_bytes(content[:length])
    assert not WeightCache.is_whole(read(path, (256, 512))[0], len(data))
    path.write_bytes(content + bytes(abs(length) or 7))
    assert not WeightCache.is_whole(read(path, (256, 512))[0], len(data))


def test_a_file_that_is_gone_or_a_folder_is_not_taken(tmp_path: Path) -> None:
    for path in (tmp_path / "gone", tmp_path):
        assert not WeightCache.is_whole(read(path, (256, 512))[0], 1)


def test_a_file_of_the_format_before_is_not_taken(tmp_path: Path) -> None:
    path, data = kept(tmp_path, (256, 512))
    content = path.read_bytes()
    assert content[len(data) :][:8] == b"trvpack2"
    path.write_bytes(content.replace(b"trvpack2", b"trvpack1"))
    assert not WeightCache.is_whole(read(path, (256, 512))[0], len(data))


def test_a_file_that_is_read_counts_as_used(tmp_path: Path) -> None:
    path, _ = kept(tmp_path, (256, 512))
    os.utime(path, (1, 1))
    read(path, (256, 512))
    assert path.stat().st_mtime > 1e9
