"""Heads for multi-token prediction: one more layer, which reads what the model makes of a token and the token that follows it, and
says which one comes behind that.

Sources: DeepSeek-AI 2024, "DeepSeek-V3", section 2.2; Qwen Team 2025, model card of Qwen3-Next-80B-A3B.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from trivium.errors import UnsupportedError
from trivium.models import Decoder, ModelInfo
from trivium.models.decoder import DRAFT_ROWS, HIDDEN
from trivium.ops import Program, Value


class HeadDecoder(Decoder):
    """A Decoder of such a head, whose layer is number `info.layers`. final: what its last norm is called."""

    def __init__(self, info: ModelInfo, max_model_len: int | None, final: str, *, norm_offset: float = 0.0) -> None:
        super().__init__(info, max_model_len, norm_offset=norm_offset)
        self._final = final

    def norm(self, x: Value, name: str) -> Value:
        """As a Decoder's, but that the model's own last norm is the head's."""
        return super().norm(x, self._final if name == "model.norm" else name)

    def joined(self, embedding_norm: str, hidden_norm: str, projection: str) -> Value:
        """x[tokens, hidden]: each token's embedding and the model's hidden state of the token before, normalised and projected."""
        e = self.embed()
        both = self.op("concat", self.norm(e, embedding_norm), self.norm(self._hidden(e), hidden_norm))
        return self.linear(both, projection, self.info.hidden_size)

    def stored(self, attend: Callable[[int, Value], Value], feed_forward: Callable[[int, Value], Value]) -> Program:
        """The head that stored_head() gives, of two blocks with their norms before them."""
        i, op = self.info.layers, self.op
        layer = f"model.layers.{i}"
        x = self.joined(f"{layer}.enorm", f"{layer}.hnorm", f"{layer}.eh_proj")
        x = op("add", x, attend(i, self.norm(x, f"{layer}.input_layernorm")))
        return self.finish(op("add", x, feed_forward(i, self.norm(x, f"{layer}.post_attention_layernorm"))))

    def _hidden(self, x: Value) -> Value:
        """h[tokens, hidden], the rows adapters[t] of HIDDEN, read as `lora` reads an adapter's: x · 0 + 1 · row. So any
        backend that can have adapters can have this."""
        ones = self.op("linear", x, self.b.array("nothing", np.zeros((1, self.info.hidden_size))), self.b.array("one", np.ones(1)))
        factors = self.b.array("draft.ones", np.ones((DRAFT_ROWS, 1, 1)))
        rows = self.b.array(HIDDEN, np.zeros((DRAFT_ROWS, 1, self.info.hidden_size)))
        return self.op("lora", self.op("scale", x, factor=0.0), ones, factors, rows, self.b.input("adapters"))


def stored_head(info: ModelInfo, max_model_len: int | None) -> HeadDecoder:
    """Of a head whose layer stands behind the others in the checkpoint. UnsupportedError unless `num_nextn_predict_layers` is 1."""
    if info.config.get("num_nextn_predict_layers") != 1:
        message = f"{info.architecture} must have a head of one layer ('num_nextn_predict_layers' 1) for its drafts, not "
        raise UnsupportedError(f"{message}{info.config.get('num_nextn_predict_layers')!r}", param="num_nextn_predict_layers")
    return HeadDecoder(info, max_model_len, f"model.layers.{info.layers}.shared_head.norm")
