"""FP8 with blocks or one scale a tensor, decoded here by torch's own float8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quantised_files import answers, check_numbers, quantised_pair, rewrite
from trivium.errors import CheckpointError, UnsupportedError
from trivium.weights import open_checkpoint

STEM = "model.layers.0.self_attn.k_proj"
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 48]}


def storing(name: str, block: tuple[int, int] | None, dtype: str = "F32", shape: tuple[int, ...] | None = None) -> Any:
    """`name`: of the scale; `block`: None is one number a tensor, of `shape`."""
    import torch

    def store(stem: str, array: np.ndarray, rng: np.random.Generator) -> tuple[dict[str, Any], np.ndarray]:
        out, size = array.shape
        rows, columns = block or array.shape
        if dtype == "F8_E8M0":
            stored = rng.integers(118, 123, (-(-out // rows), -(-size // columns)), np.uint8)
            scale = torch.from_numpy(stored).view(torch.float8_e8m0fnu).float()
        else:
            scale = torch.from_numpy(rng.random((-(-out // rows), -(-size // columns)), np.float32) * 0.02)
            stored = scale.numpy()
        codes = torch.from_numpy(rng.standard_normal((out, size), np.float32) * 8).to(torch.float8_e4m3fn)
        wide = scale.repeat_interleave(rows, 0)[:out].repeat_interleave(columns, 1)[:, :size]
        stored = stored if shape is None else stored.reshape(shape)
        return {"weight": (codes.view(torch.uint8).numpy(), "F8_E4M3"), name: (stored, dtype)}, (codes.float() * wide).numpy()

    return store


CASES: dict[str, Any] = {
    "blocks": (BLOCKS, ("weight_scale_inv", (32, 48))),
    "blocks with a rest": ({**BLOCKS, "weight_block_size": [128, 40]}, ("weight_scale_inv", (128, 40))),
    "scales of powers of two": ({**BLOCKS, "scale_fmt": "ue8m0"}, ("weight_scale_inv", (32, 48), "F8_E8M0")),
    "one scale": ({"quant_method": "fp8", "activation_scheme": "static"}, ("weight_scale", None, "F32", ())),
    "one scale as a list": ({"quant_method": "fp8"}, ("weight_scale", None, "F32", (1,))),
    "one scale, new name": ({"quant_method": "fp8", "weight_block_size": None}, ("weight_scale_inv", None, "F32", ())),
}


@pytest.mark.oracles
@pytest.mark.parametrize("name", CASES)
def test_every_number_is_torchs(tmp_path: Path, name: str) -> None:
    config, how = CASES[name]
    folder, _, meant = quantised_pair(tmp_path, config, storing(*how))
    checkpoint = check_numbers(folder, meant, "w8a8_fp8" if "activation_scheme" in config else "fp8")
    assert not [tensor for tensor in checkpoint.tensors if "scale" in tensor]


@pytest.mark.oracles
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_the_model_answers_as_its_numbers_in_float32_do(tmp_path: Path, backend: str) -> None:
    folder, plain, _ = quantised_pair(tmp_path, BLOCKS, storing("weight_scale_inv", (32, 48)))
    assert answers(folder, backend) == answers(plain, backend)


@pytest.mark.oracles
@pytest.mark.parametrize(
    ("part", "array", "message"),
    [
        (
            "weight_scale_inv",
            np.zeros((1, 1), np.float32),
            r"k_proj\.weight_scale_inv has the shape \[1, 1\]; it must have \[1, 2\]",
        ),
        ("weight_scale_inv", np.zeros((1, 2), np.int32), r"weight_scale_inv is int32; it must be float16"),
        ("weight", np.zeros((32, 64), np.float32), r"k_proj\.weight is float32; it must be float8_e4m3"),
        ("weight", None, r"lacks .*k_proj\.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, part: str, array: np.ndarray | None, message: str) -> None:
    folder, _, _ = quantised_pair(tmp_path, BLOCKS, storing("weight_scale_inv", (32, 48)))

    def change(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        tensors.pop(f"{STEM}.{part}")
        if array is not None:
            tensors[f"{STEM}.{part}"] = array

    checkpoint = open_checkpoint(rewrite(folder, change))
    with pytest.raises(CheckpointError, match=message):
        checkpoint.tensor(f"{STEM}.weight").decode()


@pytest.mark.oracles
@pytest.mark.parametrize("block", [[128], [0, 128], "128x128", [128.0, 128]])
def test_a_block_size_that_makes_no_sense_is_refused(tmp_path: Path, block: Any) -> None:
    made = storing("weight_scale_inv", (32, 48))
    folder, _, _ = quantised_pair(tmp_path, {**BLOCKS, "weight_block_size": block}, made)
    with pytest.raises(CheckpointError, match="weight_block_size must be"):
        open_checkpoint(folder)


@pytest.mark.oracles
def test_experts_in_four_bits_are_refused_by_name(tmp_path: Path) -> None:
    folder, _, _ = quantised_pair(tmp_path, {**BLOCKS, "expert_dtype": "fp4"}, storing("weight_scale_inv", (32, 48)))
    with pytest.raises(UnsupportedError, match="expert_dtype 'fp4' can't be read"):
        open_checkpoint(folder)
