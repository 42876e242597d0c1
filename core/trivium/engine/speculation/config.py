"""Which drafter an engine uses and how far it may go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from trivium.errors import InvalidRequestError

METHODS = ("ngram", "suffix", "draft")


@dataclass(frozen=True)
class Speculative:
    """method: "ngram" copies what followed the longest, then latest earlier occurrence of the last tokens; "suffix" takes what
    most often followed them, in finished requests too; "draft" asks a smaller model. num_speculative_tokens: most tokens drafted
    for a sequence in one step. adaptive: drafts get shorter, or end, where measured times and acceptance say that they lose.
    prompt_lookup_min, prompt_lookup_max: length of the occurrences that are looked for, in tokens. model, backend: the draft
    model, as LLM takes them; it must have the target's vocabulary."""

    method: str
    num_speculative_tokens: int = 6
    adaptive: bool = True
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 8
    model: str | None = None
    backend: str = "auto"

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise _refuse("method", f"one of {', '.join(METHODS)}", self.method)
        if type(self.adaptive) is not bool:
            raise _refuse("adaptive", "True or False", self.adaptive)
        for name in ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= 64:
                raise _refuse(name, "an integer from 1 to 64", value)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise _refuse("prompt_lookup_min", f"at most prompt_lookup_max ({self.prompt_lookup_max})", self.prompt_lookup_min)
        if (self.method == "draft") != (self.model is not None):
            raise _refuse("model", 'the name of a draft model for method "draft", and left out for any other', self.model)

    @classmethod
    def of(cls, given: Speculative | Mapping[str, Any] | None) -> Speculative | None:
        """From a mapping of the fields; unknown ones are refused."""
        if given is None or isinstance(given, Speculative):
            return given
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(given) - set(known)) if isinstance(given, Mapping) else [given]
        if unknown or "method" not in given:
            message = f"speculative must be a mapping with a method ({', '.join(METHODS)}) and, if need be, {', '.join(known[1:])}"
            raise InvalidRequestError(f"{message}, not {given!r}", param="speculative")
        return cls(**given)


def _refuse(name: str, wanted: str, got: object) -> InvalidRequestError:
    return InvalidRequestError(f"speculative: {name} must be {wanted}, not {got!r}", param="speculative")
