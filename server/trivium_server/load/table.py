"""The report as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

ROWS = (
    ("TTFT", "ttft_s"), ("ITL", "itl_s"), ("TPOT", "tpot_s"), ("E2E", "e2e_s"), ("TTFT from sending", "ttft_from_sending_s"),
    ("E2E from sending", "e2e_from_sending_s"), ("sent late", "late_s"),
)  # fmt: skip
COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")


def facts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(what, figures) of what is no latency."""
    load, requests, rates, tokens = report["load"], report["requests"], report["rates"], report["tokens"]
    how = ", ".join(f"{name} {_plain(value)}" for name, value in load.items() if value is not None)
    found = [
        ("server", f"{report['target']['server']}, {report['target']['model']}, {report['target']['endpoint']}"),
        ("load", how), ("prompts", report["target"]["prompts"]),
        ("requests", f"{requests['whole']} whole, {requests['failed']} failed, in {report['seconds']:.3g} s"),
        ("tokens", f"{tokens['output']} output, {_or_none(tokens['prompt'])} prompt, by {tokens['counted_by']}"),
        ("rates", f"{rates['output_tokens_per_s']:.1f} output tokens/s, {rates['requests_per_s']:.2f} requests/s"),
        ("denominator", rates["denominator"]),
    ]  # fmt: skip
    if goodput := report.get("goodput"):
        limits = ", ".join(f"{name} <= {seconds * 1e3:g} ms" for name, seconds in goodput["slo_s"].items())
        found.append(("goodput", f"{goodput['requests_per_s']:.2f} requests/s, {goodput['share']:.1%} within {limits}"))
    client, each = report["client"], report["client"]["cpu_us_per_token"]
    cost = "" if each is None else f", {each:.1f} us a token"
    found.append(("generator", f"{client['cpu_share']:.1%} of a core{cost}"))
    found += [("failure", f"{kind}: {one['count']}, first: {one['first']}") for kind, one in report["failures"].items()]
    return [*found, *(("note", note) for note in report["notes"])]


def latencies(report: Mapping[str, Any]) -> list[list[str]]:
    """Rows of milliseconds, the head first."""
    rows = [(name, report[key]) for name, key in ROWS if report.get(key)]
    return [["ms", *COLUMNS, "n"]] + [
        [name, *(f"{found[column] * 1e3:.2f}" for column in COLUMNS), str(found["n"])] for name, found in rows
    ]


def table(report: Mapping[str, Any]) -> str:
    """For a terminal."""
    known = facts(report)
    width = max(len(what) for what, _ in known)
    lines = [f"{what:<{width}}  {text}" for what, text in known]
    return "\n".join([*lines, "", _columns(latencies(report))])


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) if index else cell.ljust(width) for index, (cell, width) in enumerate(zip(row, widths)))
        for row in rows
    )


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return str(value[0]) if value[0] == value[1] else "-".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _or_none(value: int | None) -> str:
    return "unknown" if value is None else str(value)
