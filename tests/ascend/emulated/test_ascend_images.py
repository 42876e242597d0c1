"""Images on an emulated NPU: the tower and the text beside it answer as the reference does."""

from __future__ import annotations

import pytest
from vision_cases import make_seeing_checkpoint, photo

from trivium import LLM, SamplingParams

pytest.importorskip("PIL")

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
CHATS = [
    [{"role": "user", "content": [{"type": "image", "image": photo(64, 60)}, {"type": "text", "text": "what is it?"}]}],
    [{"role": "user", "content": "only a text"}],
]


def test_pictures_and_texts_are_answered_as_by_the_reference(npu, tmp_path):
    folder, found = make_seeing_checkpoint(tmp_path / "seeing"), []
    for backend in ("reference", "ascend"):
        exact = {"dtype": "float32", "kv_dtype": "float32", "num_kv_blocks": 30, "progress": False, "strict": True}
        with LLM(folder, backend, max_num_batched_tokens=50, **exact) as llm:
            found.append([o.outputs[0].token_ids for o in llm.chat(CHATS, GREEDY)])
            llm.engine.check()
    assert found[0] == found[1]
