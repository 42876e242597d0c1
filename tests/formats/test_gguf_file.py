"""The GGUF parser against files of the gguf package, and against files that lie."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGUFEndian, GGUFValueType
from gguf.quants import dequantize, quantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trivium.errors import CheckpointError, UnsupportedError
from trivium.weights import open_checkpoint
from trivium_formats.gguf import GGUFFile
from weight_files import TOKENIZER, llama_metadata, llama_tensors, random_blocks, tiny_gguf, write_gguf

Kind = gguf.GGMLQuantizationType


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def raw_gguf(*parts: bytes, tensors: int = 0, keys: int = 0, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, keys) + b"".join(parts)


def info(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def refused(path: Path, data: bytes, words: str, error: type[Exception] = CheckpointError) -> None:
    path.write_bytes(data)
    with pytest.raises(error, match=words) as e:
        GGUFFile(path)
    assert str(path) in str(e.value)
    assert "\n" not in str(e.value)


def test_metadata_is_what_the_package_wrote(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    values: dict[str, tuple[GGUFValueType, Any]] = {
        "u8": (GGUFValueType.UINT8, 255), "i8": (GGUFValueType.INT8, -128), "u16": (GGUFValueType.UINT16, 65535),
        "i16": (GGUFValueType.INT16, -32768), "u32": (GGUFValueType.UINT32, 2**32 - 1), "i32": (GGUFValueType.INT32, -(2**31)),
        "u64": (GGUFValueType.UINT64, 2**64 - 1), "i64": (GGUFValueType.INT64, -(2**63)), "f32": (GGUFValueType.FLOAT32, 0.5),
        "f64": (GGUFValueType.FLOAT64, 0.1), "yes": (GGUFValueType.BOOL, True), "no": (GGUFValueType.BOOL, False),
        "text": (GGUFValueType.STRING, "héllo 🙂"), "none": (GGUFValueType.STRING, ""),
    }  # fmt: skip
    arrays: dict[str, list[Any]] = {
        "texts": ["a", "", "ü"], "ints": [1, -2, 3], "floats": [0.5, -0.25], "bools": [True, False], "nested": [[1, 2], [3]],
    }  # fmt: skip
    for key, (kind, value) in values.items():
        writer.add_key_value(key, value, kind)
    for key, items in arrays.items():
        writer.add_array(key, items)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    got = dict(GGUFFile(tmp_path / "m.gguf").metadata)
    assert got == {"general.architecture": "llama"} | {k: v for k, (_, v) in values.items()} | arrays
    assert {k: type(v) for k, v in got.items() if k in values} == {k: type(v) for k, (_, v) in values.items()}


@pytest.mark.parametrize("alignment", [None, 8, 64, 4096])
def test_tensors_are_where_the_packages_reader_finds_them(tmp_path: Path, alignment: int | None) -> None:
    rng = np.random.default_rng(0)
    tensors: dict[str, Any] = {
        "a": rng.standard_normal((3, 5), np.float32),
        "b": (random_blocks(Kind.Q6_K, (2, 256)), Kind.Q6_K),
        "c": rng.standard_normal(7, np.float32).astype(np.float16),
        "d": rng.standard_normal((2, 3, 4), np.float32),
    }
    path = write_gguf(tmp_path / "m.gguf", "llama", {}, tensors, alignment=alignment)
    file, reader = GGUFFile(path), gguf.GGUFReader(path)
    assert list(file.tensors) == [t.name for t in reader.tensors]
    for t in reader.tensors:
        weight = file.weight(t.name, "renamed")
        assert weight.name == "renamed"
        assert weight.shape == tuple(t.shape.tolist()[::-1])
        assert file.tensors[t.name].start == t.data_offset
        assert weight.data.tobytes() == t.data.tobytes()


def test_nothing_is_copied(tmp_path: Path) -> None:
    file = GGUFFile(tiny_gguf(tmp_path / "m.gguf"))
    base: Any = file.weight("token_embd.weight", "x").data
    while base is not None and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)
    assert not file.weight("token_embd.weight", "x").data.flags.writeable


def test_version_2_is_read_like_3(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    old = tmp_path / "old.gguf"
    old.write_bytes(b"GGUF" + struct.pack("<I", 2) + path.read_bytes()[8:])
    assert GGUFFile(old).tensors == GGUFFile(path).tensors


@pytest.mark.parametrize("version", [0x10000, 1, 4, 99])
def test_other_versions_are_refused(tmp_path: Path, version: int) -> None:
    refused(tmp_path / "m.gguf", raw_gguf(version=version), "GGUF version|big-endian", UnsupportedError)


def test_big_endian_is_refused_with_words(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", {}, {"a": np.ones(4, np.float32)}, endianess=GGUFEndian.BIG)
    with pytest.raises(UnsupportedError, match="big-endian"):
        GGUFFile(path)


ALIGNMENT = string("general.alignment")
DEEP = struct.pack("<IQ", 9, 1) * 2000
LIES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "no magic": (raw_gguf(magic=b"GGML"), "not a GGUF file"),
    "tensor count": (raw_gguf(tensors=2**62), "the number of tensors says"),
    "key count": (raw_gguf(keys=2**62), "the number of metadata keys says"),
    "key length": (raw_gguf(struct.pack("<Q", 2**62) + bytes(99), keys=1), "ends within the name of metadata key 0"),
    "string length": (raw_gguf(string("k") + struct.pack("<IQ", 8, 2**63), bytes(99), keys=1), "ends within the value of 'k'"),
    "array length": (raw_gguf(string("k") + struct.pack("<IIQ", 9, 6, 2**61), bytes(99), keys=1), "length of the value of 'k'"),
    "text array length": (raw_gguf(string("k") + struct.pack("<IIQ", 9, 8, 2**40), bytes(99), keys=1), "the length of"),
    "array nesting": (raw_gguf(string("k") + struct.pack("<I", 9) + DEEP, bytes(99), keys=1), "unknown value type 9"),
    "value type": (raw_gguf(string("k") + struct.pack("<I", 77), bytes(99), keys=1), "unknown value type 77"),
    "not UTF-8": (raw_gguf(struct.pack("<Q", 2) + b"\xff\xfe" + bytes(99), keys=1), "not UTF-8"),
    "key twice": (raw_gguf(*[string("k") + struct.pack("<IB", 0, 1)] * 2, bytes(99), keys=2), "'k' is there twice"),
    "dimensions": (raw_gguf(string("t") + struct.pack("<I", 5), bytes(99), tensors=1), "'t' has 5 dimensions"),
    "huge shape": (raw_gguf(info("t", (2**63, 2**63)), bytes(99), tensors=1), "'t' ends at byte"),
    "zero shape": (raw_gguf(info("t", (0, 2**63)), bytes(99), tensors=1), "'t' has the shape"),
    "offset": (raw_gguf(info("t", (4,), 0, 2**63), bytes(99), tensors=1), "'t' ends at byte"),
    "overlap": (raw_gguf(info("t", (16,)), info("u", (16,), 0, 32), bytes(999), tensors=2), "'u' overlaps 't'"),
    "unaligned": (raw_gguf(info("t", (4,), 0, 4), bytes(999), tensors=1), "not aligned to 32"),
    "name twice": (raw_gguf(info("t", (8,)), info("t", (8,), 0, 32), bytes(999), tensors=2), "'t' is listed twice"),
    "alignment": (raw_gguf(ALIGNMENT + struct.pack("<II", 4, 0), bytes(99), keys=1), "general.alignment is 0"),
    "alignment's type": (raw_gguf(ALIGNMENT + struct.pack("<IQ", 8, 1) + b"8", bytes(99), keys=1), "alignment is 8"),
}  # fmt: skip


@pytest.mark.parametrize("case", LIES)
def test_a_lying_header_is_refused(tmp_path: Path, case: str) -> None:
    refused(tmp_path / "m.gguf", *LIES[case])


def test_a_cut_file_names_the_tensor_and_the_likely_cause(tmp_path: Path) -> None:
    data = tiny_gguf(tmp_path / "m.gguf").read_bytes()
    last = list(GGUFFile(tmp_path / "m.gguf").tensors)[-1]
    refused(tmp_path / "cut.gguf", data[:-40], f"{last}.*incomplete download")


O47_TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16"]


def o47_tensor(kind: Kind, shape: tuple[int, ...]) -> np.ndarray:
    x = np.random.default_rng(int(kind)).standard_normal(shape, np.float32)
    try:
        return quantize(x, kind)
    except NotImplementedError:
        return random_blocks(kind, shape)


@pytest.mark.faults
@pytest.mark.parametrize("name", O47_TYPES)
def test_o47_rows_of_each_type_equal_the_packages(tmp_path: Path, name: str) -> None:
    kind = Kind[name]
    raw = o47_tensor(kind, (3, 256))
    path = write_gguf(tmp_path / "m.gguf", "llama", {}, {"w": (raw, kind)})
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(GGUFFile(path).weight("w", "w").decode(), dequantize(raw, kind))


@pytest.mark.faults
def test_o47_types_are_read_per_tensor_not_from_the_files_name(tmp_path: Path) -> None:
    mixed = {f"t{i}": (o47_tensor(Kind[name], (2, 256)), Kind[name]) for i, name in enumerate(O47_TYPES)}
    file = GGUFFile(write_gguf(tmp_path / "model.Q2_K.gguf", "llama", {"general.file_type": 10}, mixed))
    formats = {"F16": "float16", "BF16": "bfloat16"}
    assert [file.tensors[t].format for t in mixed] == [formats.get(n, n.lower()) for n in O47_TYPES]
    for name, (raw, kind) in mixed.items():
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(file.weight(name, name).decode(), dequantize(raw, kind))


@pytest.mark.faults
@pytest.mark.parametrize("kind", [4, 9, 15, 31, 41, 99, 2**32 - 1])
def test_o47_a_type_without_decoder_is_one_line_with_tensor_and_type(tmp_path: Path, kind: int) -> None:
    data = raw_gguf(info("blk.0.attn_q.weight", (256, 4), kind), bytes(9999), tensors=1)
    refused(tmp_path / "m.gguf", data, f"'blk.0.attn_q.weight' has the type id {kind}", UnsupportedError)


@pytest.mark.faults
def test_o47_k_types_need_rows_of_256_and_the_formats_fallback_is_read(tmp_path: Path) -> None:
    """Quantisers store a row of 64 in a type with blocks of 32; a K type there is a damaged file."""
    raw = o47_tensor(Kind.Q5_0, (4, 64))
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", "llama", {}, {"w": (raw, Kind.Q5_0)}))
    np.testing.assert_array_equal(file.weight("w", "w").decode(), dequantize(raw, Kind.Q5_0))
    data = raw_gguf(info("w", (64, 4), int(Kind.Q4_K)), bytes(999), tensors=1)
    refused(tmp_path / "bad.gguf", data, "'w': rows of 64 numbers can't be q4_k")


def read_all(path: Path) -> None:
    """Opens a file and reads everything that trivium ever reads of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint = open_checkpoint(path)
        checkpoint.tokenizer_data()
        for name in checkpoint.tensors:
            checkpoint.tensor(name).decode()


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    tensors = llama_tensors(layers=1, hidden=4, inter=4, kv=2, vocab=5) | {"rope_freqs.weight": np.ones(1, np.float32)}
    keys = llama_metadata(block_count=1, embedding_length=4, feed_forward_length=4) | TOKENIZER
    return write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", "llama", keys, tensors).read_bytes()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_give_only_our_errors_and_little_memory(small_gguf: bytes, tmp_path: Path, data: st.DataObject) -> None:
    damaged = bytearray(small_gguf[: data.draw(st.one_of(st.just(len(small_gguf)), st.integers(0, len(small_gguf))))])
    flips = st.tuples(st.integers(0, max(len(damaged) - 1, 0)), st.integers(0, 7))
    for at, bit in data.draw(st.lists(flips, max_size=6)) if damaged else []:
        damaged[at] ^= 1 << bit
    path = tmp_path / "m.gguf"
    path.write_bytes(damaged)
    tracemalloc.start()
    try:
        read_all(path)
    except (CheckpointError, UnsupportedError) as e:
        assert "\n" not in str(e).replace(str(path), "")
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 4 << 20


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(8, 400), value=st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1]))
def test_extreme_numbers_anywhere_give_only_our_errors(small_gguf: bytes, tmp_path: Path, at: int, value: int) -> None:
    damaged = bytearray(small_gguf)
    damaged[at : at + 8] = struct.pack("<Q", value)
    path = tmp_path / "m.gguf"
    path.write_bytes(damaged)
    with contextlib.suppress(CheckpointError, UnsupportedError):
        read_all(path)


def test_the_undamaged_file_of_the_fuzz_tests_is_read(small_gguf: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(small_gguf)
    read_all(tmp_path / "m.gguf")


def strings_file(path: Path, strings: list[str]) -> Path:
    """A GGUF file with one list of strings and a number behind it, written by the format's description."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 2)
    listed = string("list") + struct.pack("<IIQ", 9, 8, len(strings)) + b"".join(map(string, strings))
    path.write_bytes(head + listed + string("after") + struct.pack("<II", 4, 77))
    return path


@given(st.lists(st.text("ab\0\n \u2581é😀", max_size=12) | st.sampled_from(["", "x" * 255, "y" * 256, "\0" * 9]), max_size=40))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_lists_of_strings_are_read_whatever_is_in_them(tmp_path: Path, strings: list[str]) -> None:
    assert GGUFFile(strings_file(tmp_path / "m.gguf", strings)).metadata == {"list": strings, "after": 77}
