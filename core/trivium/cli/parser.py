"""Argument parsing whose every complaint is one line, with the nearest match where a word is misspelt."""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn


class Command(NamedTuple):
    """What the hook trivium_command() of a plugin returns: one line of help, what adds the flags to its parser, and what runs it
    with the parsed arguments and gives the exit code. Imports nothing heavy before it is run."""

    help: str
    add: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


class UsageError(Exception):
    """A bad flag or value; the command ends with exit code 2."""


def nearest(word: str, known: Iterable[str]) -> str:
    """ "; did you mean X?" or nothing."""
    near = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, which raises UsageError instead of printing the usage and leaving. late: adds what is only
    known, or imported, once the command is asked for."""

    late: Callable[[Parser], None] | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message} (see {self.prog} --help)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in argparse; what nobody knows is refused here, by the command whose flags could have been meant."""
        if self.late is not None:
            add, self.late = self.late, None
            add(self)
        known, extra = super().parse_known_args(args, namespace)
        late = [a.dest for a in self._actions if a.nargs == "?" and not a.option_strings and getattr(known, a.dest) is None]
        if late and extra and not extra[0].startswith("-"):
            # argparse gives an optional positional up where the first flag stands; here it may come later.
            setattr(known, late[0], extra.pop(0))
        if extra:
            flags = [flag for action in self._actions for flag in action.option_strings]
            self.error(f"unknown argument {extra[0]}{nearest(extra[0].partition('=')[0], flags)}")
        return known, extra

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            message = f"{value!r} is not one of {', '.join(known)}{nearest(str(value), known)}"
            raise argparse.ArgumentError(action, message)


def number(kind: type[int] | type[float], low: float, high: float = math.inf) -> Callable[[str], Any]:
    """An argparse type: a finite int or float from `low` to `high`."""

    def convert(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or math.isinf(value):
            noun = "an integer" if kind is int else "a number"
            limit = f"from {low:g}" + ("" if math.isinf(high) else f" to {high:g}")
            raise argparse.ArgumentTypeError(f"must be {noun} {limit}, not {text!r}")
        return value

    return convert


def key_value(text: str) -> tuple[str, Any]:
    """An argparse type: KEY=VALUE, where VALUE is JSON if it can be read so, else the text itself."""
    import json

    key, found, value = text.partition("=")
    if not found or not key:
        raise argparse.ArgumentTypeError(f"must be KEY=VALUE, not {text!r}")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def named(text: str) -> str:
    """An argparse type: a name that is not empty, such as that of a model (an empty path would mean the folder one is in)."""
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output, and nothing else there")


def add_model(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """MODEL (several: one or more, each perhaps as NAME=MODEL) and the options that decide how it is loaded."""
    source = "a folder or .gguf file, hf:ORG/NAME, modelscope:ORG/NAME, pypi:PACKAGE, or an alias (smollm2-135m, gemma3-270m)"
    if several:
        parser.add_argument("model", metavar="MODEL", nargs="+", type=named, help=f"{source}; NAME=MODEL: under that name")
    else:
        parser.add_argument("model", metavar="MODEL", type=named, help=source)
    group = parser.add_argument_group("loading")
    positive = number(int, 1)
    group.add_argument("--backend", default="auto", metavar="NAME[:DEVICE]", help="see `trivium backends` (default: auto)")
    group.add_argument("--dtype", default="auto", help="float32, bfloat16 or float16 (default: what the backend does best)")
    group.add_argument(
        "--quantize",
        metavar="FORMAT",
        help="resident format of the projections (int4, int8, ...); by part: int4,lm_head=F,embedding=F",
    )
    group.add_argument("--threads", type=positive, metavar="N", help="host threads (default: what affinity and quota allow)")
    group.add_argument("--block-size", type=positive, metavar="N", help="tokens a page of the KV cache")
    group.add_argument("--num-kv-blocks", type=positive, metavar="N", help="pages of the KV cache")
    group.add_argument("--max-num-seqs", type=positive, metavar="N", default=64, help="sequences in one step (default: 64)")
    tokens_help = "tokens in one step (default: 512, or the backend's limit)"
    group.add_argument("--max-num-batched-tokens", type=positive, metavar="N", help=tokens_help)
    group.add_argument("--max-model-len", type=positive, metavar="N", help="longest prompt and output together")
    drafts_help = "speculative decoding: method=ngram, suffix, mtp or draft (model=MODEL), num_speculative_tokens=N, ..."
    group.add_argument("--speculative", type=key_value, action="append", metavar="KEY=VALUE", help=drafts_help)
    group.add_argument("--strict", action="store_true", help="refuse instead of running an operator on the host")
    group.add_argument("--option", type=key_value, action="append", metavar="KEY=VALUE", help="an option of the backend's own")


def add_split(parser: argparse.ArgumentParser) -> None:
    """The options that give prompts and what follows them to two backends."""
    group = parser.add_argument_group("two backends")
    group.add_argument("--prefill", metavar="NAME[:DEVICE]", help="the backend that computes prompts (default: the same)")
    group.add_argument("--decode", metavar="NAME[:DEVICE]", help="the backend that goes on from there, as --backend")
    only = "of the first alone: dtype, quantize, block_size, num_kv_blocks, max_num_batched_tokens, ..."
    group.add_argument("--prefill-option", type=key_value, action="append", metavar="KEY=VALUE", help=only)


def load_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of LLM that add_model() collected."""
    names = (
        "backend", "dtype", "quantize", "threads", "block_size", "num_kv_blocks", "max_num_seqs", "max_num_batched_tokens",
        "max_model_len", "strict",
    )  # fmt: skip
    speculative = dict(args.speculative) if args.speculative else None
    split = {name: getattr(args, name) for name in ("prefill", "decode") if hasattr(args, name)}
    if getattr(args, "prefill_option", None):
        split["prefill_options"] = dict(args.prefill_option)
    own = {"backend_options": dict(args.option or ()), "speculative": speculative}
    return {**{name: getattr(args, name) for name in names}, **own, **split}


def table(rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns, two blanks apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
