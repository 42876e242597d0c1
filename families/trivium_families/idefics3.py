"""Idefics 3 and SmolVLM: Llama that reads images: a SigLIP tower, pixel shuffle and one projection make tokens of each tile.

Sources: Laurençon et al. 2024, "Building and better understanding vision-language models"; Marafioti et al. 2025, "SmolVLM:
Redefining small and efficient multimodal models"; keys as in their config.json and preprocessor_config.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from trivium.errors import CheckpointError, InvalidRequestError
from trivium.models import ARCHITECTURES, Family, ModelInfo, RawConfig, Vision, count, table
from trivium.ops import Program, Span, Tile
from trivium.weights.checkpoint import read_json

from trivium_families.pieces import rearranged, refuse_unless
from trivium_families.plugin import Hook
from trivium_families.stacked import Make
from trivium_families.vision.parts import spans, take
from trivium_families.vision.siglip import Tower, TowerInfo, places
from trivium_families.vision.tiling import U8, Tiles, Tiling

_LLAMA = ARCHITECTURES["LlamaForCausalLM"]
DEFAULTS: RawConfig = {**_LLAMA.defaults, "rms_norm_eps": 1e-5}
MARK, AROUND, WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
_PATCHES = "model.vision_model.embeddings.patch_embedding.weight"


class Idefics3Vision(Vision):
    """See trivium.models.Vision. Patches are ordered so that those which one token is made of stand side by side."""

    def __init__(self, config: RawConfig, folder: Path) -> None:
        processor, given = _processor(folder)
        self.info, self.tiling = TowerInfo.of(table(config, "vision_config")), Tiling.of(processor)
        self.scale, self.side = count(config, "scale_factor", 2), self.tiling.side // self.info.patch
        self.placeholder = count(config, "image_token_id", 128257)
        self._hidden = count(table(config, "text_config"), "hidden_size")
        if self.side == 0 or self.side % self.scale:
            raise CheckpointError(f"tiles of {self.side} patches a side can't be shuffled in blocks of {self.scale}")
        self.tokens = (self.side // self.scale) ** 2
        if (said := given.get("image_seq_len")) not in (None, self.tokens):
            message = f"the processor's 'image_seq_len' is {said!r}; tiles of this configuration make {self.tokens} tokens"
            raise CheckpointError(message, param="image_seq_len")
        self.positions = self._in_blocks(places(self.side, self.info.side)).ravel()
        recipe = (self.tiling.factor, self.tiling.mean.tolist(), self.tiling.deviation.tolist(), self.side, self.info.patch)
        self._recipe = repr(recipe).encode()

    def tower(self, tiles: int) -> Program:
        tower = Tower(self.info, "model.vision_model")
        b, x = tower.b, tower.trace(tiles, self.side**2)
        blocks = tower.op("gather_blocks", x, b.input("pool_rows"), count=self.scale**2)
        weight = b.weight("model.connector.modality_projection.proj.weight", (self._hidden, int(blocks.shape[1])))
        outputs = {"hidden": tower.op("linear", blocks, weight), "logits": tower.op("gather_rows", x, b.input("sample_rows"))}
        return b.finish(outputs, vocab_size=self.info.hidden)

    def chat(self, tokenizer: Any, messages: Sequence[Any], template: Mapping[str, Any]) -> tuple[list[int], Sequence[Span]]:
        plain, images = take(messages, self.tiling.cut)
        text = self._expanded(tokenizer.render_chat(plain, **template), images)
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        tiles = [self.tile(self._patches(pixels)) for image in images for pixels in image.pixels]
        return ids, spans(ids, self.placeholder, tiles, self.tokens)

    def tile(self, data: U8) -> Tile:
        shape = self.side**2, 3 * self.info.patch**2
        if data.dtype != np.uint8 or data.shape != shape:
            raise InvalidRequestError(f"a tile of this model is uint8{list(shape)}, not {data.dtype}{list(data.shape)}")
        return Tile(blake2b(self._recipe + data.tobytes(), digest_size=32).digest(), data)

    def values(self, tile: Tile) -> npt.NDArray[np.float32]:
        colours = tile.data.reshape(len(tile.data), 3, -1).swapaxes(1, 2)
        return self.tiling.values(colours).swapaxes(1, 2).reshape(tile.data.shape)

    def _expanded(self, text: str, images: Sequence[Tiles]) -> str:
        """A rendered chat with the placeholders of its images where each is marked."""
        pieces = text.split(MARK) if images else [text]
        if len(pieces) != len(images) + 1:
            message = f"the rendered chat has {len(pieces) - 1} times {MARK!r} for {len(images)} images; texts must not contain it"
            raise InvalidRequestError(f"{message}, and the chat template must show the images of every role", param="messages")
        return "".join((pieces[0], *(self._shown(image) + piece for image, piece in zip(images, pieces[1:]))))

    def _shown(self, image: Tiles) -> str:
        """The text in which the placeholders of an image stand."""
        whole = f"{AROUND}{WHOLE}{MARK * self.tokens}{AROUND}"
        if not image.rows:
            return whole
        lines = ("".join(f"{AROUND}<row_{r}_col_{c}>{MARK * self.tokens}" for c in range(1, image.columns + 1)) + "\n"
                 for r in range(1, image.rows + 1))  # fmt: skip
        return "".join(lines) + "\n" + whole

    def _patches(self, pixels: U8) -> U8:
        """uint8[patches, 3 * patch * patch], colour by colour."""
        edge, patch = self.side * self.info.patch, self.info.patch
        grid = pixels[:edge, :edge].reshape(self.side, patch, self.side, patch, 3).transpose(0, 2, 4, 1, 3)
        return np.ascontiguousarray(self._in_blocks(grid).reshape(self.side**2, -1))

    def _in_blocks(self, grid: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """grid[side, side, ...] with the patches of a block side by side: [blocks, scale * scale, ...]."""
        n, s = self.side // self.scale, self.scale
        return grid.reshape(n, s, n, s, *grid.shape[2:]).swapaxes(1, 2).reshape(n * n, s * s, *grid.shape[2:])


def _processor(folder: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The image processor's configuration, and that of the processor around it."""
    whole, own = folder / "processor_config.json", folder / "preprocessor_config.json"
    given = read_json(whole) if whole.exists() else {}
    return table(given, "image_processor") or read_json(own), given


def build(info: ModelInfo, max_model_len: int | None) -> Program:
    """Idefics 3, SmolVLM: Llama over tokens of texts and of images."""
    refuse_unless(info, "model_type", ("llama", "idefics3", "smolvlm"), "its text model must be Llama")
    return _LLAMA.build(info, max_model_len)


def arrange(config: RawConfig, tensors: Mapping[str, Make]) -> Mapping[str, Make]:
    """The text model's tensors under Llama's names, and the convolution over patches as a projection."""
    named = {name.replace("model.text_model.", "model.", 1): make for name, make in tensors.items()}
    if _PATCHES in named:
        named[_PATCHES] = rearranged(_PATCHES, named[_PATCHES], _flat)
    return named


def _flat(kernel: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return kernel.reshape(len(kernel), -1)


idefics3 = Hook(Family(build, DEFAULTS, arrange=arrange, vision=Idefics3Vision))
