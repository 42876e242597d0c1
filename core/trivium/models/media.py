"""What a family that sees gives beside its Program; and a place for tiles' rows in that Program."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trivium.errors import ProgramError
from trivium.ops import OPERATORS, Call, Constant, Program, Span, Tile, Value

MEDIA = "media"
"""The constant that is written between steps, in the Program of the text and in that of the tower."""
SLOT = 64
"""Rows that are written to it at a time."""


class Vision(ABC):
    """How one model sees: its tower makes `tokens` rows of each tile, which stand in the prompt for as many placeholders. Any
    thread may call it. positions: int32[patches], the places of a tile's patches, as the tower takes them."""

    tokens: int
    positions: npt.NDArray[np.int32]

    @abstractmethod
    def tower(self, tiles: int) -> Program:
        """The Program of the tower for steps of up to `tiles` tiles. Its constant "media" is float32[tiles, patches, numbers a
        patch]; tile i of a step is a sequence whose token ids are the rows i * patches and following; a pooled row is the first of
        patches / tokens patches that make one row of the output "hidden"."""

    @abstractmethod
    def chat(self, tokenizer: Any, messages: Sequence[Any], template: Mapping[str, Any]) -> tuple[list[int], Sequence[Span]]:
        """Token ids of a chat that may have images among its parts, and what those stand for. tokenizer: render_chat(messages,
        **template), which shows a part {"type": "image"}, and encode(). InvalidRequestError for an image that can't be read."""

    @abstractmethod
    def tile(self, data: npt.NDArray[np.uint8]) -> Tile:
        """A tile of its data; InvalidRequestError if it has another shape or type than this model's."""

    @abstractmethod
    def values(self, tile: Tile) -> npt.NDArray[np.float32]:
        """float32[patches, numbers a patch]: what the tower takes."""


def with_media(program: Program, tokens: int) -> tuple[Program, int]:
    """The Program with a place for as many tiles' rows as a step has tokens, at most `tokens`, where it looks up its token ids:
    those from the returned one on are rows of the constant "media", float32[slots, SLOT, hidden]."""
    ids = next(v for v in program.inputs if v.name == "token_ids")
    lookups = [call for call in program.calls if call.name == "embedding" and call.args[0] is ids]
    if len(lookups) != 1 or lookups[0].args[1] is None:
        raise ProgramError("a Program with images must look up its token ids in one table")
    [call], [y], table = lookups, lookups[0].results, lookups[0].args[1]
    first, hidden = map(int, table.shape)
    zeros = np.zeros((-(-tokens // SLOT), SLOT, hidden), np.float32)
    media = Constant(Value(MEDIA, zeros.shape, "weight", "constant"), MEDIA, None, zeros)
    known, looked = Value("text_ids", ids.shape, "int32", "call"), Value(f"{y.name}.text", y.shape, y.dtype, "call")
    instead = [Call(OPERATORS["text_ids"], (ids,), {"vocab": first}, (known,))]
    for other in program.calls:
        instead.append(replace(other, args=tuple(known if v is ids else v for v in other.args)))
        if other is call:
            instead[-1] = replace(instead[-1], results=(looked,))
            instead.append(Call(OPERATORS["media_rows"], (ids, media.value, looked), {"first": first}, (y,)))
    return replace(program, constants=(*program.constants, media), calls=tuple(instead)), first
