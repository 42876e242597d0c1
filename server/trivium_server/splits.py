"""Grey release: several versions of a model behind one name, each with its share of the calls."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trivium import errors


def _wrong(message: str, param: str = "weights") -> errors.InvalidRequestError:
    return errors.InvalidRequestError(message, param=param)


@dataclass(frozen=True)
class Split:
    """weights: percent of the calls by model, 100 together; raises InvalidRequestError if they are not. The share of a model is an
    interval of [0, 1), in the order of the weights: where one grows at the cost of its neighbour, whoever it had stays with it."""

    name: str
    weights: Mapping[str, float]

    def __post_init__(self) -> None:
        if not self.name:
            raise _wrong("a split needs a name", "name")
        if wrong := [w for w in self.weights.values() if not 0 <= w < math.inf]:
            raise _wrong(f"a weight is a percentage from 0 to 100, not {wrong[0]:g}")
        if abs((total := sum(self.weights.values())) - 100) > 1e-6:
            raise _wrong(f"the weights of {self.name} must be 100 together, not {total:g}")

    @classmethod
    def parse(cls, text: str) -> Split:
        """NAME=MODEL:WEIGHT,MODEL:WEIGHT..."""
        name, _, rest = text.partition("=")
        weights: dict[str, float] = {}
        for part in rest.split(","):
            model, _, weight = part.rpartition(":")
            try:
                weights[model] = float(weight)
            except ValueError:
                raise _wrong(f"a split is written NAME=MODEL:WEIGHT,MODEL:WEIGHT, not {text!r:.80}") from None
        if len(weights) <= rest.count(","):
            raise _wrong(f"{text!r:.80} names a model twice")
        return cls(name, weights)

    @classmethod
    def parse_all(cls, texts: Sequence[str]) -> tuple[Split, ...]:
        """Several, also where they were divided at every comma, as a variable of the environment is."""
        return tuple(map(cls.parse, re.split(r",(?=[^,=]*=)", ",".join(texts)))) if texts else ()

    @property
    def main(self) -> str:
        """The model with the largest share."""
        return max(self.weights, key=lambda model: self.weights[model])

    def version(self, point: float) -> str:
        """The model that has a point of [0, 1)."""
        end = 0.0
        for model, weight in self.weights.items():
            end += weight / 100
            if point < end:
                return model
        return self.main

    def point(self, session: str) -> float:
        """Of [0, 1), the same for a session at all times: the first 8 bytes of the SHA-256 of name and session."""
        return int.from_bytes(hashlib.sha256(f"{self.name}\0{session}".encode()).digest()[:8]) / 2**64
