"""The pieces that decoder families are strung together from. Each records calls on one Builder and returns Values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from trivium.models.config import ModelInfo, RawConfig
from trivium.ops import OPERATORS, Builder, PagedKV, Program, Value
from trivium.ops.rope import rope_from_config

Rotation = Callable[[Value], Value]
HIDDEN, DRAFT_ROWS = "draft.hidden", 256
"""The constant [DRAFT_ROWS, 1, hidden] of a draft head's Program that hidden states of the target are put in before each step: the
one of token t is row adapters[t]."""


class Decoder:
    """Traces one decoder-only model. Activations are x[tokens, hidden]; constants are named by their checkpoint names
    without ".weight" or ".bias". `norm_offset` is added to every norm's weight."""

    def __init__(self, info: ModelInfo, max_model_len: int | None, *, norm_offset: float = 0.0) -> None:
        self.info = info
        self.b = Builder(OPERATORS)
        self._max_len = max_model_len or info.max_positions
        self._offset = norm_offset

    def op(self, name: str, *args: Value | None, **attrs: Any) -> Value:
        """Records an operator that has one result."""
        return cast(Value, self.b.call(name, *args, **attrs))

    def embed(self, *, scale: float = 1.0) -> Value:
        """x[tokens, hidden] of the step's token ids."""
        table = self.b.weight("model.embed_tokens.weight", (self.info.vocab_size, self.info.hidden_size))
        return self.op("embedding", self.b.input("token_ids"), table, scale=scale)

    def norm(self, x: Value, name: str) -> Value:
        """RMS norm over the last dimension."""
        return self.op("rms_norm", x, self.b.weight(f"{name}.weight", x.shape[-1:]), eps=self.info.norm_eps, offset=self._offset)

    def linear(self, x: Value, name: str, out: int, *, bias: bool = False, part: tuple[str, int] | None = None) -> Value:
        """y[..., out]. `part`: the weight is not stored under its own name but as rows of another tensor, (its name, first row)."""
        source, rows = (f"{part[0]}.weight", (part[1], part[1] + out)) if part else (None, None)
        weight = self.b.weight(f"{name}.weight", (out, x.shape[-1]), source=source, rows=rows)
        return self.op("linear", x, weight, self.b.weight(f"{name}.bias", (out,)) if bias else None)

    def qkv(self, x: Value, attn: str, *, bias: bool = False, fused: bool = False) -> list[Value]:
        """Queries, keys and values [tokens, heads, head_dim] of the attention block `attn`. `fused`: the weights of their
        projections are the rows of one tensor, qkv_proj, in this order."""
        values, first, dim = [], 0, self.info.head_dim
        for name, heads in (("q_proj", self.info.heads), ("k_proj", self.info.kv_heads), ("v_proj", self.info.kv_heads)):
            flat = self.linear(x, f"{attn}.{name}", heads * dim, bias=bias, part=(f"{attn}.qkv_proj", first) if fused else None)
            values.append(self.op("reshape", flat, shape=("tokens", heads, dim)))
            first += heads * dim
        return values

    def rotation(self, name: str = "rope.inv_freq", config: RawConfig | None = None) -> Rotation:
        """The rotary embedding that `config` (default: the model's) describes, its frequencies as the constant `name`."""
        config = self.info.config if config is None else config
        table = rope_from_config(config, self.info.head_dim, max_model_len=self._max_len)
        inv_freq, positions = self.b.array(name, table.inv_freq), self.b.input("positions")
        interleaved = bool(config.get("rope_interleaved", False))
        return lambda x: self.op("rope", x, positions, inv_freq, interleaved=interleaved, scale=table.scale)

    def mlp(self, x: Value, mlp: str, *, bias: bool = False, fused: bool = False) -> Value:
        """The gated feed-forward block `mlp`. `fused`: gate and up projection are the rows of gate_up_proj, in this order."""
        inter, hidden = self.info.intermediate_size, self.info.hidden_size
        gate_part, up_part = ((f"{mlp}.gate_up_proj", 0), (f"{mlp}.gate_up_proj", inter)) if fused else (None, None)
        gate = self.linear(x, f"{mlp}.gate_proj", inter, bias=bias, part=gate_part)
        up = self.linear(x, f"{mlp}.up_proj", inter, bias=bias, part=up_part)
        return self.linear(self.op("gated", gate, up, kind=self.info.activation), f"{mlp}.down_proj", hidden, bias=bias)

    def attention(
        self, i: int, x: Value, rotate: Rotation, *, bias: bool = False, out_bias: bool = False, qk_norm: bool = False,
        fused: bool = False, **options: Any,
    ) -> Value:  # fmt: skip
        """The attention block of layer `i` on x. `qk_norm`: queries and keys are normalised per head before they are rotated.
        `options` are those of `attend`."""
        attn, hidden = f"model.layers.{i}.self_attn", self.info.hidden_size
        q, k, v = self.qkv(x, attn, bias=bias, fused=fused)
        q, k = (self.norm(q, f"{attn}.q_norm"), self.norm(k, f"{attn}.k_norm")) if qk_norm else (q, k)
        return self.linear(self.attend(i, rotate(q), rotate(k), v, **options), f"{attn}.o_proj", hidden, bias=out_bias)

    def attend(
        self, i: int, q: Value, k: Value, v: Value, *, window: int | None = None, scale: float | None = None,
        softcap: float | None = None, sinks: Value | None = None,
    ) -> Value:  # fmt: skip
        """y[tokens, heads * head_dim] of queries, keys and values [tokens, heads, head_dim], the latter two stored in layer `i`'s
        pages. `scale` None: head_dim ** -0.5."""
        info, b = self.info, self.b
        if window is not None and window >= self._max_len:
            window = None  # never reached, and layers without a window share one group of pages
        kv = b.kv_write(b.state(f"kv.{i}", PagedKV(info.kv_heads, info.head_dim, window)), k, v)
        heads = b.paged_attention(
            q, kv, b.input("query_starts"), b.input("context_lens"), sinks,
            scale=info.head_dim**-0.5 if scale is None else scale, window=window, softcap=softcap,
        )  # fmt: skip
        return self.op("reshape", heads, shape=("tokens", info.heads * info.head_dim))

    def pre_norm(self, windows: Sequence[int | None], *, mlp_bias: bool = False, fused: bool = False, **options: bool) -> Program:
        """Llama's graph: x + attention(norm(x)), then x + mlp(norm(x)), in each layer. `options` are those of `attention`."""
        rotate, x = self.rotation(), self.embed()
        for i, window in enumerate(windows):
            at = f"model.layers.{i}"
            y = self.norm(x, f"{at}.input_layernorm")
            x = self.op("add", x, self.attention(i, y, rotate, window=window, fused=fused, **options))
            x = self.op("add", x, self.mlp(self.norm(x, f"{at}.post_attention_layernorm"), f"{at}.mlp", bias=mlp_bias, fused=fused))
        return self.finish(x)

    def finish(self, x: Value, *, softcap: float | None = None, scale: float = 1.0, bias: bool = False) -> Program:
        """Final norm of the pooled rows, hidden[pooled, hidden], and of the sampled ones with their output projection (and its
        `bias`), logits[rows, vocab]."""
        rows = [self.b.gather_rows(x, self.b.input(name)) for name in ("pool_rows", "sample_rows")]
        hidden, h = (self.norm(x, "model.norm") for x in rows)
        source = "model.embed_tokens.weight" if self.info.tied else None
        head = self.b.weight("lm_head.weight", (self.info.vocab_size, self.info.hidden_size), source=source)
        logits = self.b.linear(h, head, self.b.weight("lm_head.bias", (self.info.vocab_size,)) if bias else None)
        logits = logits if scale == 1 else self.b.scale(logits, factor=scale)
        logits = logits if softcap is None else self.b.softcap(logits, cap=softcap)
        return self.b.finish({"logits": logits, "hidden": hidden}, vocab_size=self.info.vocab_size)
