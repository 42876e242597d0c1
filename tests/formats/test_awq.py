"""AWQ: the published layout, packed and decoded here number by number as its description says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quantised_files import answers, check_numbers, quantised_pair, rewrite
from trivium.errors import CheckpointError, UnsupportedError
from trivium.weights import open_checkpoint

STEM = "model.layers.1.mlp.down_proj"
CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}


def pack(codes: np.ndarray) -> np.ndarray:
    """Numbers 0..15 [n, out] as int32[n, out / 8]."""
    words = np.zeros((len(codes), codes.shape[1] // 8), np.uint32)
    for word in range(words.shape[1]):
        for place, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            words[:, word] |= codes[:, 8 * word + output].astype(np.uint32) << np.uint32(4 * place)
    return words.view(np.int32)


def storing(group: int) -> Any:
    def store(stem: str, array: np.ndarray, rng: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray]:
        out, size = array.shape
        groups = 1 if group == -1 else size // group
        codes, zeros = rng.integers(0, 16, (size, out)), rng.integers(0, 16, (groups, out))
        scales = (rng.random((groups, out)) * 0.04 + 1e-3).astype(np.float16)
        meant = np.zeros((out, size), np.float32)
        for i in range(size):
            for o in range(out):
                g = i * groups // size
                meant[o, i] = float(scales[g, o]) * (int(codes[i, o]) - int(zeros[g, o]))
        return {"qweight": pack(codes), "qzeros": pack(zeros), "scales": scales}, meant

    return store


@pytest.mark.parametrize(
    ("config", "group"),
    [
        (CONFIG, 32),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 16}, 16),
        ({**CONFIG, "group_size": -1, "version": "exllama"}, -1),
    ],
    ids=["32", "16", "all"],
)
def test_every_number_is_the_format_s(tmp_path: Path, config: dict[str, Any], group: int) -> None:
    folder, _, meant = quantised_pair(tmp_path, config, storing(group))
    checkpoint = check_numbers(folder, meant, "awq")
    assert not [tensor for tensor in checkpoint.tensors if tensor.endswith(("qweight", "qzeros", "scales"))]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("family", ["llama", "phi3"])  # phi3's projections are cut
def test_the_model_answers_as_its_numbers_in_float32_do(tmp_path: Path, family: str, backend: str) -> None:
    folder, plain, _ = quantised_pair(tmp_path, CONFIG, storing(32), family)
    assert answers(folder, backend) == answers(plain, backend)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 3}, "with bits 3 can't be read"),
        ({"version": "gemv"}, "version 'gemv' can't be read; with gemm"),
        ({"zero_point": False}, "zero_point False"),
    ],
)
def test_other_layouts_are_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder, _, _ = quantised_pair(tmp_path, {**CONFIG, **change}, storing(32))
    with pytest.raises(UnsupportedError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("part", "array", "message"),
    [
        ("scales", None, r"lacks .*down_proj\.scales"),
        ("qzeros", None, r"lacks .*down_proj\.qzeros"),
        ("qzeros", np.zeros((2, 8), np.int32), r"down_proj\.qzeros has the shape \[2, 8\]; it must have \[3, 8\]"),
        ("scales", np.zeros((5, 64), np.float16), r"it must have \[5, 8\]"),
        ("qweight", np.zeros((97, 8), np.int32), "97 inputs can't be 3 groups"),
        ("qweight", np.zeros((96, 8), np.float32), r"qweight is float32; it must be int32"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, part: str, array: np.ndarray | None, message: str) -> None:
    folder, _, _ = quantised_pair(tmp_path, CONFIG, storing(32))

    def change(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        tensors.pop(f"{STEM}.{part}")
        if array is not None:
            tensors[f"{STEM}.{part}"] = array

    checkpoint = open_checkpoint(rewrite(folder, change))
    with pytest.raises(CheckpointError, match=message):
        checkpoint.tensor(f"{STEM}.weight").decode()
