"""Tiny random checkpoints with a head for multi-token prediction, and what such a head says, by transformers' own layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_cases import CASES, make_model

HEADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3-next": ({}, {}),
    "qwen3.5": ({}, {"mtp_num_hidden_layers": 1}),
    "deepseek-v3": ({}, {"num_nextn_predict_layers": 1}),
    "deepseek-v3.2-sparse": ({"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}, {"num_nextn_predict_layers": 1}),
    "glm4-moe": ({}, {"num_nextn_predict_layers": 1}),
}  # fmt: skip
"""By case: what is changed in it, and what its config.json says of the head."""


class Head:
    """transformers' model of a case, whose last layer is taken off and becomes the head's. Its weights are in `folder`."""

    def __init__(self, name: str, folder: Path) -> None:
        torch, safetensors = pytest.importorskip("torch"), pytest.importorskip("safetensors.torch")
        sizes, said = HEADS[name]
        layers = {"num_hidden_layers": self._count(name) + 1}
        kinds = {"layer_types": [*self._kinds(name), "full_attention"]} if name.startswith("qwen") else {}
        self.model = make_model(name, {**sizes, **layers, **kinds})
        self.layer = self.model.model.layers[-1]
        self.count = len(self.model.model.layers) - 1
        hidden = self.model.config.hidden_size
        noise = torch.Generator().manual_seed(5)
        self.norms = {part: 0.1 * torch.randn(hidden, generator=noise) for part in ("embedding", "hidden", "last")}
        self.offset = float(name.startswith("qwen"))
        self.norms = {part: norm + (1 - self.offset) for part, norm in self.norms.items()}
        self.projection = torch.randn(hidden, 2 * hidden, generator=noise) / (2 * hidden) ** 0.5
        self.save(name, folder, said, safetensors)
        del self.model.model.layers[-1]
        self.model.config.num_hidden_layers = self.count

    @staticmethod
    def _count(name: str) -> int:
        return int(CASES[name][1].get("num_hidden_layers", 3))

    @staticmethod
    def _kinds(name: str) -> list[str]:
        return [("full_attention", "linear_attention")[(i + 1) % 4 > 0] for i in range(Head._count(name))]

    def save(self, name: str, folder: Path, said: dict[str, Any], safetensors: Any) -> None:
        """The checkpoint as published: the head's layer under mtp.layers.0, or behind the others."""
        self.model.save_pretrained(folder)
        at, qwen = f"model.layers.{self.count}", name.startswith("qwen")
        tensors = safetensors.load_file(folder / "model.safetensors")
        tensors = {key.replace(f"{at}.", "mtp.layers.0.") if qwen else key: tensor for key, tensor in tensors.items()}
        names = (
            ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", "mtp.fc")
            if qwen
            else (f"{at}.enorm", f"{at}.hnorm", f"{at}.shared_head.norm", f"{at}.eh_proj")
        )
        own = [self.norms["embedding"], self.norms["hidden"], self.norms["last"], self.projection]
        tensors |= {f"{key}.weight": tensor for key, tensor in zip(names, own)}
        safetensors.save_file(tensors, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text()) | said
        config["num_hidden_layers"] = self.count
        config |= {key: config[key][: self.count] for key in ("layer_types", "mlp_layer_types") if config.get(key)}
        (folder / "config.json").write_text(json.dumps(config))

    def hidden(self, prompt: list[int]) -> Any:
        """What the model's output projection reads, [tokens, hidden]."""
        import torch

        with torch.no_grad():
            return self.model.model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0]

    def logits(self, prompt: list[int], hidden: Any) -> np.ndarray:
        """What the head says behind prompt[1:], of which token t goes with hidden[t]: [tokens - 1, vocab]."""
        import torch

        inner, count = self.model.model, len(prompt) - 1
        with torch.no_grad():
            e = inner.embed_tokens(torch.tensor([prompt[1:]]))
            both = torch.cat([self._norm(e, "embedding"), self._norm(hidden[None, :count], "hidden")], dim=-1)
            x = both @ self.projection.T
            at = torch.arange(count)[None]
            unseen = torch.triu(torch.full((count, count), -torch.inf), 1)[None, None]
            y = self.layer(x, position_embeddings=inner.rotary_emb(x, at), attention_mask=unseen, position_ids=at)
            y = self._norm(y[0] if isinstance(y, tuple) else y, "last")
            return (y[0] @ self.model.lm_head.weight.T).numpy()

    def _norm(self, x: Any, part: str) -> Any:
        eps = self.model.config.rms_norm_eps
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (self.offset + self.norms[part])
