"""quantise(): a checkpoint in, a smaller one out, layer by layer."""

from __future__ import annotations

import hashlib
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from trivium.errors import CapacityError, CheckpointError, InvalidRequestError, TriviumError
from trivium.ops import Value
from trivium.text import Tokenizer
from trivium.weights import open_checkpoint
from trivium.weights.checkpoint import EMBEDDING, HEAD
from trivium_formats.gguf import GGUFFile

from trivium_compress import memory
from trivium_compress.convert import SOURCE
from trivium_compress.finish import finish_folder, finish_gguf
from trivium_compress.floats import is_finite
from trivium_compress.layer import Layer, Target, check_zeros, round_table, target
from trivium_compress.parts import Parts
from trivium_compress.recipe import Recipe
from trivium_compress.source import Source, check_new, gguf_in, is_gguf, open_source
from trivium_compress.stored import BLOCKS
from trivium_compress.structure import Projection, Scaling, projections, scalings
from trivium_compress.texts import cut, read_text, spread
from trivium_compress.to_folder import made_of, to_folder
from trivium_compress.to_gguf import to_gguf
from trivium_compress.walk import Inputs, Live, Segment, Walk

Array = npt.NDArray[Any]
WINDOWS, WINDOW = 64, 512
"""How many windows of the text are read, and their tokens, when nothing else is asked for."""
LEAST = 16
"""The shortest window that is worth reading."""
Progress = Callable[[int, int, str], None]
"""Is told the layers that are done, all of them, and what is being done."""


@dataclass(frozen=True)
class Calibration:
    """A text of which `windows` windows (None: WINDOWS, or as many as `memory` allows) of `window` tokens are read."""

    path: Path
    windows: int | None = None
    window: int = WINDOW


def quantise(
    model: Path, output: Path, recipe: Recipe, calibration: Calibration | None = None, *, memory_bytes: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Writes the model in `model`, a folder or .gguf file, to `output`, a .gguf file if it is called so and else a folder, and says
    what has become of it (see report()).

    What is done is kept in OUTPUT.partial: the same call goes on from there. memory_bytes: what may be held at a time, see
    memory.py. Raises InvalidRequestError for what can't be asked, also if what was begun was begun otherwise or from another model;
    CapacityError if the bound is too low; UnsupportedError and CheckpointError as open_checkpoint().
    """
    file, to_file = gguf_in(model), is_gguf(output)
    if (file is not None) != to_file:
        check_new(output, model)
        through = _by_file if to_file else _by_folder
        return through(model, output, recipe, calibration, memory_bytes=memory_bytes, progress=progress)
    recipe.check_work()
    return _rounded(model, output, recipe, calibration, memory_bytes=memory_bytes, progress=progress)


def _rounded(
    model: Path, output: Path, recipe: Recipe, calibration: Calibration | None, *, memory_bytes: int | None,
    progress: Progress | None,
) -> dict[str, Any]:  # fmt: skip
    """Source and output are of one kind."""
    source = open_source(model, None if calibration is None else max(calibration.window, LEAST))
    check_new(output, source.path)
    if recipe.needs_inputs() and calibration is None:
        what = f"method {recipe.method}" if recipe.method not in (None, "rtn") else f"prune {recipe.prune}"
        raise InvalidRequestError(f"{what} looks at the inputs of projections: give a text to calibrate with", param="calibrate")
    job = Job(source, recipe, output, calibration, memory_bytes, progress or (lambda done, total, what: None))
    return job.run()


def _by_file(model: Path, output: Path, *arguments: Any, **options: Any) -> dict[str, Any]:
    """A folder as a .gguf file of the same numbers, kept beside the output until that is whole, and what it becomes."""
    plain = output.with_name(output.stem + ".plain.gguf")
    if not plain.exists() or GGUFFile(plain).metadata.get(SOURCE) != open_checkpoint(model).fingerprint:
        to_gguf(model, plain)
    with _kept_if_begun(output, plain.unlink):
        report = _rounded(plain, output, *arguments, **options)
    plain.unlink()
    return {**report, "model": str(model)}


def _by_folder(model: Path, output: Path, *arguments: Any, **options: Any) -> dict[str, Any]:
    """The other way round."""
    plain = output.with_name(output.name + ".plain")
    if plain.exists() and made_of(plain) is None:
        raise InvalidRequestError(f"{plain} is in the way, and is not ours; give another output, or remove it", param="output")
    if made_of(plain) != open_checkpoint(model).fingerprint:
        shutil.rmtree(plain, ignore_errors=True)
        to_folder(model, plain)
    with _kept_if_begun(output, partial(shutil.rmtree, plain)):
        report = _rounded(plain, output, *arguments, **options)
    shutil.rmtree(plain)
    return {**report, "model": str(model)}


@contextmanager
def _kept_if_begun(output: Path, remove: Callable[[], object]) -> Iterator[None]:
    """Removes what was to be read where that was refused, unless there is work to go on with."""
    try:
        yield
    except TriviumError:
        if not _partial(output).exists():
            remove()
        raise


def _partial(output: Path) -> Path:
    return output.with_name(output.name + ".partial")


@dataclass
class Job:
    """One call of quantise()."""

    source: Source
    recipe: Recipe
    output: Path
    calibration: Calibration | None
    memory_bytes: int | None
    progress: Progress
    projections: Mapping[str, Projection] = field(init=False)
    layers: Mapping[int, list[str]] = field(init=False)
    targets: dict[str, Target] = field(init=False)
    group: int = field(init=False)

    def __post_init__(self) -> None:
        self.projections = projections(self.source.program)
        self.layers = self.source.layers()
        chosen = [name for names in self.layers.values() for name in names if self._is_target(name)]
        widths = {self.source.checkpoint.tensor(name).shape[1] for name in chosen}
        self.group = self._group(widths)
        found = {name: target(self.source, name, self.recipe.format_of(name), self.recipe, self.group) for name in chosen}
        self.targets = {name: wanted for name, wanted in found.items() if wanted is not None}
        check_zeros(self.recipe, self.targets)
        if not self.targets and (self.recipe.format != "none" or self.recipe.prune):
            raise InvalidRequestError("no projection of this model can be rounded so", param="format")
        self._check_floats()

    def _group(self, widths: set[int]) -> int:
        """Inputs that share a scale; 0 where the format says that, or all of a row."""
        if self.source.gguf is not None:
            if self.recipe.group_size is not None:
                raise InvalidRequestError("blocks of a .gguf file have their own size; leave group_size out", param="group_size")
            return 0
        if (self.recipe.formats | {self.recipe.embedding}) & BLOCKS.keys():
            raise InvalidRequestError("blocks are for .gguf files; a folder takes int8 or int4", param="format")
        wanted = "int4" in self.recipe.formats or self.recipe.group_size is not None
        return self.recipe.group_for(widths) if wanted else 0

    def _is_target(self, name: str) -> bool:
        """A projection of a layer, or of one of its experts."""
        known = (name in self.projections and name not in self.source.made) or ".experts." in name
        weight = self.source.checkpoint.tensor(name)
        return known and name.endswith(".weight") and len(weight.shape) == 2 and not self.recipe.kept(name)

    def _check_floats(self) -> None:
        blocks = {self.source.checkpoint.tensor(n).format for n, t in self.targets.items() if t.grid is None}
        blocks -= {"float32", "float16", "bfloat16"}
        if blocks:
            message = f"what is pruned can't be written as {' or '.join(sorted(blocks))} again; give a format beside prune"
            raise InvalidRequestError(message, param="format")

    def run(self) -> dict[str, Any]:
        windows = self._windows()
        walk = Walk(self.source.program, self.calibration.window) if windows and self.calibration else None
        need = self._check_memory(walk, windows)
        parts = Parts(_partial(self.output), self._identity(windows))
        try:
            self._work(parts, walk, windows)
            found = self._report(parts, need, windows)
            parts.remove()
            return found
        finally:
            parts.close()

    def _work(self, parts: Parts, walk: Walk | None, windows: Sequence[Array]) -> None:
        """All parts that are not done, and then the whole."""
        order = sorted(layer for layer in self.layers if layer >= 0)
        total = len(order) + 1
        if walk is not None and len(parts.done) < len(order):
            self._calibrated(walk, windows, parts, total)
        for layer in order:
            if str(layer) not in parts.done:
                self.progress(len(parts.done), total, f"layer {layer}")
                self._add(parts, layer, Layer(self.source, self.recipe, self.targets, {}, {}), None)
        if "outside" not in parts.done:
            self.progress(len(parts.done), total, "embedding and head")
            self._outside(parts)
        self.progress(total, total, "writing")
        tables = {name: self._table(name) for name in (EMBEDDING, HEAD) if name in self.source.stored}
        named = {name: wanted for name, wanted in tables.items() if wanted is not None}
        (finish_folder if self.source.gguf is None else finish_gguf)(self.source, {**self.targets, **named}, parts, self.output)

    # What is read.

    def _windows(self) -> list[Array]:
        """Those of the text that fit within the bound; none without a text."""
        if self.calibration is None:
            return []
        asked = self.calibration
        if asked.window < LEAST or (asked.windows is not None and asked.windows < 1):
            raise InvalidRequestError(f"windows must be 1 or more, and have {LEAST} tokens or more each", param="windows")
        tokenizer = Tokenizer.from_data(self.source.checkpoint.tokenizer_data())
        tokenizer.check()
        found = cut(tokenizer, read_text(asked.path, "calibrate"), asked.window, least=LEAST)
        if not found:
            raise InvalidRequestError(f"{asked.path} has fewer than {LEAST} tokens", param="calibrate")
        most = asked.windows or WINDOWS
        if asked.windows is None and self.memory_bytes is not None:
            walk = Walk(self.source.program, asked.window)
            room = self.memory_bytes - max(self._needs(walk).values())
            most = max(1, min(most, room // max(memory.carried(walk, [asked.window]), 1)))
        return list(spread(found, most))

    def _identity(self, windows: Sequence[Array]) -> dict[str, Any]:
        """What decides the result."""
        ids = hashlib.sha256(b"".join(np.array([len(w), *w], np.int32).tobytes() for w in windows)).hexdigest()
        return {**self.source.identity, "recipe": self.recipe.to_json(), "text": ids if windows else None}

    def _needs(self, walk: Walk | None) -> dict[str, int]:
        """Bytes by what they are needed for."""
        found = {name: memory.of_table(self.source, name) for name in (EMBEDDING, HEAD) if self._table(name) is not None}
        segments = {s.layer: s for s in walk.segments} if walk else {}
        for layer, names in self.layers.items():
            if layer >= 0:
                arguments = (self.source, self.targets, self.projections, self.recipe, names)
                found[f"layer {layer}"] = memory.of_layer(walk, segments.get(layer), *arguments).total
        return found

    def _check_memory(self, walk: Walk | None, windows: Sequence[Array]) -> int:
        """The bytes that will be held at most; CapacityError if that is more than is allowed."""
        needs = self._needs(walk)
        windows_take = memory.carried(walk, map(len, windows)) if walk else 0
        where = max(needs, key=needs.__getitem__)
        need = needs[where] + windows_take
        if self.memory_bytes is not None and need > self.memory_bytes:
            less = "fewer or shorter windows, method rtn, or " if walk else ""
            what = f"{needs[where]} for {where}, {windows_take} for {len(windows)} windows"
            message = f"{need} bytes are needed: {what}; {self.memory_bytes} are allowed: give {less}a higher bound"
            raise CapacityError(message, param="memory")
        return need

    # The layers.

    def _calibrated(self, walk: Walk, windows: Sequence[Array], parts: Parts, total: int) -> None:
        """All layers that are not done, in order, each on what the layers before it, as they have become, make of the text."""
        live = walk.start(windows)
        last = max((s.layer for s in walk.segments if str(s.layer) in parts.done), default=None)
        if last == walk.segments[-1].layer:
            return
        if last is not None:
            _restore(live, walk, last, parts.live() or {})
        free = scalings(walk.program, self.projections)
        for segment in walk.segments:
            if last is not None and segment.layer <= last:
                continue
            if segment.layer < 0:
                walk.advance(segment, live, self.source.load)
                continue
            layer = Layer(self.source, self.recipe, self.targets, self.projections, self._taps(segment))
            self.progress(len(parts.done), total, f"layer {segment.layer}: reading")
            walk.observe(segment, live, layer.load, layer.inputs)
            _check_inputs(segment, layer.inputs)
            self.progress(len(parts.done), total, f"layer {segment.layer}: rounding")
            self._scale(layer, segment, free)
            self._add(parts, segment.layer, layer, partial(self._advance, walk, segment, live, layer))

    def _advance(self, walk: Walk, segment: Segment, live: list[Live], layer: Layer) -> dict[str, Array]:
        walk.advance(segment, live, layer.load)
        return {f"{i} {v.name}": np.asarray(window[v], np.float32) for i, window in enumerate(live) for v in segment.kept}

    def _taps(self, segment: Segment) -> dict[Value, Inputs]:
        names = self.layers[segment.layer]
        read = {self.projections[n].input for n in names if n in self.targets and n in self.projections}
        whole = memory.whole_moments(self.recipe)
        return {value: Inputs.of(int(value.shape[-1]), whole) for value in read}

    def _scale(self, layer: Layer, segment: Segment, free: Sequence[Scaling]) -> None:
        if self.recipe.method not in ("awq", "awq+gptq"):
            return
        for scaling in free:
            if scaling.input in layer.inputs and all(name in self.targets for name in scaling.sources):
                layer.scale(scaling)

    def _add(self, parts: Parts, number: int, layer: Layer, advance: Callable[[], dict[str, Array]] | None) -> None:
        """Rounds what is to be rounded in a layer, copies the rest, and adds it all as a part."""
        names = self.layers[number]
        for name in sorted(filter(self.targets.__contains__, names), key=self._input_of):
            layer.round(name)
            if advance is None:
                del layer.numbers[name]
        layer.forget_inputs()
        tensors = {self._written(name): stored for name, stored in layer.tensors.items()}
        for name in names:
            if name not in self.targets and name not in layer.tensors:
                tensors[self.source.file_name(name)] = self.source.copied(name)
        parts.add(str(number), tensors, {"facts": layer.facts}, None if advance is None else advance())

    def _input_of(self, name: str) -> str:
        return self.projections[name].input.name if name in self.projections else ""

    def _written(self, name: str) -> str:
        """The file's name of a tensor that is called as a stored one, or as one with another last part."""
        if name in self.source.stored:
            return self.source.file_name(name)
        stem, _, part = name.rpartition(".")
        return f"{self.source.file_name(stem + '.weight').removesuffix('.weight')}.{part}"

    def _table(self, name: str) -> Target | None:
        if name not in self.source.stored or self.recipe.embedding == "none" or self.recipe.kept(name):
            return None
        columns = self.source.checkpoint.tensor(name).shape[1]
        group = self.recipe.group_for({columns}) if self.recipe.embedding == "int4" and self.source.gguf is None else 0
        return target(self.source, name, self.recipe.embedding, self.recipe, group)

    def _outside(self, parts: Parts) -> None:
        """What belongs to no layer."""
        tensors, facts = dict(self.source.extras()), dict[str, Any]()
        for name in self.layers.get(-1, []):
            wanted = self._table(name) if name in (EMBEDDING, HEAD) else None
            weight = self.source.checkpoint.tensor(name)
            if wanted is None:
                tensors[self.source.file_name(name)] = self.source.copied(name)
                continue
            stem = name.removesuffix("weight")
            made = round_table(weight, wanted)
            tensors |= {self._written(stem + part): stored for part, stored in made.items()}
            facts[name] = {"format": wanted.kind or f"int{wanted.width}", "numbers": math.prod(weight.shape)}
        parts.forget_live()
        parts.add("outside", tensors, {"facts": facts}, None)

    def _report(self, parts: Parts, need: int, windows: Sequence[Array]) -> dict[str, Any]:
        """model, output, bytes of all tensors and bits a weight (tied ones once), how many matrices are of which format, and how
        many projections stay as they were; the error of the projections' outputs (or of the weights, without a text) relative to
        these, root mean square over them; the share of zeros in what was pruned; windows and tokens read; bytes of memory planned
        for; parts that were done before."""
        facts = {name: fact for part in parts.done.values() for name, fact in part["facts"].items()}
        sizes = [info.stop - info.start for name in parts.done for info in parts.tensors(name).tensors.values()]
        numbers = sum(math.prod(self.source.checkpoint.tensor(name).shape) for name in self.source.stored)
        errors = [fact["error"] ** 2 for fact in facts.values() if "error" in fact]
        pruned = [(fact["zeros"], fact["numbers"]) for fact in facts.values() if "zeros" in fact]
        return {
            "model": str(self.source.path), "output": str(self.output), "bytes": sum(sizes),
            "bits_per_weight": 8 * sum(sizes) / numbers, "parameters": numbers,
            "formats": dict(Counter(fact["format"] for fact in facts.values())),
            "unrounded": sum(1 for name in self.projections if name in self.source.stored and name not in self.targets),
            "group_size": self.group or None, "method": self._method(bool(windows)),
            "relative_error": (sum(errors) / len(errors)) ** 0.5 if errors else None,
            "zeros": sum(z for z, _ in pruned) / sum(n for _, n in pruned) if self.recipe.prune and pruned else None,
            "windows": len(windows), "tokens": sum(map(len, windows)), "memory_bytes": need, "resumed_parts": parts.resumed,
        }  # fmt: skip

    def _method(self, text: bool) -> str:
        return self.recipe.method or ("gptq" if text else "rtn")


def _check_inputs(segment: Segment, inputs: Mapping[Value, Inputs]) -> None:
    """CheckpointError where the text makes the model compute what is no number: nothing can be calibrated on that."""
    astray = [value.name for value, seen in inputs.items() if not is_finite(seen.size)]
    if astray:
        message = f"layer {segment.layer} reads NaN or infinities on this text ({', '.join(sorted(astray))}): weights before it"
        raise CheckpointError(f"{message} are damaged, or its activations overflow float32; --method rtn without a text rounds it")


def _restore(live: list[Live], walk: Walk, layer: int, arrays: Mapping[str, Array]) -> None:
    """Puts back what the windows carried behind a layer."""
    segment = next(s for s in walk.segments if s.layer == layer)
    for i, window in enumerate(live):
        for value in segment.kept:
            window[value] = arrays[f"{i} {value.name}"]
