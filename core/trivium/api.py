"""LLM: a loaded model that answers prompts and chats; and what it shares with AsyncLLM."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypedDict, Unpack, cast

from trivium.engine import Engine, EngineConfig, PoolingParams, RequestOutput
from trivium.engine.adapters import enabled
from trivium.engine.loader import CACHED, LoadOptions, load
from trivium.engine.pooling import CLASSIFIER, likelihood, relevance, text_pair
from trivium.engine.speculation.drafter import Drafter, Speculative
from trivium.engine.speculation.model import HeadDrafter, ModelDrafter
from trivium.errors import BackendError, ClosedError, InvalidRequestError, UnsupportedError
from trivium.models import build
from trivium.ops import Span
from trivium.sampling import SamplingParams, StructuredOutputs
from trivium.text.reader import Reader, ToolUse
from trivium.text.syntaxes import REASONING, TOOLS, choose
from trivium.weights import open_checkpoint, resolve

Prompt = str | Sequence[int]
"""A text, or token ids."""
Prompts = Prompt | Sequence[Prompt]
Message = Mapping[str, Any]
"""{"role": ..., "content": ...}."""
Chats = Sequence[Message] | Sequence[Sequence[Message]]
Params = SamplingParams | Sequence[SamplingParams] | None
"""For all prompts, one for each, or None: the model's own (see default_params)."""
Progress = Callable[[int, int], None] | None
"""Is told bytes that are done, and all of them."""


class Request(NamedTuple):
    """What the engine gets; `options`: those of Engine.add_request."""

    ids: list[int]
    params: SamplingParams | None
    options: Mapping[str, Any] = MappingProxyType({})


class Options(TypedDict, total=False):
    """Keyword arguments of every request; of several, one value for all or a list with one for each. adapter: the name of a loaded
    one. priority: an integer, lower runs first (the policy "fcfs" takes none). timeout: seconds until it is ended with
    DeadlineError, keeping what it has. request_id: the client's own, echoed as RequestOutput.client_id. cache_salt: prefix pages
    are shared only between equal salts."""

    adapter: str | Sequence[str | None] | None
    priority: int | Sequence[int]
    timeout: float | Sequence[float | None] | None
    request_id: str | Sequence[str | None] | None
    cache_salt: str | Sequence[str]


Tools = Sequence[Mapping[str, Any]] | None
"""[{"type": "function", "function": {"name": ..., "description": ..., "parameters": JSON schema}}]."""
ToolChoice = str | Mapping[str, Any] | None
"""See ToolUse.of."""


class Opened(ABC):
    """What LLM and AsyncLLM share: loading, tokens of prompts and chats, default parameters, the end."""

    def __init__(
        self, model: str | os.PathLike[str], backend: str = "auto", *, dtype: str = "auto", quantize: str | None = None,
        kv_dtype: str = "auto", block_size: int | None = None, num_kv_blocks: int | None = None, max_num_seqs: int = 64,
        max_num_batched_tokens: int | None = None, max_model_len: int | None = None, enable_prefix_caching: bool | None = None,
        strict: bool = False, seed: int | None = None, enable_lora: bool = False, max_loras: int = 4, max_lora_rank: int = 16,
        speculative: Speculative | Mapping[str, Any] | None = None, kv_host_bytes: int = 0,
        kv_disk_path: str | os.PathLike[str] | None = None, kv_disk_bytes: int = 10 << 30, scheduling_policy: str = "priority",
        max_waiting_requests: int | None = None, max_waiting_tokens: int | None = None, threads: int | None = None,
        backend_options: Mapping[str, Any] | None = None, prefill: str | None = None, decode: str | None = None,
        prefill_options: Mapping[str, Any] | None = None, tool_parser: str | None = "auto", reasoning_parser: str | None = "auto",
        progress: bool = True,
    ) -> None:  # fmt: skip
        """Loads a model; raises a TriviumError that says what was asked, what is possible and what to do.

        model: a folder or .gguf file, hf:ORG/NAME, modelscope:ORG/NAME, pypi:PACKAGE, or an alias. backend: "auto" or a name that
        `trivium backends` lists, with ":INDEX" for one of its devices. dtype, quantize, kv_dtype: resident formats; "auto" = the
        best that loses nothing. block_size, num_kv_blocks: tokens a page and pages of the KV cache. max_num_seqs,
        max_num_batched_tokens: limits of one step (512 tokens, if the backend can). max_model_len: prompt and output together.
        strict: refuse instead of running on the host what the backend lacks. seed: makes requests without a seed repeat from run to
        run. enable_lora: adapters can be loaded, up to max_lora_rank, and max_loras of them run at a time. speculative: tokens are
        guessed and checked several at a time; {"method": "ngram"}, or what else Speculative has. kv_host_bytes, kv_disk_path,
        kv_disk_bytes: memory, and a folder and its size, for pages that the KV cache gives away; later prompts (with the folder: of
        later runs, too) take from there what would take longer to compute. scheduling_policy: "fcfs" or "priority".
        max_waiting_requests, max_waiting_tokens: what may wait (prompts, tokens of theirs) before AsyncLLM refuses more with
        OverloadedError; the callers of an LLM wait in any case. threads and backend_options go to the backend, which refuses what
        it does not know. prefill: a backend that computes the prompts, while `backend` (decode is another name for it) goes on with
        what follows them; each has the weights, and the outputs are those of one alone where both compute the same numbers.
        prefill_options: dtype, quantize, kv_dtype, max_num_seqs, max_num_batched_tokens and strict of that backend, if not those
        above, and its block_size, num_kv_blocks and backend_options. tool_parser, reasoning_parser: how chats are read: a name of
        text.syntaxes or of a plugin, "auto" by chat template and architecture, None not at all. progress: bars, if standard error
        is a terminal.
        """
        choose(TOOLS, tool_parser, "", "tool_parser")
        choose(REASONING, reasoning_parser, "", "reasoning_parser")
        self._parsers = tool_parser, reasoning_parser
        backend = one_backend(backend, decode)
        given: Any = {} if backend_options is None else backend_options
        if not isinstance(given, Mapping):
            raise InvalidRequestError(f"backend_options must be a mapping, not {backend_options!r}", param="backend_options")
        wanted = Speculative.of(speculative)
        own = dict(given) | ({} if threads is None else {"threads": threads})
        options = LoadOptions(
            dtype=dtype, quantize=quantize, kv_dtype=kv_dtype, block_size=block_size, num_kv_blocks=num_kv_blocks,
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, max_model_len=max_model_len,
            strict=strict, enable_lora=enable_lora, max_loras=max_loras, max_lora_rank=max_lora_rank, backend_options=own,
            num_speculative_tokens=wanted.num_speculative_tokens if wanted else 0, cached=tuple(filter(vars().__getitem__, CACHED)),
        )  # fmt: skip
        config = EngineConfig(
            max_num_seqs, max_num_batched_tokens or max_num_seqs, enable_prefix_caching is not False, seed, scheduling_policy,
            max_waiting_requests, max_waiting_tokens, wanted, kv_host_bytes, kv_disk_path, kv_disk_bytes,
        )  # fmt: skip
        ahead = ahead_options(options, prefill, prefill_options)
        with contextlib.ExitStack() as opened, _progress_bar(progress) as report:
            self.loaded = load(os.fspath(model) if isinstance(model, os.PathLike) else model, backend, options, progress=report)
            opened.callback(self.loaded.close)
            drafter = self._drafter(wanted, options, backend, opened, report)
            config = replace(config, max_num_batched_tokens=self.loaded.max_num_batched_tokens)
            self.tokenizer = self.loaded.tokenizer
            if prefill is None:
                self.engine = Engine(self.loaded, self.tokenizer, config, drafter=drafter)
            else:
                from trivium.engine.split import SplitEngine

                front = load(self.loaded.name, prefill, ahead, progress=report)
                opened.callback(front.close)
                self.engine = SplitEngine(self.loaded, front, config, drafter=drafter)
            opened.callback(self.engine.close)
            self._start(opened)
            self._finalizer = weakref.finalize(self, opened.pop_all().close)

    def _drafter(
        self, wanted: Speculative | None, options: LoadOptions, backend: str, opened: contextlib.ExitStack, report: Progress
    ) -> Drafter | None:
        """The drafter of a draft model or head, whose session is then among the opened things; None: there is no such model."""
        if wanted is None or wanted.method not in ("draft", "mtp"):
            return None
        target, traced, own = self.loaded, None, LoadOptions(max_num_seqs=options.max_num_seqs)
        if wanted.method == "mtp":
            traced = build(open_checkpoint(resolve(target.name)).config, draft=True)
        if traced is not None and wanted.backend == "auto":
            own = replace(options, block_size=target.kv_spec.page_size, num_kv_blocks=target.num_pages, enable_lora=False)
            wanted = replace(wanted, backend=backend)
        draft = load(wanted.model or target.name, wanted.backend, own, progress=report, traced=traced)
        opened.callback(draft.close)
        if (draft.vocab_size, draft.tokenizer.tokens()) != (target.vocab_size, target.tokenizer.tokens()):
            raise UnsupportedError(f"the draft model {draft.name} has another vocabulary than {target.name}", param="speculative")
        limits = draft.max_num_seqs, draft.max_num_batched_tokens
        return ModelDrafter(draft, *limits) if traced is None else HeadDrafter(draft, draft.inlet, *limits)

    @abstractmethod
    def _start(self, opened: contextlib.ExitStack) -> None:
        """Sets up what runs the engine; `opened` gets what must be closed before it."""

    def close(self) -> None:
        """Gives the memory back. Nothing but close() may be called afterwards."""
        self._finalizer()
        gone = cast(Any, None)
        self.engine.speculator = None
        self.engine.model = self.loaded = replace(self.loaded, session=gone, executable=gone, lora=None, images=None)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that requests may give."""
        return () if self.loaded.lora is None else self.loaded.lora.names

    @property
    def cross_encoder(self) -> bool:
        """Whether the model makes one number of a prompt: how well a query and a document go together."""
        return self.loaded.architecture.endswith(CLASSIFIER) and self.loaded.hidden_size == 1

    def default_params(self, **fields: Any) -> SamplingParams:
        """The model's own sampling parameters (its generation config; greedy if that does not ask for sampling), with `fields`."""
        return SamplingParams.from_config(self.loaded.generation_config, **fields)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: a text gets the special tokens that the model wants, ids stay as they are. A pair of texts (tuple)
        is a query and a document, for a cross-encoder."""
        _check_prompt(prompt)
        if isinstance(prompt, tuple) and [*map(type, prompt)] == [str, str]:
            return self.tokenizer.encode_pair(*cast(tuple[str, str], prompt))
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def encode_chat(self, messages: Sequence[Message], **template: Any) -> list[int]:
        """Token ids of a chat under the model's template. `template`: tools, add_generation_prompt, or what the template knows."""
        return self._read_chat(messages, template)[0]

    @property
    def takes_images(self) -> bool:
        """Whether chats may have parts that are images: {"type": "image", "image": bytes, a pathlib.Path or an image of Pillow}, or
        {"type": "image_url", "image_url": {"url": "data:image/...;base64,..."}}."""
        return self.loaded.images is not None and not self.loaded.images.refusal

    def _read_chat(self, messages: Sequence[Message], template: Mapping[str, Any]) -> tuple[list[int], Sequence[Span]]:
        """Token ids, and what stands for images among them."""
        if self.loaded.images is None:
            return self.tokenizer.encode_chat(list(messages), **template), ()
        return self.loaded.images.vision.chat(self.tokenizer, messages, template)

    def _request(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None, tools: Tools, choice: ToolChoice,
        more: Mapping[str, Any],
    ) -> Request:  # fmt: skip
        _check_prompt(prompt)
        if not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping):
            return self._chats(cast(Sequence[Message], prompt), params, tools, choice, more)[0]
        if tools or choice is not None or more.keys() - Options.__annotations__:
            raise InvalidRequestError("tools, tool_choice and template arguments belong to a chat, not to a plain prompt")
        return with_options(self._paired([self.encode(cast(Prompt, prompt))], params), more)[0]

    def _prompts(self, prompts: Prompts, params: Params, options: Options) -> list[Request]:
        return with_options(self._paired(self._encoded(prompts), params), options)

    def _encoded(self, prompts: Prompts) -> list[list[int]]:
        _check_prompt(prompts)
        single = isinstance(prompts, str) or (len(prompts) > 0 and not hasattr(prompts[0], "__len__"))
        return [self.encode(cast(Prompt, p)) for p in ([prompts] if single else prompts)]

    def _pooled(self, prompts: Prompts, params: PoolingParams | None, options: Options) -> list[Request]:
        pooling = PoolingParams() if params is None else params
        if not isinstance(pooling, PoolingParams):
            raise InvalidRequestError(f"pooling_params must be PoolingParams, not {params!r:.80}", param="pooling_params")
        return with_options([Request(ids, None, {"pooling": pooling}) for ids in self._encoded(prompts)], options)

    def _judged(self, pairs: Sequence[tuple[str, str]], options: Options) -> list[Request]:
        if not self.cross_encoder:
            raise UnsupportedError("this model does not score pairs of texts; compare their embeddings", param="model")
        return self._pooled(cast(Prompts, [text_pair(pair) for pair in pairs]), None, options)

    def _scored(self, pair: tuple[str, str]) -> Request:
        """Context and continuation as one prompt whose last tokens are scored, cut into tokens as evaluation harnesses do."""
        context, continuation = text_pair(pair)
        ids, prefix = self.encode(context + continuation), self.encode(context.rstrip())
        if not prefix:
            prefix = sorted(self.tokenizer.eos_ids)[:1] if self.tokenizer.bos_id is None else [self.tokenizer.bos_id]
            ids = prefix + ids
        if not prefix or len(ids) <= len(prefix):
            message = f"nothing to score: {context!r:.80} and then {continuation!r:.80} must both have at least one token"
            raise InvalidRequestError(message, param="prompt")
        return Request(ids, SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0), {"score_from": len(prefix)})

    def _chats(self, messages: Chats, params: Params, tools: Tools, choice: ToolChoice, more: Mapping[str, Any]) -> list[Request]:
        if not isinstance(cast(object, messages), Sequence):
            message = f"messages must be a list of messages with role and content, or of such lists, not {type(messages).__name__}"
            raise InvalidRequestError(message, param="messages")
        use = ToolUse.of(tools, choice)
        template = {name: value for name, value in more.items() if name not in Options.__annotations__}
        options = {name: value for name, value in more.items() if name not in template}
        source = f"{self.loaded.architecture}\n{self.tokenizer.template_source(template.get('template'), bool(use.offered))}"
        chats: Any = [messages] if len(messages) == 0 or isinstance(messages[0], Mapping) else messages
        prompts = [self._read_chat(chat, {"tools": use.offered, **template}) for chat in chats]
        own = [{"reader": Reader.of(self.tokenizer, ids, use, source, *self._parsers), "media": media} for ids, media in prompts]
        paired = self._paired([ids for ids, _ in prompts], params)
        requests = [r if use.forced is None else _forced(r, use.forced) for r in paired]
        return with_options([r._replace(options=more) for r, more in zip(requests, own, strict=True)], options)

    def _paired(self, prompts: list[list[int]], params: Params) -> list[Request]:
        each = _each("sampling_params", self.default_params() if params is None else params, len(prompts))
        if not all(isinstance(one, SamplingParams) for one in each):
            message = f"sampling_params must be SamplingParams or a list of them, not {params!r:.80}"
            raise InvalidRequestError(message, param="sampling_params")
        return [Request(ids, one) for ids, one in zip(prompts, each, strict=True)]


class LLM(Opened, contextlib.AbstractContextManager["LLM"]):
    """A loaded model. A context manager; threads may share it (one steps at a time, for all)."""

    def _start(self, opened: contextlib.ExitStack) -> None:
        self._lock = threading.Lock()
        self._holder = 0
        self._inbox: dict[int, RequestOutput | None] = {}
        self._left: deque[int] = deque()

    def close(self) -> None:
        """Gives the memory back, between two steps. Whatever still runs ends with an error."""
        with self._locked():
            super().close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Makes a LoRA adapter, a folder as PEFT saves it, known as `name`, while others run. Raises InvalidRequestError,
        CheckpointError or UnsupportedError; then nothing has changed."""
        adapter = enabled(self.loaded.lora).read(path)
        with self._locked():
            self._check_open()
            self.engine.load_adapter(name, adapter)

    def unload_adapter(self, name: str) -> None:
        """Forgets an adapter. Requests that have it end with it; new ones can't name it."""
        with self._locked():
            self._check_open()
            self.engine.unload_adapter(name)

    def generate(self, prompts: Prompts, sampling_params: Params = None, **options: Unpack[Options]) -> list[RequestOutput]:
        """Completes prompts (texts or lists of token ids, one or many), in one batch; outputs in the order of the prompts.
        `options`: see Options.

        A bad request is refused before any has run (InvalidRequestError and its kin). One that fails later ends with
        finish_reason "error" and its `error` set, and the others go on; if all fail, the first error is raised.
        """
        return self._complete(self._prompts(prompts, sampling_params, options))

    def chat(
        self, messages: Chats, sampling_params: Params = None, *, tools: Tools = None, tool_choice: ToolChoice = None, **more: Any
    ) -> list[RequestOutput]:
        """As generate(), for one chat or several; the outputs have content, reasoning and tool_calls beside the text. tools,
        tool_choice: see ToolUse.of. `more`: Options, or for encode_chat. TemplateError if the model has no template."""
        return self._complete(self._chats(messages, sampling_params, tools, tool_choice, more))

    def stream(
        self, prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None = None, *, tools: Tools = None,
        tool_choice: ToolChoice = None, **more: Any,
    ) -> Iterator[RequestOutput]:  # fmt: skip
        """One prompt or chat, token by token: each RequestOutput holds what is new (of a chat also as events); the last has
        finished=True and the metrics. Closing the iterator aborts the request."""
        number = self._add(self._request(prompt, sampling_params, tools, tool_choice, more), stream=True)
        try:
            while True:
                output = self._next(number)
                yield output
                if output.error is not None:
                    raise output.error
                if output.finished:
                    return
        finally:
            self._drop(number)

    def embed(
        self, prompts: Prompts, pooling_params: PoolingParams | None = None, **options: Unpack[Options]
    ) -> list[RequestOutput]:
        """Embeddings of prompts, as generate() takes them, in the same steps as whatever else runs: see RequestOutput.embedding."""
        return self._complete(self._pooled(prompts, pooling_params, options))

    def score(self, pairs: Sequence[tuple[str, str]], **options: Unpack[Options]) -> list[float]:
        """How well each (query, document) goes together, 0 to 1, by a cross-encoder; UnsupportedError if the model is none."""
        return [relevance(output) for output in self._complete(self._judged(pairs, options))]

    def loglikelihood(self, pairs: Sequence[tuple[str, str]], **options: Unpack[Options]) -> list[tuple[float, bool]]:
        """For each (context, continuation): the sum of the log probabilities of the continuation's tokens, and whether each of them
        is the most likely one. The continuation is what follows the context's tokens in those of both texts together (blanks at
        the end of the context count with it); an empty context is the model's begin token. ContextLengthError for more tokens than
        max_model_len."""
        return [likelihood(output) for output in self._complete(with_options([self._scored(pair) for pair in pairs], options))]

    def _complete(self, requests: Sequence[Request]) -> list[RequestOutput]:
        numbers: list[int] = []
        try:
            for request in requests:
                numbers.append(self._add(request))
            return checked([self._next(number) for number in numbers])
        finally:
            for number in numbers:
                self._drop(number)

    def _add(self, request: Request, *, stream: bool = False) -> int:
        self.engine.prepare(request.params)
        with self._locked():
            self._check_open()
            number = self.engine.add_request(request.ids, request.params, stream=stream, patient=True, **request.options)
            self._inbox[number] = None
            return number

    def _next(self, number: int) -> RequestOutput:
        while True:
            with self._locked():
                self._sweep()
                if self._inbox[number] is None:
                    self._check_open()
                    if not self.engine.has_unfinished():
                        raise BackendError("this request was lost when a step was interrupted; ask again")
                    for news in self.engine.step():
                        earlier = self._inbox[news.request_id]
                        if earlier is None:
                            self._inbox[news.request_id] = news
                        else:
                            earlier.extend(news)
                output, self._inbox[number] = self._inbox[number], None
                if output is not None:
                    return output

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        if self._holder == threading.get_ident():
            message = "this model is in the middle of a step on this thread, as a signal handler sees it; ask later"
            raise InvalidRequestError(message)
        with self._lock:
            self._holder = threading.get_ident()
            try:
                yield
            finally:
                self._holder = 0

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise ClosedError("this model was closed; load it again")

    def _drop(self, number: int) -> None:
        """Ends a request. Never waits, as a stream may be collected as garbage inside a step: then whoever steps does it."""
        self._left.append(number)
        while self._left and self._lock.acquire(blocking=False):
            try:
                self._sweep()
            finally:
                self._lock.release()

    def _sweep(self) -> None:
        while self._left:
            number = self._left.popleft()
            del self._inbox[number]
            self.engine.abort(number)


def one_backend(backend: str, decode: str | None) -> str:
    """Two names of one thing."""
    if decode is not None and backend not in ("auto", decode):
        raise InvalidRequestError(f"decode {decode!r} and backend {backend!r} mean the same; give one of them", param="decode")
    return backend if decode is None else decode


def ahead_options(options: LoadOptions, prefill: str | None, given: Any) -> LoadOptions:
    """Those of a backend that computes prompts only."""
    if prefill is None and given is not None:
        raise InvalidRequestError("prefill_options are for the backend that prefill names; there is none", param="prefill_options")
    given = {} if given is None else given
    known = vars(options).keys() - {"max_model_len", "num_speculative_tokens", "enable_lora", "max_loras", "max_lora_rank"}
    if not isinstance(given, Mapping) or given.keys() - known:
        message = f"prefill_options must be a mapping with no other options than {', '.join(sorted(known))}, not {given!r:.80}"
        raise InvalidRequestError(message, param="prefill_options")
    own: dict[str, Any] = {"block_size": None, "num_kv_blocks": None, "num_speculative_tokens": 0, "backend_options": {}, **given}
    return replace(options, **own)


@contextlib.contextmanager
def _progress_bar(show: bool) -> Iterator[Progress]:
    """A progress bar over the bytes of the weights; nothing where standard error is no terminal."""
    if not show or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(unit="B", unit_scale=True, desc="loading", leave=False) as bar:

        def report(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield report


def _check_prompt(prompt: object) -> None:
    if not hasattr(prompt, "__len__") or isinstance(prompt, Mapping):
        message = f"prompts must be a text, a list of token ids, or a list of these, not {type(prompt).__name__}"
        raise InvalidRequestError(message, param="prompt")


def with_options(requests: Sequence[Request], options: Mapping[str, Any]) -> list[Request]:
    """The requests with Options that were given for all or for each."""
    if unknown := options.keys() - Options.__annotations__:
        raise TypeError(f"there is no argument {min(unknown)!r}; there are {', '.join(Options.__annotations__)}")
    for name, value in options.items():
        key, each = "client_id" if name == "request_id" else name, _each(name, value, len(requests))
        requests = [r._replace(options={**r.options, key: one}) for r, one in zip(requests, each, strict=True)]
    return list(requests)


def _each(name: str, value: Any, count: int) -> list[Any]:
    each = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value] * count
    if len(each) != count:
        raise InvalidRequestError(f"{count} prompts came with {len(each)} {name}; give one for all or one for each", param=name)
    return each


def _forced(request: Request, schema: Mapping[str, Any]) -> Request:
    """The answer must satisfy `schema`, with one blank at most between its parts, so that it ends."""
    assert request.params is not None, "a chat has sampling parameters"
    if request.params.structured_outputs is not None:
        message = "structured_outputs says what the answer is, so no tool call can be forced; leave it out or use tool_choice auto"
        raise InvalidRequestError(message, param="tool_choice")
    form = StructuredOutputs(json=schema, whitespace_pattern=" ?")
    return request._replace(params=replace(request.params, structured_outputs=form))


def checked(outputs: list[RequestOutput]) -> list[RequestOutput]:
    errors = [output.error for output in outputs if output.error is not None]
    if errors and len(errors) == len(outputs):
        raise errors[0]
    return outputs
