"""Record and replay: the Program and every Batch of a run, kept in a folder and run again on any backend.

A recording holds no weights: the checkpoint is found by name and must have the fingerprint that was recorded. Each step of a replay
starts from the recorded token ids, so one difference never causes the next. The folder: recording.json (the traced Program, the
page pool, the events in order), constants.npz (arrays that the model file computed) and one NNNNNN.npz a step. Nothing is pickled.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from trivium.engine.executor import Model
from trivium.engine.loader import Loaded, LoadOptions, load, plan
from trivium.errors import CheckpointError, InvalidRequestError, TriviumError, UnsupportedError
from trivium.ops import OPERATORS, OPSET, Batch, Builder, KVSpec, LatentKV, PagedKV, Program, Recurrent, Sampled, SampleInputs
from trivium.ops.state import Pages
from trivium.plugin.contract import Executable, Session, Step

FORMAT = 1
_STATES: Mapping[str, Any] = {"PagedKV": PagedKV, "LatentKV": LatentKV, "Recurrent": Recurrent}
_BATCH = [f.name for f in dataclasses.fields(Batch) if f.name != "sampling"]
_SAMPLING = [f.name for f in dataclasses.fields(SampleInputs)]


def program_to_json(program: Program) -> dict[str, Any]:
    """A Program without fused calls, as JSON; the arrays of its constants are left out."""
    return {
        "inputs": [v.name for v in program.inputs],
        "constants": [
            {"name": c.value.name, "shape": c.value.shape, "source": c.source, "rows": c.rows, "array": c.array is not None}
            for c in program.constants
        ],
        "states": [{"name": s.value.name, "kind": type(s.spec).__name__, **dataclasses.asdict(s.spec)} for s in program.states],
        "calls": [
            {"op": c.name, "args": [None if v is None else v.name for v in c.args], "attrs": dict(c.attrs)} for c in program.calls
        ],
        "outputs": {name: v.name for name, v in program.outputs.items()},
        "vocab_size": program.vocab_size,
    }


def program_from_json(data: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Program:
    """The Program again, traced anew by a Builder, which checks every call. Raises CheckpointError where `data` is not one."""
    try:
        return _trace(data, arrays)
    except TriviumError:
        raise
    except Exception as fault:
        raise CheckpointError(f"the recorded Program is damaged: {type(fault).__name__}: {fault}") from fault


def _trace(data: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Program:
    b = Builder(OPERATORS)
    known = {name: b.input(name) for name in data["inputs"]}
    for c in data["constants"]:
        name, shape, rows = c["name"], _tuples(c["shape"]), _tuples(c["rows"])
        known[name] = b.array(name, arrays[name]) if c["array"] else b.weight(name, shape, source=c["source"], rows=rows)
    for state in data["states"]:
        fields = {k: _tuples(v) for k, v in state.items() if k not in ("name", "kind")}
        known[state["name"]] = b.state(state["name"], _STATES[state["kind"]](**fields))
    for c in data["calls"]:
        args = [None if a is None else known[a] for a in c["args"]]
        made = b.call(c["op"], *args, **{k: _tuples(v) for k, v in c["attrs"].items()})
        known |= {v.name: v for v in (made if isinstance(made, tuple) else (made,))}
    return b.finish({name: known[v] for name, v in data["outputs"].items()}, vocab_size=data["vocab_size"])


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


class Recorder:
    """Writes what a model is asked to run. Give `model` to an Engine in place of the loaded one; close() completes the folder.

    `logits`: the logits of every sampled row are kept too (float32[rows, vocab] a step).
    """

    def __init__(self, loaded: Loaded, folder: Path, *, logits: bool = False) -> None:
        if loaded.lora is not None:
            raise UnsupportedError("adapters are not recorded; load the model without enable_lora")
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise InvalidRequestError(f"{folder} is not empty; give a new folder for the recording", param="output")
        self.folder = folder
        self.logits = logits
        self.events: list[dict[str, Any]] = []
        self._loaded = loaded
        session, executable = cast(Session, _Session(loaded.session, self)), _Executable(loaded.executable, self)
        self.model: Model = dataclasses.replace(loaded, session=session, executable=executable)

    def event(self, kind: str, **arrays: Any) -> str:
        """Notes an event, with its arrays in a file of their own; returns the file's name."""
        name = f"{len(self.events):06}.npz"
        self.events.append({"kind": kind, "file": name})
        self.save(name, **arrays)
        return name

    def save(self, name: str, **arrays: Any) -> None:
        """(Over)writes the file of an event."""
        _save(self.folder / name, {k: np.asarray(v) for k, v in arrays.items() if v is not None})

    def close(self) -> None:
        """Writes recording.json and the constants."""
        loaded, spec = self._loaded, self._loaded.kv_spec
        traced = loaded.traced
        _save(self.folder / "constants.npz", {c.value.name: c.array for c in traced.constants if c.array is not None})
        about = {
            "format": FORMAT, "opset": OPSET, "model": loaded.name, "fingerprint": loaded.fingerprint,
            "backend": f"{loaded.backend.name}:{loaded.device.index}", "page_size": spec.page_size, "pages": loaded.num_pages,
            "max_batched_tokens": loaded.max_num_batched_tokens, "max_seqs": loaded.max_num_seqs,
            "max_model_len": loaded.max_model_len, "groups": [list(g.states) for g in spec.groups],
            "program": program_to_json(traced), "text": str(traced), "events": self.events,
        }  # fmt: skip
        (self.folder / "recording.json").write_text(json.dumps(about))


def _save(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    np.savez_compressed(path, **cast(Any, arrays))


class _Session:
    """A session whose changes of pages outside steps are noted; everything else is the session's own."""

    def __init__(self, session: Session, recorder: Recorder) -> None:
        self._session = session
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def copy_pages(self, src: Sequence[int], dst: Sequence[int]) -> None:
        self._recorder.event("copy", src=src, dst=dst)
        self._session.copy_pages(src, dst)

    def import_pages(self, group: int, ids: Sequence[int], pages: Pages) -> None:
        tensors = {f"tensor_{i}_{j}": a for i, slot in enumerate(pages.tensors) for j, a in enumerate(slot)}
        self._recorder.event("import", group=group, ids=ids, **tensors)
        self._session.import_pages(group, ids, pages)


class _Executable(Executable):
    def __init__(self, executable: Executable, recorder: Recorder) -> None:
        self._executable = executable
        self._recorder = recorder

    def run(self, batch: Batch) -> Step:
        arrays: dict[str, Any] = {name: getattr(batch, name) for name in _BATCH}
        arrays |= {f"sampling_{name}": getattr(batch.sampling, name) for name in _SAMPLING}
        arrays = {name: np.array(a) for name, a in arrays.items() if a is not None}
        name = self._recorder.event("run", **arrays)
        return _Step(self._executable.run(batch), lambda **made: self._recorder.save(name, **arrays, **made), self._recorder.logits)


class _Step(Step):
    """Adds to the record what came out. A step that fails has nothing to add: its replay is run, not compared."""

    def __init__(self, step: Step, save: Callable[..., None], logits: bool) -> None:
        self._step = step
        self._save = save
        self._logits = logits

    def tokens(self) -> Sampled:
        sampled = self._step.tokens()
        made = {f"sampled_{name}": value for name, value in sampled._asdict().items()}
        self._save(**made, **({"logits": self._step.output("logits")} if self._logits else {}))
        return sampled

    def output(self, name: str) -> npt.NDArray[np.float32]:
        return self._step.output(name)


class Comparison(NamedTuple):
    """One replayed step: sampled rows, how many ids differ, and the largest differences (None: not recorded)."""

    step: int
    tokens: int
    rows: int
    different: int
    logprobs: float | None
    logits: float | None


class Replay(NamedTuple):
    """A replay. program_changed: today's model file makes another Program than the recorded one, which was run."""

    recorded_on: str
    replayed_on: str
    program_changed: bool
    steps: tuple[Comparison, ...]

    def to_json(self) -> dict[str, Any]:
        """Totals first, then every step that has a different id."""
        total = {name: sum(getattr(s, name) for s in self.steps) for name in ("tokens", "rows", "different")}
        worst = {
            name: max((v for s in self.steps if (v := getattr(s, name)) is not None), default=None)
            for name in ("logprobs", "logits")
        }
        odd = [s._asdict() for s in self.steps if s.different]
        about = {name: getattr(self, name) for name in ("recorded_on", "replayed_on", "program_changed")}
        return {**about, "steps": len(self.steps), **total, "max_difference": worst, "differing_steps": odd}


def replay(folder: Path, backend: str = "auto", *, model: str | None = None, **options: Any) -> Replay:
    """Runs a recording on `backend` and compares what is sampled. `options`: those of LoadOptions (dtype, quantize, ...).

    Raises CheckpointError for a damaged recording or another checkpoint, InvalidRequestError where the backend can't take
    its page size.
    """
    about, arrays = _read(folder)
    program = program_from_json(about["program"], arrays)
    limits = {"block_size": about["page_size"], "num_kv_blocks": about["pages"], "max_num_seqs": about["max_seqs"],
              "max_num_batched_tokens": about["max_batched_tokens"], "max_model_len": about["max_model_len"]}  # fmt: skip
    asked = model or about["model"], backend, LoadOptions(**{**limits, **options})
    changed = str(plan(*asked).traced) != about["text"]
    loaded = load(*asked, traced=program)
    try:
        if loaded.fingerprint != about["fingerprint"]:
            raise CheckpointError(f"{loaded.name} is another checkpoint than the recorded one; give the same with --model")
        if [list(g.states) for g in loaded.kv_spec.groups] != about["groups"]:
            raise CheckpointError("the layers are grouped into pages otherwise than in the recording; record again")
        steps = tuple(c for i, e in enumerate(about["events"]) if (c := _again(loaded, i, e["kind"], _arrays(folder / e["file"]))))
    finally:
        loaded.session.close()
    on = f"{loaded.backend.name}:{loaded.device.index}"
    return Replay(about["backend"], on, changed, steps)


def _read(folder: Path) -> tuple[dict[str, Any], Mapping[str, npt.NDArray[Any]]]:
    try:
        about = json.loads((folder / "recording.json").read_text())
        version = about["format"], about["opset"]
    except (OSError, ValueError, TypeError, KeyError) as fault:
        raise CheckpointError(f"{folder} holds no recording (recording.json: {type(fault).__name__}: {fault})") from fault
    if version != (FORMAT, OPSET):
        raise CheckpointError(f"{folder} has format and operator set {version}; this version reads {(FORMAT, OPSET)}")
    return about, _arrays(folder / "constants.npz")


def _arrays(path: Path) -> Mapping[str, npt.NDArray[Any]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except Exception as fault:
        raise CheckpointError(f"{path} is damaged or missing: {fault}") from fault


def _again(loaded: Loaded, index: int, kind: str, arrays: Mapping[str, npt.NDArray[Any]]) -> Comparison | None:
    """Repeats one event; a comparison if it was a step that had come to its end."""
    if kind == "copy":
        loaded.session.copy_pages(arrays["src"].tolist(), arrays["dst"].tolist())
    elif kind == "import":
        _import(loaded.session, loaded.kv_spec, arrays)
    elif kind == "run":
        batch = _batch(index, arrays)
        step = loaded.executable.run(batch)
        sampled = step.tokens()
        if "sampled_ids" in arrays:
            return _compare(index, batch, step, sampled, arrays)
    else:
        raise CheckpointError(f"event {index} of the recording is {kind!r}, which this version does not know")
    return None


def _batch(index: int, arrays: Mapping[str, npt.NDArray[Any]]) -> Batch:
    try:
        sampling = SampleInputs(**{n: _plain(arrays[f"sampling_{n}"]) for n in _SAMPLING if f"sampling_{n}" in arrays})
        return Batch(**{name: arrays[name] for name in _BATCH if name in arrays}, sampling=sampling)
    except TypeError as fault:
        raise CheckpointError(f"step {index} was recorded by another version ({fault}); record again") from fault


def _plain(array: npt.NDArray[Any]) -> Any:
    return array.item() if array.ndim == 0 else array


def _import(session: Session, spec: KVSpec, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    group, slots = int(arrays["group"]), list[tuple[npt.NDArray[np.float32], ...]]()
    while f"tensor_{len(slots)}_0" in arrays:
        prefix = f"tensor_{len(slots)}_"
        slots.append(tuple(arrays[name] for name in sorted(arrays) if name.startswith(prefix)))
    pages = Pages(spec.groups[group], spec.page_size, spec.dtype, tuple(slots))
    session.import_pages(group, arrays["ids"].tolist(), pages)


def _compare(index: int, batch: Batch, step: Step, sampled: Sampled, arrays: Mapping[str, npt.NDArray[Any]]) -> Comparison:
    def furthest(name: str, now: Any) -> float | None:
        if name not in arrays or now is None or not arrays[name].size:
            return None
        return float(np.abs(arrays[name] - now).max())

    different = int((sampled.ids != arrays["sampled_ids"]).sum())
    logits = furthest("logits", step.output("logits")) if "logits" in arrays else None
    logprobs = None if different else furthest("sampled_logprobs", sampled.logprobs)
    return Comparison(index, batch.tokens, len(sampled.ids), different, logprobs, logits)
