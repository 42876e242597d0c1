"""The whole contract between trivium and a backend, in one file.

A plugin is a Python distribution with an entry point in the group `trivium` whose module implements the hook
`trivium_backend()` (see plugin/hooks.py) and returns a Backend. What follows is everything a backend gives and everything it may
be asked. "(optional)" as the first word marks what has a default. The core owns scheduling, paging, sampling parameters, the step
loop and the runner; a backend supplies components, never a copy of those.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trivium.errors import UnsupportedError
from trivium.ops import Batch, Call, KVSpec, Pages, Pattern, Program, Sampled, Weight

API_VERSION = 2
"""The version of this file. The host accepts plugins written for API_VERSION and, with a DeprecationWarning, API_VERSION - 1.
2: Batch has adapters and pool_rows, a Program may have the output "hidden" (those for version 1 have not), asynchronous,
graph_cost and option "graph_sizes"."""

Tensor = Any
"""A backend's own tensor type: the core passes such objects around and never looks inside."""


@dataclass(frozen=True)
class Device:
    """One device: `index` within the backend, a readable `name`, total memory in bytes (0: unknown) and free-form details."""

    index: int
    name: str
    memory_bytes: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)


class Probe(NamedTuple):
    """What probe() found: devices, or none and the reason why."""

    devices: tuple[Device, ...]
    reason: str = ""


class WeightFormat(NamedTuple):
    """A resident format. `bits`: stored bits a weight. `lossless_from`: storage formats (Weight.format) that it holds exactly.
    `error_budget`: relative root-mean-square error of the weights it may introduce for any other source at most; below 16 bits
    `activation_budget`: the same that a product may add, for it may round its other side to 8 bits (the kit checks both)"""

    name: str
    bits: float
    lossless_from: frozenset[str] = frozenset()
    error_budget: float = 0.0
    activation_budget: float = 0.02


@dataclass(frozen=True)
class Capabilities:
    """What a device can do. Asked before anything is built. `unsupported` gives a reason for every "no" a user may ask about,
    keyed by the name of the dtype, format or parameter."""

    dtypes: tuple[str, ...]
    """Activation dtypes, best first: "float32", "bfloat16", "float16"."""
    weight_formats: tuple[WeightFormat, ...]
    """Resident formats, best first. Must include "float32"."""
    kv_dtypes: tuple[str, ...]
    """KV formats, best first."""
    kv_refused: Callable[[str, str], str | None] = lambda dtype, kv_dtype: None
    """Why activations of a dtype can't go with a KV format; None: they can. Each goes with one at least; "auto" is the best."""
    page_sizes: tuple[int, ...] = (16,)
    """Page sizes in tokens, best first."""
    max_batched_tokens: int | None = None
    """Largest number of tokens in one step; None: no limit."""
    sampling: frozenset[str] | None = None
    """Sampling parameters it handles; None: all. A request using another is refused at the door. The names: temperature, seed,
    top_k, top_p, min_p, typical_p, top_n_sigma, xtc_probability, repetition_penalty, presence_penalty, frequency_penalty,
    logit_bias, allowed_token_ids, bad_words, min_tokens, logprobs, prompt_logprobs, structured_outputs."""
    asynchronous: bool = False
    """run() returns before the step is done: the next step is then planned and its arrays built meanwhile. Whatever the session is
    asked for afterwards must take effect after the step, as steps do among themselves."""
    graph_capture: bool = False
    """Steps of one token a sequence are captured for the batch sizes in open()'s option "graph_sizes", ascending. Sizes between are
    padded up to the next; a larger step, and a size whose capture fails (with a warning), runs eagerly. The output is the same."""
    graph_drafts: bool = False
    """Captured, too, are steps of up to option "graph_queries" tokens a sequence, by which drafts are verified; "graph_sizes" are
    then numbers of tokens, and as many sequences fit at most."""
    max_graphs: int = 0
    """What the device has for captures, in units of its own; by default, the number of batch sizes."""
    graph_cost: Callable[[int], int] = lambda layers: 1
    """Units that one captured batch size takes for a Program with so many states (one a layer)."""
    collectives: bool = False
    memory_share: float = 0.4
    """Share of the memory left by the weights that the page pool takes if its size is not given; a step needs some of the rest."""
    threads: int = 0
    """Host threads the device will use and why (`details` of the Device says); 0: not a host device."""
    unsupported: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Kernel:
    """One implementation of an operator (its name) or of a fused Pattern. Several for one operator may stand side by side.

    run(session, args, attrs) -> result or tuple of results, in the backend's tensors; for a backend that compiles whole Programs
    it may be anything that its own compile() understands. supports(call) -> None, or the reason why not. note(call): what else
    there is to say of running it, for people.
    """

    op: str | Pattern
    run: Callable[..., Any]
    name: str = ""
    priority: int = 0
    supports: Callable[[Call], str | None] = lambda call: None
    note: Callable[[Call], str] = field(default=lambda call: "", kw_only=True)


class Memory(NamedTuple):
    """Bytes: `total` and `free` on the device, `weights` and `kv` held by this session."""

    total: int
    free: int
    weights: int
    kv: int


class Step(ABC):
    """A step that has been started."""

    @abstractmethod
    def tokens(self) -> Sampled:
        """Waits for the step and returns what was sampled. A fault of the device is raised here."""

    @abstractmethod
    def output(self, name: str) -> npt.NDArray[np.float32]:
        """Waits and returns one of the Program's outputs as float32: "logits" in the order of batch.sample_rows, "hidden" of
        batch.pool_rows. Asked for before the next step is run."""


class OperatorTime(NamedTuple):
    """What one kind of operation took: `bytes` that it can't help moving and arithmetic `operations` (a multiply-add counts as two)
    by its shapes; `floor_s`: the seconds that they need at the ceilings, the slower of the two."""

    name: str
    calls: int
    seconds: float
    bytes: int
    operations: int
    floor_s: float


class Profile(NamedTuple):
    """The operations, and the `ceilings` that the device was measured to have just then, each a second: "bytes" of memory read, and
    operations by their kind ("int8", "float32")."""

    operators: Sequence[OperatorTime]
    ceilings: Mapping[str, float]


class Executable(ABC):
    """A compiled Program."""

    @abstractmethod
    def run(self, batch: Batch) -> Step:
        """Starts one step; may return before it is done. The arrays of `batch` must not be kept after run() returns.
        If it raises, the KV pages named by batch.slot_mapping may hold anything; all others are unchanged."""

    def profile(self, on: bool) -> Profile:
        """(optional) What was timed since it was switched on. From here on every operation is timed, from zero, or none."""
        raise UnsupportedError("this backend can't time its operations")


class Session(ABC):
    """An opened device. It owns the memory. Not thread-safe: the core calls it from one thread at a time."""

    @abstractmethod
    def put(self, array: npt.NDArray[Any]) -> Tensor:
        """Copies a host array to the device; float32 becomes the activation dtype, integers stay."""

    @abstractmethod
    def get(self, tensor: Tensor) -> npt.NDArray[Any]:
        """Copies a device tensor to the host; floats come back as float32."""

    @abstractmethod
    def load(self, weight: Weight, format: str) -> Tensor:
        """Makes a weight resident in `format`, repacked into the backend's own layout, once. A tied head is loaded once: its
        handle serves `embedding` and `linear` alike."""

    @abstractmethod
    def read_weight(self, tensor: Tensor) -> npt.NDArray[np.float32]:
        """The plain numbers of a loaded weight, in the checkpoint's layout, whatever the resident layout is."""

    @abstractmethod
    def kv_store(self, spec: KVSpec, pages: int) -> None:
        """Allocates the one pool of `pages` pages. Raises CapacityError (with the bytes) if it does not fit. Called once, after
        the weights are loaded and before compile()."""

    @abstractmethod
    def page_bytes(self, spec: KVSpec) -> int:
        """Bytes that one page of this spec takes on the device."""

    @abstractmethod
    def memory(self) -> Memory:
        """Memory now."""

    @abstractmethod
    def compile(self, program: Program, weights: Mapping[str, Tensor]) -> Executable:
        """Compiles a fused Program; `weights` holds every constant by name. plugin.EagerExecutable is a ready-made answer: a loop
        over kernels in which an operator without a kernel runs as the numpy reference on the host."""

    @abstractmethod
    def export_pages(self, group: int, ids: Sequence[int]) -> Pages:
        """The content of some pages of a group."""

    @abstractmethod
    def import_pages(self, group: int, ids: Sequence[int], pages: Pages) -> None:
        """Writes exported content into the pages `ids`."""

    @abstractmethod
    def copy_pages(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copies whole pages within the pool, src[i] to dst[i]."""

    @abstractmethod
    def close(self) -> None:
        """Gives everything back. Called once; nothing else is called afterwards."""

    def start_export(self, group: int, ids: Sequence[int]) -> Callable[[], Pages]:
        """(optional) Like export_pages, for a device whose copies run beside its steps: returns at once, and what it returns waits
        for the copy. The pages may be written by what is run next; their content is that of now."""
        pages = self.export_pages(group, ids)
        return lambda: pages

    def step_bytes(self, program: Program, weights: Mapping[str, Tensor], spec: KVSpec) -> int:
        """(optional) Bytes that the largest step takes for a time, beside weights and pages, found by running one: the pages take
        memory_share of what it leaves. Asked before kv_store(), and only if the user doesn't say how many pages there are to be."""
        return 0

    def assign(self, tensor: Tensor, index: int, array: npt.NDArray[np.float32]) -> None:
        """(optional) Overwrites entry `index` of the first of the three dimensions of a weight that load() made in "float32";
        steps that are run from then on see it. Never called while a step runs. Adapters need it."""
        raise UnsupportedError("this backend can't change a weight that it has loaded")

    def step_state(self, state: int, batch: Batch) -> Any:
        """(optional) What kernels receive for a state of the Program in one step; EagerExecutable asks if a kernel takes one."""
        raise UnsupportedError("this backend has no eager state")

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """(optional) Sum over the ranks of the tensor-parallel group."""
        raise UnsupportedError("this backend has no collectives")

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """(optional) Concatenation over the ranks along `dim`."""
        raise UnsupportedError("this backend has no collectives")

    def send(self, tensor: Tensor, rank: int) -> None:
        """(optional) Sends to a rank of the pipeline."""
        raise UnsupportedError("this backend has no collectives")

    def recv(self, like: Tensor, rank: int) -> Tensor:
        """(optional) Receives from a rank of the pipeline."""
        raise UnsupportedError("this backend has no collectives")


class Backend(ABC):
    """What the hook returns. Making one must be cheap and import no heavy library."""

    name: str
    """How users ask for it: lower case, unique among all plugins."""
    api_version: int
    """The API_VERSION it was written for."""
    version: str
    """Its own version."""
    priority: int = 0
    """(optional) backend="auto" takes the available backend with the highest priority."""

    @abstractmethod
    def probe(self) -> Probe:
        """The devices it sees, or why it sees none. Never raises, is quick; heavy libraries are imported here at the
        earliest. Called on a thread of its own, so that a probe that hangs can be given up."""

    @abstractmethod
    def capabilities(self, device: Device) -> Capabilities:
        """What a device can do."""

    @abstractmethod
    def kernels(self, device: Device) -> Sequence[Kernel]:
        """Every kernel for this device, operators and fused patterns."""

    @abstractmethod
    def open(self, device: Device, options: Mapping[str, Any]) -> Session:
        """Opens a device. `options`: "dtype" (activations), "max_batched_tokens", "max_seqs", "max_model_len", "strict" (refuse
        operators without a kernel), "graph_sizes" (only with graph_capture), "graph_queries" (only with graph_drafts), and what the
        user passed for this backend; an unknown one is an InvalidRequestError."""
