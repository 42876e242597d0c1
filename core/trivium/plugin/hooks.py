"""The hooks that plugins implement. The entry point's group says which: `trivium` for a backend, `trivium.logits_processors` for a
logits processor; its name is the backend's or the processor's name, its object (a module, say) has the hook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt
import pluggy

from trivium.plugin.contract import Backend

PROJECT = "trivium"
PROCESSORS = "trivium.logits_processors"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


LogitsProcessor = Callable[[Sequence[int], Sequence[int]], "tuple[npt.ArrayLike, npt.ArrayLike] | None"]
"""(prompt ids, output ids) -> ids and what is added to their logits for the next token (-inf bans an id), or None. A function of
these two and of nothing else: it is asked ahead for tokens that may not come, again after a fault, and for all samples of a
request. Whatever it raises ends that request with a PluginError, and no other."""
ProcessorFactory = Callable[[Any, Any], LogitsProcessor]
"""(arguments, tokenizer) -> the processor of one request, when it arrives. `arguments`: JSON values as the client gave them; those
it can't use are an InvalidRequestError. `tokenizer`: encode, decode, token_bytes, token_text, vocab_size."""


class Hooks:
    """Hook specifications."""

    @hookspec
    def trivium_backend(self) -> Backend:  # type: ignore[empty-body]
        """Returns the plugin's one Backend. Must be cheap: no heavy import, no device access (that is Backend.probe's place)."""

    @hookspec
    def trivium_logits_processor(self) -> ProcessorFactory:  # type: ignore[empty-body]
        """Returns the factory of the plugin's one logits processor; asked once, when a request first names it."""
