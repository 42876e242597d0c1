"""bitsandbytes in 4 bits: weights that the format's own package rounded, against what it makes of them again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quantised_files import answers, check_numbers, quantised_pair, rewrite
from trivium.errors import CheckpointError, UnsupportedError
from trivium.weights import open_checkpoint

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.oracles

SIZES = {"intermediate_size": 128}
"""So that rows are whole blocks: where they are not, the package's kernels for processors take other scales than its own
definition (bitsandbytes 0.50.2)."""
STEM = "model.layers.0.self_attn.q_proj"
CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}


def storing(kind: str, nested: bool, block: int = 64) -> Any:
    import torch
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    def store(stem: str, array: np.ndarray, rng: np.random.Generator) -> tuple[dict[str, Any], np.ndarray]:
        whole = torch.from_numpy(array)
        packed, state = quantize_4bit(whole, quant_type=kind, compress_statistics=nested, blocksize=block)
        parts = {"weight": packed.numpy(), **{f"weight.{k}": v.numpy() for k, v in state.as_dict(packed=True).items()}}
        return parts, dequantize_4bit(packed, state).numpy()

    return store


@pytest.mark.parametrize(("kind", "nested", "block"), [("nf4", False, 64), ("nf4", True, 64), ("fp4", True, 32)])
def test_every_number_is_the_package_s(tmp_path: Path, kind: str, nested: bool, block: int) -> None:
    folder, _, meant = quantised_pair(tmp_path, CONFIG, storing(kind, nested, block), **SIZES)
    checkpoint = check_numbers(folder, meant, "bitsandbytes")
    assert all(tensor.endswith(".weight") for tensor in checkpoint.tensors)


def test_blocks_go_on_from_row_to_row(tmp_path: Path) -> None:
    inner = storing("nf4", False, 128)

    def store(stem: str, array: np.ndarray, rng: np.random.Generator) -> tuple[dict[str, Any], np.ndarray]:
        parts, meant = inner(stem, array, rng)[0], np.empty(array.size, np.float32)
        for i in range(array.size):
            byte = int(parts["weight"].reshape(-1)[i // 2])
            code = byte & 15 if i % 2 else byte >> 4
            meant[i] = parts["weight.quant_map"][code] * parts["weight.absmax"][i // 128]
        return parts, meant.reshape(array.shape)

    folder, _, meant = quantised_pair(tmp_path, CONFIG, store)
    check_numbers(folder, meant, "bitsandbytes")


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_the_model_answers_as_its_numbers_in_float32_do(tmp_path: Path, backend: str) -> None:
    folder, plain, _ = quantised_pair(tmp_path, CONFIG, storing("nf4", True), **SIZES)
    assert answers(folder, backend) == answers(plain, backend)


def test_weights_in_eight_bits_are_refused(tmp_path: Path) -> None:
    folder, _, _ = quantised_pair(tmp_path, {**CONFIG, "load_in_8bit": True}, storing("nf4", True))
    with pytest.raises(UnsupportedError, match="load_in_8bit True can't be read"):
        open_checkpoint(folder)

    def change(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        config["quantization_config"]["load_in_8bit"] = False
        tensors[f"{STEM}.SCB"] = np.zeros(64, np.float32)

    with pytest.raises(UnsupportedError, match="called SCB"):
        open_checkpoint(rewrite(folder, change))


@pytest.mark.parametrize(
    ("part", "array", "message"),
    [
        ("weight.absmax", None, r"lacks .*q_proj\.weight\.absmax"),
        ("weight.absmax", np.zeros(63, np.uint8), r"must have \[64\]"),
        ("weight.nested_absmax", None, r"lacks .*nested_absmax"),
        ("weight.quant_map", np.zeros(15, np.float32), r"must have \[16\]"),
        ("weight", np.zeros((2047, 1), np.uint8), "2047 bytes, too many or few for 64 x 64"),
        ("weight.quant_state.bitsandbytes__nf4", np.frombuffer(b"{}", np.uint8), "is no quant_state: 'shape'"),
        ("weight.quant_state.bitsandbytes__nf4", np.frombuffer(b"[1", np.uint8), "is no quant_state"),
        ("weight.quant_state.bitsandbytes__nf4", np.frombuffer(b'{"shape": [64, 64], "blocksize": 0}', np.uint8), "numbers from 1"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, part: str, array: np.ndarray | None, message: str) -> None:
    folder, _, _ = quantised_pair(tmp_path, CONFIG, storing("nf4", True))

    def change(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        tensors.pop(f"{STEM}.{part}")
        if array is not None:
            tensors[f"{STEM}.{part}"] = array

    checkpoint = open_checkpoint(rewrite(folder, change))
    with pytest.raises(CheckpointError, match=message):
        checkpoint.tensor(f"{STEM}.weight").decode()
