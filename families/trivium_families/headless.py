"""Models that were published without an output projection, for embeddings and reranking: Qwen3-Embedding and its like; and those
that have one to classes in its place.

Sources: Zhang et al. 2025, "Qwen3 Embedding"; names of tensors and keys as their config.json has them.
"""

from __future__ import annotations

from dataclasses import replace

from trivium.errors import CheckpointError
from trivium.models import ARCHITECTURES, Family, ModelInfo, RawConfig, table
from trivium.ops import Builder, Program, Value, new_builder
from trivium_families.encoders import labels
from trivium_families.llama_kin import MISTRAL
from trivium_families.plugin import Hook


def without_head(whole: Family) -> Hook:
    """The family `whole`, its logits those of a head that is tied to the embedding."""

    def read(architecture: str, config: RawConfig) -> ModelInfo:
        return whole.read(architecture, {**config, "tie_word_embeddings": True})

    def build(info: ModelInfo, max_model_len: int | None) -> Program:
        return whole.build(info, max_model_len)

    build.__doc__ = f"{(whole.build.__doc__ or '').rstrip('.')}; without a head, for embeddings."
    return Hook(Family(build, whole.defaults, read))


def classifying(whole: Family) -> Hook:
    """The family `whole`, whose last hidden states go through a projection to classes, or (`logit_score`, as the
    module LogitScore of sentence-transformers has it) to the logit of one token less that of another."""

    def read(architecture: str, config: RawConfig) -> ModelInfo:
        tied = {} if "logit_score" in config else {"tie_word_embeddings": True}
        return whole.read(architecture, {**config, **tied})

    def build(info: ModelInfo, max_model_len: int | None) -> Program:
        program = whole.build(info, max_model_len)
        b, hidden = new_builder(), program.outputs["hidden"]
        if "logit_score" in info.config:
            scores = _logit_score(b, hidden, info, program)
        else:
            scores = b.linear(hidden, b.weight("score.weight", (labels(info.config), info.hidden_size)))
        return _continued(program, b.finish({"hidden": scores}))

    build.__doc__ = f"{(whole.build.__doc__ or '').rstrip('.')}; as a classifier or, with one class, a cross-encoder."
    return Hook(Family(build, whole.defaults, read))


def _continued(program: Program, more: Program) -> Program:
    """`program` and then the calls of `more`, which read its values; the names of their results tell where they come from."""
    new = {v: Value(f"score.{v.name}", v.shape, v.dtype, v.kind) for call in more.calls for v in call.results}
    calls = (
        replace(
            call, args=tuple(None if v is None else new.get(v, v) for v in call.args), results=tuple(new[v] for v in call.results)
        )
        for call in more.calls
    )
    outputs = {**program.outputs, **{name: new[v] for name, v in more.outputs.items()}}
    constants = (*program.constants, *more.constants)
    return replace(program, constants=constants, calls=(*program.calls, *calls), outputs=outputs)


def _logit_score(b: Builder, hidden: Value, info: ModelInfo, program: Program) -> Value:
    """score[pooled, 1] by rows of the output projection."""
    asked = table(info.config, "logit_score")
    source = next(c.source for c in program.constants if c.value.name == "lm_head.weight")

    def logit(key: str) -> Value:
        token = asked.get(key)
        if type(token) is not int or not 0 <= token < info.vocab_size:
            raise CheckpointError(f"{key} {token!r} of LogitScore is no id of the {info.vocab_size} tokens", param=key)
        weight = b.weight(f"score.{key}.weight", (1, info.hidden_size), source=source, rows=(token, token + 1))
        return b.linear(hidden, weight)  # type: ignore[no-any-return]

    yes = logit("true_token_id")
    if asked.get("false_token_id") is None:
        return yes
    return b.add(yes, b.scale(logit("false_token_id"), factor=-1.0))  # type: ignore[no-any-return]


llama = without_head(ARCHITECTURES["LlamaForCausalLM"])
mistral = without_head(MISTRAL)
qwen2 = without_head(ARCHITECTURES["Qwen2ForCausalLM"])
qwen3 = without_head(ARCHITECTURES["Qwen3ForCausalLM"])
llama_classes = classifying(ARCHITECTURES["LlamaForCausalLM"])
mistral_classes = classifying(MISTRAL)
qwen2_classes = classifying(ARCHITECTURES["Qwen2ForCausalLM"])
qwen3_classes = classifying(ARCHITECTURES["Qwen3ForCausalLM"])
