"""ModelSlim's folders, written here number by number as the tool's description of its output says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from modelslim_files import DESCRIPTION, modelslim_pair
from quantised_files import answers, check_numbers
from trivium.errors import CheckpointError, UnsupportedError
from trivium.ops import InputScale
from trivium.weights import open_checkpoint
from trivium_families.stacked import Stacked
from weight_files import safetensors_bytes

STEM = "model.layers.0.self_attn.q_proj"
KINDS = ("W8A8", "W8A8S", "W8A8_DYNAMIC", "W8A8_MIX", "W8A16")

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{kind: (kind, "llama", {}) for kind in KINDS},
    "offsets of weights": ("W8A16", "llama", {"asymmetric": True}),
    "float32's bits in int64": ("W8A8", "llama", {"half": True, "only_products": True}),
    "products of scales only": ("W8A8", "llama", {"only_products": True}),
    "biases within quant_bias": ("W8A8", "qwen2", {}),
    "biases beside quant_bias": ("W8A8", "qwen2", {"keep_bias": True, "shift": -7}),
}


@pytest.mark.parametrize("name", CASES)
def test_every_number_is_the_description_s(tmp_path: Path, name: str) -> None:
    kind, family, how = CASES[name]
    folder, _, meant, _ = modelslim_pair(tmp_path, kind, family, **how)
    checkpoint = check_numbers(folder, meant, "modelslim" if "asymmetric" in how else "w8a16" if kind == "W8A16" else "w8a8")
    static = kind in ("W8A8", "W8A8S")
    expected = InputScale(float(np.float32(0.03)), how.get("shift", 5)) if static else None
    weight = checkpoint.tensor(f"{STEM}.weight")
    assert weight.inputs == weight.slice_rows(3, 9).inputs == expected
    assert checkpoint.tensor("model.embed_tokens.weight").inputs is None


@pytest.mark.parametrize("name", ["W8A8", "biases within quant_bias"])
@pytest.mark.parametrize("backend", ["reference", "cpu", "torch:cpu"])
def test_the_model_answers_as_its_numbers_in_float32_do(tmp_path: Path, name: str, backend: str) -> None:
    if backend == "torch:cpu":
        pytest.importorskip("torch")
    kind, family, how = CASES[name]
    folder, plain, _, _ = modelslim_pair(tmp_path, kind, family, **how)
    assert answers(folder, backend) == answers(plain, backend)


def test_whole_numbers_and_scales_are_handed_on_as_they_are_stored(tmp_path: Path) -> None:
    folder, _, _, matrices = modelslim_pair(tmp_path, "W8A8")
    parts: Any = open_checkpoint(folder).tensor(f"{STEM}.weight").slice_rows(2, 20)
    found = parts.parts()
    np.testing.assert_array_equal(found["codes"], matrices[STEM]["weight"][2:20])
    np.testing.assert_array_equal(found["scales"], matrices[STEM]["weight_scale"][2:20])
    folder, *_ = modelslim_pair(tmp_path / "offsets", "W8A16", asymmetric=True)
    shifted: Any = open_checkpoint(folder).tensor(f"{STEM}.weight")
    assert shifted.parts() is None


def test_experts_that_are_stacked_are_stacked_whole_numbers(tmp_path: Path) -> None:
    folder, _, _, matrices = modelslim_pair(tmp_path, "W8A8_DYNAMIC")
    checkpoint, stems = open_checkpoint(folder), [f"model.layers.{i}.mlp.up_proj" for i in (0, 1)]
    found: Any = Stacked("experts", [checkpoint.tensor(f"{stem}.weight") for stem in stems])
    for part, stored in (("codes", "weight"), ("scales", "weight_scale")):
        np.testing.assert_array_equal(found.parts()[part], np.stack([matrices[stem][stored] for stem in stems]))
    mixed: Any = Stacked("experts", [checkpoint.tensor("model.norm.weight")] * 2)
    assert mixed.parts() is None


def test_names_of_a_multimodal_checkpoint_are_found_in_its_description(tmp_path: Path) -> None:
    folder, _, meant, _ = modelslim_pair(tmp_path, "W8A8")
    described = json.loads((folder / DESCRIPTION).read_text())
    renamed = {k.replace("model.l", "model.language_model.l", 1): v for k, v in described.items()}
    assert renamed != described
    (folder / DESCRIPTION).write_text(json.dumps(renamed))
    check_numbers(folder, meant, "w8a8")


def test_a_quantization_config_goes_before_the_file(tmp_path: Path) -> None:
    folder, *_ = modelslim_pair(tmp_path, "W8A8")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "nobody's"}}))
    with pytest.raises(UnsupportedError, match="quantised by nobody's"):
        open_checkpoint(folder)


def test_the_description_is_part_of_the_model_s_fingerprint(tmp_path: Path) -> None:
    folder, *_ = modelslim_pair(tmp_path, "W8A8")
    before = open_checkpoint(folder).fingerprint
    described = json.loads((folder / DESCRIPTION).read_text())
    (folder / DESCRIPTION).write_text(json.dumps({**described, f"{STEM}.weight": "W8A16"}))
    assert open_checkpoint(folder).fingerprint != before


def change(folder: Path, name: str, value: Any) -> Path:
    described = json.loads((folder / DESCRIPTION).read_text())
    (folder / DESCRIPTION).write_text(json.dumps({**described, name: value}))
    return folder


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (f"{STEM}.weight", "W4A8_DYNAMIC", f"{STEM}.weight is W4A8_DYNAMIC"),
        ("model.embed_tokens.weight", "W8A8_MXFP8", "model.embed_tokens.weight is W8A8_MXFP8"),
        ("metadata", {"quarot": {"max_tp_size": 4}}, "rotate activations"),
    ],
)
def test_what_can_not_be_read_is_refused_by_name(tmp_path: Path, name: str, value: Any, message: str) -> None:
    folder, *_ = modelslim_pair(tmp_path, "W8A8")
    with pytest.raises(UnsupportedError, match=message):
        open_checkpoint(change(folder, name, value))


@pytest.mark.parametrize("said", [{f"{STEM}.weight": "FLOAT"}, {}])
def test_a_matrix_with_scales_of_which_no_kind_is_said_is_named(tmp_path: Path, said: dict[str, str]) -> None:
    folder, *_ = modelslim_pair(tmp_path, "W8A8")
    described = json.loads((folder / DESCRIPTION).read_text())
    del described[f"{STEM}.weight"]
    (folder / DESCRIPTION).write_text(json.dumps({**described, **said}))
    with pytest.raises(CheckpointError, match=rf"does not say of what kind {STEM}\.weight is"):
        open_checkpoint(folder)


def with_tensors(folder: Path, **changed: Any) -> Path:
    """The folder after some tensors were put in another's place, or (None) taken away."""
    from trivium.weights.safetensors import find_tensors

    files = find_tensors(folder)
    kept = {name: np.array(file.weight(name, name).data) for name, file in files.items()} | changed
    (folder / "quant_model_weight.safetensors").write_bytes(safetensors_bytes({n: t for n, t in kept.items() if t is not None}))
    return folder


def test_norms_that_were_shifted_against_outliers_are_refused(tmp_path: Path) -> None:
    folder, *_ = modelslim_pair(tmp_path, "W8A8")
    name = "model.layers.1.input_layernorm.bias"
    with pytest.raises(UnsupportedError, match=f"{name}: RMS norms with a bias"):
        open_checkpoint(with_tensors(folder, **{name: np.ones(64, np.float32)}))


@pytest.mark.parametrize(
    ("part", "tensor", "message"),
    [
        ("input_scale", None, f"lacks {STEM}.input_scale"),
        ("input_scale", np.zeros(1, np.float32), "can't be rounded by the scale 0.0"),
        ("input_scale", np.ones(2, np.float32), "must be one number"),
        ("input_offset", np.array([0.5], np.float32), "the offset 0.5"),
        ("weight_scale", np.ones((3, 1), np.float32), "weight_scale has the shape"),
        ("weight", np.ones((64, 64), np.float32), "weight is float32; it must be int8"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, part: str, tensor: Any, message: str) -> None:
    folder, *_ = modelslim_pair(tmp_path, "W8A8")
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(with_tensors(folder, **{f"{STEM}.{part}": tensor})).tensor(f"{STEM}.weight")
