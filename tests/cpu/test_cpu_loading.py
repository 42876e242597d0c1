"""How the CPU backend takes weights in: the file's pages, the cache of rounded weights, and faults of both."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trivium.ops import Weight
from trivium.weights.formats import make_weight, map_file
from trivium_cpu import weight_cache
from trivium_cpu.plugin import CpuBackend

SHAPE = (256, 512)


def stored(folder: Path, format: str, seed: int = 0) -> Weight:
    """A tensor of a mapped file: bfloat16, or q4_1 blocks of random codes with small scales."""
    rng = np.random.default_rng(seed)
    if format == "bfloat16":
        raw = (rng.normal(size=SHAPE).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    else:
        raw = rng.integers(0, 256, (SHAPE[0], SHAPE[1] // 32, 20), dtype=np.uint8)
        raw[..., :4] = rng.normal(size=(*raw.shape[:2], 2)).astype(np.float16).view(np.uint8)
    path = folder / f"{format}-{seed}"
    path.write_bytes(raw.tobytes())
    weight = make_weight(path.name, SHAPE, format, map_file(path))
    return Weight(weight.name, weight.shape, weight.format, weight.data, weight.decoder, origin=f"{path} {path.stat().st_mtime_ns}")


def opened(**options: Any) -> Any:
    backend = CpuBackend()
    return backend.open(backend.probe().devices[0], {"threads": 2, **options})


def loaded(weight: Weight, format: str, **options: Any) -> tuple[Any, np.ndarray]:
    """The weight's packed bytes and numbers, as a session has them when loading is over."""
    session = opened(**options)
    resident = session.load(weight, format)
    numbers = session.read_weight(resident)
    session._finish_loading()
    return np.array(resident.matrix.packed), numbers


@pytest.mark.parametrize("format", ["q4_1", "bfloat16"])
def test_the_pages_of_a_mapped_file_are_given_back_as_it_is_packed(tmp_path: Path, format: str) -> None:
    weight = stored(tmp_path, format)
    session = opened()
    resident = session.load(weight, "int4" if format == "q4_1" else format)
    session._finish_loading()
    assert session._runtime.bytes_given_back == weight.nbytes
    np.testing.assert_array_equal(session.read_weight(resident), weight.decode())  # and the file is still what it was


def test_memory_that_is_no_files_is_never_given_back() -> None:
    session = opened()
    data = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    before = data.copy()
    resident = session.load(Weight("w", SHAPE, "float32", data, lambda d: d), "float32")
    assert session._runtime.bytes_given_back == 0
    np.testing.assert_array_equal(session.read_weight(resident), before)
    np.testing.assert_array_equal(data, before)


@pytest.mark.parametrize("out", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("storage", ["q4_0", "q4_1", "q8_0", "bfloat16"])
@pytest.mark.parametrize("inputs", [32, 96, 128])
def test_what_is_moved_word_by_word_decodes_to_the_same_numbers(storage: str, out: int, inputs: int) -> None:
    size = {"q4_0": 18, "q4_1": 20, "q8_0": 34, "bfloat16": 64}[storage] * inputs // 32
    raw = np.random.default_rng(out).integers(0, 256, (out, size), dtype=np.uint8)
    if storage == "bfloat16":
        raw.view(np.uint16)[:] &= 0xBFFF  # no infinities
    else:
        blocks = raw.reshape(out, inputs // 32, -1)
        blocks[..., 1] &= 0x3F
        blocks[..., 3] &= 0x3F
    weight = make_weight("w", (out, inputs), storage, raw.ravel())
    session = opened()
    format = {"q8_0": "int8", "bfloat16": "bfloat16"}.get(storage, "int4")
    np.testing.assert_array_equal(session.read_weight(session.load(weight, format)), weight.decode())


@pytest.mark.parametrize("format", ["int4", "int8"])
def test_a_weight_that_was_rounded_before_is_read_and_is_the_same(tmp_path: Path, format: str, monkeypatch: Any) -> None:
    weight, folder = stored(tmp_path, "bfloat16"), tmp_path / "packed"
    plain = loaded(weight, format, weight_cache=False)
    first = loaded(weight, format, weight_cache=folder)
    assert len(list(folder.iterdir())) == 1
    monkeypatch.setattr("trivium_cpu.session.CpuSession._pack", lambda *_: pytest.fail("it was rounded again"))
    second = loaded(weight, format, weight_cache=str(folder))
    for got in (first, second):
        np.testing.assert_array_equal(got[0], plain[0])
        np.testing.assert_array_equal(got[1], plain[1])


def test_what_is_only_rearranged_is_not_kept(tmp_path: Path) -> None:
    loaded(stored(tmp_path, "q4_1"), "int4", weight_cache=tmp_path / "packed")
    loaded(stored(tmp_path, "bfloat16"), "bfloat16", weight_cache=tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_a_changed_checkpoint_another_format_and_another_build_have_files_of_their_own(tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    old = stored(tmp_path, "bfloat16")
    loaded(old, "int4", weight_cache=folder)
    path = tmp_path / old.name
    path.write_bytes(bytes(old.nbytes))
    os.utime(path, ns=(1, 1))
    new = Weight(old.name, SHAPE, "bfloat16", np.zeros(SHAPE, np.uint16), old.decoder, origin=f"{path} 1")
    assert not loaded(new, "int4", weight_cache=folder)[1].any()
    loaded(new, "int8", weight_cache=folder)
    assert len(list(folder.iterdir())) == 3
    one, other = (weight_cache.WeightCache(folder, parts) for parts in ((1, 2), (1, 3)))
    assert one.path("w") != other.path("w")


@pytest.mark.parametrize("damage", ["bit", "short", "long", "empty", "number"])
def test_a_damaged_file_is_noticed_and_made_again(tmp_path: Path, damage: str, caplog: Any) -> None:
    weight, folder = stored(tmp_path, "bfloat16"), tmp_path / "packed"
    good = loaded(weight, "int4", weight_cache=folder)
    (path,) = folder.iterdir()
    content = bytearray(path.read_bytes())
    if damage == "bit":
        content[len(content) // 2] ^= 16
    elif damage == "number":
        content[-9] ^= 1
    path.write_bytes({"short": content[:-100], "long": content + b"x", "empty": b""}.get(damage, content))
    with caplog.at_level(logging.WARNING):
        again = loaded(weight, "int4", weight_cache=folder)
    assert "damaged" in caplog.text and weight.name in caplog.text
    np.testing.assert_array_equal(again[0], good[0])
    caplog.clear()
    loaded(weight, "int4", weight_cache=folder)
    assert not caplog.text


def test_a_folder_that_cannot_be_written_is_said_once_and_loading_goes_on(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "file").write_bytes(b"")
    session = opened(weight_cache=tmp_path / "file" / "packed")
    with caplog.at_level(logging.WARNING):
        for seed in range(3):
            session.load(stored(tmp_path, "bfloat16", seed), "int4")
        session._finish_loading()
    assert caplog.text.count("can't be kept") == 1


def test_sessions_that_round_at_the_same_time_leave_whole_files(tmp_path: Path) -> None:
    weight, folder = stored(tmp_path, "bfloat16"), tmp_path / "packed"
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(loaded(weight, "int8", weight_cache=folder))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(np.array_equal(results[0][0], packed) for packed, _ in results)
    assert [path.suffix for path in folder.iterdir()] == [".bin"]


def test_the_files_used_least_recently_make_room(tmp_path: Path) -> None:
    for age in range(5):
        (tmp_path / f"{age}.bin").write_bytes(bytes(100))
        os.utime(tmp_path / f"{age}.bin", (age, age))
    weight_cache._evict(tmp_path, 250)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3.bin", "4.bin"]


def test_an_option_that_is_no_folder_is_refused() -> None:
    from trivium.errors import InvalidRequestError

    with pytest.raises(InvalidRequestError, match="weight_cache must be True, False or a folder"):
        opened(weight_cache=3)
