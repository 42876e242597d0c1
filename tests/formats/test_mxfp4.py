"""MXFP4 of gpt-oss, against transformers' own conversion to floats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quantised_files import answers, rewrite
from tiny_checkpoints import byte_tokenizer, make_weights, tiny_config, write_safetensors
from trivium import LLM
from trivium.errors import CheckpointError
from trivium.models import arrange
from trivium.weights import open_checkpoint
from weight_files import safetensors_bytes

pytest.importorskip("transformers")
pytestmark = pytest.mark.oracles

CONFIG = tiny_config(
    "llama", architectures=["GptOssForCausalLM"], model_type="gpt_oss", intermediate_size=96, num_local_experts=4,
    num_experts_per_tok=2, head_dim=16, sliding_window=7,
)  # fmt: skip
EXPERTS = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, np.ndarray]]:
    """A checkpoint with experts in MXFP4, the float32 one that transformers makes of it, and the latter's tensors."""
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng, stored, meant = np.random.default_rng(3), {}, {}
    for name, array in make_weights(CONFIG).items():
        stem, _, part = name.rpartition(".")
        if ".experts." not in name:
            stored[name] = meant[name] = array
        elif "gate_proj" in name and part == "bias":
            both = np.stack([array, rng.standard_normal(array.shape, np.float32) * np.float32(0.1)], -1)
            stored[f"{stem.replace('gate_proj', 'gate_up_proj')}_bias"] = both.reshape(len(array), -1)
        elif "down_proj" in name and part == "bias":
            stored[f"{stem}_bias"] = array
        elif part == "weight" and "up_proj" not in name:
            whole, rows = stem.replace("gate_proj", "gate_up_proj"), array.shape[1] * (2 if "gate_proj" in name else 1)
            blocks = rng.integers(0, 256, (len(array), rows, array.shape[2] // 32, 16), np.uint8)
            scales = rng.integers(121, 125, blocks.shape[:-1], np.uint8)
            stored |= {f"{whole}_blocks": blocks, f"{whole}_scales": scales}
            floats = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32)
            meant[whole] = floats.numpy()
    meant |= {name: array for name, array in stored.items() if name.endswith("_bias")}
    folders = []
    for name, config in (("quantised", {**CONFIG, "quantization_config": {"quant_method": "mxfp4"}}), ("plain", CONFIG)):
        folder = tmp_path_factory.mktemp("mxfp4") / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
        folders.append(folder)
    (folders[0] / "model.safetensors").write_bytes(safetensors_bytes({n: np.ascontiguousarray(a) for n, a in stored.items()}))
    write_safetensors(folders[1] / "model.safetensors", meant)
    return folders[0], folders[1], meant


def test_every_number_is_transformers_(pair: tuple[Path, Path, dict[str, np.ndarray]]) -> None:
    folder, _, meant = pair
    checkpoint = open_checkpoint(folder)
    assert set(checkpoint.tensors) == set(meant)
    for name, array in meant.items():
        weight = checkpoint.tensor(name)
        matrix = name.endswith(("gate_up_proj", "down_proj"))
        np.testing.assert_array_equal(weight.decode(), array.swapaxes(1, 2) if matrix else array, err_msg=name)
        assert weight.format == ("mxfp4" if matrix else "float32")
        np.testing.assert_array_equal(weight.slice_rows(1, 3).decode(), weight.decode()[1:3])


def test_gate_and_up_stay_in_blocks(pair: tuple[Path, Path, dict[str, np.ndarray]]) -> None:
    folder, _, meant = pair
    checkpoint = open_checkpoint(folder)
    tensors = arrange(checkpoint.config, checkpoint.tensors)
    for first, part in enumerate(("gate_proj", "up_proj")):
        weight = tensors[f"{EXPERTS}.{part}.weight"]()
        assert (weight.format, weight.shape, weight.data.nbytes) == ("mxfp4", (4, 96, 64), weight.nbytes)
        np.testing.assert_array_equal(weight.decode(), meant[f"{EXPERTS}.gate_up_proj"].swapaxes(1, 2)[:, first::2])


def test_the_cpu_backend_holds_the_experts_without_loss(pair: tuple[Path, Path, dict[str, np.ndarray]]) -> None:
    with LLM(str(pair[0]), "cpu", progress=False, num_kv_blocks=40) as llm:
        routes = {(r.storage, r.resident, r.lossless) for r in llm.loaded.routes if "experts" in r.name and "bias" not in r.name}
    assert routes == {("mxfp4", "int8", True)}


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_the_model_answers_as_its_numbers_in_float32_do(pair: tuple[Path, Path, dict[str, np.ndarray]], backend: str) -> None:
    assert answers(pair[0], backend) == answers(pair[1], backend)


@pytest.mark.parametrize(
    ("part", "array", "message"),
    [
        ("gate_up_proj_scales", None, r"lacks .*experts\.gate_up_proj_scales"),
        ("gate_up_proj_scales", np.zeros((4, 192, 3), np.uint8), r"must have \[4, 192, 2\]"),
        ("gate_up_proj_scales", np.full((4, 192, 2), 255, np.uint8), r"no numbers \(255\)"),
        ("gate_up_proj_blocks", np.zeros((4, 192, 2, 8), np.uint8), "must end with blocks of 16 bytes"),
        ("gate_up_proj_blocks", np.zeros((4, 192, 2, 16), np.float32), "is float32; it must be uint8"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    pair: tuple[Path, Path, dict[str, np.ndarray]], tmp_path: Path, part: str, array: np.ndarray | None, message: str
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((pair[0] / name).read_bytes())

    def change(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        tensors.pop(f"{EXPERTS}.{part}")
        if array is not None:
            tensors[f"{EXPERTS}.{part}"] = array

    checkpoint = open_checkpoint(rewrite(tmp_path, change))
    with pytest.raises(CheckpointError, match=message):
        checkpoint.tensor(f"{EXPERTS}.gate_up_proj").decode()
