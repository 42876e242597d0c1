"""A loaded model that says what a test wants: it computes as ever, but the sampled ids are those of a script."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from chat_models import make_chat_model

SPECIAL = ("<|python_tag|>", "<|im_end|>", "[TOOL_CALLS]")
ADDED = ("<think>", "</think>", "<tool_call>")


def make_scripted_model(folder: Path, *, template: str) -> Path:
    """A byte-level llama with SPECIAL tokens from id 259 on and ADDED ones, which are not special, behind them."""
    make_chat_model(folder, template=template)
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for i, text in enumerate(SPECIAL + ADDED):
        data["added_tokens"].append({"id": 259 + i, "content": text, "special": text in SPECIAL, **flags})
    path.write_text(json.dumps(data))
    return folder


class Script:
    """An executable that runs the model's own and answers `text` to prompts of `prompt` tokens, then the end token."""

    def __init__(self, executable: Any, ids: list[int], prompt: int, end: int) -> None:
        self._executable, self._ids, self._prompt, self._end = executable, ids, prompt, end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executable, name)

    def run(self, batch: Any) -> Any:
        step = self._executable.run(batch)
        places = batch.positions[batch.sample_rows] + 1 - self._prompt
        ids = [self._ids[i] if i < len(self._ids) else self._end for i in places]
        return _Step(step, ids)


class _Step:
    def __init__(self, step: Any, ids: list[int]) -> None:
        self._step, self._ids = step, ids

    def tokens(self) -> Any:
        return self._step.tokens()._replace(ids=np.array(self._ids, np.int32))


def say(llm: Any, answer: str | list[int], prompt: int) -> None:
    """From now on `llm` answers that to prompts of `prompt` tokens. Only between requests."""
    own = getattr(llm.loaded.executable, "_executable", llm.loaded.executable)
    ids = llm.tokenizer.encode(answer, add_special_tokens=False) if isinstance(answer, str) else answer
    script = Script(own, ids, prompt, min(llm.loaded.eos_ids))
    llm.loaded = llm.engine.model = dataclasses.replace(llm.loaded, executable=script)
