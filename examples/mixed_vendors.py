"""Prompts on one vendor's device and their answers on another's, and that the tokens are those that either makes alone.

    python examples/mixed_vendors.py MODEL --prefill ascend --decode torch:cpu

Pages of keys and values cross in the neutral format. Both sides keep them in one dtype.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from trivium import LLM, SamplingParams

PROMPTS = ("Three roads meet where", "The capital of France is", "def fibonacci(n):")
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


def answers(model: str, dtype: str, **where: str) -> list[str]:
    """What the model says to the prompts on these devices."""
    kv = {"dtype": dtype, "kv_dtype": dtype, "max_model_len": 512, "progress": False}
    more = {"prefill_options": {"dtype": dtype, "kv_dtype": dtype}} if "prefill" in where else {}
    with LLM(model, **where, **kv, **more) as llm:
        return [output.outputs[0].text for output in llm.generate(list(PROMPTS), GREEDY)]


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--prefill", required=True, help="the backend that computes prompts")
    parser.add_argument("--decode", required=True, help="the backend that answers them")
    parser.add_argument("--dtype", default="float16")
    asked = parser.parse_args(given)
    split = answers(asked.model, asked.dtype, prefill=asked.prefill, decode=asked.decode)
    alone = answers(asked.model, asked.dtype, backend=asked.decode)
    for prompt, text, same in zip(PROMPTS, split, alone, strict=True):
        print(f"{prompt!r} -> {text!r}{'' if text == same else f'; alone: {same!r}'}")
    return 0 if split == alone else 1


if __name__ == "__main__":
    raise SystemExit(main())
