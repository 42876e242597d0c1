"""trivium's CPU backend against other engines, by turns in one run: ratios to the best peer of each axis, and shares of the floor.

ROOT holds the peers, their scripts and their forms of the models; docs/benchmarks-cpu.md says how to make it and what the columns
mean. Each measurement is a fresh process on a machine that is waited for to be quiet. Per model and axis: trivium, peer, peer, and
again, as often as the time allows; medians. A peer that is missing or fails is named in `absent` with the reason. JSON to standard
output, progress and a table to standard error.

    python benchmarks/cpu_vs_peers.py --peers ROOT [--json] [--quick] [--models M,...] [--axes A,...] [--rounds N] [--all-peers]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PARTS = {"decode": "a", "prefill": "b", "batch_8": "d", "batch_32": "d", "cold": "cold"}


class Comparison:
    """All measurements of one call."""

    def __init__(self, args: argparse.Namespace) -> None:
        from peers.entrants import AXES, PHASES, SUBJECTS, peers

        self.args = args
        self.root: Path = args.peers.resolve()
        self.subjects = {model: SUBJECTS[model] for model in args.models}
        self.axes = {model: [a for a in args.axes if a in s.axes] for model, s in self.subjects.items()}
        wanted = {model: {AXES[a].phase for a in axes} for model, axes in self.axes.items()}
        self.stages = [(m, p) for m in self.subjects for p in PHASES if p in wanted[m] and (not args.quick or p in _quick(m))]
        self.peers = list(peers())
        self.runs: dict[tuple[str, str], Any] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        self.absent: list[dict[str, str]] = []
        self.busy: list[float] = []
        self.until = time.monotonic() + 60 * args.minutes

    def go(self) -> dict[str, Any]:
        """Measures everything and returns the report."""
        ceilings = [self._ceilings()]
        for left, (model, phase) in zip(range(len(self.stages), 0, -1), self.stages):
            self._stage(model, phase, (self.until - time.monotonic()) / left)
        ceilings.append(self._ceilings())
        return self._report([c for c in ceilings if c])

    def _stage(self, model: str, phase: str, share: float) -> None:
        """One phase of one model, everybody in turn; further rounds while they fit into this stage's share of the time."""
        entrants = [None, *(p for p in self.peers if p.runs(model, phase, self.args.all_peers) and self._there(p, model, phase))]
        started, failed = time.monotonic(), set[Any]()
        for done in range(self.args.rounds):
            spent = time.monotonic() - started
            if done and spent * (done + 1) / done > share:
                break
            for peer in entrants:
                if peer not in failed and not self._measure(model, phase, peer):
                    failed.add(peer)

    def _there(self, peer: Any, model: str, phase: str) -> bool:
        if reason := peer.missing(self.root, model):
            self._miss(model, phase, peer.label, reason)
        return reason is None

    def _miss(self, model: str, phase: str, label: str, error: str) -> None:
        self.absent.append({"model": model, "phase": phase, "peer": label, "error": error})
        _say(f"{model} {phase} {label}: {error}")

    def _measure(self, model: str, phase: str, peer: Any) -> bool:
        """One process of trivium (None) or a peer; False: it failed, which is noted."""
        from peers.entrants import AXES
        from peers.report import OURS, Runs
        from peers.running import Failed, figures, wait_until_quiet

        subject = self.subjects[model]
        reps = 1 if self.args.quick else subject.reps
        label, bits = (OURS, 0.0) if peer is None else (peer.label, peer.bits)
        command = self._ours(model, phase, reps) if peer is None else peer.command(self.root, model, phase, reps, _free_port())
        self.busy.append(wait_until_quiet(self.args.patience))
        folder = Path.cwd() if peer is None else self.root / "bench"
        try:
            found = figures(command, folder, self.args.timeout)
        except Failed as e:
            self._miss(model, phase, label, str(e))
            return False
        axes = [a for a in self.axes[model] if AXES[a].phase == phase]
        runs = self.runs.setdefault((model, label), Runs(label, bits))
        runs.add(found, axes)
        if peer is None:
            self.facts[model] = found
        _say(f"{model} {phase} {label}: " + ", ".join(f"{a} {runs.samples[a][-1]:.4g}" for a in axes if a in runs.samples))
        return True

    def _ours(self, model: str, phase: str, reps: int) -> list[str]:
        subject = self.subjects[model]
        files = [str(self.root / "models" / subject.ours), str(self.root / "bench" / f"prompts-{subject.prompts}.json")]
        batches = ["--batches", phase.removeprefix("batch_")] if phase.startswith("batch_") else []
        options = json.dumps({"quantize": subject.quantize, "kv_dtype": subject.kv_dtype} | self.args.options)
        flags = ["--parts", PARTS[phase], "--reps", str(reps), "--options", options, *batches]
        return [sys.executable, str(HERE / "cpu_vs_peers.py"), "--ours", *files, *flags]

    def _ceilings(self) -> dict[str, Any]:
        """By model: the machine's limits for as many bytes as its weights have. Empty: not measured, which is noted."""
        from peers.running import Failed, figures, wait_until_quiet

        found: dict[str, Any] = {}
        for model, subject in self.subjects.items():
            path = self.root / "models" / subject.ours
            size = path.stat().st_size / 1e6 if path.is_file() else 100.0
            command = [sys.executable, str(HERE / "cpu_vs_peers.py"), "--ceilings", f"{size:.0f}"]
            self.busy.append(wait_until_quiet(self.args.patience))
            try:
                found[model] = figures(command, Path.cwd(), self.args.timeout)
            except Failed as e:
                self._miss(model, "ceilings", "trivium", str(e))
        return found

    def _report(self, ceilings: list[dict[str, Any]]) -> dict[str, Any]:
        from peers.report import OURS, Runs, row

        rows = []
        for model, axes in self.axes.items():
            rivals = [runs for (m, label), runs in self.runs.items() if m == model and label != OURS]
            ours = self.runs.get((model, OURS), Runs(OURS, 0.0))
            rows += [row(model, axis, ours, rivals, self._floors(model, ceilings)) for axis in axes]
        precision = {model: facts["precision"] for model, facts in self.facts.items()}
        return {
            "rows": [r for r in rows if r is not None], "absent": self.absent, "machine": _machine(),
            "instruction_sets": {m: facts["device"] for m, facts in self.facts.items()}, "ceilings": ceilings,
            "precision": precision, "versions": {f"{m}: {label}": r.version for (m, label), r in self.runs.items()},
            "busy_share_before_runs": max(self.busy, default=0.0), "quality": self._quality(),
        }  # fmt: skip

    def _floors(self, model: str, ceilings: list[dict[str, Any]]) -> dict[str, float]:
        """By the better of the limits seen before and after."""
        from peers.ceilings import Work, floors

        seen, facts = [c[model] for c in ceilings if model in c], self.facts.get(model)
        if not seen or facts is None:
            return {}
        work = Work(facts["weights_bytes"], facts["body"], facts["head"])
        return dict(floors(work, max(c["read_gb_s"] for c in seen), max(c["tops"] for c in seen)))

    def _quality(self) -> Any:
        """What quality.py prints for SmolLM2, or why it did not run."""
        from peers.entrants import SUBJECTS
        from peers.running import Failed, figures

        if self.args.quick or not self.args.quality:
            return "not measured in this run; see benchmarks/quality.py"
        judge = [sys.executable, str(HERE / "quality.py"), "--peers", str(self.root), "--json"]
        try:
            subject = SUBJECTS["smollm2-135m"]
            return figures([*judge, "--quantize", subject.quantize, "--kv-dtype", subject.kv_dtype], Path.cwd(), 600)
        except Failed as e:
            return f"failed: {e}"


def _quick(model: str) -> tuple[str, ...]:
    """Phases of a quick run: the large model's take minutes."""
    from peers.entrants import PHASES, SUBJECTS

    return ("decode",) if SUBJECTS[model].slow else PHASES


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _machine() -> dict[str, Any]:
    """Processor, system and the instruction sets that matter here."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    facts = {key.strip(): value.strip() for key, value in facts.items()}
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    known = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_int8", "amx_bf16", "asimddp", "i8mm")
    return {
        "processor": facts.get("model name", platform.machine()), "processors": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "system": platform.platform(),
        "python": platform.python_version(), "flags": [f for f in known if f in flags],
    }  # fmt: skip


def arguments(given: list[str]) -> argparse.Namespace:
    """The call's options, checked."""
    from peers.entrants import AXES, SUBJECTS

    def some(known: Any) -> Any:
        def parse(text: str) -> list[str]:
            names = text.split(",")
            for name in names:
                if name not in known:
                    raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
            return names

        return parse

    parser = argparse.ArgumentParser(description="trivium's CPU backend against other engines", epilog="see docs/benchmarks-cpu.md")
    parser.add_argument("--peers", type=Path, required=True, metavar="ROOT", help="folder of the peers")
    parser.add_argument("--json", action="store_true", help="the default")
    parser.add_argument("--models", type=some(SUBJECTS), help=f"of {','.join(SUBJECTS)} (default: all; quick: not gemma3-270m)")
    parser.add_argument("--axes", type=some(AXES), default=list(AXES), help=f"of {','.join(AXES)} (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="at most so many by turns (default: 3)")
    parser.add_argument("--minutes", type=float, default=20, help="further rounds only within this time (default: 20)")
    parser.add_argument("--patience", type=float, default=20, help="seconds to wait for a quiet machine (default: 20)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that one process may take (default: 600)")
    parser.add_argument("--quick", action="store_true", help="one round of one repeat; of llama-1b the decode only")
    parser.add_argument("--all-peers", action="store_true", help="everybody on every axis, not only who may be the best")
    parser.add_argument("--no-quality", dest="quality", action="store_false", help="leave out what quality.py measures")
    parser.add_argument("--options", type=json.loads, default={}, help="more arguments of LLM(), as JSON")
    args = parser.parse_args(given)
    if not (args.peers / "bench").is_dir():
        parser.error(f"{args.peers} has no folder bench; docs/benchmarks-cpu.md says how to make it")
    args.models = args.models or [m for m in SUBJECTS if not args.quick or m != "gemma3-270m"]
    args.rounds = 1 if args.quick else args.rounds
    return args


def main() -> None:
    given = sys.argv[1:]
    if given[:1] == ["--ours"]:
        from peers import ours

        ours.main(given[1:])
    elif given[:1] == ["--ceilings"]:
        from peers import ceilings

        print("JSON " + json.dumps(ceilings.measure(float(given[1]))))
    else:
        from peers.report import table

        report = Comparison(arguments(given)).go()
        _say(table(report["rows"]))
        print(json.dumps(report))


if __name__ == "__main__":
    main()
