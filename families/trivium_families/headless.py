"""Models that were published without an output projection, for embeddings and reranking: Qwen3-Embedding and its like.

Sources: Zhang et al. 2025, "Qwen3 Embedding"; names of tensors and keys as their config.json has them.
"""

from __future__ import annotations

from trivium.models import ARCHITECTURES, Family, ModelInfo, RawConfig
from trivium.ops import Program

from trivium_families.plugin import Hook


def without_head(name: str) -> Hook:
    """The family of the architecture `name`, its logits those of a head that is tied to the embedding."""
    whole = ARCHITECTURES[name]

    def read(architecture: str, config: RawConfig) -> ModelInfo:
        return whole.read(architecture, {**config, "tie_word_embeddings": True})

    def build(info: ModelInfo, max_model_len: int | None) -> Program:
        return whole.build(info, max_model_len)

    build.__doc__ = f"{(whole.build.__doc__ or '').rstrip('.')}; without a head, for embeddings."
    return Hook(Family(build, whole.defaults, read))


llama = without_head("LlamaForCausalLM")
mistral = without_head("MistralForCausalLM")
qwen2 = without_head("Qwen2ForCausalLM")
qwen3 = without_head("Qwen3ForCausalLM")
