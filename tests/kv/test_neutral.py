"""The neutral page format: every bit survives, and nothing in a stranger's file is believed before it has been checked."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
from fake_model import spec_of
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from tiny_checkpoints import tiny_config
from trivium.errors import PageFormatError
from trivium.kv import Layout, neutral
from trivium.models import build
from trivium.ops import Group, KVSpec, LatentKV, PagedKV, Recurrent
from trivium.ops.rope import rope_from_config

DTYPES = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_every_value_survives_in_its_own_bits(dtype: str, data: st.DataObject) -> None:
    bits = data.draw(arrays_of.arrays(DTYPES[dtype], arrays_of.array_shapes(max_dims=4, min_side=0)))
    if dtype == "bfloat16":
        numbers = (bits.astype(np.uint32) << 16).view(np.float32)
    else:
        numbers = bits.view(dtype).astype(np.float32)
    stored = neutral.encode(numbers, dtype)
    assert stored.nbytes == bits.nbytes
    meta, arrays = neutral.unpack(neutral.pack({"about": "x"}, {"a": (dtype, stored)}))
    assert meta["about"] == "x" and arrays["a"][0] == dtype
    np.testing.assert_array_equal(neutral.decode(arrays["a"][1], dtype), numbers)


def record(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A record with a checksum that holds, whatever it says."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    body = text + data
    size = len(text) if length is None else length
    return neutral.MAGIC + size.to_bytes(8, "little") + blake2b(body, digest_size=32).digest() + body


def one(*entry: Any) -> dict[str, Any]:
    return {"arrays": [list(entry)]}


HOSTILE = {
    "empty": b"", "another format": b"PK" * 40, "no header": record({})[:20], "long header": record({}, length=2**62),
    "header beyond the end": record({"arrays": []}, length=10_000), "not JSON": record(b"{"), "deep JSON": record(b"[" * 100_000),
    "a list": record([]), "no arrays": record({}), "arrays are text": record({"arrays": "x"}), "entry is text": record(one("x")),
    "unknown dtype": record(one("a", "object", [1]), b"12345678"), "dtype is a list": record(one("a", [], [1])),
    "negative size": record(one("a", "float32", [-1])), "size is a bool": record(one("a", "float32", [True]), b"1234"),
    "size is a float": record(one("a", "float32", [1.0]), b"1234"), "too many dims": record(one("a", "float32", [1] * 40), b"1234"),
    "more than there is": record(one("a", "float32", [2]), b"1234"), "2**80 numbers": record(one("a", "float32", [2**40, 2**40])),
    "no numbers of 2**80": record(one("a", "float32", [0, 2**40, 2**40])), "left over": record(one("a", "float32", [1]), b"12345"),
    "twice": record({"arrays": [["a", "int32", [1]], ["a", "int32", [1]]]}, b"12345678"),
    "name is a number": record(one(1, "int32", [])),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_what_a_stranger_wrote_is_refused(what: str) -> None:
    with pytest.raises(PageFormatError):
        neutral.unpack(HOSTILE[what])


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_damage_is_found(data: st.DataObject) -> None:
    whole = neutral.pack({"x": 1}, {"a": ("int32", np.arange(5, dtype=np.int32))})
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged = data.draw(st.sampled_from([whole[:at], whole + b"x", whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]]))
    with pytest.raises(PageFormatError):
        neutral.unpack(damaged)


def test_a_header_that_could_not_be_read_again_is_not_written() -> None:
    with pytest.raises(PageFormatError, match="header"):
        neutral.pack({"x": "y" * neutral.MAX_HEADER}, {})


def test_a_description_says_everything_the_bytes_mean() -> None:
    groups = (Group(PagedKV(2, 8, window=16), (0, 1)), Group(LatentKV(4, 2), (2,)), Group(Recurrent((3, 5)), (3,)))
    layout = Layout("model", "chip 1", KVSpec(32, "bfloat16", groups), ("rope of 4", "", "", ""))
    assert layout.describe(0) == {
        "fingerprint": "model", "producer": "chip 1", "group": 0, "states": [0, 1], "kind": "PagedKV", "kv_heads": 2, "head_dim": 8,
        "window": 16, "keys": ["rope of 4", ""], "page_size": 32, "kv_dtype": "bfloat16", "scales": None, "zero_points": None,
    }  # fmt: skip
    assert layout.shapes(0, 7) == {f"{s}.{i}": (7, 2, 8) for s in (0, 1) for i in (0, 1)}
    assert layout.shapes(1, 7) == {"2.0": (7, 4), "2.1": (7, 2)} and layout.shapes(2, 7) == {"3.0": (3, 5)}
    assert [neutral.stored_dtype(layout.spec, g) for g in range(3)] == ["bfloat16", "bfloat16", "float32"]
    assert json.loads(json.dumps(layout.describe(2))) == layout.describe(2)


def test_layouts_that_differ_in_anything_have_other_digests() -> None:
    base = Layout("m", "p", spec_of((None, 5), 4), ("a", "b"))
    others = [
        base._replace(fingerprint="n"), base._replace(producer="q"), base._replace(rotations=("a", "c")),
        base._replace(spec=spec_of((None, 5), 8)), base._replace(spec=spec_of((None, 6), 4)),
        base._replace(spec=KVSpec(4, "float16", base.spec.groups)),
    ]  # fmt: skip
    assert len({layout.digest for layout in (base, *others)}) == 7
    assert base.digest == Layout("m", "p", spec_of((None, 5), 4), ("a", "b")).digest


def test_an_unknown_kv_dtype_is_stored_as_float32() -> None:
    assert neutral.stored_dtype(KVSpec(4, "int8", (Group(PagedKV(1, 1), (0,)),)), 0) == "float32"


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_rotations_are_read_off_the_program(family: str) -> None:
    config = tiny_config(family)
    said = neutral.rotations(build(config))
    table = rope_from_config(config, config.get("head_dim", 16), max_model_len=512).inv_freq
    digest = blake2b(table.astype("<f4").tobytes(), digest_size=16).hexdigest()
    assert len(said) == config["num_hidden_layers"]
    assert f"rope of {len(table)} split pairs, scale 1.0, inv_freq blake2b {digest}" in said
    assert len(set(said)) == (2 if family == "gemma3" else 1)
    assert neutral.rotations(build(tiny_config(family, rope_theta=5000.0))) != said
