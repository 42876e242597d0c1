"""`trivium bench latency` and `trivium bench throughput`: fixed lengths, warm-up, repeats, medians. `trivium bench serve` is the
server package's own."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from trivium.cli.parser import Parser, UsageError, add_json, add_model, add_split, load_options, number, table

if TYPE_CHECKING:
    from trivium.api import LLM
    from trivium.plugin import Profile
    from trivium.sampling import SamplingParams

SEED = 20
"""Of the random token ids that the prompts are made of."""
Sample = dict[str, float]


def add_bench(parser: Parser) -> None:
    """The options of each kind of measurement."""
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True, parser_class=Parser)
    latency = kinds.add_parser("latency", help="one request at a time: TTFT, prefill and decode tokens/s, the host's share")
    throughput = kinds.add_parser("throughput", help="many requests at once: output tokens/s")
    throughput.add_argument(
        "--num-requests", type=number(int, 1), metavar="N", default=32, help="requests given at once (default: 32)"
    )
    kinds.add_parser("serve", help="load on a running server of OpenAI's dialect, ours or another").late = _add_serve
    latency.add_argument(
        "--profile", action="store_true",
        help="one more run in which every operator is timed: bytes, operations, and their share of this machine's ceilings",
    )  # fmt: skip
    for sub in (latency, throughput):
        sub.description = "Random tokens as prompts, greedy, no prefix cache; warm-up, repeats, medians."
    for sub, lengths in ((latency, (512, 64)), (throughput, (128, 64))):
        add_model(sub)
        add_split(sub)
        for flag, default, what in zip(("--input-len", "--output-len"), lengths, ("prompt", "output"), strict=True):
            sub.add_argument(
                flag, type=number(int, 1), metavar="N", default=default, help=f"tokens of each {what} (default: {default})"
            )
        sub.add_argument("--repeat", type=number(int, 1), metavar="N", default=3, help="measured runs (default: 3)")
        sub.add_argument("--warmup", type=number(int, 0), metavar="N", default=1, help="runs before them (default: 1)")
        add_json(sub)


def _add_serve(parser: Parser) -> None:
    try:
        from trivium_server.load import add_arguments
    except ImportError as error:
        need = "install the server with pip install 'trivium[server]'"
        raise UsageError(f"trivium bench serve: {error.name} is missing; {need}") from error
    add_arguments(parser)


def bench(args: argparse.Namespace) -> int:
    """Loads the model without prefix cache, measures, and prints medians."""
    from trivium.api import LLM

    started = time.perf_counter()
    with LLM(args.model, **load_options(args), enable_prefix_caching=False, progress=not args.json) as llm:
        load_s = time.perf_counter() - started
        if profiled := args.kind == "latency" and args.profile:
            llm.loaded.executable.profile(False)  # a backend that can't says so before anything is measured
        runs = measure(llm, args)
        phases = profile(llm, args) if profiled else {}
        summary = llm.loaded.summary()
        if args.prefill:
            summary = f"prompts on {cast(Any, llm.engine).front.model.summary()}; then {summary}"
        setting = {name: getattr(args, name) for name in ("input_len", "output_len", "repeat", "warmup")}
    facts = {"kind": args.kind, "model": args.model, "device": summary, **setting, "load_s": load_s, "peak_rss_bytes": _peak_rss()}
    share = statistics.median(run.pop("host_share") for run in runs)
    step = statistics.median(run.pop("host_s_per_step") for run in runs)
    figures = {name: _spread([run[name] for run in runs]) for name in runs[0]}
    report(args, {**figures, "host_share": share, "host_s_per_step": step, **facts, **({"profile": phases} if phases else {})})
    return 0


def report(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """As one JSON document or as a table."""
    if args.json:
        print(json.dumps(result))
        return
    print(result["device"])
    rows = [["", "MEDIAN", "MIN", "MAX"]]
    spreads = {k: v for k, v in result.items() if isinstance(v, dict) and "median" in v}
    rows += [[k, *(f"{v[s]:.4g}" for s in ("median", "min", "max"))] for k, v in spreads.items()]
    rows += [[k, f"{v:.4g}", "", ""] for k, v in result.items() if isinstance(v, float)]
    print(table(rows))
    for phase, found in result.get("profile", {}).items():
        report_profile(phase, found)


def report_profile(phase: str, found: dict[str, Any]) -> None:
    """A table of one phase's operators, and the ceilings they are held against."""
    ceilings = ", ".join(f"{rate / 1e9:.4g} G{kind}" for kind, rate in found["ceilings"].items())
    print(f"\n{phase}, {found['seconds'] * 1e3:.4g} ms timed; this machine's ceilings just now, a second: {ceilings}")
    rows = [["OPERATOR", "CALLS", "MS", "SHARE", "GB/S", "GOP/S", "OF CEILING"]]
    for o in found["operators"]:
        rates = (f"{o[name] / o['seconds'] / 1e9:.4g}" if o["seconds"] else "" for name in ("bytes", "operations"))
        rows.append(
            [o["name"], str(o["calls"]), f"{o['seconds'] * 1e3:.4g}", f"{o['share']:.1%}", *rates, f"{o['of_ceiling']:.0%}"]
        )
    print(table(rows))


def profile(llm: LLM, args: argparse.Namespace) -> dict[str, Any]:
    """The operators of a prefill and of the decode steps after it. Threads meet after every operator, so a step takes a little
    longer than in the runs that are measured."""
    (prompt,), params = _requests(llm, args, 1)
    executable = llm.loaded.executable
    phases: dict[str, Profile] = {}
    executable.profile(True)
    for _ in llm.stream(prompt, params):
        if not phases:
            phases["prefill"] = executable.profile(True)
    phases["decode"] = executable.profile(False)
    return {phase: _shares(found) for phase, found in phases.items() if found.operators}


def _shares(found: Profile) -> dict[str, Any]:
    total = sum(o.seconds for o in found.operators)
    rows = [
        {**o._asdict(), "share": o.seconds / total if total else 0.0, "of_ceiling": o.floor_s / o.seconds if o.seconds else 0.0}
        for o in found.operators
    ]
    return {"seconds": total, "ceilings": dict(found.ceilings), "operators": rows}


def _requests(llm: LLM, args: argparse.Namespace, count: int) -> tuple[list[list[int]], SamplingParams]:
    import numpy as np

    from trivium.sampling import SamplingParams

    prompts = np.random.default_rng(SEED).integers(0, llm.loaded.vocab_size, (count, args.input_len)).tolist()
    return prompts, SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True)


def measure(llm: LLM, args: argparse.Namespace) -> list[Sample]:
    """One Sample a measured run."""
    prompts, params = _requests(llm, args, args.num_requests if args.kind == "throughput" else 1)
    one = _throughput if args.kind == "throughput" else _latency
    samples = []
    for turn in range(args.warmup + args.repeat):
        samples.append(one(llm, prompts, params))
        if not args.json:
            print(f"run {turn + 1} of {args.warmup + args.repeat}", file=sys.stderr, flush=True)
    return samples[args.warmup :]


class _Host:
    """The host's part of the steps since it was made."""

    def __init__(self, llm: LLM) -> None:
        self._stats = llm.engine.stats
        self._before = self._now()

    def _now(self) -> tuple[float, float, int]:
        return self._stats.host_seconds, self._stats.device_seconds, self._stats.steps

    def sample(self) -> Sample:
        host, device, steps = (now - before for now, before in zip(self._now(), self._before, strict=True))
        return {"host_share": host / (host + device) if steps else 0.0, "host_s_per_step": host / steps if steps else 0.0}


def _latency(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> Sample:
    """Prefill and decode are measured by the request's own clock; the host's share is that of the decode steps alone."""
    host, metrics, made = None, None, 0
    for output in llm.stream(prompts[0], params):
        host = host or _Host(llm)
        metrics, made = output.metrics, made + len(output.outputs[0].token_ids)
    assert metrics is not None and host is not None and metrics.prefill_time and metrics.time_to_first_token
    prefill = {"prefill_tokens_per_s": len(prompts[0]) / metrics.prefill_time, "ttft_s": metrics.time_to_first_token}
    if metrics.transfer_time:
        prefill["transfer_s"] = metrics.transfer_time
    if not metrics.decode_time or not metrics.mean_itl:
        return {**prefill, **host.sample()}
    return {"decode_tokens_per_s": (made - 1) / metrics.decode_time, **prefill, "itl_s": metrics.mean_itl, **host.sample()}


def _throughput(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> Sample:
    host, started = _Host(llm), time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - started
    made = sum(len(output.outputs[0].token_ids) for output in outputs)
    read = sum(map(len, prompts))
    first = statistics.median(o.metrics.time_to_first_token for o in outputs if o.metrics and o.metrics.time_to_first_token)
    rates = {"output_tokens_per_s": made / seconds, "total_tokens_per_s": (made + read) / seconds}
    return {**rates, "requests_per_s": len(prompts) / seconds, "ttft_s": first, **host.sample()}


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}


def _peak_rss() -> int:
    """Largest resident memory of this process so far, in bytes."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
