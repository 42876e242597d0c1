"""compressed-tensors: weights that the format's own package compressed, against what it makes of them again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quantised_files import answers, check_numbers, quantised_pair, rewrite
from trivium.errors import CheckpointError, UnsupportedError
from trivium.ops import InputScale
from trivium.weights import open_checkpoint

pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.oracles

STEM = "model.layers.0.self_attn.q_proj"
KINDS = {"torch.int8": "I8", "torch.float8_e4m3fn": "F8_E4M3", "torch.int32": "I32", "torch.int64": "I64", "torch.float32": "F32",
         "torch.bfloat16": "BF16"}  # fmt: skip


def config_of(format: str, weights: dict[str, Any], *, targets: list[str] | None = None, **more: Any) -> dict[str, Any]:
    activations = {"num_bits": 8, "type": weights.get("type", "int"), "strategy": "token", "dynamic": True, "symmetric": True}
    group = {"targets": targets or ["Linear"], "weights": weights, "output_activations": None,
             "input_activations": activations if format in ("int-quantized", "float-quantized") else None}  # fmt: skip
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}, "ignore": ["lm_head"],
            "kv_cache_scheme": None, "quantization_status": "compressed", **more}  # fmt: skip


def storing(format: str, weights: dict[str, Any]) -> Any:
    """By the package, with random scales and zero points."""
    import torch
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(format)

    def store(stem: str, array: np.ndarray, rng: np.random.Generator) -> tuple[dict[str, Any], np.ndarray]:
        out, size = array.shape
        rows, columns = args.block_structure or (1, args.group_size)
        shape = {"tensor": (1,), "channel": (out, 1), "group": (out, size // (columns or 1)),
                 "block": (-(-out // rows), -(-size // (columns or 1)))}[args.strategy]  # fmt: skip
        top = 448.0 if args.type == "float" else 2.0 ** (args.num_bits - 1)
        module = {"weight": torch.from_numpy(array),
                  "weight_scale": torch.from_numpy((rng.random(shape, np.float32) + 0.5) * np.float32(0.4 / top))}  # fmt: skip
        if not args.symmetric:
            low, high = -(1 << (args.num_bits - 1)), 1 << (args.num_bits - 1)
            module["weight_zero_point"] = torch.from_numpy(rng.integers(low, high, shape, np.int8))
        stored = compressor.compress(module, scheme)
        meant = compressor.decompress(stored, scheme)["weight"].float().numpy()
        arrays = {}
        for part, tensor in stored.items():
            bits = tensor.contiguous()
            if tensor.dtype == torch.float8_e4m3fn:
                bits = bits.view(torch.uint8)
            arrays[part] = (bits.numpy(), KINDS[str(tensor.dtype)])
        return arrays, meant

    return store


W4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
W8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
CHANNELS = {**W4, "strategy": "channel", "group_size": None}
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "W4A16": ("pack-quantized", W4, "w4a16"),
    "W4A16 asymmetric": ("pack-quantized", {**W4, "symmetric": False, "group_size": 16}, "w4a16"),
    "W4A16 channels": ("pack-quantized", CHANNELS, "w4a16"),
    "W4A16 channels, asymmetric": ("pack-quantized", {**CHANNELS, "symmetric": False}, "w4a16"),
    "W8A16": ("pack-quantized", {**W4, "num_bits": 8}, "compressed-tensors"),
    "W8A16 asymmetric": ("pack-quantized", {**W4, "num_bits": 8, "symmetric": False}, "compressed-tensors"),
    "W8A16 channels": ("pack-quantized", {**CHANNELS, "num_bits": 8}, "w8a16"),
    "W8A16 tensor": ("pack-quantized", {**W4, "num_bits": 8, "strategy": "tensor", "group_size": None}, "w8a16"),
    "W2A16": ("pack-quantized", {**W4, "num_bits": 2, "symmetric": False}, "compressed-tensors"),
    "W8A8": ("int-quantized", W8, "w8a8"),
    "W8A8 asymmetric": ("int-quantized", {**W8, "symmetric": False}, "compressed-tensors"),
    "W8A8 tensor": ("int-quantized", {**W8, "strategy": "tensor"}, "w8a8"),
    "FP8 channels": ("float-quantized", FP8, "w8a8_fp8"),
    "FP8 tensor": ("float-quantized", {**FP8, "strategy": "tensor"}, "w8a8_fp8"),
    "FP8 alone": ("naive-quantized", FP8, "fp8"),
    "FP8 blocks of 128": ("float-quantized", {**FP8, "strategy": "block", "block_structure": [128, 128]}, "w8a8_fp8"),
    "FP8 blocks": ("float-quantized", {**FP8, "strategy": "block", "block_structure": [32, 16]}, "compressed-tensors"),
    "FP8 blocks with a rest": ("naive-quantized", {**FP8, "strategy": "block", "block_structure": [128, 40]}, "compressed-tensors"),
}


@pytest.mark.parametrize("name", CASES)
def test_every_number_is_the_package_s(tmp_path: Path, name: str) -> None:
    format, weights, stored_as = CASES[name]
    folder, _, meant = quantised_pair(tmp_path, config_of(format, weights), storing(format, weights))
    checkpoint = check_numbers(folder, meant, stored_as)
    assert all(tensor.endswith(".weight") for tensor in checkpoint.tensors)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", ["W4A16 asymmetric", "W8A8", "FP8 blocks"])
def test_the_model_answers_as_its_numbers_in_float32_do(tmp_path: Path, name: str, backend: str) -> None:
    format, weights, _ = CASES[name]
    folder, plain, _ = quantised_pair(tmp_path, config_of(format, weights), storing(format, weights))
    assert answers(folder, backend) == answers(plain, backend)


def test_groups_in_the_order_of_activations(tmp_path: Path) -> None:
    """weight_g_idx, which later versions of the package no longer write."""
    inner, orders = storing("pack-quantized", W4), {}

    def store(stem: str, array: np.ndarray, rng: np.random.Generator) -> tuple[dict[str, Any], np.ndarray]:
        parts, meant = inner(stem, array, rng)
        order = orders[stem] = rng.permutation(np.arange(array.shape[1]) // 32).astype(np.int32)
        scale = parts["weight_scale"][0]
        codes = meant / np.repeat(scale, 32, axis=1)
        return {**parts, "weight_g_idx": order}, np.rint(codes).astype(np.float32) * scale[:, order]

    folder, _, meant = quantised_pair(tmp_path, config_of("pack-quantized", {**W4, "actorder": "group"}), store)
    check_numbers(folder, meant, "w4a16")
    assert len(orders) == 14


def test_a_module_goes_by_its_name_then_by_a_pattern_then_by_its_class(tmp_path: Path) -> None:
    ways = {"Linear": W4, "re:.*self_attn.*": {**W4, "num_bits": 8}, STEM: {**W4, "group_size": 16}}
    stores = {target: storing("pack-quantized", weights) for target, weights in ways.items()}

    def store(stem: str, array: np.ndarray, rng: np.random.Generator) -> tuple[dict[str, Any], np.ndarray]:
        target = STEM if stem == STEM else "re:.*self_attn.*" if "self_attn" in stem else "Linear"
        return stores[target](stem, array, rng)

    config = config_of("mixed-precision", W4)
    config["config_groups"] = {
        f"group_{i}": {"targets": [target], "weights": weights, "format": "pack-quantized"}
        for i, (target, weights) in enumerate(ways.items())
    }
    folder, _, meant = quantised_pair(tmp_path, config, store)
    checkpoint = open_checkpoint(folder)
    for name, array in meant.items():
        np.testing.assert_array_equal(checkpoint.tensor(name).decode(), array, err_msg=name)
    assert (checkpoint.tensor(f"{STEM}.weight").format, checkpoint.tensor(f"{STEM.replace('q_', 'k_')}.weight").format) == (
        "w4a16", "compressed-tensors",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized' can't be read; with pack-quantized"),
        ({"format": "marlin-24"}, "format 'marlin-24'"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "format 'sparse-24-bitmask'"),
        ({"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}, "config_groups {'R1'"),
        ({"weights": {**W4, "num_bits": 3}}, "num_bits 3"),
        ({"weights": {**W4, "type": "float"}}, "num_bits 4 can't be read; with 8"),
        ({"weights": {**W4, "strategy": "tensor_group"}}, "strategy 'tensor_group'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    config = config_of("pack-quantized", change.pop("weights", W4))
    folder, _, _ = quantised_pair(tmp_path, {**config, **change}, storing("pack-quantized", W4))
    with pytest.raises(UnsupportedError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"config_groups": None}, "no config_groups"),
        ({"config_groups": {"group_0": {"weights": W4}}}, "no config_groups with their targets"),
        (config_of("pack-quantized", {**W4, "group_size": 0}), "group_size must be"),
        (config_of("pack-quantized", {**W4, "strategy": "block", "block_structure": [1]}), "block_structure must be"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    whole = {**config_of("pack-quantized", W4), **config}
    folder, _, _ = quantised_pair(tmp_path, whole, storing("pack-quantized", W4))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("targets", "part", "array", "message"),
    [
        (["re:.*mlp.*"], None, None, "q_proj is stored quantised, but none of config_groups is about it"),
        (None, "weight_shape", None, r"lacks .*q_proj\.weight_shape"),
        (None, "weight_shape", np.array([64, 72]), "can't be .64, 72. numbers of 4 bits"),
        (None, "weight_scale", np.zeros((64, 3), np.float32), r"weight_scale has the shape \[64, 3\]; it must have \[64, 2\]"),
        (None, "weight_g_idx", np.full(64, 2, np.int32), "groups 2 to 2, but there are 2"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, targets: list[str] | None, part: str | None, array: np.ndarray | None, message: str
) -> None:
    config = config_of("pack-quantized", W4, targets=targets)
    folder, _, _ = quantised_pair(tmp_path, config, storing("pack-quantized", W4))

    def change(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        tensors.pop(f"{STEM}.{part}", None)
        if array is not None:
            tensors[f"{STEM}.{part}"] = array

    checkpoint = open_checkpoint(rewrite(folder, change))
    with pytest.raises(CheckpointError, match=message):
        checkpoint.tensor(f"{STEM}.weight").decode()


def static_config(**activations: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    config = config_of("int-quantized", weights)
    config["config_groups"]["group_0"]["input_activations"] = {
        "num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False, "symmetric": True, **activations,
    }  # fmt: skip
    return config


@pytest.mark.parametrize(
    ("activations", "expected"), [({}, InputScale(0.0625, -5)), ({"dynamic": True}, None), ({"type": "float"}, None)]
)
def test_scales_of_inputs_are_handed_on_where_they_are_the_same_for_all_tokens(
    tmp_path: Path, activations: dict[str, Any], expected: InputScale | None
) -> None:
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    store = storing("int-quantized", weights)

    def with_inputs(stem: str, array: np.ndarray, rng: np.random.Generator) -> tuple[dict[str, Any], np.ndarray]:
        parts, meant = store(stem, array, rng)
        return {**parts, "input_scale": np.array([0.0625], np.float32), "input_zero_point": np.array([-5], np.int8)}, meant

    folder, _, meant = quantised_pair(tmp_path, static_config(**activations), with_inputs)
    stored_as = "w8a16" if "type" in activations else "w8a8"
    weight: Any = check_numbers(folder, meant, stored_as).tensor(f"{STEM}.weight")
    assert weight.inputs == weight.slice_rows(1, 5).inputs == expected
    found = weight.slice_rows(1, 5).parts()
    np.testing.assert_array_equal(found["codes"].astype(np.float32) * found["scales"], meant[f"{STEM}.weight"][1:5])


@pytest.mark.parametrize("name", ["W4A16 asymmetric", "W8A8 tensor", "FP8 blocks of 128"])
def test_experts_that_are_stacked_keep_what_they_are_stored_as(tmp_path: Path, name: str) -> None:
    from trivium_families.stacked import Rearranged, Stacked

    format, weights, stored_as = CASES[name]
    folder, _, _ = quantised_pair(tmp_path, config_of(format, weights), storing(format, weights))
    checkpoint = open_checkpoint(folder)
    members = [checkpoint.tensor(f"model.layers.{layer}.mlp.up_proj.weight") for layer in (1, 0)]
    stacked = Stacked("experts", members)
    assert (stacked.format, stacked.shape) == (stored_as, (2, *members[0].shape))
    found, parts = stacked.parts(), [member.parts() for member in members]  # type: ignore[attr-defined]
    for key, value in found.items():
        for of_one, part in zip(value if isinstance(value, np.ndarray) else [value, value], parts, strict=True):
            np.testing.assert_array_equal(of_one, part[key])
    np.testing.assert_array_equal(stacked.decode(), np.stack([member.decode() for member in members]))
    half = Rearranged("half", members[0], lambda rows: rows[::2], whole_rows=True)
    assert (half.format, half.parts()) == ("float32", None)
    np.testing.assert_array_equal(half.decode(), members[0].decode()[::2])
