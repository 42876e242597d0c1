"""Encoders and classifiers on an emulated NPU give the reference's numbers."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_checkpoints import make_checkpoint

from trivium import LLM

PROMPTS = [*([(7 * i * i + n) % 250 for i in range(n)] for n in (1, 16, 37, 50)), [5, 7, 6, 7, 9]]
MODELS = {
    "BertModel": {"hidden_act": "gelu", "type_vocab_size": 2, "sep_token_id": 7},
    "ModernBertModel": {"hidden_activation": "gelu", "local_attention": 8, "num_hidden_layers": 4},
    "Qwen3ForSequenceClassification": {"num_labels": 1},
}


@pytest.mark.parametrize("architecture", MODELS)
def test_embeddings_and_scores_equal_the_reference_s(tmp_path, npu, architecture):
    folder = make_checkpoint(tmp_path / "model", "llama", architectures=[architecture], **MODELS[architecture])
    found = []
    for backend in ("reference", "ascend"):
        with LLM(folder, backend, dtype="float32", kv_dtype="float32", progress=False) as llm:
            found.append(np.stack([output.embedding for output in llm.embed(PROMPTS)]))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-5)
    assert len(np.unique(found[0].round(4), axis=0)) == len(PROMPTS)
