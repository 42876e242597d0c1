"""GPTQ: the published layout, packed and decoded here number by number as its description says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quantised_files import answers, check_numbers, quantised_pair, rewrite
from trivium.errors import CheckpointError, UnsupportedError
from trivium.weights import open_checkpoint

STEM = "model.layers.0.self_attn.q_proj"


def pack(codes: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Whole numbers of `bits` bits along an axis into int32 words, the first in the lowest bits."""
    codes = np.moveaxis(codes, axis, 0).astype(np.uint64)
    words = np.zeros((len(codes) * bits // 32, *codes.shape[1:]), np.uint64)
    for i, code in enumerate(codes):
        words[i * bits // 32] |= code << np.uint64(i * bits % 32)
    return np.moveaxis(words, 0, axis).astype(np.uint32).view(np.int32)


def storing(bits: int, group: int, *, order: bool, less: int, g_idx: bool = True) -> Any:
    """`order`: inputs belong to groups in a random order; `less`: what stored zero points lack."""

    def store(stem: str, array: np.ndarray, rng: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray]:
        out, size = array.shape
        groups = 1 if group == -1 else -(-size // group)
        of = np.arange(size) // (size if group == -1 else group)
        if order:
            of = rng.permutation(of)
        codes = rng.integers(0, 1 << bits, (size, out))
        zeros = rng.integers(0, 1 << bits, (groups, out))
        scales = (rng.random((groups, out)) * 0.6 / (1 << bits) + 1e-3).astype(np.float16)
        meant = np.zeros((out, size), np.float32)
        for i in range(size):
            for o in range(out):
                meant[o, i] = float(scales[of[i], o]) * (int(codes[i, o]) - int(zeros[of[i], o]))
        parts = {"qweight": pack(codes, bits, 0), "scales": scales, "g_idx": of.astype(np.int32),
                 "qzeros": pack((zeros - less) % (1 << bits), bits, 1)}  # fmt: skip
        if not g_idx:
            del parts["g_idx"]
        return parts, meant

    return store


CASES = {
    "4 bits": ({"bits": 4, "group_size": 32}, storing(4, 32, order=False, less=1)),
    "4 bits, one group": ({"bits": 4, "group_size": -1}, storing(4, -1, order=False, less=1, g_idx=False)),
    "4 bits, no g_idx": ({"bits": 4, "group_size": 16}, storing(4, 16, order=False, less=1, g_idx=False)),
    "act order": ({"bits": 4, "group_size": 32, "desc_act": True}, storing(4, 32, order=True, less=1)),
    "8 bits": ({"bits": 8, "group_size": 32, "checkpoint_format": "gptq"}, storing(8, 32, order=True, less=1)),
    "2 bits": ({"bits": 2, "group_size": 32}, storing(2, 32, order=False, less=1)),
    "v2": ({"bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}, storing(4, 32, order=True, less=0)),
    "v2, 8 bits": ({"bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"}, storing(8, -1, order=False, less=0)),
    "bits of its own": ({"bits": 4, "group_size": 32, "dynamic": {"+:.*": {"bits": 8}}}, storing(8, 32, order=False, less=1)),
}


@pytest.mark.parametrize("name", CASES)
def test_every_number_is_the_format_s(tmp_path: Path, name: str) -> None:
    config, store = CASES[name]
    folder, _, meant = quantised_pair(tmp_path, {"quant_method": "gptq", **config}, store)
    other = name in ("8 bits", "2 bits", "v2, 8 bits", "bits of its own")
    checkpoint = check_numbers(folder, meant, "gptq" if other else "gptq_4")
    assert not [tensor for tensor in checkpoint.tensors if tensor.endswith(("qweight", "qzeros", "scales", "g_idx"))]


@pytest.mark.faults
@pytest.mark.parametrize(("version", "less"), [("gptq", 1), ("gptq_v2", 0)])
def test_o46_every_zero_point_is_exact_in_both_conventions(tmp_path: Path, version: str, less: int) -> None:
    def store(stem: str, array: np.ndarray, rng: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray]:
        out, size = array.shape
        zeros = np.arange(out)[None] % 16  # all of them, 0 and 15 too
        codes = np.zeros((size, out), int)
        scales = np.full((1, out), 0.5, np.float16)
        parts = {"qweight": pack(codes, 4, 0), "qzeros": pack((zeros - less) % 16, 4, 1), "scales": scales}
        return parts, np.repeat(-0.5 * zeros.T.astype(np.float32), size, axis=1)

    config = {"quant_method": "gptq", "bits": 4, "group_size": -1, "checkpoint_format": version}
    folder, _, meant = quantised_pair(tmp_path, config, store)
    check_numbers(folder, meant, "gptq_4")


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_the_model_answers_as_its_numbers_in_float32_do(tmp_path: Path, backend: str) -> None:
    config, store = CASES["act order"]
    folder, plain, _ = quantised_pair(tmp_path, {"quant_method": "gptq", **config}, store)
    assert answers(folder, backend) == answers(plain, backend)


def test_rows_are_cut_out_of_fused_projections(tmp_path: Path) -> None:
    config, store = CASES["4 bits"]
    folder, plain, meant = quantised_pair(tmp_path, {"quant_method": "gptq", **config}, store, "phi3")
    check_numbers(folder, meant, "gptq_4")
    assert answers(folder, "cpu") == answers(plain, "cpu")


def test_opening_decodes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trivium_formats.gptq

    config, store = CASES["4 bits"]
    folder, _, meant = quantised_pair(tmp_path, {"quant_method": "gptq", **config}, store)
    decoded: list[int] = []
    unpack = trivium_formats.gptq.unpack
    monkeypatch.setattr(trivium_formats.gptq, "unpack", lambda words, bits: decoded.append(words.size) or unpack(words, bits))
    weight = open_checkpoint(folder).tensor(f"{STEM}.weight").slice_rows(0, 8)
    assert (weight.shape, weight.nbytes > 0, decoded) == ((8, 64), True, [])
    np.testing.assert_array_equal(weight.decode(), meant[f"{STEM}.weight"][:8])
    assert decoded == [64]  # eight rows of 64 numbers, eight a word


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 3}, "with bits 3 can't be read"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' can't be read; with gptq, gptq_v2"),
        ({"is_marlin_format": True}, "is_marlin_format True"),
    ],
)
def test_other_layouts_are_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    config, store = CASES["4 bits"]
    folder, _, _ = quantised_pair(tmp_path, {"quant_method": "gptq", **config, **change}, store)
    with pytest.raises(UnsupportedError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("part", "array", "message"),
    [
        ("scales", None, r"lacks .*q_proj\.scales"),
        ("qzeros", None, r"lacks .*q_proj\.qzeros"),
        ("qzeros", np.zeros((3, 8), np.int32), r"q_proj\.qzeros has the shape \[3, 8\]; it must have \[2, 8\]"),
        ("scales", np.zeros((2, 9), np.float16), r"q_proj\.scales has the shape \[2, 9\]; it must have \[2, 64\]"),
        ("scales", np.zeros((2, 64), np.int32), r"q_proj\.scales is int32; it must be float16"),
        ("qweight", np.zeros((8, 64), np.float32), r"q_proj\.qweight is float32; it must be int32"),
        ("qweight", np.zeros(8, np.int32), r"must be a matrix"),
        ("g_idx", np.zeros(63, np.int32), "don't fit together"),
        ("g_idx", np.full(64, 2, np.int32), "groups 2 to 2, but there are 2"),
        ("g_idx", np.full(64, -1, np.int32), "groups -1 to -1"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, part: str, array: np.ndarray | None, message: str) -> None:
    config, store = CASES["4 bits"]
    folder, _, _ = quantised_pair(tmp_path, {"quant_method": "gptq", **config}, store)

    def change(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        tensors.pop(f"{STEM}.{part}")
        if array is not None:
            tensors[f"{STEM}.{part}"] = array

    checkpoint = open_checkpoint(rewrite(folder, change))
    with pytest.raises(CheckpointError, match=message):
        checkpoint.tensor(f"{STEM}.weight").decode()


@pytest.mark.parametrize("group", [0, -2, "32", None])
def test_a_group_size_that_makes_no_sense_is_refused(tmp_path: Path, group: Any) -> None:
    folder, _, _ = quantised_pair(tmp_path, {"quant_method": "gptq", "bits": 4, "group_size": group}, CASES["4 bits"][1])
    with pytest.raises(CheckpointError, match="group_size must be"):
        open_checkpoint(folder)
