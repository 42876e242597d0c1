"""What an evaluation found, as a table for terminals and as one HTML file that needs no other."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from trivium.cli.parser import table

_ROWS = {
    "perplexity": ("perplexity", "{:.4f}"), "perplexity_of_measure": ("perplexity of the measure", "{:.4f}"),
    "perplexity_ratio": ("ratio of the two", "{:.5f}"), "kl_mean": ("KL divergence, mean (nats)", "{:.6f}"),
    "top1": ("same likeliest token", "{:.4%}"), "kl_median": ("KL divergence, median", "{:.6f}"),
    "kl_p99": ("KL divergence, 99th percentile", "{:.6f}"), "kl_max": ("KL divergence, largest", "{:.6f}"),
}  # fmt: skip


def rows(report: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(name, figure, interval) for people."""
    for key, (name, form) in _ROWS.items():
        if key not in report:
            continue
        entry = report[key]
        if not isinstance(entry, Mapping):
            yield name, form.format(entry), ""
            continue
        interval = entry["interval"]
        yield name, form.format(entry["value"]), "" if interval is None else " to ".join(form.format(edge) for edge in interval)


def as_table(report: Mapping[str, Any]) -> str:
    """For terminals."""
    sides = [("judged", report["judged"]["loaded"])]
    if report["against"] is not None:
        sides.append(("measure", report["against"]["loaded"]))
    lines = [f"{name}: {text}" for name, text in sides]
    lines += [f"{report['positions']} positions in {report['windows']} windows of {report['material']['file']}", ""]
    lines.append(table([("", "FIGURE", "95 % INTERVAL"), *rows(report)]))
    if report["windows"] < 2:
        lines.append("one window: nothing can be said about how sure these are")
    if report["answers"]:
        changed = sum(a["measure"] != a["judged"] for a in report["answers"])
        lines.append(f"{changed} of {len(report['answers'])} answers changed")
    for gate in report.get("gate", ()):
        bound = f"at most {gate['at_most']}" if "at_most" in gate else f"at least {gate['at_least']}"
        lines.append(f"gate: {gate['figure']} {gate['value']:.6g}, {bound}: {'passed' if gate['passed'] else 'FAILED'}")
    return "\n".join(lines)


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; color: #222; background: #fff; }
table { border-collapse: collapse; } td, th { padding: .3rem .8rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align:
top; } .pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; } .pair > div, pre { white-space: pre-wrap; overflow-wrap:
anywhere; background: #f6f6f6; padding: .7rem; border-radius: .3rem; margin: .3rem 0; } del { background: #fcd5d5; text-decoration:
none; } ins { background: #d3f2d3; text-decoration: none; } summary { cursor: pointer; } .failed { color: #b00020; font-weight: 600;
} @media (prefers-color-scheme: dark) { body { color: #ddd; background: #181818; } td, th { border-color: #444; }
.pair > div, pre { background: #242424; } del { background: #5d2525; } ins { background: #20502a; } .failed { color: #ff8a80; } }
"""


def as_html(report: Mapping[str, Any]) -> str:
    """One page: who was compared, the figures, the gate, and the answers side by side, those that changed first."""
    measure = report["against"]
    against = f"<tr><th>measure</th><td>{escape(measure['loaded'])}</td></tr>" if measure else ""
    parts = [
        f"<h1>{escape(report['judged']['model'])}</h1>",
        f"<table><tr><th>judged</th><td>{escape(report['judged']['loaded'])}</td></tr>{against}"
        f"<tr><th>on</th><td>{report['positions']} positions in {report['windows']} windows of "
        f"{escape(report['material']['file'])}</td></tr></table>",
        "<h2>Figures</h2>", _figures(rows(report)), *_gates(report.get("gate", ())), *_answers(report["answers"]),
    ]  # fmt: skip
    head = f'<meta charset="utf-8"><title>{escape(report["judged"]["model"])}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _figures(found: Iterator[tuple[str, str, str]]) -> str:
    cells = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in found)
    return f"<table><tr><th></th><th>figure</th><th>95 % interval</th></tr>{cells}</table>"


def _gates(gates: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if gates:
        yield "<h2>Gate</h2>"
    for gate in gates:
        bound = f"at most {gate['at_most']}" if "at_most" in gate else f"at least {gate['at_least']}"
        state = "passed" if gate["passed"] else '<span class="failed">failed</span>'
        yield f"<p>{escape(gate['figure'])} {gate['value']:.6g}, {bound}: {state}</p>"


def _answers(answers: Sequence[Mapping[str, str]]) -> Iterator[str]:
    if not answers:
        return
    changed = [a for a in answers if a["measure"] != a["judged"]]
    yield f"<h2>Answers: {len(changed)} of {len(answers)} changed</h2><p>Measure on the left, judged on the right.</p>"
    for answer in changed:
        left, right = marked(answer["measure"], answer["judged"])
        yield f"<h3>changed</h3>{_prompt(answer)}<div class=pair><div>{left}</div><div>{right}</div></div>"
    for answer in answers:
        if answer not in changed:
            yield f"<h3>the same</h3>{_prompt(answer)}<pre>{escape(answer['measure'])}</pre>"


def _prompt(answer: Mapping[str, str]) -> str:
    return f"<details><summary>prompt</summary><pre>{escape(answer['prompt'])}</pre></details>"


def marked(before: str, after: str) -> tuple[str, str]:
    """Both as HTML, with the words that differ in <del> and <ins>."""
    a, b = (text.split(" ") for text in (before, after))
    left, right = list[str](), list[str]()
    for kind, i, j, k, n in difflib.SequenceMatcher(a=a, b=b, autojunk=False).get_opcodes():
        one, two = escape(" ".join(a[i:j])), escape(" ".join(b[k:n]))
        left += [one if kind == "equal" else f"<del>{one}</del>"] if j > i else []
        right += [two if kind == "equal" else f"<ins>{two}</ins>"] if n > k else []
    return " ".join(left), " ".join(right)
