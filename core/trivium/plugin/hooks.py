"""The hooks that plugins implement, one a kind of thing. The entry point's group says the kind: `trivium` for a backend,
`trivium.KINDs` for all others; its name is the name under which the thing is asked for, its object (a module, say) has the hook
`trivium_KIND`. See docs/plugins.md for an example of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import pluggy

from trivium.extensions import PROJECT
from trivium.ops import Weight
from trivium.plugin.contract import Backend

if TYPE_CHECKING:
    import tokenizers

    from trivium.models import Family
    from trivium.text.syntaxes import ReasoningSyntax, ToolSyntax
    from trivium.weights import Checkpoint

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


LogitsProcessor = Callable[[Sequence[int], Sequence[int]], "tuple[npt.ArrayLike, npt.ArrayLike] | None"]
"""(prompt ids, output ids) -> ids and what is added to their logits for the next token (-inf bans an id), or None. A function of
these two and of nothing else: it is asked ahead for tokens that may not come, again after a fault, and for all samples of a
request. Whatever it raises ends that request with a PluginError, and no other."""
ProcessorFactory = Callable[[Any, Any], LogitsProcessor]
"""(arguments, tokenizer) -> the processor of one request, when it arrives. `arguments`: JSON values as the client gave them; those
it can't use are an InvalidRequestError. `tokenizer`: encode, decode, token_bytes, token_text, vocab_size."""
Tensors = Mapping[str, Callable[[], Weight]]
"""Tensors by name; each is made, as a Weight over bytes that lie on disk, when it is called."""
WeightReader = Callable[[Mapping[str, Any], Tensors], Tensors]
"""(quantization_config, the checkpoint's tensors) -> the weights that the model's Program names. Of a tensor that is stored as
several (packed numbers, scales, zero points) it makes one Weight, whose `data` has the weight's rows first, so that rows can be cut
out, whose `decoder` gives exactly the numbers that the format means, and whose `format` is a name of its own, or one that backends
know where the data is repacked without loss. Other tensors are handed on as they are."""
CheckpointReader = Callable[[Path], "Checkpoint"]
"""(the file) -> the model in it, whose configuration has the keys of config.json and whose tensors have canonical names. What is
wrong with the file is a CheckpointError, what can't be read an UnsupportedError."""
TokenizerFactory = Callable[[Path, Mapping[str, Any]], "tokenizers.Tokenizer"]
"""(the checkpoint's folder, tokenizer_config.json) -> what encodes, of the library `tokenizers`, with its decoder."""
ModelSource = Callable[[str, "Path | None", bool, bool], "str | Path"]
"""(what follows "SCHEME:", the folder for what is fetched or None for the usual one, whether to show progress, whether to compare
the digests of what is there) -> the local folder or .gguf file. DownloadError and ModelNotFoundError say what went wrong."""


class Hooks:
    """Hook specifications: each is asked, once, when its thing is first asked for by name, and must be cheap."""

    @hookspec
    def trivium_backend(self) -> Backend:  # type: ignore[empty-body]
        """Returns the plugin's one Backend: no heavy import, no device access (that is Backend.probe's place). Asked for by
        backend="NAME"."""

    @hookspec
    def trivium_model(self) -> Family:  # type: ignore[empty-body]
        """Returns a model family: configuration -> Program. NAME: what config.json has under "architectures"."""

    @hookspec
    def trivium_checkpoint(self) -> CheckpointReader:  # type: ignore[empty-body]
        """Returns what opens a model that is one file. NAME: the suffix of such files, without the dot."""

    @hookspec
    def trivium_gguf_model(self) -> object:
        """Returns a `trivium_formats.gguf.GGUFModel`: what the tensors and keys of GGUF files of one architecture mean. NAME: their
        "general.architecture"."""

    @hookspec
    def trivium_weight_format(self) -> WeightReader:  # type: ignore[empty-body]
        """Returns the reader of a storage format. NAME: the "quant_method" in the quantization_config of config.json; or,
        ending in ".json", a file beside it: where config.json has none, that file's object is read, its keys named as tensors
        are."""

    @hookspec
    def trivium_tokenizer(self) -> TokenizerFactory:  # type: ignore[empty-body]
        """Returns what builds a tokenizer where a checkpoint has no tokenizer.json. NAME: the "tokenizer_class" of its
        tokenizer_config.json."""

    @hookspec
    def trivium_tool_parser(self) -> ToolSyntax:  # type: ignore[empty-body]
        """Returns how a family writes tool calls. Asked for by tool_parser="NAME"."""

    @hookspec
    def trivium_reasoning_parser(self) -> ReasoningSyntax:  # type: ignore[empty-body]
        """Returns how a family writes its reasoning. Asked for by reasoning_parser="NAME"."""

    @hookspec
    def trivium_logits_processor(self) -> ProcessorFactory:  # type: ignore[empty-body]
        """Returns the factory of a logits processor. Asked for by SamplingParams(logits_processors={"NAME": arguments})."""

    @hookspec
    def trivium_model_source(self) -> ModelSource:  # type: ignore[empty-body]
        """Returns what brings models onto this machine. NAME: the scheme, for models called "NAME:..."."""
