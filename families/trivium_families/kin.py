"""Dense decoders that are Llama but for a norm, an activation, a bias or what is rotated.

Sources: Arcee 2025, model card of AFM-4.5B; ByteDance Seed 2025, model card of Seed-OSS; LG AI Research 2025, "EXAONE 4.0"; Tencent
2025, model cards of Hunyuan 0.5B to 7B; Baidu 2025, "ERNIE 4.5 Technical Report"; Kyutai 2025, model card of Helium 1; GLM Team
2024, "ChatGLM"; FAIR CodeGen 2025, "CWM"; NAVER 2025, "HyperCLOVA X THINK"; Gemma Team 2024, "Gemma"; Groeneveld et al. 2024,
"OLMo"; Bellagente et al. 2024, "Stable LM 2 1.6B"; Parmar et al. 2024, "Nemotron-4 15B"; Lozhkov et al. 2024, "StarCoder 2"; Cohere
2024, model card of Command R; Li et al. 2023, "Textbooks Are All You Need II: phi-1.5"; keys as in their config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trivium.models import Decoder, Family, ModelInfo, RawConfig, count, flag, number, read_info, table
from trivium.models.decoder import Rotation
from trivium.ops import Program, Value

from trivium_families.gemma import gemma_decoder
from trivium_families.pieces import as_is, computed, refuse_unless
from trivium_families.plugin import Hook
from trivium_families.stacked import Make

_LLAMA: RawConfig = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1e4}
_EPS = 1e-5


class LayerNormed(Decoder):
    """Layer norms in place of RMS norms. affine: with weight and bias, else with neither. names: of norms that are called
    otherwise."""

    def __init__(
        self, info: ModelInfo, max_model_len: int | None, *, affine: bool = True, bias: bool = True, names: RawConfig | None = None
    ) -> None:  # fmt: skip
        super().__init__(info, max_model_len)
        self._affine, self._bias, self._names = affine, bias, names or {}

    def norm(self, x: Value, name: str) -> Value:
        """Layer norm over the last dimension."""
        name = self._names.get(name, name)
        weight = self.b.weight(f"{name}.weight", x.shape[-1:]) if self._affine else None
        bias = self.b.weight(f"{name}.bias", x.shape[-1:]) if self._affine and self._bias else None
        return self.op("layer_norm", x, weight, bias, eps=self.info.norm_eps)


def plain_mlp(d: Decoder, x: Value, block: str, *, bias: bool, names: tuple[str, str] = ("up_proj", "down_proj")) -> Value:
    """down(f(up(x))): a feed-forward block without a gate."""
    up = d.linear(x, f"{block}.{names[0]}", d.info.intermediate_size, bias=bias)
    return d.linear(d.op("activation", up, kind=d.info.activation), f"{block}.{names[1]}", d.info.hidden_size, bias=bias)


def stack(
    d: Decoder, attend: Callable[[int, Value], Value], feed_forward: Callable[[int, Value], Value], *, parallel: bool = False
) -> Value:
    """x behind all layers. `parallel`: both blocks of a layer read one norm."""
    x = d.embed()
    for i in range(d.info.layers):
        y = d.norm(x, f"model.layers.{i}.input_layernorm")
        x, z = d.op("add", x, attend(i, y)), y
        x = d.op("add", x, feed_forward(i, z if parallel else d.norm(x, f"model.layers.{i}.post_attention_layernorm")))
    return x


def _attention(d: Decoder, bias: bool, out_bias: bool, rotate: Rotation | None = None) -> Callable[[int, Value], Value]:
    turn = d.rotation() if rotate is None else rotate
    return lambda i, y: d.attention(i, y, turn, bias=bias, out_bias=out_bias)


def build_arcee(info: ModelInfo, max_model_len: int | None) -> Program:
    """Arcee (AFM): Llama with squared ReLUs in place of gates."""
    d, bias, mlp_bias = Decoder(info, max_model_len), *(flag(info.config, key, False) for key in ("attention_bias", "mlp_bias"))
    return d.finish(stack(d, _attention(d, bias, bias), lambda i, y: plain_mlp(d, y, f"model.layers.{i}.mlp", bias=mlp_bias)))


def build_seed_oss(info: ModelInfo, max_model_len: int | None) -> Program:
    """Seed-OSS: Llama with biases on queries, keys and values."""
    bias, out_bias = flag(info.config, "attention_bias", True), flag(info.config, "attention_out_bias", False)
    d, mlp_bias = Decoder(info, max_model_len), flag(info.config, "mlp_bias", False)
    return d.pre_norm((None,) * info.layers, bias=bias, out_bias=out_bias, mlp_bias=mlp_bias)


def build_ernie(info: ModelInfo, max_model_len: int | None) -> Program:
    """ERNIE 4.5 (dense): Llama, rotated in neighbouring pairs."""
    bias = flag(info.config, "use_bias", False)
    return Decoder(info, max_model_len).pre_norm((None,) * info.layers, bias=bias, out_bias=bias, mlp_bias=bias)


def build_helium(info: ModelInfo, max_model_len: int | None) -> Program:
    """Helium: Llama, rotated in neighbouring pairs."""
    bias, mlp_bias = flag(info.config, "attention_bias", False), flag(info.config, "mlp_bias", False)
    return Decoder(info, max_model_len).pre_norm((None,) * info.layers, bias=bias, mlp_bias=mlp_bias)


def build_glm(info: ModelInfo, max_model_len: int | None) -> Program:
    """GLM-4 (2024): Llama with half of each head rotated in neighbouring pairs, and biases on queries, keys and values."""
    d, bias = Decoder(info, max_model_len), flag(info.config, "attention_bias", True)
    return d.finish(stack(d, _attention(d, bias, False), lambda i, y: d.mlp(y, f"model.layers.{i}.mlp", fused=True)))


def build_cwm(info: ModelInfo, max_model_len: int | None) -> Program:
    """Code World Model: Llama with windows in three layers of four."""
    return Decoder(info, max_model_len).pre_norm(info.windows(lambda layer: layer % 4 != 0))


def build_exaone4(info: ModelInfo, max_model_len: int | None) -> Program:
    """EXAONE 4: what a block gives is normalised; with windows, layers that see all positions rotate nothing."""
    d, pattern = Decoder(info, max_model_len), info.config.get("sliding_window_pattern")
    windows = info.windows(_exaone_pattern(info, pattern))
    rotate, x = d.rotation(), d.embed()
    turned = info.config.get("sliding_window") is None
    for i, window in enumerate(windows):
        layer = f"model.layers.{i}"
        y = d.attention(i, x, rotate if turned or window is not None else as_is, qk_norm=True, window=window)
        x = d.op("add", x, d.norm(y, f"{layer}.post_attention_layernorm"))
        x = d.op("add", x, d.norm(d.mlp(x, f"{layer}.mlp"), f"{layer}.post_feedforward_layernorm"))
    return d.finish(x)


def _exaone_pattern(info: ModelInfo, pattern: object) -> Callable[[int], bool]:
    """A text of L (window) and G, which repeats and whose last layer is G; or a number: every so many layers see all positions."""
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        return lambda layer: pattern[layer % len(pattern)] == "L" and layer + 1 < info.layers
    every = count(info.config, "sliding_window_pattern") if pattern else 1
    return lambda layer: (layer + 1) % every != 0


def build_hunyuan(info: ModelInfo, max_model_len: int | None) -> Program:
    """Hunyuan (dense): queries and keys are normalised per head once they are rotated."""
    d, bias, config = Decoder(info, max_model_len), flag(info.config, "attention_bias", False), info.config
    rotate = d.rotation(config=_stretched(config, info.head_dim))

    def attend(i: int, y: Value) -> Value:
        attn = f"model.layers.{i}.self_attn"
        q, k, v = d.qkv(y, attn, bias=bias)
        q, k = d.norm(rotate(q), f"{attn}.query_layernorm"), d.norm(rotate(k), f"{attn}.key_layernorm")
        return d.linear(d.attend(i, q, k, v), f"{attn}.o_proj", info.hidden_size, bias=bias)

    return d.finish(stack(d, attend, lambda i, y: d.mlp(y, f"model.layers.{i}.mlp")))


def _stretched(config: RawConfig, head_dim: int) -> RawConfig:
    """`alpha` stretches the base of the frequencies, for any length (NTK-aware scaling)."""
    rope = {**table(config, "rope_scaling"), **table(config, "rope_parameters")}
    if not rope.get("alpha"):
        return config
    theta = number(rope, "rope_theta", number(config, "rope_theta"))
    base = theta * number(rope, "alpha") ** (head_dim / (head_dim - 2))
    return {**config, "rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": base}}


def build_hyperclovax(info: ModelInfo, max_model_len: int | None) -> Program:
    """HyperCLOVA X: Granite with norms behind each block."""
    config, d = info.config, Decoder(info, max_model_len)
    bias, mlp_bias = flag(config, "attention_bias", False), flag(config, "mlp_bias", False)
    post = flag(config, "use_post_norm", True)
    scale, residual = number(config, "attention_multiplier", info.head_dim**-0.5), number(config, "residual_multiplier")
    rotate, x = d.rotation(), d.embed(scale=number(config, "embedding_multiplier"))
    for i in range(info.layers):
        layer = f"model.layers.{i}"
        y = d.attention(i, d.norm(x, f"{layer}.input_layernorm"), rotate, bias=bias, out_bias=bias, scale=scale)
        y = d.norm(y, f"{layer}.post_norm1") if post else y
        x = d.op("add", x, d.op("scale", y, factor=residual))
        y = d.mlp(d.norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp", bias=mlp_bias)
        y = d.norm(y, f"{layer}.post_norm2") if post else y
        x = d.op("add", x, d.op("scale", y, factor=residual))
    return d.finish(x, scale=number(config, "logits_scaling"))


def build_gemma(info: ModelInfo, max_model_len: int | None) -> Program:
    """Gemma (the first): Llama with scaled embeddings, and norm weights that are stored minus one."""
    d, bias = gemma_decoder(info, max_model_len), flag(info.config, "attention_bias", False)
    rotate, x = d.rotation(), d.embed(scale=info.hidden_size**0.5)
    for i in range(info.layers):
        layer = f"model.layers.{i}"
        x = d.op("add", x, d.attention(i, d.norm(x, f"{layer}.input_layernorm"), rotate, bias=bias, out_bias=bias))
        x = d.op("add", x, d.mlp(d.norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp"))
    return d.finish(x)


def read_layer_norms(key: str) -> Callable[[str, RawConfig], ModelInfo]:
    """`key` is what the epsilon of layer norms is called; without it, 1e-5."""
    return lambda architecture, config: read_info(architecture, {**config, "rms_norm_eps": config.get(key) or _EPS})


def build_olmo(info: ModelInfo, max_model_len: int | None) -> Program:
    """OLMo (the first): Llama with layer norms that have no weights."""
    refuse_unless(info, "clip_qkv", (), "no operator clips queries, keys and values")
    d, bias = LayerNormed(info, max_model_len, affine=False), flag(info.config, "attention_bias", False)
    return d.finish(stack(d, _attention(d, bias, bias), lambda i, y: d.mlp(y, f"model.layers.{i}.mlp")))


def build_stablelm(info: ModelInfo, max_model_len: int | None) -> Program:
    """StableLM 2: layer norms with biases, a quarter of each head rotated; both blocks of a layer may read one norm."""
    refuse_unless(info, "qk_layernorm", (False,), "norms of queries and keys with weights of each head have no operator")
    d, parallel = LayerNormed(info, max_model_len), flag(info.config, "use_parallel_residual", False)
    attend = _attention(d, flag(info.config, "use_qkv_bias", False), False)
    return d.finish(stack(d, attend, lambda i, y: d.mlp(y, f"model.layers.{i}.mlp"), parallel=parallel))


def build_nemotron(info: ModelInfo, max_model_len: int | None) -> Program:
    """Nemotron-4, Minitron: layer norms, squared ReLUs in place of gates, half of each head rotated."""
    d, bias, mlp_bias = LayerNormed(info, max_model_len), *(flag(info.config, key, False) for key in ("attention_bias", "mlp_bias"))
    return d.finish(stack(d, _attention(d, bias, bias), lambda i, y: plain_mlp(d, y, f"model.layers.{i}.mlp", bias=mlp_bias)))


def one_more(config: RawConfig, tensors: Mapping[str, Make]) -> Mapping[str, Make]:
    """Norm weights, which are stored minus one."""
    return {name: _one_more(name, make) if name.endswith("norm.weight") else make for name, make in tensors.items()}


def _one_more(name: str, make: Make) -> Make:
    return computed(name, make, lambda a: a + 1)


def build_starcoder2(info: ModelInfo, max_model_len: int | None) -> Program:
    """StarCoder 2: layer norms, biases and feed-forward blocks without gates; a window."""
    d, bias = LayerNormed(info, max_model_len), flag(info.config, "use_bias", True)
    windows, rotate = info.windows(lambda layer: True), d.rotation()

    def attend(i: int, y: Value) -> Value:
        return d.attention(i, y, rotate, bias=bias, out_bias=bias, window=windows[i])

    return d.finish(stack(d, attend, lambda i, y: plain_mlp(d, y, f"model.layers.{i}.mlp", bias=bias, names=("c_fc", "c_proj"))))


def build_cohere(info: ModelInfo, max_model_len: int | None) -> Program:
    """Cohere (Command R): layer norms without biases, both blocks of a layer read one norm; rotated in neighbouring pairs."""
    refuse_unless(info, "use_qk_norm", (False,), "norms of queries and keys with weights of each head have no operator")
    d, bias = LayerNormed(info, max_model_len, bias=False), flag(info.config, "attention_bias", False)
    x = stack(d, _attention(d, bias, bias), lambda i, y: d.mlp(y, f"model.layers.{i}.mlp"), parallel=True)
    return d.finish(x, scale=number(info.config, "logit_scale"))


def build_phi(info: ModelInfo, max_model_len: int | None) -> Program:
    """Phi-1, Phi-1.5, Phi-2: layer norms and biases, both blocks of a layer read one norm; a part of each head is rotated."""
    refuse_unless(info, "qk_layernorm", (False,), "none of the published models has norms of queries and keys")
    d = LayerNormed(info, max_model_len, names={"model.norm": "model.final_layernorm"})
    rotate = d.rotation()

    def attend(i: int, y: Value) -> Value:
        attn = f"model.layers.{i}.self_attn"
        q, k, v = d.qkv(y, attn, bias=True)
        return d.linear(d.attend(i, rotate(q), rotate(k), v), f"{attn}.dense", info.hidden_size, bias=True)

    x = stack(d, attend, lambda i, y: plain_mlp(d, y, f"model.layers.{i}.mlp", bias=True, names=("fc1", "fc2")), parallel=True)
    return d.finish(x, bias=True)


_GRANITE: RawConfig = {
    "rms_norm_eps": 1e-6, "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
}  # fmt: skip
_GEMMA: RawConfig = {"hidden_act": "gelu_tanh", "rms_norm_eps": 1e-6, "head_dim": 256, "tie_word_embeddings": True}
_STARCODER: RawConfig = {"hidden_act": "gelu_tanh", "num_key_value_heads": 2, "tie_word_embeddings": True}
_CWM_ROPE: RawConfig = {
    "rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
arcee = Hook(Family(build_arcee, {**_LLAMA, "hidden_act": "relu2"}))
seed_oss = Hook(Family(build_seed_oss, {**_LLAMA, "rms_norm_eps": 1e-6, "head_dim": 128, "num_key_value_heads": 8}))
ernie = Hook(Family(build_ernie, {
    **_LLAMA, "rope_theta": 5e5, "head_dim": 128, "num_key_value_heads": 2, "tie_word_embeddings": True, "rope_interleaved": True,
}))  # fmt: skip
helium = Hook(Family(build_helium, {**_LLAMA, "rms_norm_eps": 1e-8, "rope_theta": 1e5, "head_dim": 128, "rope_interleaved": True}))
glm = Hook(Family(build_glm, {
    **_LLAMA, "rms_norm_eps": 1.5625e-07, "head_dim": 128, "num_key_value_heads": 2, "partial_rotary_factor": 0.5,
    "rope_interleaved": True,
}))  # fmt: skip
cwm = Hook(Family(build_cwm, {**_LLAMA, "head_dim": 128, "sliding_window": 8192, "rope_parameters": _CWM_ROPE}))
exaone4 = Hook(Family(build_exaone4, {**_LLAMA, "sliding_window": 4096, "sliding_window_pattern": 4}))
hunyuan = Hook(Family(build_hunyuan, _LLAMA))
hyperclovax = Hook(Family(build_hyperclovax, {**_LLAMA, **_GRANITE}))
gemma = Hook(Family(build_gemma, {**_LLAMA, **_GEMMA}))
olmo = Hook(Family(build_olmo, _LLAMA, read_layer_norms("layer_norm_eps")))
stablelm = Hook(Family(build_stablelm, {**_LLAMA, "partial_rotary_factor": 0.25}, read_layer_norms("layer_norm_eps")))
nemotron = Hook(
    Family(build_nemotron, {**_LLAMA, "hidden_act": "relu2", "partial_rotary_factor": 0.5}, read_layer_norms("norm_eps"), one_more)
)
starcoder2 = Hook(Family(build_starcoder2, {**_LLAMA, **_STARCODER}, read_layer_norms("norm_epsilon")))
cohere = Hook(Family(build_cohere, {
    **_LLAMA, "rope_theta": 5e5, "logit_scale": 0.0625, "tie_word_embeddings": True, "rope_interleaved": True,
}, read_layer_norms("layer_norm_eps")))  # fmt: skip
_PHI: RawConfig = {"hidden_act": "gelu_tanh", "partial_rotary_factor": 0.5}
phi = Hook(Family(build_phi, {**_LLAMA, **_PHI}, read_layer_norms("layer_norm_eps")))
