"""Tokens a second with and without speculation, as ratios within one run.

Two engines over the same model answer the same greedy prompt in turn: a text to be repeated, and random token ids. Each ratio is
the decode speed with drafts over that without; medians over the repetitions. The ids of both must be equal. Prints JSON.

    python benchmarks/speculation.py [--model M] [--backend B] [--draft-model M] [--tokens N] [--repeat N] [METHOD ...]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from typing import Any

from trivium import LLM, SamplingParams

SENTENCE = "The quick brown fox jumps over the lazy dog near the river bank. "


def prompts(seed: int, vocab_size: int) -> dict[str, str | list[int]]:
    """By kind: one that asks for a copy, one without sense."""
    text, rng = SENTENCE * 12, random.Random(seed)
    return {
        "copy": f"Repeat this text exactly, word for word:\n{text}\nRepeated:\n{text[:200]}",
        "random": [rng.randrange(vocab_size // 40, vocab_size // 2) for _ in range(200)],
    }


def decode(llm: LLM, prompt: str | list[int], tokens: int) -> tuple[float, list[int], Any]:
    """Tokens a second behind the first, the ids and the request's metrics."""
    [output] = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
    return (tokens - 1) / output.metrics.decode_time, output.outputs[0].token_ids, output.metrics


def measure(plain: LLM, fast: LLM, tokens: int, repeat: int) -> dict[str, Any]:
    """Ratios by kind of prompt, both engines in turn, every repetition with random ids of its own."""
    found: dict[str, list[dict[str, float]]] = {}
    for i in range(repeat):
        for kind, prompt in prompts(i, plain.loaded.vocab_size).items():
            (with_drafts, ids, metrics), (without, same, _) = decode(fast, prompt, tokens), decode(plain, prompt, tokens)
            assert ids == same, f"{kind}: the ids differ"
            drafted, accepted = metrics.num_draft_tokens, metrics.num_accepted_tokens
            found.setdefault(kind, []).append({"ratio": with_drafts / without, "drafted": drafted, "accepted": accepted})
    return {
        kind: {
            "ratio": statistics.median(one["ratio"] for one in ones), "ratios": [round(one["ratio"], 3) for one in ones],
            "drafted": sum(one["drafted"] for one in ones), "accepted": sum(one["accepted"] for one in ones),
        }
        for kind, ones in found.items()
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of speculative decoding against plain decoding.")
    parser.add_argument("methods", nargs="*", default=["ngram", "suffix", "draft"])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--draft-model", help="for the method draft; default: the model itself, which shows the mechanism only")
    parser.add_argument("--num-speculative-tokens", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="the default")
    args = parser.parse_args()
    results: dict[str, Any] = {"model": args.model, "backend": args.backend, "tokens": args.tokens, "repeat": args.repeat}
    with LLM(args.model, backend=args.backend) as plain:
        for method in args.methods:
            wanted = {"method": method, "num_speculative_tokens": args.num_speculative_tokens}
            if method == "draft":
                wanted |= {"model": args.draft_model or args.model, "backend": args.backend}
            with LLM(args.model, backend=args.backend, speculative=wanted) as fast:
                results[method] = measure(plain, fast, args.tokens, args.repeat)
                stats = fast.engine.stats
                results[method] |= {
                    "draft_seconds": stats.draft_seconds, "device_seconds": stats.device_seconds,
                    "accepted_by_position": stats.accepted_by_position,
                }  # fmt: skip
    print(json.dumps(results))


if __name__ == "__main__":
    main()
