"""What it costs that a row's bits do not depend on the rows beside it, as JSON.

reference: its way, one product a row, against one product of all rows, whose bits depend on how many there are: `differs` counts
the row counts from 1 to 17 that change a row. By the sizes of SmolLM2-135M's matrices.

cpu has nothing to compare with: its kernels add in an order that only the weight format sets, whatever the rows and threads. They
have no variant that gives this up, so what it costs them is not measured.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from trivium.ops import OPERATORS

SIZES = {"attention": (576, 576), "mlp up": (576, 1536), "mlp down": (1536, 576), "vocabulary": (576, 49152)}
ROWS = (1, 8, 64)


def best(work: Callable[[], Any], tries: int = 5) -> float:
    """Seconds of the fastest of `tries` runs."""

    def once() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return min(once() for _ in range(tries))


def figures(tries: int = 5) -> dict[str, Any]:
    linear, rng, found = OPERATORS["linear"], np.random.default_rng(0), dict[str, Any]()
    for name, (inputs, outputs) in SIZES.items():
        x = rng.standard_normal((max(ROWS), inputs), np.float32)
        weight = rng.standard_normal((outputs, inputs), np.float32)

        def apart(n: int, x: Any = x, weight: Any = weight) -> Any:
            return linear(x[:n], weight, None)

        def together(n: int, x: Any = x, weight: Any = weight) -> Any:
            return x[:n] @ weight.T

        counts, whole = range(1, 18), {way: way(max(ROWS)) for way in (apart, together)}
        found[name] = {
            "seconds_apart": {n: best(lambda n=n: apart(n), tries) for n in ROWS},
            "seconds_together": {n: best(lambda n=n: together(n), tries) for n in ROWS},
            "differs_apart": sum(bool((apart(n) != whole[apart][:n]).any()) for n in counts),
            "differs_together": sum(bool((together(n) != whole[together][:n]).any()) for n in counts),
        }
    return found


if __name__ == "__main__":
    print(json.dumps({"reference": figures(*map(int, sys.argv[1:]))}, indent=1))  # how many tries
