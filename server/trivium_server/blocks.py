"""An answer as blocks, one after another: what Anthropic calls content blocks and OpenAI's Responses output items."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from trivium import CompletionOutput

Kind = Literal["reasoning", "text", "call"]
Change = Literal["open", "more", "close"]


@dataclass
class Block:
    """text: of a call its arguments as JSON text. call: its number, id and name."""

    index: int
    kind: Kind
    text: str = ""
    call: int = -1
    id: str = ""
    name: str = ""
    complete: bool = True


class Blocks:
    """Takes the news of one output, or all of it at once, and says how blocks open, grow and close."""

    def __init__(self, *, single: bool = False) -> None:
        """single: calls after the first are left out."""
        self.all: list[Block] = []
        self._single = single
        self._open: Block | None = None

    def take(self, output: CompletionOutput) -> Iterator[tuple[Change, Block, str]]:
        """(what happens, to which block, its new text)."""
        for kind, text in (("reasoning", output.reasoning), ("text", output.content)):
            if text:
                yield from self._grow(kind, text)  # type: ignore[arg-type]
        for call in output.tool_calls if output.events else ():
            if self._single and call.index:
                continue
            if call.id:
                yield from self.close()
                yield "open", self._opened(Block(len(self.all), "call", "", call.index, call.id, call.name, False)), ""
            if self._open is not None and self._open.call == call.index:
                if call.arguments:
                    self._open.text += call.arguments
                    yield "more", self._open, call.arguments
                self._open.complete = self._open.complete or call.complete

    def close(self) -> Iterator[tuple[Change, Block, str]]:
        """Ends the block that is open, if one is."""
        if self._open is not None:
            block, self._open = self._open, None
            yield "close", block, ""

    def _grow(self, kind: Kind, text: str) -> Iterator[tuple[Change, Block, str]]:
        if self._open is None or self._open.kind != kind:
            yield from self.close()
            yield "open", self._opened(Block(len(self.all), kind)), ""
        assert self._open is not None
        self._open.text += text
        yield "more", self._open, text

    def _opened(self, block: Block) -> Block:
        self.all.append(block)
        self._open = block
        return block


def whole(output: CompletionOutput, *, single: bool = False) -> list[Block]:
    """The blocks of a whole answer; calls that broke off must not be executed, and are left out."""
    blocks = Blocks(single=single)
    for _ in blocks.take(output):
        pass
    return [block for block in blocks.all if block.complete]
