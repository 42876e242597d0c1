"""From a model's name to something that runs: checkpoint -> Program -> fusion -> resident weights -> page pool -> Executable."""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, cast

from trivium.collector import paused
from trivium.errors import CapacityError, CheckpointError, InvalidRequestError, NoCacheError, UnsupportedError
from trivium.engine.adapters import Adapters
from trivium.engine.executor import Model
from trivium.engine.media import Images
from trivium.engine.pooling import PoolingParams, own_pooling
from trivium.extensions import blame, expect
from trivium.kv import Layout, plan_groups
from trivium.kv.neutral import rotations
from trivium.models import Vision, arrange, build, count, describe, sight
from trivium.models.decoder import HIDDEN
from trivium.models.lora import Target, with_lora
from trivium.models.media import MEDIA, with_media
from trivium.ops import Call, Constant, KVSpec, Operator, Program, Value, Weight, rewrite
from trivium.plugin import Backend, Capabilities, Device, Executable, Session, WeightFormat, resolve as resolve_backend
from trivium.plugin.guard import capabilities_of, kernels_of
from trivium.plugin.select import accepts, patterns
from trivium.text import Tokenizer
from trivium.weights import Checkpoint, open_checkpoint, resolve as resolve_model

STEP_TOKENS = 512
"""max_num_batched_tokens when it is not given, unless the backend's limit is lower."""
TOWER_TOKENS = 2048
"""Patches a step of a vision tower: as many whole tiles, one at least."""
CACHED = ("speculative", "kv_host_bytes", "kv_disk_path", "enable_prefix_caching", "block_size", "num_kv_blocks")
"""What LLM takes that is about the KV cache, and so is refused with NoCacheError where a model reads whole texts and has none."""
_SAMPLE_FORMATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class LoadOptions:
    """How to load. None or "auto": chosen and reported. `dtype`: every weight resident in that float type. `quantize`: resident
    format of the projections, also by part: "int4,lm_head=int4_asym,embedding=int8"; rounds what is quantised already, too.
    `block_size`: tokens a page. `num_kv_blocks`: pages in the pool, over all groups. `num_speculative_tokens`: further rows that
    each sequence may want in a step. `cached`: those of CACHED that were asked for. `enable_lora`: adapters can be loaded, up to
    `max_lora_rank`; sequences that run have at most `max_loras` different ones."""

    dtype: str = "auto"
    quantize: str | None = None
    kv_dtype: str = "auto"
    block_size: int | None = None
    num_kv_blocks: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    num_speculative_tokens: int = 0
    strict: bool = False
    cached: tuple[str, ...] = ()
    enable_lora: bool = False
    max_loras: int = 4
    max_lora_rank: int = 16
    backend_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("block_size", "num_kv_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_loras",
                     "max_lora_rank"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise InvalidRequestError(f"{name} must be a positive integer, not {value!r}", param=name)
        if type(self.enable_lora) is not bool or not self.max_loras or not self.max_lora_rank:
            raise InvalidRequestError("enable_lora must be True or False, max_loras and max_lora_rank counts", param="enable_lora")
        if self.max_model_len == 1:
            raise InvalidRequestError("max_model_len 1 has no room for a prompt and a token; give 2 or more", param="max_model_len")


class Route(NamedTuple):
    """How one constant became resident: its storage format, the resident one, whether that holds it exactly."""

    name: str
    storage: str
    resident: str
    lossless: bool
    nbytes: int


@dataclass(frozen=True)
class Loaded(Model):
    """A model that is ready to run on one device, and what became of its files. `traced`: the Program before fusion. `inlet`: what
    the backend has loaded of the constant HIDDEN, if it is a draft head."""

    name: str
    device: Device
    traced: Program
    program: Program
    max_num_batched_tokens: int
    max_num_seqs: int
    tokenizer: Tokenizer
    generation_config: Mapping[str, Any]
    routes: tuple[Route, ...]
    architecture: str
    inlet: Any

    def close(self) -> None:
        """Closes the session, and that of the tower."""
        self.session.close()
        if self.images is not None:
            self.images.close()

    def summary(self) -> str:
        """One line: which weights went which way, and the page pool."""
        ways = Counter((r.storage, r.resident, r.lossless) for r in self.routes)
        weights = ", ".join(f"{n} {s} -> {r}{'' if exact else ' (lossy)'}" for (s, r, exact), n in ways.most_common())
        pool = f"{self.num_pages} pages of {self.kv_spec.page_size} tokens"
        return f"{self.backend.name}:{self.device.index} ({self.device.name}); weights {weights}; {pool}"


class Plan(NamedTuple):
    """A model opened but not loaded: everything that can be said without taking memory."""

    path: Path
    checkpoint: Checkpoint
    backend: Backend
    device: Device
    capabilities: Capabilities
    traced: Program
    program: Program
    routes: tuple[tuple[Constant, Weight, WeightFormat, bool], ...]
    max_model_len: int
    targets: Sequence[Target]
    pooling: PoolingParams
    options: LoadOptions
    vision: Vision | None = None
    media_first: int | None = None

    @property
    def step_tokens(self) -> int:
        """Tokens a step: as asked, which the backend must be able to, else STEP_TOKENS (or, where a sequence must be whole in its
        step, the longest one) or the backend's limit."""
        asked, limit = self.options.max_num_batched_tokens, self.capabilities.max_batched_tokens
        if asked is not None and limit is not None and asked > limit:
            message = f"max_num_batched_tokens {asked} is over this backend's limit; give {limit} or less, or leave it out"
            raise InvalidRequestError(message, param="max_num_batched_tokens")
        usual = STEP_TOKENS if self.program.states else max(STEP_TOKENS, self.max_model_len)
        return asked or min(usual, limit or usual)


@paused()
def plan(
    model: str, backend: str = "auto", options: LoadOptions | None = None, *, progress: bool = False, traced: Program | None = None
) -> Plan:
    """Finds the model and the backend, traces and fuses the Program and chooses every weight's route; loads nothing. `traced`: this
    Program in place of the model file's."""
    options = options or LoadOptions()
    for param, name in (("model", model), ("backend", backend)):
        if not isinstance(name, str) or not name:
            raise InvalidRequestError(f"{param} must be a name, not {name!r}", param=param)
    chosen, device = resolve_backend(backend)
    capabilities = capabilities_of(chosen, device)
    floats = [f.name for f in capabilities.weight_formats if f.name in _SAMPLE_FORMATS]
    _check_choice("dtype", options.dtype, (*capabilities.dtypes, *floats), capabilities)
    _check_choice("kv_dtype", options.kv_dtype, capabilities.kv_dtypes, capabilities)
    possible = capabilities.kv_dtypes if options.kv_dtype == "auto" else (options.kv_dtype,)
    refused = [capabilities.kv_refused(_activations(options, capabilities), kv) for kv in possible]
    if all(refused):
        raise InvalidRequestError(f"kv_dtype {options.kv_dtype!r}: {'; '.join(map(str, refused))}", param="kv_dtype")
    path = resolve_model(model, progress=progress)
    checkpoint = open_checkpoint(path)
    checkpoint = replace(checkpoint, tensors=arrange(checkpoint.config, checkpoint.tensors))
    positions = describe(checkpoint.config).max_positions
    max_model_len = options.max_model_len or positions
    if max_model_len > positions and traced is None:
        message = f"max_model_len {max_model_len} is more than the model's {positions} positions"
        raise InvalidRequestError(message, param="max_model_len")
    vision, first = sight(checkpoint.config, path) if traced is None else None, None
    if count(checkpoint.config, "type_vocab_size", 1) > 1 and checkpoint.config.get("sep_token_id") is None:
        checkpoint.config["sep_token_id"] = Tokenizer.from_data(checkpoint.tokenizer_data()).separator_id
    traced = traced or build(checkpoint.config, max_model_len=max_model_len)
    if options.cached and not traced.states:
        raise NoCacheError(f"{model} reads whole texts, without a KV cache: leave {options.cached[0]} out", param=options.cached[0])
    traced = traced.only("logits") if chosen.api_version < 2 else traced
    traced, targets = with_lora(traced, options.max_loras, options.max_lora_rank) if options.enable_lora else (traced, ())
    kernels = kernels_of(chosen, device)
    pooling = own_pooling(checkpoint.config["architectures"][0], checkpoint.modules, whole=not traced.states)
    p = Plan(path, checkpoint, chosen, device, capabilities, traced, traced, (), max_model_len, targets, pooling, options, vision)
    if vision is not None and any(kernel.op == "media_rows" for kernel in kernels):
        traced, first = with_media(traced, p.step_tokens)
    program = rewrite(traced, patterns(kernels), accept=lambda call: accepts(call, kernels))
    p = p._replace(traced=traced, program=program, media_first=first)
    heads = {c.source for c in program.constants if c.value.name == "lm_head.weight"}
    parts = _parts(traced)
    return p._replace(routes=tuple(_route(c, c.source in heads, parts.get(c.value.name), p) for c in program.constants))


def load(
    model: str, backend: str = "auto", options: LoadOptions | None = None, *, progress: Callable[[int, int], None] | None = None,
    traced: Program | None = None,
) -> Loaded:  # fmt: skip
    """Loads a model. `progress(done, total)` is told bytes of weights; `traced`: as for plan(). Raises a TriviumError that says
    what to change."""
    p = plan(model, backend, options, progress=progress is not None, traced=traced)
    given, words = _backend_options(p), p.checkpoint.tokenizer_data()
    changing = p.options.enable_lora or any(c.value.name == HIDDEN for c in p.program.constants)
    with contextlib.ExitStack() as opened:
        tower, refusal = _load_tower(p, opened)
        with blame(f"backend {p.backend.name!r}: open()"):
            session: Session = expect(Session, p.backend.open(p.device, given), f"backend {p.backend.name!r}: open()")
        opened.callback(_quietly, session.close)
        if changing and type(session).assign is Session.assign:
            message = f"the backend {p.backend.name} can't change a weight that it has loaded, which adapters and draft heads need"
            raise UnsupportedError(message, param="enable_lora" if p.options.enable_lora else "speculative")
        with blame(f"backend {p.backend.name!r}: loading {model}"):
            loaded = _load_into(session, model, p, words, given["dtype"], progress)
        opened.pop_all()
    return loaded if p.vision is None else replace(loaded, images=Images(p.vision, loaded, p.media_first, tower, refusal))


def _quietly(close: Callable[[], None]) -> None:
    with contextlib.suppress(Exception):  # what went wrong first is the news
        close()


def _load_tower(p: Plan, opened: contextlib.ExitStack) -> tuple[Loaded | None, str]:
    """The tower of a model that sees, on a session of its own; else why it can't be run."""
    if p.vision is None:
        return None, ""
    name, can, patches = p.backend.name, p.capabilities, len(p.vision.positions)
    limit = can.max_batched_tokens or max(TOWER_TOKENS, patches)
    tiles = min(limit, max(TOWER_TOKENS, patches)) // patches
    if p.media_first is None or not tiles:
        lack = "has no kernel for media_rows" if p.media_first is None else f"takes only {limit} of {patches} patches a step"
        return None, f"the backend {name} {lack}, which images need; choose another"
    graphs, own = {"graph_sizes": ()} if can.graph_capture else {}, _activations(p.options, can)
    options = LoadOptions(
        dtype=p.options.dtype, kv_dtype=own if own in can.kv_dtypes else "auto", max_num_seqs=tiles, max_model_len=patches,
        max_num_batched_tokens=tiles * patches, num_kv_blocks=tiles * -(-patches // can.page_sizes[0]), strict=p.options.strict,
        backend_options={**p.options.backend_options, **graphs},
    )  # fmt: skip
    tower = load(str(p.path), f"{name}:{p.device.index}", options, traced=p.vision.tower(tiles))
    if type(tower.session).assign is Session.assign:
        tower.close()
        return None, f"the backend {name} can't change what it has loaded, which images need; choose another"
    opened.callback(_quietly, tower.close)
    return tower, ""


def _load_into(
    session: Session, model: str, p: Plan, words: Mapping[str, Any], dtype: str, progress: Callable[[int, int], None] | None
) -> Loaded:
    options, fingerprint = p.options, p.checkpoint.fingerprint
    weights = _load_weights(session, p, progress)
    tokenizer = Tokenizer.from_data(words)  # while the backend may still be busy with the weights
    tokenizer.check()
    can, kv_dtype, activations = p.capabilities, options.kv_dtype, _activations(options, p.capabilities)
    if kv_dtype == "auto":
        kv_dtype = next(kv for kv in can.kv_dtypes if not can.kv_refused(activations, kv))
    spec = plan_groups(p.program.states, _page_size(p.capabilities.page_sizes, options.block_size), kv_dtype)
    program = replace(p.program, vocab_size=min(p.program.vocab_size, tokenizer.vocab_size))
    pages, max_model_len = _pool_size(session, spec, p, program, weights)
    session.kv_store(spec, pages)
    executable = expect(Executable, session.compile(program, weights), f"backend {p.backend.name!r}: compile()")
    routes = tuple(Route(c.value.name, w.format, f.name, exact, w.nbytes) for c, w, f, exact in p.routes if c.array is None)
    formats = blake2b(repr([(r.name, r.resident) for r in routes]).encode(), digest_size=8).hexdigest()
    producer = f"{p.backend.name} {p.backend.version}, activations {dtype}, weight formats {formats}"
    return Loaded(
        name=model, backend=p.backend, device=p.device, capabilities=p.capabilities, session=session, traced=p.traced,
        program=program, executable=executable, kv_spec=spec, num_pages=pages, vocab_size=program.vocab_size,
        max_model_len=max_model_len, max_num_batched_tokens=p.step_tokens, max_num_seqs=options.max_num_seqs,
        eos_ids=_eos_ids(p.checkpoint, tokenizer), fingerprint=fingerprint, tokenizer=tokenizer, routes=routes,
        hidden_size=int(program.outputs["hidden"].shape[-1]) if "hidden" in program.outputs else 0,
        generation_config=p.checkpoint.generation_config, architecture=p.checkpoint.config["architectures"][0],
        inlet=weights.get(HIDDEN), pooling=p.pooling,
        lora=_adapters(session, p, weights) if options.enable_lora else None,
        layout=Layout(fingerprint, producer, spec, rotations(p.traced)), media=weights.get(MEDIA), images=None,
    )  # fmt: skip


def _adapters(session: Session, p: Plan, weights: Mapping[str, Any]) -> Adapters:
    placed = {target: (weights[target.a.name], weights[target.b.name]) for target in p.targets}
    head_dim = describe(p.checkpoint.config).head_dim if p.checkpoint.config.get("rope_interleaved") else 0
    return Adapters(session, placed, p.options.max_loras, p.options.max_lora_rank, head_dim)


def _activations(options: LoadOptions, can: Capabilities) -> str:
    return options.dtype if options.dtype in can.dtypes else can.dtypes[0]


def _backend_options(p: Plan) -> dict[str, Any]:
    can, options, tokens = p.capabilities, p.options, p.step_tokens
    rows = options.max_num_seqs * (1 + options.num_speculative_tokens)
    given = {"dtype": _activations(options, can), "max_batched_tokens": tokens, "max_seqs": rows, "max_model_len": p.max_model_len}
    if can.graph_capture and p.backend.api_version >= 2 and p.program.states:
        given["graph_sizes"] = _graph_sizes(can, len(p.program.states), min(rows, tokens))
        given |= {"graph_queries": 1 + options.num_speculative_tokens} if can.graph_drafts else {}
    return {**given, "strict": options.strict, **options.backend_options}


def _graph_sizes(capabilities: Capabilities, layers: int, largest: int) -> tuple[int, ...]:
    """Batch sizes to capture: powers of two and the largest, thinned out evenly to what the backend can pay for."""
    sizes = [*itertools.takewhile(lambda n: n < largest, (1 << i for i in itertools.count())), largest]
    count = min(len(sizes), capabilities.max_graphs // max(capabilities.graph_cost(layers), 1))
    gaps = max(count - 1, 1)
    return tuple(sizes[len(sizes) - 1 - i * (len(sizes) - 1) // gaps] for i in reversed(range(count)))


def _check_choice(param: str, value: str | None, possible: tuple[str, ...], capabilities: Capabilities) -> None:
    if value not in ("auto", *possible):
        reason = capabilities.unsupported.get(str(value), "not possible on this backend")
        known = ", ".join(dict.fromkeys(possible))
        raise InvalidRequestError(f"{param} {value!r}: {reason}; choose from auto, {known}", param=param)


def _parts(program: Program) -> dict[str, str]:
    """The part (embedding or linear) of the constants that may be rounded, by name: matrices of products, unless an operator does
    something else with them, too, or what they give decides (see ops.schema), or they have one column, which makes a number each
    what a scale would be."""
    made = {value: call for call in program.calls for value in call.results}
    deciding = [value for call in program.calls for value in _marked(call, "!")]
    kept = {value for call in program.calls for value in (*_marked(call, ""), *_marked(call, "!"))}
    while deciding:
        if call := made.get(deciding.pop()):
            matrices = _marked(call, "*")
            kept.update(matrices)
            deciding += () if matrices else _marked(call, "")
    found = ((value, call.name) for call in program.calls for value in _marked(call, "*"))
    rounded = ((value.name, name) for value, name in found if value not in kept and value.shape[-1:] != (1,))
    return {constant: "embedding" if name == "embedding" else "linear" for constant, name in rounded}


def _marked(call: Call, mark: str) -> list[Value]:
    """The arguments that the operator's signature marks so."""
    args = cast(Operator, call.op).signature.args
    return [value for arg, value in zip(args, call.args) if value is not None and arg.mark == mark]


def _route(constant: Constant, head: bool, part: str | None, p: Plan) -> tuple[Constant, Weight, WeightFormat, bool]:
    """The constant, its (sliced) checkpoint tensor, its resident format and whether that is lossless. `head`: the tensor is that of
    the output projection; `part`: which `quantize` speaks of the constant, None if that must not round it."""
    formats, checkpoint = {f.name: f for f in p.capabilities.weight_formats}, p.checkpoint
    if constant.array is not None:
        array = constant.array
        return constant, Weight(constant.source, array.shape, "float32", array, lambda data: data), formats["float32"], True
    weight = checkpoint.tensor(constant.source)
    if constant.rows is not None:
        weight = weight.slice_rows(*constant.rows)
    if weight.shape != constant.value.shape:
        raise CheckpointError(f"{constant.source} has the shape {weight.shape}; the configuration says {constant.value.shape}")
    chosen = _choose_format(weight, head, part, formats, p)
    return constant, weight, chosen, chosen.name == "float32" or weight.format in chosen.lossless_from


def _choose_format(weight: Weight, head: bool, part: str | None, formats: Mapping[str, WeightFormat], p: Plan) -> WeightFormat:
    name = "float32" if len(weight.shape) < 2 else _quantised(weight, head, part, formats, p)
    if name == "auto" and p.options.dtype != "auto":
        name = p.options.dtype if p.options.dtype in formats else "float32"
    lossless = (f for f in formats.values() if weight.format in f.lossless_from)
    return next(lossless, formats["float32"]) if name == "auto" else formats[name]


def _quantised(weight: Weight, head: bool, part: str | None, formats: Mapping[str, WeightFormat], p: Plan) -> str:
    """The format that `quantize` gives to a weight, or "auto". A table that is not named is the head that it is tied to, else as
    stored; a head that is not named is held as the projections are, but in 8 bits or more unless it is stored in fewer."""
    parts = _quantised_parts(p.options.quantize)
    if wrong := [name for name in parts.values() if name not in (*formats, "auto")]:
        raise InvalidRequestError(f"quantize {wrong[0]!r} is not a format here; {', '.join(formats)} are", param="quantize")
    if part is None:
        return "auto"
    part = "lm_head" if head and (part == "linear" or "embedding" not in parts) else part
    name = parts.get(part, "auto" if part == "embedding" else parts.get("linear", "auto"))
    if part == "lm_head" not in parts and name != "auto" and formats[name].bits < 8:
        return next(f.name for f in formats.values() if weight.format in f.lossless_from or f.bits >= 8)
    return name


def _quantised_parts(quantize: str | None) -> dict[str, str]:
    """Format by part, "auto" for as stored: linear (every projection; the name may be left out), lm_head, embedding."""
    pairs = [item.strip().rpartition("=")[::2] for item in ("auto" if quantize is None else str(quantize)).split(",")]
    parts = {part or "linear": format for part, format in pairs}
    if len(parts) < len(pairs) or parts.keys() - {"linear", "lm_head", "embedding"}:
        example = "linear, lm_head and embedding, once each, as in 'int4,lm_head=int8'"
        raise InvalidRequestError(f"quantize {quantize!r}: parts are {example}", param="quantize")
    return parts


def _load_weights(session: Session, p: Plan, progress: Callable[[int, int], None] | None) -> dict[str, Any]:
    """Every constant's handle by name; a tensor that two constants share (a tied head) is made resident once."""
    total = sum(w.nbytes for _, w, _, _ in p.routes)
    loaded: dict[str, Any] = {}
    resident_once: dict[tuple[str, tuple[int, int] | None, str], Any] = {}
    done = 0
    for constant, weight, resident, _ in p.routes:
        key = (constant.source, constant.rows, resident.name)
        if key not in resident_once:
            with blame(f"backend {p.backend.name!r}: load({constant.value.name!r}, {resident.name!r})"):
                resident_once[key] = session.load(weight, resident.name)
        loaded[constant.value.name] = resident_once[key]
        done += weight.nbytes
        if progress is not None:
            progress(done, total)
    return loaded


def _page_size(sizes: tuple[int, ...], asked: int | None) -> int:
    if asked is not None and asked not in sizes:
        known = ", ".join(map(str, sorted(sizes))) if len(sizes) < 12 else f"{min(sizes)} to {max(sizes)}"
        raise InvalidRequestError(f"block_size {asked} is not possible on this backend; choose from {known}", param="block_size")
    return asked or sizes[0]


def _pages_for(spec: KVSpec, length: int, chunk: int) -> int:
    """Most pages that one sequence of `length` tokens holds at a time when it is prefilled in chunks of `chunk` tokens. A recurrent
    group takes two, one of which is kept."""
    whole, specs = -(-length // spec.page_size), [group.spec for group in spec.groups]
    spans = (length if s.paged and s.window is None else (s.window or 1) + chunk * s.paged for s in specs)
    return sum(min(whole, -(-span // spec.page_size) + 1) for span in spans)


def _pool_size(session: Session, spec: KVSpec, p: Plan, program: Program, weights: Mapping[str, Any]) -> tuple[int, int]:
    """(pages, max_model_len): as asked, else what the memory share holds; a context nobody asked for is cut to what fits."""
    options, max_model_len, tokens = p.options, p.max_model_len, p.step_tokens
    if not spec.groups:
        if options.max_model_len is not None and max_model_len > tokens:
            message = f"texts are read whole, in one step: max_model_len {max_model_len} needs max_num_batched_tokens as large"
            raise InvalidRequestError(message, param="max_model_len")
        return 0, min(max_model_len, tokens)
    page_bytes = session.page_bytes(spec)
    if options.num_kv_blocks is not None:
        pages = options.num_kv_blocks
    else:
        free = session.memory().free - session.step_bytes(program, weights, spec)
        affordable = int(free * p.capabilities.memory_share) // max(page_bytes, 1)
        pages = min(affordable, options.max_num_seqs * _pages_for(spec, max_model_len, tokens))
    fits = bisect.bisect_right(range(1, max_model_len + 1), pages, key=lambda length: _pages_for(spec, length, tokens))
    if fits < 1:
        raise CapacityError(f"{pages} pages of {page_bytes} bytes hold no sequence at all; free memory or raise num_kv_blocks")
    if fits < max_model_len and options.max_model_len is not None and options.num_kv_blocks is None:
        message = f"max_model_len {max_model_len} does not fit: {pages} pages of {page_bytes} bytes are enough for {fits} tokens"
        raise CapacityError(message)
    return pages, min(max_model_len, fits) if options.max_model_len is None else max_model_len


def _eos_ids(checkpoint: Checkpoint, tokenizer: Tokenizer) -> frozenset[int]:
    ids = set(tokenizer.eos_ids)
    for source in (checkpoint.config, checkpoint.generation_config):
        value = source.get("eos_token_id")
        ids.update([value] if isinstance(value, int) else value or [])
    if any(type(i) is not int or i < 0 for i in ids):
        raise UnsupportedError(f"eos_token_id {sorted(map(str, ids))} in {checkpoint.path} are not token ids")
    return frozenset(ids)
