"""Text in and out: tokenizers, incremental detokenisation, stop strings and chat templates.

Importing this package loads neither `tokenizers` nor `jinja2`; the first tokenizer and the first rendered chat do.
"""

from __future__ import annotations

from trivium.text.events import CallArguments, CallEnd, CallStart, ContentDelta, Event, ReasoningDelta, ToolCall
from trivium.text.grammar import Grammars, Matcher
from trivium.text.stops import StopMatcher
from trivium.text.tokenizer import Detokenizer, Tokenizer, Vocabulary

__all__ = [
    "CallArguments", "CallEnd", "CallStart", "ContentDelta", "Detokenizer", "Event", "Grammars", "Matcher", "ReasoningDelta",
    "StopMatcher", "Tokenizer", "ToolCall", "Vocabulary",
]  # fmt: skip
