"""The pieces that decoder families are strung together from. Each records calls on one Builder and returns Values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from trivium.models.config import ModelInfo, RawConfig
from trivium.ops import OPERATORS, Builder, PagedKV, Program, Value
from trivium.ops.rope import rope_from_config

Rotation = Callable[[Value], Value]


class Decoder:
    """Traces one decoder-only model. Activations are x[tokens, hidden]; constants are named by their checkpoint names
    without ".weight" or ".bias". `norm_offset` is added to every norm's weight."""

    def __init__(self, info: ModelInfo, max_model_len: int | None, *, norm_offset: float = 0.0) -> None:
        self.info = info
        self.b = Builder(OPERATORS)
        self._max_len = max_model_len or info.max_positions
        self._norm_offset = norm_offset

    def op(self, name: str, *args: Value | None, **attrs: Any) -> Value:
        """Records an operator that has one result."""
        return cast(Value, self.b.call(name, *args, **attrs))

    def embed(self, *, scale: float = 1.0) -> Value:
        """x[tokens, hidden] of the step's token ids."""
        table = self.b.weight("model.embed_tokens.weight", (self.info.vocab_size, self.info.hidden_size))
        return self.op("embedding", self.b.input("token_ids"), table, scale=scale)

    def norm(self, x: Value, name: str) -> Value:
        """RMS norm over the last dimension."""
        weight = self.b.weight(f"{name}.weight", x.shape[-1:])
        return self.op("rms_norm", x, weight, eps=self.info.norm_eps, offset=self._norm_offset)

    def linear(self, x: Value, name: str, out: int, *, bias: bool = False, part: tuple[str, int] | None = None) -> Value:
        """y[..., out]. `part`: the weight is not stored under its own name but as rows of another tensor, (its name, first row)."""
        source, rows = (f"{part[0]}.weight", (part[1], part[1] + out)) if part else (None, None)
        weight = self.b.weight(f"{name}.weight", (out, x.shape[-1]), source=source, rows=rows)
        return self.op("linear", x, weight, self.b.weight(f"{name}.bias", (out,)) if bias else None)

    def heads(self, x: Value, name: str, heads: int, *, bias: bool = False, part: tuple[str, int] | None = None) -> Value:
        """A projection split into y[tokens, heads, head_dim]."""
        flat = self.linear(x, name, heads * self.info.head_dim, bias=bias, part=part)
        return self.op("reshape", flat, shape=("tokens", heads, self.info.head_dim))

    def qkv(self, x: Value, attn: str, *, bias: bool = False) -> tuple[Value, Value, Value]:
        """Queries, keys and values from the three projections of the attention block `attn`."""
        q = self.heads(x, f"{attn}.q_proj", self.info.heads, bias=bias)
        k = self.heads(x, f"{attn}.k_proj", self.info.kv_heads, bias=bias)
        return q, k, self.heads(x, f"{attn}.v_proj", self.info.kv_heads, bias=bias)

    def rotation(self, name: str = "rope.inv_freq", config: RawConfig | None = None) -> Rotation:
        """The rotary embedding that `config` (default: the model's) describes, its frequencies as the constant `name`."""
        config = self.info.config if config is None else config
        table = rope_from_config(config, self.info.head_dim, max_model_len=self._max_len)
        inv_freq, positions = self.b.array(name, table.inv_freq), self.b.input("positions")
        interleaved = bool(config.get("rope_interleaved", False))
        return lambda x: self.op("rope", x, positions, inv_freq, interleaved=interleaved, scale=table.scale)

    def attend(
        self, layer: int, q: Value, k: Value, v: Value,
        *, window: int | None = None, scale: float | None = None, softcap: float | None = None,
    ) -> Value:  # fmt: skip
        """Stores k and v in the layer's pages and attends: y[tokens, heads * head_dim]. `scale` None: head_dim ** -0.5."""
        info, b = self.info, self.b
        if window is not None and window >= self._max_len:
            window = None  # never reached, and layers without a window share one group of pages
        kv = b.kv_write(b.state(f"kv.{layer}", PagedKV(info.kv_heads, info.head_dim, window)), k, v)
        heads = b.paged_attention(
            q, kv, b.input("query_starts"), b.input("context_lens"), None,
            scale=info.head_dim**-0.5 if scale is None else scale, window=window, softcap=softcap,
        )  # fmt: skip
        return self.op("reshape", heads, shape=("tokens", info.heads * info.head_dim))

    def gated(self, gate: Value, up: Value) -> Value:
        """act(gate) * up with the model's activation."""
        return self.op("gated", gate, up, kind=self.info.activation)

    def mlp(self, x: Value, mlp: str, *, bias: bool = False) -> Value:
        """The gated feed-forward block `mlp`."""
        gate = self.linear(x, f"{mlp}.gate_proj", self.info.intermediate_size, bias=bias)
        up = self.linear(x, f"{mlp}.up_proj", self.info.intermediate_size, bias=bias)
        return self.linear(self.gated(gate, up), f"{mlp}.down_proj", self.info.hidden_size, bias=bias)

    def finish(self, x: Value, *, softcap: float | None = None) -> Program:
        """Final norm and output projection of the sampled rows only: logits[rows, vocab]."""
        h = self.norm(self.b.gather_rows(x, self.b.input("sample_rows")), "model.norm")
        source = "model.embed_tokens.weight" if self.info.tied else None
        head = self.b.weight("lm_head.weight", (self.info.vocab_size, self.info.hidden_size), source=source)
        logits = self.b.linear(h, head, None)
        if softcap is not None:
            logits = self.b.softcap(logits, cap=softcap)
        return self.b.finish({"logits": logits}, vocab_size=self.info.vocab_size)
