"""A request inside the engine: n outputs that grow token by token until something ends them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from trivium.engine.pooling import Pool
from trivium.engine.outputs import Clock, CompletionOutput, RequestOutput, TokenLogprobs
from trivium.errors import TriviumError
from trivium.ops import Span
from trivium.sampling import SamplerState, SamplingParams
from trivium.sched import Sequence as Stream
from trivium.text import Detokenizer, StopMatcher, Tokenizer
from trivium.text.events import Event, merge
from trivium.text.parser import OutputParser
from trivium.text.reader import Reader

if TYPE_CHECKING:
    from trivium.engine.beams import Beams


class Text:
    """Token ids to the text a client sees: whole characters only, nothing that could still become a stop string."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.parts: list[str] = []
        self.matched: str | None = None
        """The stop string that ended the text."""
        self._held: list[int] = []
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._matcher = StopMatcher(params.stop, include_stop=params.include_stop_str_in_output) if params.stop else None

    def push(self, token: int, *, watch: bool, stream: bool) -> None:
        """Adds a token; `watch`: stop strings count from here on; `stream`: it is wanted at once, not only at the end."""
        self._held.append(token)
        if stream or self._matcher is not None:
            self._read(watch)

    def finish(self, *, watch: bool, broken: bool) -> None:
        """Lets go of what was held back, unless it ends as `broken`. Not to be called after a match."""
        self._read(watch, end=not broken)
        if self._matcher is not None and not broken:
            self.parts.append(self._matcher.finish())
            self.matched = self._matcher.matched

    def show(self, ids: frozenset[int]) -> None:
        """Special tokens that stay visible. To be called before the first token."""
        self._detokenizer.show(ids)

    def _read(self, watch: bool, end: bool = False) -> None:
        held, self._held = self._held, []  # they are done with, also if this fails
        piece = self._detokenizer.push(*held) + (self._detokenizer.finish() if end else "")
        if self._matcher is not None and watch:
            piece, self.matched = self._matcher.push(piece)
        self.parts.append(piece)


class Completion:
    """One of the n outputs of a request."""

    def __init__(self, request: Request, seq: Stream, sampler: SamplerState, text: Text) -> None:
        self.request = request
        self.index = seq.order[2]
        self.seq = seq
        self.sampler = sampler
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None if request.params.logprobs is None else []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.over = False
        """No token will follow those that grow() has taken."""
        self._text = text
        self._logprob_sum = 0.0
        self.last_token: float | None = None
        self._sent = (0, 0)
        self._parser: OutputParser | None = None

    @property
    def resting(self) -> bool:
        """The scheduler has nothing to do for it now."""
        return self.finish_reason is not None

    def grow(self, drawn: Sequence[int], draft: Sequence[int]) -> int:
        """Takes, as far as the next step needs them, the tokens drawn behind the known ones and behind each draft: up to the first
        that is not the one drafted in its place, or that is the last one. Returns how many drafts came true before that."""
        right = 0
        for right, token in enumerate(drawn):
            self.seq.append(token)
            self.sampler.append(token)
            ends = token in self.request.end_ids and self.sampler.generated > self.request.params.min_tokens
            self.over = ends or self.seq.length == self.seq.limit or self.sampler.complete
            if self.over or right == len(draft) or token != draft[right]:
                break
        return right

    def unseen(self) -> Sequence[int]:
        """The tokens that grow() took and accept() has not seen."""
        return self.seq.tokens(len(self.request.prompt_ids) + len(self.token_ids))

    def read_with(self, reader: Reader) -> None:
        """As Request.read_with."""
        self._text.show(reader.shown)
        self._parser = reader.parser()

    def accept(self, token: int, logprobs: TokenLogprobs | None, now: float) -> None:
        """Shows a token that grow() took and that was made at `now`, and ends the output where a rule says so. An end token's own
        text is shown only with include_stop_str_in_output; a stop string must lie behind the first min_tokens tokens."""
        params = self.request.params
        self.token_ids.append(token)
        if logprobs is not None:
            self._logprob_sum += logprobs[token].logprob
            if self.logprobs is not None:
                self.logprobs.append(logprobs)
        self.request.clock.token(now, self.last_token)
        self.last_token = now
        watch = len(self.token_ids) > params.min_tokens
        ends = watch and token in self.request.end_ids
        if not ends or params.include_stop_str_in_output:
            self._text.push(token, watch=watch, stream=self.request.stream)
        if self._text.matched is not None:
            self.finish("stop")
        elif ends:
            self.stop_reason = token if token in params.stop_token_ids else None
            self.finish("stop")
        elif self.sampler.complete and len(self.token_ids) == self.sampler.generated:
            self.finish("stop")
        elif len(self.token_ids) >= self.request.max_tokens:
            self.finish("length")

    def finish(self, reason: str) -> None:
        """Ends the output; text that was held back comes out, and may still complete a stop string."""
        if self._text.matched is None:
            self._text.finish(watch=len(self.token_ids) > self.request.params.min_tokens, broken=reason == "error")
        if self._text.matched is not None and reason in ("stop", "length"):
            reason, self.stop_reason = "stop", self._text.matched
        self.finish_reason, self.over = reason, True

    def output(self) -> CompletionOutput:
        """What is there: for a streaming request, since the last call."""
        tokens, parts = self._sent
        text = "".join(self._text.parts[parts:])
        events: list[Event] | None = None
        reason = self.finish_reason
        if self._parser is not None:
            events = merge(self._parser.push(text) + (self._parser.finish() if reason else []))
            if self._parser.calls > 0 and reason in ("stop", "length"):
                reason = "tool_calls"
        if self.request.stream:
            self._sent = (len(self.token_ids), len(self._text.parts))
        return CompletionOutput(
            index=self.index, text=text, token_ids=self.token_ids[tokens:], finish_reason=reason, stop_reason=self.stop_reason,
            logprobs=None if self.logprobs is None else self.logprobs[tokens:],
            cumulative_logprob=None if self.logprobs is None and self.request.beams is None else self._logprob_sum, events=events,
        )  # fmt: skip


@dataclass(eq=False)
class Request:
    """A request that the engine has taken. end_ids: tokens that end an output. started: outputs whose sequence the scheduler
    knows; the others wait until the first has computed the prompt but for its last token."""

    id: int
    prompt_ids: list[int]
    params: SamplingParams
    max_tokens: int
    end_ids: frozenset[int]
    clock: Clock
    stream: bool = False
    client_id: str | None = None
    salt: str = ""
    adapter: str | None = None
    seed: int = 0
    completions: list[Completion] = field(default_factory=list)
    started: int = 1
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    pool: Pool | None = None
    error: TriviumError | None = None
    beams: Beams | None = None
    reader: Reader | None = None
    media: Sequence[Span] = ()

    def read_with(self, reader: Reader) -> None:
        """The outputs are answers of a chat. To be called before the first token."""
        self.reader = reader
        for completion in self.completions:
            completion.read_with(reader)

    @property
    def finished(self) -> bool:
        return None not in [completion.finish_reason for completion in self.completions]

    def output(self, moved: list[Completion], clock: Callable[[], float]) -> RequestOutput:
        """News for the client: the outputs that moved, or all of them if it doesn't stream."""
        news = [c.output() for c in moved] if self.stream else self._outputs()
        output = RequestOutput(self.id, self.prompt_ids, news, self.finished)
        output.prompt_logprobs = None if self.params.prompt_logprobs is None else self.prompt_logprobs
        output.error, output.client_id = self.error, self.client_id
        if output.finished:
            output.metrics = self.clock.metrics(clock())
            output.embedding = None if self.pool is None else self.pool.result()
        return output

    def _outputs(self) -> list[CompletionOutput]:
        if not self.params.ranked:
            return [c.output() for c in self.completions]
        best = sorted(self.completions, key=lambda c: -c._logprob_sum / max(len(c.token_ids), 1))[: self.params.n]
        return [replace(c.output(), index=i) for i, c in enumerate(best)]
