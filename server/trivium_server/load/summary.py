"""What a run of the load generator comes to: percentiles, rates that name their denominator, goodput, failures by kind."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from trivium_server.load.answers import Outcome
from trivium_server.load.generator import Run

QUANTILES = (50, 90, 95, 99)
BUSY = 0.7
"""Share of a core above which the generator itself may be what was measured."""
DEFINITIONS = {
    "ttft": "from the scheduled time (closed loop: from sending, connecting included) to the first piece of output",
    "itl": "between two pieces of output of one answer; a piece may hold several tokens",
    "tpot": "(last piece - first piece) / (tokens - 1), one for each answer of two tokens or more",
    "e2e": "from the scheduled time (closed loop: from sending) to the end of the answer",
    "from_sending": "the same from the moment of sending: without the wait that coordinated omission would hide",
    "late": "between the scheduled time and the moment of sending",
    "percentiles": "linear between the two nearest observations, over whole answers",
    "rates": "a second of the time from the first scheduled request to the end of the last answer; of whole answers only",
    "goodput": "whole answers within every limit of the SLO; itl is the largest gap of an answer, tpot its mean; failures miss",
}
SLO = ("ttft", "itl", "tpot", "e2e")


def slo(text: str) -> dict[str, float]:
    """NAME=TIME[,...] in seconds by name: ttft=500ms,itl=50ms,e2e=10s. ValueError if it is none."""
    found: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(\d+(?:\.\d+)?)\s*(ms|s)\s*", part)
        if match is None or match[1] not in SLO or match[1] in found:
            names = ", ".join(SLO)
            raise ValueError(f"an SLO is {names}, each once, with a time in ms or s, as in ttft=500ms,itl=50ms; not {part!r}")
        found[match[1]] = float(match[2]) / (1000.0 if match[3] == "ms" else 1.0)
    return found


def times(outcome: Outcome) -> dict[str, float]:
    """ttft, largest itl, tpot and e2e of one whole answer, in seconds; those that it has."""
    found = {"e2e": outcome.end - outcome.scheduled}
    news = outcome.times
    if news:
        found["ttft"] = news[0] - outcome.scheduled
    if len(news) > 1:
        found["itl"] = float(np.diff(news).max())
    if len(news) > 1 and outcome.made > 1:
        found["tpot"] = (news[-1] - news[0]) / (outcome.made - 1)
    return found


def spread(values: Iterable[float]) -> dict[str, float] | None:
    """mean, percentiles, min, max and number of the values; None of none."""
    found = np.fromiter(values, np.float64)
    if not found.size:
        return None
    marks = dict(zip((f"p{q}" for q in QUANTILES), np.percentile(found, QUANTILES).tolist(), strict=True))
    return {"mean": float(found.mean()), **marks, "min": float(found.min()), "max": float(found.max()), "n": found.size}


def gaps(outcomes: Iterable[Outcome]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Every gap between two pieces of output, in seconds."""
    found = [np.diff(outcome.times) for outcome in outcomes if len(outcome.times) > 1]
    return np.concatenate(found) if found else np.zeros(0)


def summarized(run: Run, load: Mapping[str, Any], target: Mapping[str, Any], limits: Mapping[str, float]) -> dict[str, Any]:
    """The report, as JSON has it. load, target: how it was asked; limits: of the SLO, if there is one. Times in seconds."""
    whole = [o for o in run.outcomes if not o.failure]
    seconds = max(run.end - run.start, 1e-9)
    output, prompt = sum(o.made for o in whole), sum(o.prompt_tokens or 0 for o in whole)
    read = prompt if any(o.prompt_tokens for o in whole) else None
    each = [times(o) for o in whole]
    latencies = {name: spread(one[name] for one in each if name in one) for name in ("ttft", "tpot", "e2e")}
    report: dict[str, Any] = {
        "target": dict(target), "load": dict(load), "seconds": seconds,
        "requests": {"sent": len(run.outcomes), "whole": len(whole), "failed": len(run.outcomes) - len(whole)},
        "failures": _failures(run.outcomes),
        "tokens": {"output": output, "prompt": read, "counted_by": _counted(whole)},
        "rates": {
            "requests_per_s": len(whole) / seconds, "output_tokens_per_s": output / seconds,
            "total_tokens_per_s": None if read is None else (output + read) / seconds, "denominator": DEFINITIONS["rates"],
        },
        "ttft_s": latencies["ttft"], "itl_s": spread(gaps(whole)), "tpot_s": latencies["tpot"], "e2e_s": latencies["e2e"],
        "lengths": {
            "prompt_tokens": spread(o.prompt_tokens for o in whole if o.prompt_tokens is not None),
            "output_tokens": spread(o.made for o in whole),
        },
        "client": {
            "cpu_s": run.cpu, "cpu_share": run.cpu / seconds, "cpu_us_per_token": run.cpu / output * 1e6 if output else None,
        },
    }  # fmt: skip
    if load["kind"] == "open":
        report |= _from_sending(whole)
    if limits:
        met = sum(all(one.get(name, _missing(name)) <= limit for name, limit in limits.items()) for one in each)
        share = met / len(run.outcomes) if run.outcomes else 0.0
        report["goodput"] = {"slo_s": dict(limits), "met": met, "share": share, "requests_per_s": met / seconds}
    report["notes"] = _notes(report)
    report["definitions"] = DEFINITIONS
    return report


def _missing(name: str) -> float:
    """What an answer without such a time counts as: gaps that there are not are short, a first token that never came is late."""
    return 0.0 if name in ("itl", "tpot") else float("inf")


def _from_sending(whole: Sequence[Outcome]) -> dict[str, Any]:
    first = spread(o.times[0] - o.sent for o in whole if o.times)
    return {
        "ttft_from_sending_s": first, "e2e_from_sending_s": spread(o.end - o.sent for o in whole),
        "late_s": spread(o.sent - o.scheduled for o in whole),
    }  # fmt: skip


def _failures(outcomes: Iterable[Outcome]) -> dict[str, dict[str, Any]]:
    failed = [o for o in outcomes if o.failure]
    first = {o.failure: o.message for o in reversed(failed)}
    return {kind: {"count": count, "first": first[kind]} for kind, count in Counter(o.failure for o in failed).most_common()}


def _counted(whole: Sequence[Outcome]) -> str:
    """By whom the tokens were counted."""
    by_server = sum(o.output_tokens is not None for o in whole)
    if by_server in (0, len(whole)):
        return "the server's usage" if by_server else "pieces of output"
    return f"the server's usage in {by_server} answers, pieces of output in the others"


def _notes(report: Mapping[str, Any]) -> list[str]:
    notes, share = [], report["client"]["cpu_share"]
    if share > BUSY:
        notes.append(f"this generator used {share:.0%} of a core: it, not the server, may be what was measured")
    late, first = report.get("late_s"), report["ttft_s"]
    if late and first and late["p99"] > 0.1 * first["p50"]:
        notes.append(f"requests were sent up to {late['max'] * 1e3:.0f} ms late; latencies count from the schedule")
    if report["requests"]["failed"]:
        notes.append(f"{report['requests']['failed']} of {report['requests']['sent']} requests failed; latencies are of the others")
    return notes
