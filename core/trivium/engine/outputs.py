"""What comes out of the engine: tokens, text, logprobs, and the clock of a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from trivium.errors import TriviumError
from trivium.ops.batch import F32
from trivium.text.events import ContentDelta, Event, ReasoningDelta, ToolCall, joined, tool_calls


class Logprob(NamedTuple):
    """Natural log probability of a token under the raw logits, its rank (1 = most likely), its text and its own bytes, of which
    the text may show only U+FFFD."""

    logprob: float
    rank: int
    decoded_token: str
    token_bytes: bytes


TokenLogprobs = dict[int, Logprob]
"""By token id: the token itself first, then the alternatives asked for, most likely first. The k most likely are those of a rank up
to k, whether the token is one of them or not."""


class Metrics(NamedTuple):
    """Times of one request in seconds; None where there is nothing to measure.

    queue_time: arrival until first scheduled. prefill_time: from there until the last prompt token is computed. decode_time: first
    to last token. time_to_first_token: arrival to first token, queue included. mean_itl: mean gap between the moments at which an
    output grew. time_per_output_token: the same time by the number of tokens, so smaller where a step yields several; both are None
    if no output has a second token. e2e_time: arrival to the end. preempted_time: spent waiting after preemptions, in none of the
    above apart from the interval it falls into. num_cached_tokens: prompt tokens found in the prefix cache when first scheduled;
    num_restored_host_tokens and num_restored_disk_tokens: those of them that came back from a tier.
    num_draft_tokens, num_accepted_tokens: guesses that were checked, and those that came true. transfer_time: from the end of the
    prompt on one backend until its pages had come to another, to go on there. inter_token_latencies: the gaps that mean_itl is
    the mean of, those of n outputs mixed. arrival: what the engine's clock (time.perf_counter, unless it was given another) said
    then, so that these times can be laid beside others.
    """

    queue_time: float | None
    prefill_time: float | None
    decode_time: float | None
    time_to_first_token: float | None
    mean_itl: float | None
    time_per_output_token: float | None
    e2e_time: float
    preempted_time: float
    num_cached_tokens: int
    num_preemptions: int
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_restored_host_tokens: int = 0
    num_restored_disk_tokens: int = 0
    transfer_time: float = 0.0
    inter_token_latencies: tuple[float, ...] = ()
    arrival: float = 0.0


@dataclass(slots=True)  # as RequestOutput made in every step; freezing them would double what they cost
class CompletionOutput:
    """One of the n outputs. finish_reason: None while it runs, then "stop", "length", "tool_calls", "abort" or "error".
    stop_reason: the stop string or stop token id that ended it; None for the model's own end token. token_ids includes the token
    that ended it.

    events: what a chat's text says, in order; in a stream what is new with certainty, which may lag behind `text`. None for what is
    no chat. "tool_calls" stands in place of "stop" and "length" if and only if a tool call is complete."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    events: list[Event] | None = None

    @property
    def content(self) -> str:
        """What a chat's answer says to the reader: without reasoning and calls."""
        return self.text if self.events is None else joined(self.events, ContentDelta)

    @property
    def reasoning(self) -> str | None:
        """What the model thought first; None if it did not."""
        return joined(self.events or (), ReasoningDelta) or None

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls of a chat's answer, in order; in a stream their new pieces. Only those with complete=True may be executed."""
        return tool_calls(self.events or ())

    def extend(self, later: CompletionOutput) -> None:
        """Takes in the news that followed these."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs = later.logprobs if self.logprobs is None else [*self.logprobs, *(later.logprobs or ())]
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason
        self.cumulative_logprob = later.cumulative_logprob
        if later.events is not None:
            self.events = [*(self.events or ()), *later.events]


@dataclass(slots=True)
class RequestOutput:
    """News of one request. A streaming request reports after every step what is new (text, token_ids and logprobs of each output
    that moved); any other reports once, whole, outputs in order of index. prompt_logprobs[i] belongs to prompt token i; the first
    has none. embedding: float32[dimensions] of a request with pooling that ran to its end. metrics and error are set when it has
    finished."""

    request_id: int
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: Metrics | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    embedding: F32 | None = None
    error: TriviumError | None = None
    client_id: str | None = None

    def extend(self, later: RequestOutput) -> None:
        """Takes in the news that followed these, of a streaming request."""
        known = {output.index: output for output in self.outputs}
        for output in later.outputs:
            if output.index in known:
                known[output.index].extend(output)
            else:
                self.outputs.append(output)
        for name in ("finished", "metrics", "prompt_logprobs", "error"):
            setattr(self, name, getattr(later, name))


@dataclass
class Clock:
    """The life of a request in seconds of the engine's clock; n outputs share one."""

    arrival: float
    deadline: float | None = None
    first_scheduled: float | None = None
    prefill_done: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    preemptions: int = 0
    preempted_time: float = 0.0
    cached_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    restored_tokens: tuple[int, int] = (0, 0)
    gaps: list[float] = field(default_factory=list)
    later_tokens: int = 0
    left: float | None = None
    transfer_time: float = 0.0
    _waiting_since: dict[int, float] = field(default_factory=dict)

    def schedule(self, index: int, now: float, cached: int, host: int = 0, disk: int = 0) -> None:
        """Output `index` was admitted, with `cached` tokens found, of them `host` and `disk` in these tiers."""
        if self.first_scheduled is None:
            self.first_scheduled, self.cached_tokens, self.restored_tokens = now, cached, (host, disk)
        self.preempted_time += now - self._waiting_since.pop(index, now)

    def land(self, now: float) -> None:
        """What another backend had computed is here."""
        if self.left is not None:
            self.transfer_time += now - self.left
            self.left = None

    def preempt(self, index: int, now: float) -> None:
        self.preemptions += 1
        self._waiting_since[index] = now

    def token(self, now: float, previous: float | None) -> None:
        """A token was made; `previous`: time of the one before it in the same output."""
        if self.first_token is None:
            self.first_token = now
        if previous is not None:
            self.later_tokens += 1
            self.gaps += [now - previous] if now != previous else []  # tokens of one step have one time
        if self.last_token is None or now > self.last_token:
            self.last_token = now

    def metrics(self, now: float) -> Metrics:
        """The figures of a request that ends now."""
        return Metrics(
            queue_time=_span(self.arrival, self.first_scheduled), prefill_time=_span(self.first_scheduled, self.prefill_done),
            decode_time=_span(self.first_token, self.last_token), time_to_first_token=_span(self.arrival, self.first_token),
            mean_itl=sum(self.gaps) / len(self.gaps) if self.gaps else None, inter_token_latencies=tuple(self.gaps),
            time_per_output_token=sum(self.gaps) / self.later_tokens if self.later_tokens else None, e2e_time=now - self.arrival,
            preempted_time=self.preempted_time, num_cached_tokens=self.cached_tokens, num_preemptions=self.preemptions,
            num_draft_tokens=self.drafted, num_accepted_tokens=self.accepted, num_restored_host_tokens=self.restored_tokens[0],
            num_restored_disk_tokens=self.restored_tokens[1], transfer_time=self.transfer_time, arrival=self.arrival,
        )  # fmt: skip


def _span(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
