"""Heads for multi-token prediction: one more layer, which reads what the model makes of a token and the token that follows it, and
says which one comes behind that.

Sources: DeepSeek-AI 2024, "DeepSeek-V3", section 2.2; Qwen Team 2025, model card of Qwen3-Next-80B-A3B.
"""

from __future__ import annotations

import numpy as np
from trivium.models import Decoder, ModelInfo
from trivium.models.decoder import DRAFT_ROWS, HIDDEN
from trivium.ops import Value


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

    def _hidden(self, x: Value) -> Value:
        """h[tokens, hidden], the rows adapters[t] of HIDDEN, read as `lora` reads an adapter's: x · 0 + 1 · row. So any
        backend that can have adapters can have this."""
        ones = self.op("linear", x, self.b.array("nothing", np.zeros((1, self.info.hidden_size))), self.b.array("one", np.ones(1)))
        factors = self.b.array("draft.ones", np.ones((DRAFT_ROWS, 1, 1)))
        rows = self.b.array(HIDDEN, np.zeros((DRAFT_ROWS, 1, self.info.hidden_size)))
        return self.op("lora", self.op("scale", x, factor=0.0), ones, factors, rows, self.b.input("adapters"))
