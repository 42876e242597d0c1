"""Writes the recording that test_recording.py replays: run it when a change of Programs, Batches or sampling is intended.

python tests/helpers/make_recording.py
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from trivium import LLM, SamplingParams
from trivium.conformance.recording import Recorder

sys.path.insert(0, str(Path(__file__).parent))
from tiny_checkpoints import make_checkpoint

FOLDER = Path(__file__).resolve().parents[1] / "conformance" / "golden" / "recording"
FAMILY = "mistral"


def record(folder: Path) -> None:
    """Eight requests of all kinds through a pool that is too small for them, on the reference."""
    kinds = [
        {"temperature": 0.0},
        {"top_k": 9, "repetition_penalty": 1.3},
        {"top_p": 0.8, "n": 2},
        {"allowed_token_ids": range(99)},
    ]
    params = [SamplingParams(max_tokens=9, ignore_eos=True, logprobs=1, seed=i, **kinds[i % 4]) for i in range(8)]
    prompts = [[1 + i, 7, 9, 4 + i] * (3 + i % 5) for i in range(8)]
    with tempfile.TemporaryDirectory() as model:
        make_checkpoint(Path(model), FAMILY)
        with LLM(model, backend="reference", num_kv_blocks=14, max_num_batched_tokens=32) as llm:
            recorder = Recorder(llm.loaded, folder)
            llm.engine.model = recorder.model
            llm.generate(prompts, params)
            recorder.close()


if __name__ == "__main__":
    shutil.rmtree(FOLDER, ignore_errors=True)
    record(FOLDER)
    print(f"{FOLDER}: {sum(f.stat().st_size for f in FOLDER.iterdir())} bytes in {len(list(FOLDER.iterdir()))} files")
