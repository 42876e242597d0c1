"""Tiny llama folders with a chat template or a generation config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_checkpoints import make_checkpoint

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"


def make_chat_model(
    folder: Path, *, template: str | None = TEMPLATE, generation: dict[str, Any] | None = None, **config: Any
) -> Path:
    """A byte-level llama of two layers; `generation` becomes generation_config.json."""
    make_checkpoint(folder, "llama", **config)
    tokenizer = folder / "tokenizer_config.json"
    if template is not None:
        tokenizer.write_text(json.dumps({**json.loads(tokenizer.read_text()), "chat_template": template}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder
