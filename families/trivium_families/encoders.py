"""Encoders: models that read a text from both ends, for embeddings, classes and reranking. They make no tokens.

Sources: Devlin et al. 2019, "BERT"; Liu et al. 2019, "RoBERTa"; Conneau et al. 2020, "Unsupervised Cross-lingual Representation
Learning at Scale" (XLM-R); Warner et al. 2024, "Smarter, Better, Faster, Longer" (ModernBERT); keys and names of tensors as in
their checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial

from trivium.errors import CheckpointError
from trivium.models import Decoder, Family, ModelInfo, RawConfig, count, flag, number, read_info, table
from trivium.ops import Program, Value

from trivium_families.pieces import layer_kinds, refuse_unless
from trivium_families.plugin import Hook
from trivium_families.stacked import Make

BERT_DEFAULTS: RawConfig = {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2, "pad_token_id": 0}
ROBERTA_DEFAULTS: RawConfig = {**BERT_DEFAULTS, "type_vocab_size": 1, "pad_token_id": 1}
MODERNBERT_DEFAULTS: RawConfig = {
    "hidden_activation": "gelu", "norm_eps": 1e-5, "local_attention": 128, "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0, "local_rope_theta": 10000.0,
}  # fmt: skip

Head = Callable[["Encoder", Value], Value]
"""What becomes of the last hidden states."""


class Encoder(Decoder):
    """Traces one encoder. `head`: None for embeddings, which are made of the last hidden states as they are."""

    def __init__(self, info: ModelInfo, max_model_len: int | None, head: Head | None, words: str) -> None:
        super().__init__(info, max_model_len)
        self._head = head
        self.words = self.b.weight(words, (info.vocab_size, info.hidden_size))
        """The table of the tokens."""

    def layer_norm(self, x: Value, name: str, *, bias: bool = True) -> Value:
        size = x.shape[-1:]
        shift = self.b.weight(f"{name}.bias", size) if bias else None
        return self.op("layer_norm", x, self.b.weight(f"{name}.weight", size), shift, eps=self.info.norm_eps)

    def piece(self, x: Value, source: str, name: str, first: int, out: int, *, bias: bool) -> Value:
        """A projection whose weight and bias are rows `first`.. of those of `source`."""
        rows = first, first + out
        weight = self.b.weight(f"{name}.weight", (out, x.shape[-1]), source=f"{source}.weight", rows=rows)
        shift = self.b.weight(f"{name}.bias", (out,), source=f"{source}.bias", rows=rows) if bias else None
        return self.op("linear", x, weight, shift)

    def heads(self, x: Value) -> Value:
        """x[tokens, hidden] as [tokens, heads, head_dim]."""
        return self.op("reshape", x, shape=("tokens", self.info.heads, self.info.head_dim))

    def both_ways(self, q: Value, k: Value, v: Value, window: int | None = None) -> Value:
        """y[tokens, hidden] of queries, keys and values [tokens, heads, head_dim]."""
        starts = self.b.input("query_starts")
        y = self.op("bidirectional_attention", q, k, v, starts, scale=self.info.head_dim**-0.5, window=window)
        return self.op("reshape", y, shape=("tokens", self.info.hidden_size))

    def mean(self, x: Value) -> Value:
        """In every row the mean of x[tokens, hidden] over the row's sequence: attention that weighs all alike."""
        rows = self.op("reshape", x, shape=("tokens", 1, self.info.hidden_size))
        alike = self.op("scale", rows, factor=0.0)
        y = self.op("bidirectional_attention", alike, alike, rows, self.b.input("query_starts"), scale=1.0)
        return self.op("reshape", y, shape=("tokens", self.info.hidden_size))

    def encoded(self, x: Value) -> Program:
        """Hidden states, or what the head makes of them, of the pooled rows. Logits there must be: those of a head that is tied to
        the table, for no row is ever sampled."""
        rows = [self.b.gather_rows(x, self.b.input(name)) for name in ("pool_rows", "sample_rows")]
        hidden = rows[0] if self._head is None else self._head(self, rows[0])
        head = self.b.weight("lm_head.weight", self.words.shape, source=self.words.name)
        return self.b.finish({"hidden": hidden, "logits": self.b.linear(rows[1], head)}, vocab_size=self.info.vocab_size)


def labels(config: RawConfig) -> int:
    """How many classes a classifier tells apart."""
    return len(table(config, "id2label")) or count(config, "num_labels", 2)


def read_encoder(norm_eps: str, architecture: str, config: RawConfig) -> ModelInfo:
    """`norm_eps`: the key under which the family has it."""
    for key in ("is_decoder", "add_cross_attention"):
        if flag(config, key, False):
            raise CheckpointError(f"{architecture} with {key!r} is no encoder", param=key)
    return read_info(architecture, {**config, "rms_norm_eps": number(config, norm_eps)})


def build_bert(info: ModelInfo, max_model_len: int | None, head: Head | None = None) -> Program:
    """BERT: each block's sum is normalised; learned positions, and segments that tell the texts of a pair apart."""
    return _bert(Encoder(info, max_model_len, head, "embeddings.word_embeddings.weight"), 0)


def build_roberta(info: ModelInfo, max_model_len: int | None, head: Head | None = None) -> Program:
    """RoBERTa, XLM-R: BERT, whose positions begin behind that of the padding."""
    skipped = count(info.config, "pad_token_id") + 1
    return _bert(Encoder(info, max_model_len, head, "embeddings.word_embeddings.weight"), skipped)


def read_roberta(architecture: str, config: RawConfig) -> ModelInfo:
    """The first positions of the table are nobody's."""
    info = read_encoder("layer_norm_eps", architecture, config)
    skipped = count(config, "pad_token_id") + 1
    if info.max_positions <= skipped:
        raise CheckpointError(
            f"'max_position_embeddings' {info.max_positions} leaves no position behind 'pad_token_id'",
            param="max_position_embeddings",
        )
    return info._replace(max_positions=info.max_positions - skipped)


def _bert(e: Encoder, skipped: int) -> Program:
    """`skipped`: rows of the table of positions before that of the first token."""
    info, b, at = e.info, e.b, "embeddings"
    refuse_unless(info, "position_embedding_type", ("absolute",), "only learned positions are")
    size, hidden = info.max_positions, info.hidden_size
    rows = (skipped, skipped + size) if skipped else None
    places = b.weight(f"{at}.position_embeddings.weight", (size, hidden), rows=rows)
    segments = count(info.config, "type_vocab_size")
    kinds = b.weight(f"{at}.token_type_embeddings.weight", (segments, hidden))
    separator = count(info.config, "sep_token_id", 1 if segments == 1 else None)
    x = e.op("embedding", b.input("token_ids"), e.words)
    x = e.op("add", x, e.op("embedding", b.input("positions"), places))
    x = e.op("add", x, e.op("segment_embedding", b.input("token_ids"), kinds, b.input("query_starts"), separator=separator))
    x = e.layer_norm(x, f"{at}.LayerNorm")
    for i in range(info.layers):
        x = _bert_layer(e, x, f"encoder.layer.{i}")
    return e.encoded(x)


def _bert_layer(e: Encoder, x: Value, at: str) -> Value:
    hidden = e.info.hidden_size
    q, k, v = (e.heads(e.linear(x, f"{at}.attention.self.{name}", hidden, bias=True)) for name in ("query", "key", "value"))
    y = e.linear(e.both_ways(q, k, v), f"{at}.attention.output.dense", hidden, bias=True)
    x = e.layer_norm(e.op("add", x, y), f"{at}.attention.output.LayerNorm")
    y = e.linear(x, f"{at}.intermediate.dense", e.info.intermediate_size, bias=True)
    y = e.linear(e.op("activation", y, kind=e.info.activation), f"{at}.output.dense", hidden, bias=True)
    return e.layer_norm(e.op("add", x, y), f"{at}.output.LayerNorm")


def bert_classifier(e: Encoder, x: Value) -> Value:
    """The pooler's layer, then the classes."""
    y = e.op("activation", e.linear(x, "pooler.dense", e.info.hidden_size, bias=True), kind="tanh")
    return e.linear(y, "classifier", labels(e.info.config), bias=True)


def roberta_classifier(e: Encoder, x: Value) -> Value:
    """A layer of its own, then the classes."""
    y = e.op("activation", e.linear(x, "classifier.dense", e.info.hidden_size, bias=True), kind="tanh")
    return e.linear(y, "classifier.out_proj", labels(e.info.config), bias=True)


def build_modernbert(info: ModelInfo, max_model_len: int | None, head: Head | None = None) -> Program:
    """ModernBERT: rotary positions, gated blocks behind norms; two layers of three see only what is near, on both sides."""
    config, e = info.config, Encoder(info, max_model_len, head, "embeddings.tok_embeddings.weight")
    every, bias = count(config, "global_attn_every_n_layers"), flag(config, "norm_bias", False)
    kinds = layer_kinds(
        info, ("full_attention", "sliding_attention"), lambda i: "sliding_attention" if i % every else "full_attention"
    )
    rotations = {kind: e.rotation(f"rope.{kind}.inv_freq", _rotary(config, kind)) for kind in dict.fromkeys(kinds)}
    x = e.layer_norm(e.op("embedding", e.b.input("token_ids"), e.words), "embeddings.norm", bias=bias)
    for i, kind in enumerate(kinds):
        at, window = f"model.layers.{i}", count(config, "local_attention") // 2 if kind == "sliding_attention" else None
        y = e.layer_norm(x, f"{at}.attn_norm", bias=bias) if i else x
        q, k, v = _modernbert_qkv(e, y, f"{at}.attn")
        y = e.both_ways(rotations[kind](q), rotations[kind](k), v, window)
        y = e.linear(y, f"{at}.attn.Wo", info.hidden_size, bias=flag(config, "attention_bias", False))
        x = e.op("add", x, y)
        x = e.op("add", x, _modernbert_mlp(e, e.layer_norm(x, f"{at}.mlp_norm", bias=bias), f"{at}.mlp"))
    x = e.layer_norm(x, "final_norm", bias=bias)
    averaged = head is not None and config.get("classifier_pooling", "cls") == "mean"
    return e.encoded(e.mean(x) if averaged else x)


def _rotary(config: RawConfig, kind: str) -> RawConfig:
    """Both kinds of layers have their own frequencies, under `rope_parameters` or as two keys."""
    base = config["global_rope_theta" if kind == "full_attention" else "local_rope_theta"]
    return {**config, "rope_parameters": {"rope_theta": base, **table(table(config, "rope_parameters"), kind)}}


def _modernbert_qkv(e: Encoder, x: Value, attn: str) -> list[Value]:
    size, bias = e.info.hidden_size, flag(e.info.config, "attention_bias", False)
    parts = (e.piece(x, f"{attn}.Wqkv", f"{attn}.{name}", i * size, size, bias=bias) for i, name in enumerate("qkv"))
    return [e.heads(part) for part in parts]


def _modernbert_mlp(e: Encoder, x: Value, mlp: str) -> Value:
    size, bias = e.info.intermediate_size, flag(e.info.config, "mlp_bias", False)
    gate, up = (e.piece(x, f"{mlp}.Wi", f"{mlp}.{name}", i * size, size, bias=bias) for i, name in enumerate(("gate", "up")))
    return e.linear(e.op("gated", gate, up, kind=e.info.activation), f"{mlp}.Wo", e.info.hidden_size, bias=bias)


def modernbert_classifier(e: Encoder, x: Value) -> Value:
    """The prediction head, then the classes."""
    config = e.info.config
    refuse_unless(e.info, "classifier_pooling", ("cls", "mean"), "only these two are")
    refuse_unless(e.info, "classifier_activation", ("gelu",), "only gelu is")
    y = e.linear(x, "head.dense", e.info.hidden_size, bias=flag(config, "classifier_bias", False))
    y = e.layer_norm(e.op("activation", y, kind="gelu"), "head.norm", bias=flag(config, "norm_bias", False))
    return e.linear(y, "classifier", labels(config), bias=True)


_PREFIX = re.compile(r"(?:bert|roberta|model)\.(?!layers\.)")


def without_prefix(config: RawConfig, tensors: Mapping[str, Make]) -> Mapping[str, Make]:
    """The names of a model without a head, whatever head it has; and those of norms as old checkpoints spell them."""
    named = dict[str, Make]()
    for name, make in tensors.items():
        plain = _PREFIX.sub("", name, count=1) if _PREFIX.match(name) else name
        plain = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", plain))
        named[plain] = make
    return named


def _family(
    build: Callable[[ModelInfo, int | None, Head | None], Program],
    defaults: RawConfig,
    read: Callable[[str, RawConfig], ModelInfo],
    head: Head | None = None,
) -> Hook:
    def traced(info: ModelInfo, max_model_len: int | None) -> Program:
        return build(info, max_model_len, head)

    about = "for embeddings" if head is None else "as a classifier or, with one class, a cross-encoder"
    traced.__doc__ = f"{(build.__doc__ or '').rstrip('.')}; {about}."
    return Hook(Family(traced, defaults, read, without_prefix))


_read_bert, _read_modernbert = partial(read_encoder, "layer_norm_eps"), partial(read_encoder, "norm_eps")
bert = _family(build_bert, BERT_DEFAULTS, _read_bert)
bert_classes = _family(build_bert, BERT_DEFAULTS, _read_bert, bert_classifier)
roberta = _family(build_roberta, ROBERTA_DEFAULTS, read_roberta)
roberta_classes = _family(build_roberta, ROBERTA_DEFAULTS, read_roberta, roberta_classifier)
modernbert = _family(build_modernbert, MODERNBERT_DEFAULTS, _read_modernbert)
modernbert_classes = _family(build_modernbert, MODERNBERT_DEFAULTS, _read_modernbert, modernbert_classifier)
