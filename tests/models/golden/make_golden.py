"""Makes golden.json and golden.npz: what transformers computes for tiny seeded models. Needs the extra `oracles`.

    PYTHONPATH=tests/helpers python tests/models/golden/make_golden.py

golden.json holds of every case its configuration, seed, prompts, the number of tokens decoded one at a time at their ends, the rows
kept and a checksum of the weights; golden.npz the logits float32[rows, vocab] of all prompts, one after the other. The weights come
from the seed again (tiny_checkpoints.make_weights).
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from model_cases import DECODE, MAX_MODEL_LEN, make_prompts, oracle_logits, oracle_model
from tiny_checkpoints import make_weights

FOLDER = Path(__file__).parent
NAMES = (
    "llama", "llama3-scaling", "mistral", "qwen2", "qwen2-untied-yarn", "qwen3", "gemma2", "gemma3", "phi3", "phi3-partial",
    "phi3-longrope-short",
)  # fmt: skip
LENGTHS, ROWS = (37, 18), ((0, 4, 15, 16, 31, 33, 36), (3, 12, 13, 17))


def weight_sum(weights: dict[str, np.ndarray]) -> float:
    """A checksum that says whether two sets of weights are the same, coarse enough for any order of summation."""
    return round(float(sum(np.abs(w.astype(np.float64)).sum() for w in weights.values())), 4)


def make_case(name: str) -> tuple[dict[str, Any], np.ndarray]:
    """The description and the logits of one case."""
    with tempfile.TemporaryDirectory() as folder:
        model = oracle_model(name, Path(folder))
        config = json.loads((Path(folder) / "config.json").read_text())
    prompts, seed = make_prompts(LENGTHS), len(name)
    logits = [oracle_logits(model, prompt)[list(rows)] for prompt, rows in zip(prompts, ROWS)]
    about = {
        "config": config, "seed": seed, "max_model_len": MAX_MODEL_LEN.get(name), "prompts": prompts, "decode": DECODE,
        "rows": ROWS, "weight_sum": weight_sum(make_weights(config, seed)),
    }  # fmt: skip
    return about, np.concatenate(logits)


def main() -> None:
    """Writes both files."""
    made = {name: make_case(name) for name in NAMES}
    about = ",\n".join(f"{json.dumps(name)}: {json.dumps(case)}" for name, (case, _) in made.items())
    (FOLDER / "golden.json").write_text("{\n" + about + "\n}\n")
    np.savez_compressed(FOLDER / "golden.npz", **{name: logits for name, (_, logits) in made.items()})


if __name__ == "__main__":
    main()
