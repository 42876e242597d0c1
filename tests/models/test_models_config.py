"""What a model's configuration may say: spellings, defaults, and the faults that are refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from paged_runner import PagedRunner, run_in_chunks
from tiny_checkpoints import FAMILIES, make_checkpoint, make_weights, tiny_config, weight_shapes
from trivium.errors import CheckpointError, UnsupportedError
from trivium.models import ARCHITECTURES, build, describe
from trivium.ops import OPERATORS, PagedKV, Program


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def table(program: Program, name: str = "rope.inv_freq") -> np.ndarray:
    return next(c.array for c in program.constants if c.value.name == name)


def windows(program: Program) -> list[int | None]:
    return [s.spec.window for s in program.states]


def trace(program: Program) -> list[tuple[Any, ...]]:
    """A Program as plain data, so that two can be compared."""
    calls = [(c.name, [a and a.name for a in c.args], sorted(c.attrs.items()), [r.shape for r in c.results]) for c in program.calls]
    arrays = [(c.value.name, c.source, c.rows, None if c.array is None else c.array.tolist()) for c in program.constants]
    return [*calls, *arrays, *((s.value.name, s.spec) for s in program.states)]


@pytest.mark.parametrize("family", FAMILIES)
def test_program_uses_known_operators_and_one_state_a_layer(family: str) -> None:
    program = build(tiny_config(family))
    assert {c.name for c in program.calls} <= OPERATORS.keys()
    assert [s.value.name for s in program.states] == [f"kv.{i}" for i in range(len(program.states))]
    assert program.outputs["logits"].shape == ("rows", 320)
    assert program.vocab_size == 320


@pytest.mark.parametrize("family", FAMILIES)
def test_only_sampled_rows_reach_the_output_projection(family: str) -> None:
    program = build(tiny_config(family)).only("logits")
    names = [c.name for c in program.calls]
    after = program.calls[names.index("gather_rows") :]
    assert [c.name for c in after][:3] == ["gather_rows", "rms_norm", "linear"]
    assert all(c.results[0].shape[0] == "rows" for c in after)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_pooled_rows_reach_the_hidden_states(family: str) -> None:
    whole = build(tiny_config(family))
    assert whole.outputs["hidden"].shape == ("pooled", 64)
    program = whole.only("hidden")
    assert [c.name for c in program.calls][-2:] == ["gather_rows", "rms_norm"]
    assert {v.name for v in program.inputs} == {"token_ids", "positions", "query_starts", "context_lens", "pool_rows"}
    assert not any(c.value.name == "lm_head.weight" for c in program.constants)


def test_description_of_a_model() -> None:
    info = describe(tiny_config("qwen3"))
    assert (info.architecture, info.vocab_size, info.max_positions) == ("Qwen3ForCausalLM", 320, 512)
    assert (info.layers, info.heads, info.kv_heads, info.head_dim, info.hidden_size) == (2, 4, 2, 24, 64)


def test_nested_text_config_gives_the_same_program() -> None:
    flat = tiny_config("gemma3")
    nested = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "vision_config": {"hidden_size": 3},
        "text_config": without(flat, "architectures"),
    }  # fmt: skip
    assert trace(build(nested)) == trace(build(flat))


def test_missing_keys_have_the_family_s_defaults() -> None:
    config = without(tiny_config("llama"), "num_key_value_heads", "rms_norm_eps", "hidden_act", "rope_theta", "tie_word_embeddings")
    info = describe(config)
    assert (info.kv_heads, info.head_dim, info.norm_eps, info.activation, info.tied) == (4, 16, 1e-6, "silu", False)
    assert describe(without(tiny_config("gemma3"), "head_dim", "num_attention_heads", "num_key_value_heads")).head_dim == 256


def test_tied_head_reads_the_embedding_matrix() -> None:
    heads = {
        tied: next(c for c in build(tiny_config("llama", tie_word_embeddings=tied)).constants if c.value.name == "lm_head.weight")
        for tied in (True, False)
    }
    assert heads[True].source == "model.embed_tokens.weight"
    assert heads[False].source == "lm_head.weight"


def test_fused_projections_are_read_as_rows() -> None:
    parts = {c.value.name: (c.source, c.rows) for c in build(tiny_config("phi3")).constants if c.rows is not None}
    layer = "model.layers.1"
    fused = f"{layer}.self_attn.qkv_proj.weight"
    assert [parts[f"{layer}.self_attn.{p}_proj.weight"] for p in "qkv"] == [(fused, (0, 64)), (fused, (64, 96)), (fused, (96, 128))]
    gate_up = f"{layer}.mlp.gate_up_proj.weight"
    assert [parts[f"{layer}.mlp.{p}_proj.weight"] for p in ("gate", "up")] == [(gate_up, (0, 96)), (gate_up, (96, 192))]
    assert weight_shapes(tiny_config("phi3"))[fused] == (128, 64)


def test_windows_follow_the_configuration() -> None:
    assert windows(build(tiny_config("mistral"))) == [7, 7]
    assert windows(build(tiny_config("mistral", sliding_window=None))) == [None, None]
    assert windows(build(tiny_config("gemma2"))) == [6, None]
    assert windows(build(tiny_config("gemma3"))) == [6, 6, None, 6]
    kinds = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
    assert windows(build(tiny_config("gemma3", layer_types=kinds))) == [None, 6, None, None]
    qwen = {"sliding_window": 5, "max_window_layers": 1}
    assert windows(build(tiny_config("qwen2", use_sliding_window=True, **qwen))) == [None, 5]
    assert windows(build(tiny_config("qwen2", use_sliding_window=False, **qwen))) == [None, None]


def test_window_that_is_never_reached_is_no_window() -> None:
    assert build(tiny_config("mistral"), max_model_len=7).states[0].spec == PagedKV(2, 16)
    assert build(tiny_config("mistral"), max_model_len=8).states[0].spec == PagedKV(2, 16, 7)


def test_layers_with_a_window_rotate_by_their_own_base() -> None:
    legacy = build(tiny_config("gemma3"))
    params = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}}
    current = build(without(tiny_config("gemma3", rope_parameters=params), "rope_theta", "rope_local_base_freq"))
    assert trace(current) == trace(legacy)
    exponents = np.arange(0, 24, 2) / 24
    np.testing.assert_allclose(table(legacy, "rope.full.inv_freq"), 1e6**-exponents, rtol=1e-6)
    np.testing.assert_allclose(table(legacy, "rope.sliding.inv_freq"), 1e4**-exponents, rtol=1e-6)
    used = [c.args[2].name for c in legacy.calls if c.name == "rope"]
    assert used == ["rope.sliding.inv_freq"] * 4 + ["rope.full.inv_freq"] * 2 + ["rope.sliding.inv_freq"] * 2


def test_norm_weights_that_hold_their_offset_give_the_same_logits() -> None:
    config = tiny_config("gemma3")
    weights = make_weights(config)
    shifted = {name: w + np.float32(1) if w.ndim == 1 else w for name, w in weights.items()}
    prompt = [list(range(40, 60))]
    plain = run_in_chunks(PagedRunner(build(config), weights, page_size=4), prompt, 7)
    moved = run_in_chunks(PagedRunner(build({**config, "norm_offset": 0.0}), shifted, page_size=4), prompt, 7)
    np.testing.assert_allclose(moved[0], plain[0], atol=1e-4)


def test_interleaved_rotation_of_permuted_projections_gives_the_same_logits() -> None:
    config = tiny_config("llama")
    weights = make_weights(config)
    pairs = {name: interleave(w, 16) if name.endswith(("q_proj.weight", "k_proj.weight")) else w for name, w in weights.items()}
    prompt = [list(range(40, 60))]
    plain = run_in_chunks(PagedRunner(build(config), weights, page_size=4), prompt, 7)
    moved = run_in_chunks(PagedRunner(build({**config, "rope_interleaved": True}), pairs, page_size=4), prompt, 7)
    np.testing.assert_allclose(moved[0], plain[0], atol=1e-4)


def interleave(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of every head from (first halves, second halves) to neighbouring pairs, as GGUF files of Llama have them."""
    heads = weight.reshape(-1, 2, head_dim // 2, weight.shape[1])
    return heads.swapaxes(1, 2).reshape(weight.shape)


def test_unknown_architecture_names_the_nearest_and_all() -> None:
    with pytest.raises(UnsupportedError, match=r"'Qwen2ForCasualLM'.*did you mean Qwen2ForCausalLM\?") as e:
        build(tiny_config("llama", architectures=["Qwen2ForCasualLM"]))
    assert all(name in str(e.value) for name in ARCHITECTURES)
    with pytest.raises(UnsupportedError, match="not supported"):
        describe({"architectures": ["T5EncoderModel"]})


@pytest.mark.parametrize("names", [None, [], "LlamaForCausalLM", [3]])
def test_architectures_must_be_a_list_of_names(names: Any) -> None:
    with pytest.raises(CheckpointError, match="'architectures'"):
        build(tiny_config("llama", architectures=names))


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size", "num_attention_heads",
                                 "max_position_embeddings"])  # fmt: skip
@pytest.mark.parametrize("value", [None, 0, -4, 2.5, "64", True, 2**40])
def test_impossible_size_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=f"'{key}'") as e:
        build(tiny_config("llama", **{key: value}))
    assert e.value.param == key


@pytest.mark.parametrize(
    ("family", "override", "key"),
    [
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("llama", {"hidden_size": 66}, "hidden_size"),
        ("llama", {"num_hidden_layers": 10**6}, "num_hidden_layers"),
        ("llama", {"rms_norm_eps": -1e-6}, "rms_norm_eps"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ("llama", {"attention_bias": 1}, "attention_bias"),
        ("llama", {"text_config": [1]}, "text_config"),
        ("llama", {"rope_theta": 0}, "rope_theta"),
        ("llama", {"head_dim": 7}, "partial_rotary_factor"),
        ("mistral", {"sliding_window": 0}, "sliding_window"),
        ("gemma2", {"final_logit_softcapping": 0.0}, "final_logit_softcapping"),
        ("gemma2", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar"),
        ("gemma3", {"layer_types": ["full_attention"]}, "layer_types"),
        ("gemma3", {"rope_parameters": {"full_attention": 3}}, "full_attention"),
        ("gemma3", {"rope_parameters": "none"}, "rope_parameters"),
        ("gemma3", {"norm_offset": "one"}, "norm_offset"),
    ],
)
def test_value_that_cannot_be_true_is_refused_by_name(family: str, override: dict[str, Any], key: str) -> None:
    with pytest.raises(CheckpointError) as e:
        build(tiny_config(family, **override))
    assert e.value.param == key


@pytest.mark.parametrize(
    ("family", "override", "key"),
    [
        ("llama", {"hidden_act": "maxout"}, "hidden_act"),
        ("llama", {"hidden_act": ["silu"]}, "hidden_act"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_what_no_family_does_is_unsupported_by_name(family: str, override: dict[str, Any], key: str) -> None:
    with pytest.raises(UnsupportedError) as e:
        build(tiny_config(family, **override))
    assert e.value.param == key


def test_tiny_checkpoint_is_written_and_read_back(tmp_path: Any) -> None:
    weights = pytest.importorskip("trivium.weights")
    folder = make_checkpoint(tmp_path / "model", "phi3", seed=3)
    checkpoint = weights.open_checkpoint(folder)
    for name, want in make_weights(tiny_config("phi3"), 3).items():
        np.testing.assert_array_equal(checkpoint.tensor(name).decode(), want)
    assert checkpoint.tokenizer_data()["kind"] == "json"
