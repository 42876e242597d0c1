"""SigLIP's vision transformer: patches, learned positions, pre-norm layers of attention over all of a tile.

Source: Zhai et al. 2023, "Sigmoid Loss for Language Image Pre-Training"; positions of tiles of any size as in Dehghani et al. 2023,
"Patch n' Pack: NaViT".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
from trivium.errors import CheckpointError, UnsupportedError
from trivium.models import count, number
from trivium.models.config import MAX_LAYERS
from trivium.ops import OPERATORS, Builder, PagedKV, Value

ACTIVATIONS = {
    "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "silu": "silu", "quick_gelu": "quick_gelu",
}  # fmt: skip


_DEFAULTS = {
    "hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16, "num_channels": 3,
    "image_size": 224, "patch_size": 32, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
}  # fmt: skip


class TowerInfo(NamedTuple):
    """The configuration of a tower, checked. side: patches along each side of the images that its positions are learned for; patch:
    pixels along a side of a patch."""

    hidden: int
    inter: int
    layers: int
    heads: int
    side: int
    patch: int
    activation: str
    eps: float

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> TowerInfo:
        """What the configuration leaves out is as in the models' own code. CheckpointError or UnsupportedError names the key."""
        config = {**_DEFAULTS, **config}
        if count(config, "num_channels") != 3:
            raise UnsupportedError("the tower takes images of another number of channels than three", param="num_channels")
        hidden, heads, patch = count(config, "hidden_size"), count(config, "num_attention_heads"), count(config, "patch_size")
        image, activation = count(config, "image_size"), config["hidden_act"]
        if hidden % heads or image < patch:
            raise CheckpointError(f"the tower has {hidden} channels for {heads} heads, and patches of {patch} of {image} pixels")
        if activation not in ACTIVATIONS:
            message = f"the tower's activation {activation!r} is not one of {', '.join(ACTIVATIONS)}"
            raise UnsupportedError(message, param="hidden_act")
        layers = count(config, "num_hidden_layers", limit=MAX_LAYERS)
        eps = number(config, "layer_norm_eps")
        return cls(hidden, count(config, "intermediate_size"), layers, heads, image // patch, patch, ACTIVATIONS[activation], eps)


class Tower:
    """Traces one tower. Activations are x[tokens, hidden], a token a patch and a sequence a tile; constants are named by their
    checkpoint names behind `prefix`."""

    def __init__(self, info: TowerInfo, prefix: str) -> None:
        self.info, self.prefix, self.b = info, prefix, Builder(OPERATORS)

    def op(self, name: str, *args: Value | None, **attrs: Any) -> Value:
        """Records an operator that has one result."""
        return cast(Value, self.b.call(name, *args, **attrs))

    def linear(self, x: Value, name: str, out: int) -> Value:
        """y[..., out], with a bias."""
        weight = self.b.weight(f"{name}.weight", (out, x.shape[-1]))
        return self.op("linear", x, weight, self.b.weight(f"{name}.bias", (out,)))

    def norm(self, x: Value, name: str) -> Value:
        """Layer norm."""
        weight, bias = (self.b.weight(f"{name}.{part}", (self.info.hidden,)) for part in ("weight", "bias"))
        return self.op("layer_norm", x, weight, bias, eps=self.info.eps)

    def embed(self, tiles: int, patches: int) -> Value:
        """Patches by number, tile after tile, from the constant "media" (float32[tiles, patches, 3 * patch * patch]); their places
        among the learned positions are the step's positions."""
        info, at = self.info, f"{self.prefix}.embeddings"
        media = self.b.array("media", np.zeros((tiles, patches, 3 * info.patch**2), np.float32))
        x = self.linear(self.op("media_rows", self.b.input("token_ids"), media, first=0), f"{at}.patch_embedding", info.hidden)
        learned = self.b.weight(f"{at}.position_embedding.weight", (info.side**2, info.hidden))
        places = self.op("text_ids", self.b.input("positions"), vocab=info.side**2)
        return self.op("add", x, self.op("embedding", places, learned))

    def trace(self, tiles: int, patches: int) -> Value:
        """What the last norm gives."""
        x = self.embed(tiles, patches)
        for i in range(self.info.layers):
            at = f"{self.prefix}.encoder.layers.{i}"
            x = self.op("add", x, self._attention(i, self.norm(x, f"{at}.layer_norm1"), f"{at}.self_attn"))
            y = self.linear(self.norm(x, f"{at}.layer_norm2"), f"{at}.mlp.fc1", self.info.inter)
            y = self.op("activation", y, kind=self.info.activation)
            x = self.op("add", x, self.linear(y, f"{at}.mlp.fc2", self.info.hidden))
        return self.norm(x, f"{self.prefix}.post_layernorm")

    def _attention(self, i: int, x: Value, at: str) -> Value:
        heads, dim = self.info.heads, self.info.hidden // self.info.heads
        flat = [self.linear(x, f"{at}.{name}_proj", self.info.hidden) for name in ("q", "k", "v")]
        q, k, v = (self.op("reshape", y, shape=("tokens", heads, dim)) for y in flat)
        kv = self.b.kv_write(self.b.state(f"kv.{i}", PagedKV(heads, dim)), k, v)
        lengths = self.b.input("query_starts"), self.b.input("context_lens")
        y = self.op("paged_attention", q, kv, *lengths, scale=dim**-0.5, causal=False)
        return self.linear(self.op("reshape", y, shape=("tokens", heads * dim)), f"{at}.out_proj", self.info.hidden)


def places(side: int, learned: int) -> npt.NDArray[np.int32]:
    """int32[side, side]: the learned position (of learned * learned, line by line) of each patch of a tile, by the part of the tile
    that lies before it. In whole numbers: float32 arithmetic would give some patches their neighbours' (not in tiles of 26, 27 or
    32 patches a side, which published models have)."""
    bucket = np.arange(side) * learned // side
    return np.asarray(bucket[:, None] * learned + bucket, np.int32)
