"""Images on trivium_cuda over an emulated device: chunks, captured decode steps and text beside them, as on the reference."""

from __future__ import annotations

import emulated_cuda
import pytest
from vision_cases import make_seeing_checkpoint, photo

from trivium import LLM, SamplingParams

pytest.importorskip("PIL")

LOAD = {"dtype": "float32", "kv_dtype": "float32", "num_kv_blocks": 48, "block_size": 16, "progress": False, "max_num_seqs": 4}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
CHATS = [
    [{"role": "user", "content": [{"type": "image", "image": photo(64, 60)}, {"type": "text", "text": "what is it?"}]}],
    [{"role": "user", "content": "only a text"}],
    [{"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image", "image": photo(20, 20, 1)}]}],
]


def test_pictures_and_texts_in_one_batch_are_answered_as_by_the_reference(tmp_path, emulated, monkeypatch):
    monkeypatch.setattr(emulated_cuda, "DEVICES", (emulated_cuda.EmulatedDevice((7, 5)),))
    folder = make_seeing_checkpoint(tmp_path / "seeing")
    found = []
    for backend in ("reference", "cuda_emulated"):
        with LLM(folder, backend, max_num_batched_tokens=50, **LOAD) as llm:
            found.append([[o.outputs[0].token_ids for o in llm.chat(CHATS, GREEDY)] for _ in range(2)])
            assert llm.engine.stats.cached_tokens > 0
            llm.engine.check()
    assert found[0] == found[1] and found[0][0] == found[0][1]
