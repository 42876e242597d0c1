"""Writes vectors.json: published test vectors of the sampling pipeline. Run: python tests/sampling/make_vectors.py

Every number comes from the plain-Python pipeline in tests/helpers/sampling_oracle.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "helpers"))

import sampling_oracle as oracle  # noqa: E402


def plain(rng: np.random.Generator, width: int, count: int, grid: float, **fields) -> list[oracle.Row]:
    logits = (np.round(rng.normal(0, 2, (count, width)) / grid) * grid).tolist()
    return [oracle.Row(x, seed=int(rng.integers(0, 2**64, dtype=np.uint64)), position=i, **fields) for i, x in enumerate(logits)]


def case(name: str, rows: list[oracle.Row], vocab: int, top_logprobs: int = -1) -> dict:
    ids = [oracle.sample(row, vocab) for row in rows]
    made = {"name": name, "vocab_size": vocab, "top_logprobs": top_logprobs, "rows": [r.to_json() for r in rows], "ids": ids}
    if top_logprobs >= 0:
        reports = [oracle.logprobs(row, vocab) for row in rows]
        made["logprobs"] = [round(p[i], 9) for (p, _), i in zip(reports, ids)]
        made["ranks"] = [order.index(i) + 1 for (_, order), i in zip(reports, ids)]
        made["top_ids"] = [order[:top_logprobs] for _, order in reports]
        made["top_logprob_values"] = [[round(p[i], 9) for i in order[:top_logprobs]] for p, order in reports]
    return made


def banned(rows: list[oracle.Row]) -> list[oracle.Row]:
    """Bans the most likely id of each row."""
    for row in rows:
        row.bias = [[max(range(len(row.logits)), key=row.logits.__getitem__), "-inf"]]
    return rows


def cases(rng: np.random.Generator) -> list[dict]:
    padded = plain(rng, 24, 6, 0.125, temperature=2.0)
    for row in padded:
        row.logits[20:] = [60.0] * 4
    return [
        case("greedy with ties", plain(rng, 20, 6, 2.0), 20),
        case("temperature", plain(rng, 20, 20, 0.125, temperature=0.75), 20),
        case("top_k with ties at the edge", plain(rng, 20, 20, 2.0, temperature=1.0, top_k=4), 20),
        case("top_k beyond the vocabulary", plain(rng, 20, 8, 0.125, temperature=1.0, top_k=10**6), 20),
        case("top_p", plain(rng, 20, 20, 0.125, temperature=1.25, top_p=0.625), 20),
        case("min_p", plain(rng, 20, 20, 0.125, temperature=1.5, min_p=0.15625), 20),
        case("min_p of one", plain(rng, 20, 4, 0.125, temperature=1.0, min_p=1.0), 20),
        case("typical_p", plain(rng, 20, 20, 0.125, temperature=1.25, typical_p=0.5), 20),
        case(
            "typical_p with ties, then top_p", plain(rng, 20, 20, 1.0, temperature=1.0, typical_p=0.75, top_p=0.5, min_p=0.25), 20
        ),
        case("top_n_sigma", plain(rng, 20, 20, 0.125, temperature=2.5, top_n_sigma=1.0), 20),
        case("XTC", plain(rng, 20, 20, 0.125, temperature=1.5, xtc_probability=0.5, xtc_threshold=0.125), 20),
        case("XTC with ties", plain(rng, 20, 20, 2.0, temperature=1.0, xtc_probability=1.0, xtc_threshold=0.0625), 20),
        case("ban", banned(plain(rng, 20, 8, 0.125, temperature=0.5)), 20),
        case("padded vocabulary", padded, 20),
        case("logprobs", plain(rng, 20, 8, 0.5, temperature=1.0), 20, top_logprobs=5),
        case("everything, fine grid", oracle.random_rows(rng, 40, 60, grid=2.0**-6), 40),
        case("everything, ties", oracle.random_rows(rng, 40, 60, grid=1.0), 40),
    ]


def main() -> None:
    positions = (0, 1, 2, 1000, 2**32, 2**40 + 3)
    draws = [[s, p, *(oracle.uniform(s, p, n) for n in (0, 2))] for s in (0, 1, 42, 2**32, 2**64 - 1) for p in positions]
    about = "sampling vectors, format 3: see make_vectors.py"
    document = {"about": about, "uniform": draws, "cases": cases(np.random.default_rng(20))}
    text = json.dumps(document).replace('{"name"', '\n{"name"').replace('{"logits"', '\n  {"logits"')
    (HERE / "vectors.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
