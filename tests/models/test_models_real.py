"""Real checkpoints on the operators' references against transformers reading the same GGUF file, all in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paged_runner import PagedRunner, constant_arrays, run_in_chunks
from trivium.models import build
from trivium.weights import Checkpoint, open_checkpoint, resolve

pytestmark = [pytest.mark.oracles, pytest.mark.weights]

# "The history of the city begins long before the first written records. Archaeologists have found traces of settlements ..."
PROMPTS = {
    "smollm2-135m": [
        504, 1463, 282, 260, 2240, 5634, 986, 1092, 260, 808, 2855, 4585, 30, 15053, 4725, 457, 983, 14419, 282, 14936, 338, 3688,
        1056, 288, 260, 24655, 7351, 28, 284, 411, 260, 655, 260, 12990, 6612, 665, 436, 2221, 253, 10229,
    ],
    "gemma3-270m": [
        2, 818, 4083, 529, 506, 3207, 12502, 1440, 1680, 506, 1171, 5267, 8735, 236761, 67214, 20179, 735, 1765, 32678, 529, 53965,
        600, 3433, 1063, 531, 506, 67469, 17884, 236764, 532, 684, 506, 990, 506, 51386, 12208, 993, 691, 3016, 496,
    ],
}  # fmt: skip


def oracle_logits(path: Path, prompt: list[int]) -> np.ndarray:
    """transformers' own reading of the GGUF file. Its loader asks for one more package, its parts do not."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.initialization import no_init_weights
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    torch.set_num_threads(1)
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    report = model.load_state_dict(tensors, strict=False)
    assert report.missing_keys == ["lm_head.weight"] and not report.unexpected_keys
    model.tie_weights()
    with torch.no_grad():
        logits: Any = model(torch.tensor([prompt])).logits[0]
    return logits.numpy()


def our_logits(checkpoint: Checkpoint, prompt: list[int]) -> np.ndarray:
    """Through pages of 16, in chunks of 16, the last 4 tokens one at a time."""
    program = build(checkpoint.config, max_model_len=64)
    sources = {c.source for c in program.constants if c.array is None}
    weights = {name: checkpoint.tensor(name).decode() for name in sources}
    assert all(array.dtype == np.float32 for array in constant_arrays(program, weights).values())
    return run_in_chunks(PagedRunner(program, weights, page_size=16, pages=128), [prompt], 16, decode=4)[0]


@pytest.mark.parametrize("model", ["smollm2-135m", pytest.param("gemma3-270m", marks=pytest.mark.slow)])
def test_real_model_gives_the_logits_of_the_oracle(model: str) -> None:
    checkpoint = open_checkpoint(resolve(model, progress=False))
    want = oracle_logits(checkpoint.path, PROMPTS[model])
    got = our_logits(checkpoint, PROMPTS[model])
    assert np.abs(got - want).max() < 1e-3 * want.std()
    np.testing.assert_array_equal(got.argmax(-1), want.argmax(-1))
