"""The command: its flags, and a run from the first model list to the report."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trivium.errors import InvalidRequestError, TriviumError

from trivium_server.load.answers import Outcome
from trivium_server.load.generator import Generator, Run, Target, calibrated, first_model
from trivium_server.load.page import page
from trivium_server.load.summary import slo, summarized
from trivium_server.load.table import table
from trivium_server.load.wire import Address, Client, Failure
from trivium_server.load.workload import MIXES, Ask, Ids, Lengths, Part, Range, Text, arrivals, trace

_REQUESTS = 100


class UnreachableError(TriviumError):
    """The server can't be measured."""

    code = "unreachable"


def _checked(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """As an argparse type that shows the words of its ValueError."""

    def checked(text: str) -> Any:
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return checked


def _number(kind: type[int] | type[float], low: float) -> Callable[[str], Any]:
    noun = "an integer" if kind is int else "a number"

    def convert(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value < math.inf:
            raise ValueError(f"must be {noun} from {low:g} up, not {text!r}")
        return value

    return _checked(convert)


def _field(text: str) -> tuple[str, Any]:
    name, found, value = text.partition("=")
    if not found or not name:
        raise ValueError(f"must be NAME=VALUE, not {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `trivium bench serve`; `handler` runs it."""
    count, seconds = _number(int, 1), _number(float, 1e-3)
    add = parser.add_argument
    add("--url", type=_checked(Address.of), default="http://127.0.0.1:8000", metavar="URL", help="the server, with or without /v1")
    add("--model", metavar="NAME", help="(default: the first that the server lists)")
    add("--api-key", metavar="KEY", help="(default: the variable OPENAI_API_KEY, if there is one)")
    add("--endpoint", choices=("chat", "completions"), default="chat", help="(default: chat)")
    add("--body", type=_checked(_field), action="append", metavar="NAME=VALUE", help="one more field of every request; null: none")
    add("--no-ignore-eos", action="store_true", help="answers may end early; for servers that refuse the field ignore_eos")
    add("--timeout", type=seconds, default=600.0, metavar="S", help="until an answer must be whole (default: 600)")
    group = parser.add_argument_group("load")
    group.add_argument("--concurrency", type=count, metavar="N", help="closed loop: this many requests under way (default: 1)")
    group.add_argument("--rate", type=seconds, metavar="R", help="open loop: requests a second, whatever is under way")
    group.add_argument("--arrivals", choices=("poisson", "constant"), default="poisson", help="gaps of the open loop (poisson)")
    group.add_argument("--max-in-flight", type=count, metavar="N", help="open loop: more wait, and their latency counts on")
    group.add_argument("--requests", type=count, metavar="N", help=f"so many (default: {_REQUESTS}, or what --duration gives)")
    group.add_argument("--duration", type=seconds, metavar="S", help="begin none after S seconds; those under way are waited for")
    group.add_argument("--warmup", type=_number(int, 0), default=1, metavar="N", help="requests before, not counted (default: 1)")
    group.add_argument(
        "--seed", type=_number(int, 0), metavar="N", help="of arrivals, lengths, prompts (default: another each run)"
    )
    group = parser.add_argument_group("prompts and answers")
    length = _checked(Range.of)
    group.add_argument("--input-len", type=length, metavar="N|A-B", help="tokens of prompts, fixed or uniform (default: 128)")
    group.add_argument("--output-len", type=length, metavar="N|A-B", help="tokens of answers (default: 64)")
    group.add_argument("--mix", choices=sorted(MIXES), help="lengths of a kind of use, instead")
    group.add_argument("--prefix-tokens", type=count, default=0, metavar="N", help="in front of each prompt, shared")
    group.add_argument("--prefix-groups", type=count, default=1, metavar="N", help="different prefixes (default: 1)")
    group.add_argument("--vocab-size", type=count, metavar="N", help="prompts are ids below N, exact in length (completions)")
    group.add_argument("--trace", type=Path, metavar="FILE", help="JSON lines: timestamp, input_length, output_length; or prompt")
    group.add_argument("--trace-unit", choices=("s", "ms"), default="s", help="of its timestamps (default: s)")
    group.add_argument("--trace-speed", type=_number(float, 1e-6), default=1.0, metavar="X", help="replay so many times as fast")
    group.add_argument("--trace-block", type=count, default=512, metavar="N", help="tokens of a hash id (default: 512)")
    group = parser.add_argument_group("report")
    group.add_argument("--slo", type=_checked(slo), default={}, metavar="LIMITS", help="for goodput, as in ttft=500ms,itl=50ms")
    group.add_argument("--json", action="store_true", help="print one JSON document on standard output, and nothing else there")
    group.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots")
    parser.set_defaults(handler=bench_serve)


class Plan(NamedTuple):
    """A load: what is asked, and how. load: the same in words, for the report. concurrency: None in an open loop."""

    asks: list[Ask] | Iterator[Ask]
    load: dict[str, Any]
    concurrency: int | None


def planned(args: argparse.Namespace, seed: int) -> Plan:
    """What the flags ask for. Raises InvalidRequestError where they contradict each other."""
    _check(args)
    limits = {"requests": _count(args), "duration_s": args.duration}
    if args.trace is not None:
        found = trace(args.trace, unit=1e-3 if args.trace_unit == "ms" else 1.0, speed=args.trace_speed)[: args.requests]
        is_open = found[0].at is not None and args.concurrency is None
        concurrency = None if is_open else args.concurrency or 1
        load = {"kind": "open" if is_open else "closed", "trace": str(args.trace), "speed": args.trace_speed, **limits}
        return Plan(found, {**load, "concurrency": concurrency, "seed": seed, "requests": len(found)}, concurrency)
    times: Iterator[float | None] = itertools.repeat(None)
    how: dict[str, Any] = {"kind": "closed", "concurrency": args.concurrency or 1}
    if args.rate is not None:
        times = arrivals(args.rate, args.arrivals, seed)
        how = {"kind": "open", "rate": args.rate, "arrivals": args.arrivals, "max_in_flight": args.max_in_flight}
    one = Part(1.0, args.input_len or Range(128, 128), args.output_len or Range(64, 64))
    lengths = Lengths(MIXES[args.mix] if args.mix else [one], args.prefix_tokens, args.prefix_groups)
    shape = {"mix": args.mix} if args.mix else {"input_len": list(one.prompt), "output_len": list(one.output)}
    prefix = {"prefix_tokens": args.prefix_tokens, "prefix_groups": args.prefix_groups} if args.prefix_tokens else {}
    asks = itertools.islice(lengths.asks(times, seed), limits["requests"])
    return Plan(asks, {**how, **limits, **shape, **prefix, "warmup": args.warmup, "seed": seed}, how.get("concurrency"))


def _count(args: argparse.Namespace) -> int | None:
    """Requests to send at most."""
    return args.requests or (None if args.duration is not None else _REQUESTS)


def _check(args: argparse.Namespace) -> None:
    lengths = args.input_len or args.output_len or args.prefix_tokens
    for wrong, why in (
        (args.rate is not None and args.concurrency is not None, "--rate is an open loop, --concurrency a closed one"),
        (args.mix and (args.input_len or args.output_len), "--mix has lengths of its own"),
        (args.trace and (args.rate is not None or args.mix or lengths), "--trace has times and lengths of its own"),
        (args.vocab_size and args.endpoint == "chat", "--vocab-size is for --endpoint completions"),
        (args.max_in_flight and args.concurrency is not None, "--max-in-flight is for an open loop"),
    ):
        if wrong:
            raise InvalidRequestError(f"trivium bench serve: {why}; leave one out")


def bench_serve(args: argparse.Namespace) -> int:
    """Measures and prints; 0 if any request was answered, else 1. Raises TriviumError."""
    import uvloop

    if args.html is not None and not args.html.parent.is_dir():
        raise InvalidRequestError(f"--html: there is no folder {args.html.parent}")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        report, outcomes = runner.run(measured(args))
    if args.html is not None:
        args.html.write_text(page(report, outcomes), "utf-8")
    print(json.dumps(report, indent=1) if args.json else table(report))
    return 0 if report["requests"]["whole"] else 1


async def measured(args: argparse.Namespace, **own: Any) -> tuple[dict[str, Any], Run]:
    """(report, run) of what the flags ask for. own: see Client. Raises TriviumError."""
    seed = secrets.randbelow(1 << 31) if args.seed is None else args.seed
    plan = planned(args, seed)
    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    client = Client(args.url, {"Authorization": f"Bearer {key}"} if key else {}, **own)
    try:
        return await _measured(args, plan, client, seed)
    except Failure as failure:
        raise UnreachableError(f"{args.url.authority}: {failure.kind}: {failure.message}") from failure
    finally:
        client.close()


async def _measured(args: argparse.Namespace, plan: Plan, client: Client, seed: int) -> tuple[dict[str, Any], Run]:
    target = Target(
        args.model or await first_model(client), chat=args.endpoint == "chat", ignore_eos=not args.no_ignore_eos,
        extra=dict(args.body or ()),
    )  # fmt: skip
    prompts, how = await _prompts(args, client, target, seed)
    progress = _Progress(plan.load["requests"], quiet=args.json)
    generator = Generator(client, target, prompts, args.timeout, progress)
    asks = iter(plan.asks)
    first = next(asks)
    asks = itertools.chain([first], asks)
    warm = await generator.warm(args.warmup, first, plan.concurrency or 1)
    if warm and all(outcome.failure for outcome in warm):
        raise Failure(warm[0].failure, f"no request of the warm-up was answered: {warm[0].message}")
    if plan.concurrency is not None:
        run = await generator.closed(asks, plan.concurrency, args.duration)
    else:
        run = await generator.open(asks, args.duration, args.max_in_flight)
    progress.end()
    about = {"server": args.url.authority, "model": target.model, "endpoint": args.endpoint, "prompts": how}
    return summarized(run, plan.load, about, args.slo), run


async def _prompts(args: argparse.Namespace, client: Client, target: Target, seed: int) -> tuple[Text | Ids, str]:
    """(how prompts are made, the same in words)."""
    if args.vocab_size:
        return Ids(seed, args.vocab_size, args.trace_block), "random ids"
    text = Text(seed, block=args.trace_block)
    found = await calibrated(client, target, text, args.timeout)
    if found is None:
        return text, "random words, one counted as one token: the server counts none"
    return found, f"random words; tokens by the server's count: {found.per_word:.3g} a word, {found.fixed:.3g} around a prompt"


class _Progress:
    """A line on a terminal, now and then."""

    def __init__(self, count: int | None, *, quiet: bool) -> None:
        self._of = "" if count is None else f" of {count}"
        self._quiet = quiet or not sys.stderr.isatty()
        self._done = 0

    def __call__(self, outcome: Outcome) -> None:
        self._done += 1
        if not self._quiet and self._done % 10 == 0:
            print(f"\r{self._done}{self._of} answers", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """What follows begins on a line of its own."""
        if not self._quiet:
            print(file=sys.stderr)
