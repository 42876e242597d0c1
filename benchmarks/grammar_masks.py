"""Grammar libraries on a real vocabulary: seconds to build its trie, to compile a grammar, and to take one token and
make the mask behind it.

Every grammar is walked by tokens drawn at random from its masks, the same way for each library. llguidance is what trivium uses,
xgrammar is measured where it is installed. `trivium` is the whole of what one token costs a request: its mask is narrowed to
what else the request allows.

    python benchmarks/grammar_masks.py [--json] [--model smollm2-135m] [--tokens N] [--repeat N]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np

from trivium.sampling import SamplerState, SamplingParams, StructuredOutputs
from trivium.text import Grammars, Tokenizer
from trivium.weights import open_checkpoint, resolve

PERSON = {
    "type": "object", "required": ["name", "age", "tags"], "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "maxLength": 40}, "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "maxItems": 5, "items": {"type": "string", "pattern": "^[a-z]{1,12}$"}},
    },
}  # fmt: skip
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {"node": {
        "type": "object", "required": ["v", "children"], "additionalProperties": False,
        "properties": {"v": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
    }},
}  # fmt: skip
GRAMMARS: dict[str, dict[str, Any]] = {
    "any object": {"json": {"type": "object"}},
    "person": {"json": PERSON},
    "recursive tree": {"json": TREE},
    "enum of 1000": {"json": {"enum": [f"value {i}" for i in range(1000)]}},
    "telephone number": {"regex": "([0-9]{3}-){2}[0-9]{4}"},
    "letters and blanks": {"regex": "[a-zA-Z ]{1,300}"},
    "sums": {"grammar": 'root ::= num (("+" | "-") (num | "(" root ")"))*\nnum ::= [0-9]+'},
}

Walker = tuple[Callable[[np.ndarray], None], Callable[[int], bool]]
"""fill(mask), accept(token) -> whether the text is complete."""


class LLGuidance:
    def __init__(self, tokenizer: Tokenizer) -> None:
        from llguidance import LLTokenizer

        self.grammars = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
        self.tokens: LLTokenizer = self.grammars._trie

    def walker(self, fields: dict[str, Any]) -> tuple[float, Walker]:
        from llguidance import LLMatcher
        from llguidance.gbnf_to_lark import any_to_lark
        from trivium.text.grammar import _rules

        kind, text = StructuredOutputs(**fields).spec
        rules = any_to_lark(text) if kind == "grammar" else _rules(kind, text)
        began = time.perf_counter()
        matcher = LLMatcher(self.tokens, '%llguidance {"no_forcing": true}\n' + rules)
        seconds = time.perf_counter() - began

        def accept(token: int) -> bool:
            assert matcher.consume_token(token)
            return matcher.is_stopped()

        return seconds, (lambda mask: matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes), accept)


class XGrammar:
    def __init__(self, tokenizer: Tokenizer) -> None:
        import xgrammar

        words = [b"" if i in tokenizer.special_ids else tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self.info = xgrammar.TokenizerInfo(words, stop_token_ids=sorted(tokenizer.eos_ids))

    def walker(self, fields: dict[str, Any]) -> tuple[float, Walker]:
        import xgrammar

        began = time.perf_counter()
        compiler = xgrammar.GrammarCompiler(self.info, max_threads=1, cache_enabled=False)
        kind, text = StructuredOutputs(**fields).spec
        make = {"json": compiler.compile_json_schema, "regex": compiler.compile_regex, "grammar": compiler.compile_grammar}
        matcher = xgrammar.GrammarMatcher(make[kind](text))
        seconds = time.perf_counter() - began

        def accept(token: int) -> bool:
            return not matcher.accept_token(token)  # it ends with an end token only

        return seconds, (lambda mask: matcher.fill_next_token_bitmask(mask.view(np.int32)[None], 0), accept)


class Trivium:
    """A request's SamplerState instead of the bare library; its compile time has the trial in a process of its own in it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def walker(self, fields: dict[str, Any]) -> tuple[float, Walker]:
        size, ends = self.tokenizer.vocab_size, self.tokenizer.eos_ids
        grammars, wanted = Grammars(self.tokenizer, size, ends), StructuredOutputs(**fields)
        assert grammars._trie  # made before the clock starts
        began = time.perf_counter()
        matcher = grammars.matcher(*wanted.spec, ends)
        seconds = time.perf_counter() - began
        state = SamplerState(SamplingParams(structured_outputs=wanted), [1], ends, size, 0, grammar=matcher)

        def fill(mask: np.ndarray) -> None:
            assert state.mask is not None
            mask[:] = state.mask

        def accept(token: int) -> bool:
            state.append(token)
            return state.complete

        return seconds, (fill, accept)


def walk(walker: Walker, tokenizer: Tokenizer, tokens: int, seed: int) -> Iterator[float]:
    """Seconds of every token on the way: it is accepted and the mask behind it made."""
    fill, accept = walker
    rng, mask = np.random.default_rng(seed), np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)
    fill(mask)
    for _ in range(tokens):
        token = int(rng.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))))
        if token in tokenizer.eos_ids:
            return
        began = time.perf_counter()
        if accept(token):
            return
        fill(mask)
        yield time.perf_counter() - began


def measure(library: type[Any], tokenizer: Tokenizer, tokens: int, repeat: int) -> dict[str, Any]:
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    made = library(tokenizer)
    report: dict[str, Any] = {"build_ms": (time.perf_counter() - began) * 1e3}
    for name, fields in GRAMMARS.items():
        compiled, masks = list[float](), list[float]()
        for seed in range(repeat):
            seconds, walker = made.walker(fields)
            compiled.append(seconds)
            masks.extend(walk(walker, tokenizer, tokens, seed))
        times = sorted(masks)
        report[name] = {
            "compile_ms": statistics.median(compiled) * 1e3, "tokens": len(times), "token_us": statistics.median(times) * 1e6,
            "mean_us": statistics.mean(times) * 1e6, "p99_us": times[len(times) * 99 // 100] * 1e6,
        }  # fmt: skip
    report["peak_growth_mb"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--repeat", type=int, default=8)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_data(open_checkpoint(resolve(args.model)).tokenizer_data())
    for token in range(tokenizer.vocab_size):
        tokenizer.token_bytes(token)
    libraries: dict[str, type[Any]] = {"llguidance": LLGuidance, "trivium": Trivium}
    if find_spec("xgrammar"):
        import xgrammar  # noqa: F401  # its import loads torch, which is nothing that is to be measured

        libraries["xgrammar"] = XGrammar
    found = {name: measure(library, tokenizer, args.tokens, args.repeat) for name, library in libraries.items()}
    report = {"model": args.model, "vocabulary": tokenizer.vocab_size, **found}
    if args.json:
        print(json.dumps(report, indent=2))
        return
    print(f"{args.model}, {tokenizer.vocab_size} tokens")
    for library, figures in found.items():
        print(f"{library}: trie {figures['build_ms']:.0f} ms, memory {figures['peak_growth_mb']:.0f} MB")
        for name in GRAMMARS:
            f = figures[name]
            times = f"token {f['token_us']:6.1f} us (mean {f['mean_us']:6.1f}, 99 % {f['p99_us']:7.1f})"
            print(f"  {name:<20} compile {f['compile_ms']:7.2f} ms; {times}; {f['tokens']} tokens")


if __name__ == "__main__":
    main()
