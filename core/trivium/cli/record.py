"""`trivium record` and `replay`: what a run asked of a backend, kept, and asked again of any other."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from trivium.cli.parser import add_json, add_model, key_value, load_options, named, number
from trivium.errors import InvalidRequestError


def add_record(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="texts to complete, all in one batch")
    parser.add_argument("--output", "-o", type=Path, required=True, metavar="FOLDER", help="a new folder for the recording")
    parser.add_argument("--max-tokens", type=number(int, 1), default=32, metavar="N", help="tokens a prompt (default: 32)")
    parser.add_argument("--temperature", type=number(float, 0), default=0.0, metavar="T", help="0 is greedy (default)")
    parser.add_argument("--logits", action="store_true", help="keep the logits too (4 bytes a row and vocabulary entry)")
    add_json(parser)


def record(args: argparse.Namespace) -> int:
    """Completes the prompts and writes the Program and every Batch."""
    from trivium.api import LLM
    from trivium.conformance.recording import Recorder
    from trivium.sampling import SamplingParams

    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, logprobs=0, seed=0)
    with LLM(args.model, **load_options(args), progress=not args.json) as llm:
        recorder = Recorder(llm.loaded, args.output, logits=args.logits)
        llm.engine.model = recorder.model
        outputs = llm.generate(args.prompts, params)
        recorder.close()
    made = {"folder": str(args.output), "events": len(recorder.events), "texts": [o.outputs[0].text for o in outputs]}
    print(json.dumps(made) if args.json else f"{args.output}: {len(recorder.events)} events")
    return 0


def add_replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="what `trivium record` wrote")
    parser.add_argument("--backend", default="auto", metavar="NAME[:DEVICE]", help="see `trivium backends` (default: auto)")
    parser.add_argument("--model", type=named, help="where the checkpoint is now (default: where it was)")
    parser.add_argument("--dtype", default="auto", help="as for `trivium run`")
    parser.add_argument("--kv-dtype", default="auto", metavar="FORMAT", help="KV format (default: the backend's best)")
    parser.add_argument("--quantize", metavar="FORMAT", help="as for `trivium run`")
    parser.add_argument("--option", type=key_value, action="append", metavar="KEY=VALUE", help="an option of the backend's own")
    parser.add_argument("--allow", type=number(int, 0), default=0, metavar="N", help="ids that may differ (default: 0)")
    add_json(parser)


def replay(args: argparse.Namespace) -> int:
    """Runs the recording; 1 if more ids differ than allowed."""
    from trivium.conformance.recording import replay as run

    if not args.folder.is_dir():
        raise InvalidRequestError(f"there is no folder {args.folder}", param="folder")
    options = {name: getattr(args, name) for name in ("dtype", "kv_dtype", "quantize")}
    done = run(args.folder, args.backend, model=args.model, **options, backend_options=dict(args.option or ()))
    report = done.to_json()
    if args.json:
        print(json.dumps(report))
    else:
        print(f"{report['steps']} steps, {report['rows']} sampled rows: {report['different']} ids differ between "
              f"{done.recorded_on} and {done.replayed_on}; largest differences {report['max_difference']}")  # fmt: skip
        if done.program_changed:
            print("today's model file makes another Program than the recorded one (which was run)")
    return 0 if report["different"] <= args.allow else 1
