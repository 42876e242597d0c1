"""The safetensors parser against the format's own package, and against files and folders that lie."""

from __future__ import annotations

import contextlib
import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trivium.errors import CheckpointError, UnsupportedError
from trivium.weights import open_checkpoint
from trivium.weights.safetensors import SafetensorsFile, find_tensors
from weight_files import HF_CONFIG, hf_folder, hf_tensors, safetensors_bytes, sharded_folder, write_folder

SECOND = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def entry(dtype: str = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_tensors_are_what_the_formats_package_wrote(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.numpy")
    rng = np.random.default_rng(0)
    dtypes = [np.float64, np.float32, np.float16, np.int64, np.int32, np.int16, np.int8, np.uint8, np.bool_]
    tensors = {np.dtype(d).name: rng.integers(0, 2, (3, 1, 5)).astype(d) for d in dtypes}
    tensors |= {"scalar": np.array(7, np.float32), "empty": np.zeros((0, 4), np.float32)}
    package.save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "m.safetensors")
    assert file.tensors.keys() == tensors.keys()
    for name, array in tensors.items():
        weight = file.weight(name, "w")
        assert weight.shape == array.shape
        np.testing.assert_array_equal(weight.decode(), array.astype(np.float32))


def test_nothing_is_copied(tmp_path: Path) -> None:
    path = written(tmp_path / "m.safetensors", safetensors_bytes({"a": np.ones((9, 9), np.float32)}))
    data = SafetensorsFile(path).weight("a", "a").data
    base: Any = data
    while base is not None and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)
    assert not data.flags.writeable


ONE = {"a": np.ones(1, np.float32)}
TWO = {"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)}
LIES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "short": (b"\x02\0\0\0\0\0\0\0{", "a header of 2 bytes in a file of 9"),
    "2^62 header": (struct.pack("<Q", 2**62) + bytes(99), "a header of 4611686018427387904 bytes in a file of 107"),
    "header past the end": (struct.pack("<Q", 200) + b"{}" + bytes(99), "a header of 200 bytes"),
    "not JSON": (safetensors_bytes(ONE, header=b"{nonsense}"), "not valid JSON"),
    "not UTF-8": (safetensors_bytes(ONE, header=b'{"\xff": 1}'), "not valid JSON"),
    "no object": (safetensors_bytes({}, header=b"[]"), "not a JSON object"),
    "nested bomb": (safetensors_bytes(ONE, header=b"[" * 200_000), "not valid JSON"),
    "object bomb": (safetensors_bytes(ONE, header=b'{"a":' * 200_000), "not valid JSON"),
    "huge number": (safetensors_bytes(ONE, header=b'{"a":' + b"9" * 9999 + b"}"), "not valid JSON"),
    "key twice": (safetensors_bytes(ONE, header=b'{"a":1,"a":1}'), "'a' is there twice"),
    "inner key twice": (safetensors_bytes(ONE, header=b'{"a":{"dtype":"F32","dtype":"F32"}}'), "'dtype' is there twice"),
    "entry is a number": (safetensors_bytes(ONE, header={"a": 3}), "entry for 'a' makes no sense"),
    "negative shape": (safetensors_bytes(ONE, header={"a": entry(shape=[-1])}), "entry for 'a'"),
    "shape of floats": (safetensors_bytes(ONE, header={"a": entry(shape=[1.0])}), "entry for 'a'"),
    "shape of truths": (safetensors_bytes(ONE, header={"a": entry(shape=[True])}), "entry for 'a'"),
    "too many dimensions": (safetensors_bytes(ONE, header={"a": entry(shape=[1] * 99)}), "entry for 'a'"),
    "overflowing shape": (safetensors_bytes(ONE, header={"a": entry(shape=[0, 2**40, 2**40], offsets=[0, 0])}), "entry for 'a'"),
    "three offsets": (safetensors_bytes(ONE, header={"a": entry(offsets=[0, 4, 8])}), "entry for 'a'"),
    "offsets and shape": (safetensors_bytes(TWO, header={"a": entry(offsets=[0, 8])}), "'a' is F32.* but has the bytes"),
    "backward offsets": (safetensors_bytes(ONE, header={"a": entry(offsets=[4, 0])}), "but has the bytes"),
    "outside": (safetensors_bytes(ONE, header={"a": entry(offsets=[2**61, 2**61 + 4])}), "'a' overlaps the header or leaves"),
    "overlap": (safetensors_bytes(TWO, header={"a": entry(), "b": entry()}), "'b' overlaps 'a'"),
    "hole": (safetensors_bytes(TWO, header={"a": entry(), "b": entry(offsets=[8, 12])}), "'b' overlaps 'a' or leaves a hole"),
    "longer than the header says": (safetensors_bytes(TWO, header={"a": entry()}), "the header describes"),
}  # fmt: skip


@pytest.mark.parametrize("case", LIES)
def test_a_lying_file_is_refused_by_name(tmp_path: Path, case: str) -> None:
    data, words = LIES[case]
    with pytest.raises(CheckpointError, match=words) as e:
        SafetensorsFile(written(tmp_path / "m.safetensors", data))
    assert "m.safetensors" in str(e.value)


def test_an_unknown_dtype_is_named_with_its_tensor(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="'a' is 'F4'"):
        SafetensorsFile(written(tmp_path / "m.safetensors", safetensors_bytes(ONE, header={"a": entry("F4")})))


def test_a_header_larger_than_any_real_one_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with path.open("wb") as f:
        f.write(struct.pack("<Q", 33 << 20))
        f.truncate(40 << 20)
    with pytest.raises(CheckpointError, match="at most 33554432"):
        SafetensorsFile(path)


@pytest.mark.faults
def test_o48_two_shards_with_an_index_load(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(sharded_folder(tmp_path))
    for name, want in hf_tensors().items():
        np.testing.assert_array_equal(checkpoint.tensor(name).decode(), want)


@pytest.mark.faults
def test_o48_a_missing_shard_is_named(tmp_path: Path) -> None:
    (sharded_folder(tmp_path) / SECOND).unlink()
    with pytest.raises(CheckpointError, match=f"{SECOND} is missing.*incomplete download"):
        open_checkpoint(tmp_path)


@pytest.mark.faults
@pytest.mark.parametrize("cut", [1, 16, 60, 100])
def test_o48_a_short_shard_is_named(tmp_path: Path, cut: int) -> None:
    shard = sharded_folder(tmp_path) / SECOND
    shard.write_bytes(shard.read_bytes()[:-cut])
    with pytest.raises(CheckpointError, match=f"{SECOND}.*incomplete download"):
        open_checkpoint(tmp_path)


@pytest.mark.faults
def test_o48_a_header_length_of_2_to_the_62_is_refused(tmp_path: Path) -> None:
    shard = sharded_folder(tmp_path) / SECOND
    shard.write_bytes(struct.pack("<Q", 2**62) + shard.read_bytes()[8:])
    with pytest.raises(CheckpointError, match=f"{SECOND}: a header of {2**62} bytes"):
        open_checkpoint(tmp_path)


@pytest.mark.faults
def test_o48_without_the_index_both_shards_load(tmp_path: Path) -> None:
    (sharded_folder(tmp_path) / INDEX).unlink()
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.tensors) == set(hf_tensors())
    for name, want in hf_tensors().items():
        np.testing.assert_array_equal(checkpoint.tensor(name).decode(), want)


@pytest.mark.faults
def test_o48_without_the_index_a_missing_numbered_shard_is_named(tmp_path: Path) -> None:
    (sharded_folder(tmp_path) / INDEX).unlink()
    (tmp_path / SECOND).unlink()
    with pytest.raises(CheckpointError, match=f"{SECOND} is missing"):
        open_checkpoint(tmp_path)


@pytest.mark.faults
def test_o48_a_tensor_that_no_shard_has_is_named(tmp_path: Path) -> None:
    index = sharded_folder(tmp_path) / INDEX
    content = json.loads(index.read_text())
    content["weight_map"]["model.layers.0.mlp.up_proj.weight"] = SECOND
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=rf"{SECOND}: the tensor 'model\.layers\.0\.mlp\.up_proj\.weight'.*incomplete"):
        open_checkpoint(tmp_path)


@pytest.mark.faults
def test_o48_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither a \.safetensors nor a \.gguf file.*incomplete download"):
        open_checkpoint(tmp_path)


@pytest.mark.faults
def test_o48_an_index_without_any_shard_is_an_error(tmp_path: Path) -> None:
    for shard in sharded_folder(tmp_path).glob("*.safetensors"):
        shard.unlink()
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors is missing"):
        open_checkpoint(tmp_path)


@pytest.mark.faults
def test_o48_a_parameter_that_was_never_stored_stops_the_load(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tensor 'model\.layers\.0\.mlp\.up_proj\.weight'.*incomplete"):
        open_checkpoint(hf_folder(tmp_path)).tensor("model.layers.0.mlp.up_proj.weight")


@pytest.mark.parametrize("file", ["../m.safetensors", "/etc/passwd", "sub/m.safetensors", "..", "C:m", "a\\b", ""])
def test_an_index_must_not_lead_out_of_the_folder(tmp_path: Path, file: str) -> None:
    write_folder(tmp_path, {"config.json": HF_CONFIG, INDEX: {"weight_map": {"a": file}}})
    with pytest.raises(CheckpointError, match="not the name of a file in the same folder"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [[], {}, {"weight_map": []}, {"weight_map": {"a": 3}}, b"{", b'{"a":{},"a":{}}'])
def test_a_malformed_index_is_an_error(tmp_path: Path, content: Any) -> None:
    write_folder(tmp_path, {"config.json": HF_CONFIG, INDEX: content})
    with pytest.raises(CheckpointError, match=r"index\.json"):
        open_checkpoint(tmp_path)


def test_a_tensor_in_two_files_is_an_error(tmp_path: Path) -> None:
    write_folder(tmp_path, {"a.safetensors": safetensors_bytes(ONE), "b.safetensors": safetensors_bytes(ONE)})
    with pytest.raises(CheckpointError, match=r"'a' is in a\.safetensors and in b\.safetensors"):
        find_tensors(tmp_path)


def test_model_safetensors_stands_alone(tmp_path: Path) -> None:
    """Some models lie twice in their folder, under different names of tensors."""
    write_folder(tmp_path, {"model.safetensors": safetensors_bytes(ONE), "consolidated.safetensors": safetensors_bytes(TWO)})
    assert set(find_tensors(tmp_path)) == {"a"}


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_give_only_our_errors_and_little_memory(tmp_path: Path, data: st.DataObject) -> None:
    whole = safetensors_bytes({"a": np.ones((2, 3), np.float32), "b": np.zeros(5, np.uint8)}, metadata={"format": "pt"})
    damaged = bytearray(whole[: data.draw(st.one_of(st.just(len(whole)), st.integers(0, len(whole))))])
    flips = st.tuples(st.integers(0, max(len(damaged) - 1, 0)), st.integers(0, 7))
    for at, bit in data.draw(st.lists(flips, max_size=4)) if damaged else []:
        damaged[at] ^= 1 << bit
    path = written(tmp_path / "m.safetensors", bytes(damaged))
    tracemalloc.start()
    with contextlib.suppress(CheckpointError, UnsupportedError), np.errstate(all="ignore"):
        file = SafetensorsFile(path)
        for name in file.tensors:
            file.weight(name, name).decode()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


NAMES = ["a", "b", "__metadata__"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.sampled_from(["F32", "U8", "BF16", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", *NAMES]), inner),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=st.dictionaries(st.sampled_from(NAMES), JSON) | JSON)
def test_any_header_gives_only_our_errors(tmp_path: Path, header: Any) -> None:
    path = written(tmp_path / "m.safetensors", safetensors_bytes(ONE, header=json.dumps(header).encode()))
    with contextlib.suppress(CheckpointError, UnsupportedError):
        SafetensorsFile(path)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes=st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=5))
def test_every_true_file_is_read(tmp_path: Path, shapes: list[list[int]]) -> None:
    rng = np.random.default_rng(len(shapes))
    tensors = {f"t{i}": rng.standard_normal(shape).astype(np.float32) for i, shape in enumerate(shapes)}
    file = SafetensorsFile(written(tmp_path / "m.safetensors", safetensors_bytes(tensors)))
    assert file.tensors.keys() == tensors.keys()
    for name, want in tensors.items():
        np.testing.assert_array_equal(file.weight(name, name).decode(), want)
