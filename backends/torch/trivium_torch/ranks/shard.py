"""One rank's part of a Program: weights cut, heads and channels shared out, collectives where ranks must meet.

As in Megatron-LM (Shoeybi et al., 2019): a projection of what all ranks have is cut by its outputs, one of what is cut by its
inputs, and the sum over the ranks follows. What is between them works on each rank's own heads or channels. An operator without a
rule gets its arguments whole. Where that would cost a gather, the projections that lead there are not cut at all; only the logits
are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from trivium.ops import OPERATORS, Builder, Group, KVSpec, PagedKV, Pattern, Program, Value


class Part(NamedTuple):
    """A constant of the rank's Program: constant `name` of the whole one, or the rank's part of it along dimension `dim`."""

    name: str
    dim: int | None = None


@dataclass
class Plan:
    """What is not cut: projections by the name of their weight, and states by their index. It grows until it fits the Program."""

    whole: set[str] = field(default_factory=set)
    whole_states: set[int] = field(default_factory=set)

    def size(self) -> int:
        return len(self.whole) + len(self.whole_states)


class Sharded(NamedTuple):
    """A rank's Program, the part that each of its constants is, and the states that are cut by their heads."""

    program: Program
    parts: Mapping[str, Part]
    cut_states: frozenset[int]


def shard(program: Program, groups: Sequence[Group], ranks: int, rank: int) -> Sharded:
    """Rank `rank`'s part of a Program, fused or not, for states grouped as `groups`. All ranks' parts fit together."""
    plan = Plan()
    while True:
        before = plan.size()
        tracer = _Shard(program, ranks, rank, plan)
        traced = tracer.trace()
        for group in groups:
            if plan.whole_states & set(group.states):  # pages of a group have one shape
                plan.whole_states.update(group.states)
        if plan.size() == before:
            cut = frozenset(i for i, s in enumerate(program.states) if i not in plan.whole_states and isinstance(s.spec, PagedKV))
            return Sharded(traced, tracer.parts, cut)


def local_spec(spec: KVSpec, cut_states: frozenset[int], ranks: int) -> KVSpec:
    """What each rank stores."""

    def local(group: Group) -> Group:
        if not isinstance(group.spec, PagedKV) or not cut_states.issuperset(group.states):
            return group
        return group._replace(spec=replace(group.spec, kv_heads=group.spec.kv_heads // ranks))

    return spec._replace(groups=tuple(map(local, spec.groups)))


Rule = Callable[["_Shard", Sequence[Any], Mapping[str, Any]], Any]


class _Shard(Builder):
    """Traces a rank's Program: `call` takes and gives values of which some are cut along one dimension."""

    def __init__(self, program: Program, ranks: int, rank: int, plan: Plan) -> None:
        super().__init__(OPERATORS)
        self.program, self.ranks, self.rank, self.plan = program, ranks, rank, plan
        self.parts: dict[str, Part] = {}
        self.cut: dict[Value, int] = {}
        self._causes: dict[Value, frozenset[str]] = {}
        self._state_index: dict[Value, int] = {}
        self._constants_of = {c.value: c for c in program.constants}

    def trace(self) -> Program:
        """The whole of it."""
        env: dict[Value, Any] = {v: self.input(v.name) for v in self.program.inputs}
        env.update((c.value, c.value) for c in self.program.constants)  # cut, or not, where they are read
        for i, declared in enumerate(self.program.states):
            env[declared.value] = self._declare(i)
        for call in self.program.calls:
            args = [None if v is None else env[v] for v in call.args]
            if isinstance(call.op, Pattern):
                got = call.op.fn(self, *args, **call.attrs)
            else:
                got = self.call(call.name, *args, **call.attrs)
            env.update(zip(call.results, got if isinstance(got, tuple) else (got,), strict=True))
        outputs = {name: self._whole(env[v]) for name, v in self.program.outputs.items()}
        return self.finish(outputs, vocab_size=self.program.vocab_size)

    def _declare(self, index: int) -> Value:
        declared = self.program.states[index]
        spec = declared.spec
        if isinstance(spec, PagedKV) and spec.kv_heads % self.ranks:
            self.plan.whole_states.add(index)
        if isinstance(spec, PagedKV) and index not in self.plan.whole_states:
            spec = replace(spec, kv_heads=spec.kv_heads // self.ranks)
        value = self.state(declared.value.name, spec)
        self._state_index[value] = index
        return value

    def call(self, name: str, *args: Value | None, **attrs: Any) -> Any:
        """As Builder.call, of values that may be cut."""
        padded = self._bind_args(self._operators[name], args)
        rule = RULES.get(name)
        if rule is not None:
            return rule(self, padded, attrs)
        for state in (v for v in padded if v in self._state_index):
            self.keep_state(state)  # whole arguments want the whole state
        return self.plain(name, self.gathered(padded), attrs)

    def plain(self, name: str, args: Sequence[Value | None], attrs: Mapping[str, Any], cut: int | None = None) -> Any:
        """A call of the operator itself, whose first result is cut along `cut`; the others are states."""
        local = [self.constant(v) if v in self._constants_of else v for v in args]
        got = super().call(name, *local, **attrs)
        first = got[0] if isinstance(got, tuple) else got
        causes = frozenset[str]().union(*(self._causes.get(v, frozenset()) for v in args if v is not None))
        self.mark(first, cut, causes)
        for value in got if isinstance(got, tuple) else (got,):
            if value.kind == "state":
                before = next(v for v in args if v is not None and v.kind == "state")
                self._state_index[value] = self._state_index[before]
        return got

    def mark(self, value: Value, cut: int | None, causes: frozenset[str]) -> None:
        """Notes how a value is cut and which cut projections it comes from."""
        if cut is not None:
            self.cut[value] = cut
            self._causes[value] = causes

    def constant(self, value: Value, dim: int | None = None) -> Value:
        """A constant of the whole Program in the rank's: whole, or its part along `dim`."""
        whole = self._constants_of[value]
        name = value.name if dim is None else f"{value.name}/{dim}"
        self.parts[name] = Part(value.name, dim)
        shape = list(value.shape)
        if dim is not None:
            shape[dim] = shape[dim] // self.ranks  # type: ignore[operator]
        elif whole.array is not None:
            return self.array(name, whole.array)
        return self.weight(name, tuple(shape), source=whole.source)

    def state_is_cut(self, state: Value) -> bool:
        """Whether a state holds the rank's own heads only."""
        return self._state_index[state] not in self.plan.whole_states

    def keep_state(self, state: Value) -> None:
        """In the next attempt the state is whole."""
        self.plan.whole_states.add(self._state_index[state])

    def _whole(self, value: Value) -> Value:
        """A value, gathered if it is cut."""
        if value not in self.cut:
            return value
        return super().call("all_gather", value, dim=self.cut[value] - len(value.shape), ranks=self.ranks)  # type: ignore[no-any-return]

    def gathered(self, args: Sequence[Value | None]) -> list[Value | None]:
        """All of them whole; in the next attempt what made them is not cut."""
        for value in args:
            self.plan.whole |= self._causes.get(value, frozenset()) if value is not None else frozenset()
        return [None if v is None else self._whole(v) for v in args]

    def divides(self, size: Any) -> bool:
        """Whether there is an equal share of `size` for each rank."""
        return isinstance(size, int) and size % self.ranks == 0


def _linear(s: _Shard, args: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    x, weight, bias = args
    last = len(x.shape) - 1
    if s.cut.get(x) == last:
        own = None if bias is None or s.rank else s.constant(bias)  # it is added once
        return s.plain("all_reduce", [Builder.call(s, "linear", x, s.constant(weight, 1), own)], {})
    [x] = s.gathered([x])
    if weight.name in s.plan.whole or not s.divides(weight.shape[0]):
        return s.plain("linear", [x, weight, bias], attrs)
    y = Builder.call(s, "linear", x, s.constant(weight, 0), None if bias is None else s.constant(bias, 0))
    s.mark(y, last, frozenset({weight.name}))
    return y


def _same(name: str, *, last: bool = True) -> Rule:
    """An operator whose first argument's cut its result has; further activations must be cut alike. last: also along the last
    dimension."""

    def rule(s: _Shard, args: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
        activations = [v for v in args if v is not None and v.kind == "call"]
        cuts = {s.cut.get(v) for v in activations}
        [cut] = cuts if len(cuts) == 1 else [None]
        if cut is None or (not last and cut == len(activations[0].shape) - 1):
            return s.plain(name, s.gathered(args), attrs)
        return s.plain(name, args, attrs, cut)

    return rule


def _reshape(s: _Shard, args: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Channels to heads and back: heads are cut where channels were."""
    [x], shape = args, list(attrs["shape"])
    if s.cut.get(x) != 1 or len(shape) < 2 or not s.divides(shape[1]):
        return s.plain("reshape", s.gathered(args), attrs)
    shape[1] //= s.ranks
    return s.plain("reshape", args, {"shape": tuple(shape)}, 1)


def _kv_write(s: _Shard, args: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    state, k, v = args
    cut = s.cut.get(k) == 1 and s.cut.get(v) == 1
    if not cut and s.state_is_cut(state):
        s.keep_state(state)
        return state  # the attempt after this one gets it right
    return s.plain("kv_write", args if s.state_is_cut(state) else s.gathered(args), attrs)


def _attention(name: str) -> Rule:
    """An operator that reads pages with queries [tokens, heads, head_dim]; what it has beyond lengths is one number a head."""

    def rule(s: _Shard, args: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
        q, state, starts, lens, *by_head = args
        if s.state_is_cut(state) and s.cut.get(q) == 1:
            own = [None if v is None else s.constant(v, 0) for v in by_head]
            y = Builder.call(s, name, q, state, starts, lens, *own, **attrs)
            s.mark(y, 1, s._causes[q])
            return y
        was_cut = s.state_is_cut(state)
        s.keep_state(state)
        whole = s.gathered(args)
        return whole[0] if was_cut else s.plain(name, whole, attrs)  # the attempt after this one gets it right

    return rule


def _head_linear(s: _Shard, args: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    x, weight = args
    if s.cut.get(x) != 1:
        return s.plain("head_linear", s.gathered(args), attrs)
    y = Builder.call(s, "head_linear", x, s.constant(weight, 0))
    s.mark(y, 1, s._causes[x])
    return y


def _latent_attention(name: str) -> Rule:
    """Latents are of no head: every rank stores all of them, and attends with its own heads."""

    def rule(s: _Shard, args: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
        if s.cut.get(args[0]) != 1 or s.cut.get(args[1]) != 1:
            return s.plain(name, s.gathered(args), attrs)
        return s.plain(name, args, attrs, 1)

    return rule


def _moe_experts(s: _Shard, args: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Every rank has a share of each expert's channels."""
    x, weights, ids = s.gathered(args[:3])
    gate, up, down, gate_bias, up_bias, down_bias = args[3:]
    if not s.divides(gate.shape[1]):
        return s.plain("moe_experts", [x, weights, ids, *args[3:]], attrs)
    cut = [None if v is None else s.constant(v, 1) for v in (gate_bias, up_bias)]
    last = None if down_bias is None or s.rank else s.constant(down_bias)
    y = Builder.call(
        s, "moe_experts", x, weights, ids, s.constant(gate, 1), s.constant(up, 1), s.constant(down, 2), *cut, last, **attrs
    )
    return s.plain("all_reduce", [y], {})


RULES: Mapping[str, Rule] = {
    "linear": _linear, "reshape": _reshape, "kv_write": _kv_write,
    **{name: _attention(name) for name in ("paged_attention", "chunked_attention")},
    "head_linear": _head_linear, "moe_experts": _moe_experts,
    **{name: _latent_attention(name) for name in ("latent_attention", "sparse_latent_attention")},
    **{name: _same(name) for name in ("add", "mul", "gated", "scale", "softcap", "activation")},
    **{name: _same(name, last=False) for name in ("rms_norm", "layer_norm", "rope", "position_scale", "slice", "concat")},
    "bidirectional_attention": _same("bidirectional_attention", last=False), "gather_rows": _same("gather_rows"),
}  # fmt: skip
"""What is known of operators whose arguments may be cut."""
