"""Tensor parallelism over processes of one machine: the tokens are those of one rank, whatever is cut, moved or lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tiny_checkpoints import FAMILIES, make_checkpoint

from trivium import LLM, SamplingParams
from trivium.errors import BackendError, InvalidRequestError, UnsupportedError
from trivium.kv.groups import plan_groups
from trivium.models import build
from trivium.ops import Group, KVSpec, PagedKV, Recurrent, new_builder
from trivium.plugin import Device
from trivium.weights import open_checkpoint

pytest.importorskip("torch")

from trivium_torch.plugin import TorchBackend
from trivium_torch.ranks.data import Message, program_message, program_of
from trivium_torch.ranks.division import Ways, divide, loads
from trivium_torch.ranks.session import rank_devices
from trivium_torch.ranks.shard import RULES, local_spec, shard
from trivium_torch.ranks.stages import cut, stage_spec
from trivium_torch.ranks.wire import Wire

LOAD = {"dtype": "float32", "kv_dtype": "float32", "num_kv_blocks": 96, "block_size": 16, "progress": False}
PROMPTS = [[(7 * i * i + n) % 250 for i in range(n)] for n in (1, 16, 37, 50)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
ASKED = [
    GREEDY, SamplingParams(temperature=0.9, seed=5, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=6, top_k=30, top_p=0.9, min_p=0.01, max_tokens=12, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=0.8, seed=7, repetition_penalty=1.3, logit_bias={7: 2.0}, max_tokens=12, ignore_eos=True),
]  # fmt: skip
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}


def over(ranks, **more):
    return {**LOAD, "backend_options": {"tensor_parallel": ranks}, **more}


def ids(outputs):
    return [[c.token_ids for c in output.outputs] for output in outputs]


def traced(folder):
    return build(open_checkpoint(folder).config, max_model_len=64)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("models")
    return {family: make_checkpoint(home / family, family) for family in FAMILIES}


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model whose heads four ranks can share."""
    return make_checkpoint(tmp_path_factory.mktemp("wide") / "llama", "llama", **HEADS)


def reference(folder, **more):
    with LLM(folder, "reference", **{**LOAD, **more}) as llm:
        return ids(llm.generate(PROMPTS, ASKED))


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "phi3"])
def test_two_ranks_give_the_reference_s_tokens(folders, family):
    with LLM(folders[family], "torch:cpu", **over(2)) as llm:
        assert ids(llm.generate(PROMPTS, ASKED)) == reference(folders[family])
        llm.engine.check()


def test_four_ranks_share_heads_weights_and_pages(wide):
    with LLM(wide, "torch:cpu", **LOAD) as llm:
        alone = llm.loaded.session.memory()
    with LLM(wide, "torch:cpu", **over(4)) as llm:
        assert ids(llm.generate(PROMPTS, ASKED)) == reference(wide)
        together = llm.loaded.session.memory()
        assert together.kv == alone.kv  # over all ranks: none stores another's heads
        embedding_and_norms = together.weights - alone.weights  # what each of the other three holds as well
        assert 0 < embedding_and_norms < alone.weights


def test_chunks_preemption_and_cached_prefixes_change_no_token(wide):
    with LLM(wide, "torch:cpu", **over(2, num_kv_blocks=34, block_size=4, max_model_len=64, max_num_batched_tokens=20)) as llm:
        want = reference(wide)
        assert ids(llm.generate(PROMPTS, ASKED)) == want == ids(llm.generate(PROMPTS, ASKED))
        assert llm.engine.stats.preemptions > 0 and llm.engine.stats.cached_tokens > 0


@pytest.mark.parametrize(("ahead", "backend"), [("reference", "torch:cpu"), ("torch:cpu", "reference")])
def test_pages_go_from_one_device_to_ranks_and_back(wide, ahead, backend):
    two = {"backend_options": {"tensor_parallel": 2}}
    split = two if backend == "torch:cpu" else {"prefill_options": two}
    with LLM(wide, backend, prefill=ahead, **LOAD, **split) as llm:
        assert ids(llm.generate(PROMPTS, ASKED)) == reference(wide)


def test_weights_are_cut_on_both_sides_of_a_block(wide):
    parts = shard(traced(wide), (), 2, 1).parts
    cut = {part.name.removeprefix("model.layers.0."): part.dim for part in parts.values() if part.dim is not None}
    columns = {f"self_attn.{p}_proj.weight": 0 for p in "qkv"} | {f"mlp.{p}_proj.weight": 0 for p in ("gate", "up")}
    assert columns | {"self_attn.o_proj.weight": 1, "mlp.down_proj.weight": 1, "lm_head.weight": 0} == {
        name: dim for name, dim in cut.items() if not name.startswith("model.layers")
    }


def test_a_group_is_stored_in_parts_if_all_its_layers_are():
    groups = (Group(PagedKV(4, 8), (0, 1)), Group(PagedKV(4, 8, 16), (2,)), Group(Recurrent((3, 5)), (3,)))
    cut = local_spec(KVSpec(16, "float32", groups), frozenset({0, 1}), 2)
    assert [group.spec for group in cut.groups] == [PagedKV(2, 8), PagedKV(4, 8, 16), Recurrent((3, 5))]


def test_ranks_meet_twice_a_layer_and_once_for_the_logits(wide):
    names = [call.name for call in shard(traced(wide), (), 4, 0).program.calls]
    layers = open_checkpoint(wide).config["num_hidden_layers"]
    assert names.count("all_reduce") == 2 * layers and names.count("all_gather") == 1


def test_heads_that_ranks_cannot_share_stay_whole(wide):
    made = shard(traced(wide), (), 3, 0)
    assert made.cut_states == frozenset()
    assert not any("self_attn" in part.name for part in made.parts.values() if part.dim is not None)


@pytest.mark.slow
def test_three_ranks_that_share_little_give_the_reference_s_tokens(wide):
    with LLM(wide, "torch:cpu", **over(3)) as llm:
        assert ids(llm.generate(PROMPTS, ASKED)) == reference(wide)


def test_an_operator_without_a_rule_gets_its_arguments_whole():
    b = new_builder()
    x = b.embedding(b.input("token_ids"), b.weight("table", (9, 8)))
    wide_x = b.linear(x, b.weight("up", (16, 8)))
    y = b.rms_norm(wide_x, b.weight("norm", (16,)), eps=1e-5)  # over all channels
    logits = b.gather_rows(b.linear(y, b.weight("head", (9, 16))), b.input("sample_rows"))
    made = shard(b.finish({"logits": logits}, vocab_size=9), (), 2, 0)
    assert made.parts["up"].dim is None  # rather than cut and gathered at once
    assert [call.name for call in made.program.calls].count("all_gather") == 0


def attending(name, **attrs):
    """A layer of four heads over two of keys that reads its pages by the operator `name`."""
    b = new_builder()
    x = b.embedding(b.input("token_ids"), b.weight("table", (9, 8)))
    made = [b.reshape(b.linear(x, b.weight(n, (h * 4, 8))), shape=("tokens", h, 4)) for n, h in (("q", 4), ("k", 2), ("v", 2))]
    state = b.kv_write(b.state("kv", PagedKV(2, 4)), made[1], made[2])
    y = b.call(name, made[0], state, b.input("query_starts"), b.input("context_lens"), scale=0.5, **attrs)
    out = b.linear(b.reshape(y, shape=("tokens", 16)), b.weight("o", (8, 16)))
    return b.finish({"logits": b.gather_rows(out, b.input("sample_rows"))}, vocab_size=8)


@pytest.mark.parametrize(("name", "attrs"), [("paged_attention", {}), ("chunked_attention", {"chunk": 8})])
def test_every_kind_of_attention_works_on_its_own_heads(name, attrs):
    made = shard(attending(name, **attrs), (), 2, 0)
    assert made.cut_states == {0} and {part.dim for part in made.parts.values()} == {None, 0, 1}
    [call] = [call for call in made.program.calls if call.name == name]
    assert call.args[0].shape == ("tokens", 2, 4)


def test_attention_to_both_sides_works_on_its_own_heads():
    b = new_builder()
    x = b.embedding(b.input("token_ids"), b.weight("table", (9, 8)))
    made = [b.reshape(b.linear(x, b.weight(n, (h * 4, 8))), shape=("tokens", h, 4)) for n, h in (("q", 4), ("k", 2), ("v", 2))]
    y = b.bidirectional_attention(*made, b.input("query_starts"), scale=0.5)
    out = b.linear(b.reshape(y, shape=("tokens", 16)), b.weight("o", (8, 16)))
    program = b.finish({"logits": b.gather_rows(out, b.input("sample_rows"))}, vocab_size=8)
    part = shard(program, (), 2, 0)
    assert {name: p.dim for name, p in part.parts.items()} == {"table": None, "q/0": 0, "k/0": 0, "v/0": 0, "o/1": 1}
    [call] = [call for call in part.program.calls if call.name == "bidirectional_attention"]
    assert [a.shape[1] for a in call.args[:3]] == [2, 1, 1]
    three = shard(program, (), 3, 0)  # of which none gets equal heads
    assert {p.dim for p in three.parts.values()} == {None}


def test_a_state_that_an_operator_without_a_rule_reads_stays_whole(monkeypatch):
    rules = {k: v for k, v in RULES.items() if k != "chunked_attention"}
    monkeypatch.setattr("trivium_torch.ranks.shard.RULES", rules)
    made = shard(attending("chunked_attention", chunk=8), (), 2, 0)
    assert made.cut_states == frozenset() and made.program.states[0].spec == PagedKV(2, 4)
    [call] = [call for call in made.program.calls if call.name == "chunked_attention"]
    assert call.args[0].shape == ("tokens", 4, 4)


def test_a_bias_after_a_sum_is_added_by_one_rank():
    b = new_builder()
    x = b.embedding(b.input("token_ids"), b.weight("table", (9, 8)))
    y = b.linear(b.activation(b.linear(x, b.weight("up", (16, 8))), kind="silu"), b.weight("down", (8, 16)), b.weight("bias", (8,)))
    program = b.finish({"logits": b.gather_rows(y, b.input("sample_rows"))}, vocab_size=8)
    assert ["bias" in shard(program, (), 2, rank).parts for rank in (0, 1)] == [True, False]


def test_programs_are_the_same_on_the_other_side_of_a_wire(folders):
    import socket

    here, there = socket.socketpair()
    for folder in folders.values():
        program = traced(folder)
        Wire(here).send(program_message(program))
        again = program_of(Wire(there).recv())
        assert str(again) == str(program)
        for mine, theirs in zip(program.constants, again.constants, strict=True):
            assert mine.array is None or np.array_equal(mine.array, theirs.array)
    Wire(here).send(Message({"none": None}, [np.zeros((0, 3), np.int32), np.float32([[1]])[:, ::-1]]))
    got = Wire(there).recv()
    assert got.head == {"none": None} and [a.shape for a in got.arrays] == [(0, 3), (1, 1)]
    here.close()
    there.close()


def test_a_rank_that_ends_is_an_error_and_not_a_wait(wide):
    with LLM(wide, "torch:cpu", **over(2)) as llm:
        os.kill(llm.loaded.session._processes[1].pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(BackendError, match="the group of ranks is lost: rank 1 has ended"):
                llm.generate(PROMPTS[:1], GREEDY)


ASKED_BY_A_TERMINAL = """
import os, signal, sys, time
from trivium import LLM, SamplingParams

def main():
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    llm = LLM(sys.argv[1], "torch:cpu", dtype="float32", num_kv_blocks=96, progress=False, backend_options={"tensor_parallel": 2})
    ask = lambda: llm.generate([[1, 2, 3]], params)[0].outputs[0].token_ids
    before = ask()
    try:
        os.killpg(0, signal.SIGINT)
        for _ in range(6000):  # in short waits: another thread may get the signal, and it ends no wait of this one
            time.sleep(0.01)
    except KeyboardInterrupt:
        pass
    print(ask() == before, *(p.pid for p in llm.loaded.session._processes), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

main()
"""


def test_ctrl_c_reaches_who_asked_alone_and_ranks_end_with_who_is_killed(folders, tmp_path):
    """A terminal sends Ctrl-C to the whole process group. Nobody tidies up after SIGKILL but the ranks."""
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", ASKED_BY_A_TERMINAL, str(folders["llama"])]
    done = subprocess.run(command, env=env, start_new_session=True, stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL
    same, *pids = done.stdout.split()
    assert same == "True" and len(pids) == 2
    until = time.monotonic() + 60
    while any(is_running(int(pid)) for pid in pids) or any(tmp_path.iterdir()):
        assert time.monotonic() < until, (pids, list(tmp_path.iterdir()))
        threading.Event().wait(0.05)


def is_running(pid):
    """Whether the process is there and has not ended, though nobody may have asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("way", ["send", "recv"])
def test_half_a_message_is_the_end_of_the_group_and_no_wait(wide, monkeypatch, way):
    """Ctrl-C may come anywhere: one rank has the message, and the other never will."""
    with LLM(wide, "torch:cpu", **over(2)) as llm:
        second, whole = llm.loaded.session._wires[1], getattr(Wire, way)

        def interrupted(wire, *message):
            if wire is second:
                raise KeyboardInterrupt
            return whole(wire, *message)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Wire, way, interrupted)
            llm.generate(PROMPTS[:1], GREEDY)
        with pytest.raises(BackendError, match="a message of rank 1 was cut off; load the model again"):
            llm.generate(PROMPTS[:1], GREEDY)


def test_a_wait_that_was_interrupted_takes_no_answer_for_another(wide, monkeypatch):
    """Two steps may be under way: what a rank says of the second is not its answer to the first."""
    from trivium.plugin import resolve

    backend, device = resolve("torch:cpu")
    session = backend.open(device, {"dtype": "float32", "tensor_parallel": 2})
    take = session._take

    def interrupted(ticket, rank):
        take(ticket, rank)
        raise KeyboardInterrupt

    try:
        first, second = session._tell({"do": "memory"}), session._tell({"do": "output", "name": "logits"})
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(session, "_take", interrupted)
            session.settle(first)
        assert len(first.answers) == 1
        assert all("memory" in answer.head for answer in session.settle(first))
        with pytest.raises(BackendError, match="rank 0: no step was run yet"):
            session.settle(second)
    finally:
        session.close()


def test_what_a_rank_raises_is_raised_with_its_number(wide):
    from trivium.plugin import resolve

    backend, device = resolve("torch:cpu")
    session = backend.open(device, {"dtype": "float32", "tensor_parallel": 2})
    try:
        with pytest.raises(BackendError, match="rank 0: no step was run yet"):
            session.ask({"do": "output", "name": "logits"})  # before there is a step
        assert session.memory().total > 0  # the group goes on
    finally:
        session.close()


def staged(ranks, **more):
    return {**LOAD, "backend_options": {"pipeline_parallel": ranks}, **more}


@pytest.fixture(scope="module")
def deep_heads(tmp_path_factory):
    """A model of four layers, some with windows, whose heads two ranks can share."""
    folder = tmp_path_factory.mktemp("deep-heads") / "gemma3"
    return make_checkpoint(folder, "gemma3", num_hidden_layers=4, layer_types=None, **HEADS)


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A model of five layers, some with windows."""
    return make_checkpoint(tmp_path_factory.mktemp("deep") / "gemma3", "gemma3", num_hidden_layers=5, layer_types=None)


def test_three_stages_give_the_reference_s_tokens(deep):
    with LLM(deep, "torch:cpu", **staged(3)) as llm:
        assert ids(llm.generate(PROMPTS, ASKED)) == reference(deep)
        llm.engine.check()


def test_two_stages_share_weights_and_pages(wide):
    with LLM(wide, "torch:cpu", **LOAD) as llm:
        alone = llm.loaded.session.memory()
    with LLM(wide, "torch:cpu", **staged(2)) as llm:
        assert ids(llm.generate(PROMPTS, ASKED)) == reference(wide)
        together = llm.loaded.session.memory()
    assert together.kv == alone.kv
    assert alone.weights <= together.weights < 1.1 * alone.weights  # no layer is held twice


@pytest.mark.parametrize(("ahead", "backend"), [("reference", "torch:cpu"), ("torch:cpu", "reference")])
def test_pages_go_from_one_device_to_stages_and_back(deep, ahead, backend):
    two = {"backend_options": {"pipeline_parallel": 2}}
    split = two if backend == "torch:cpu" else {"prefill_options": two}
    with LLM(deep, backend, prefill=ahead, **LOAD, **split) as llm:
        assert ids(llm.generate(PROMPTS, ASKED)) == reference(deep)


def test_one_activation_a_token_crosses_a_cut(folders):
    for family in FAMILIES:
        program = traced(folders[family])
        first, last = cut(program, 2)
        sent = [call for call in first.program.calls if call.name == "send"]
        assert [call.args[0].shape for call in sent] == [("tokens", open_checkpoint(folders[family]).config["hidden_size"])]
        assert [call.name for call in last.program.calls].count("recv") == 1
        assert (*first.states, *last.states) == tuple(range(len(program.states)))


def test_every_stage_stores_its_own_layers():
    groups = (Group(PagedKV(4, 8), (0, 2, 3)), Group(PagedKV(4, 8, 16), (1, 4)))
    spec = KVSpec(16, "float32", groups)
    assert [g.states for g in stage_spec(spec, (0, 1)).groups] == [(0,), (1,)]
    assert [g.states for g in stage_spec(spec, (2, 3, 4)).groups] == [(0, 1), (2,)]


def test_more_stages_than_layers_are_refused(folders):
    with pytest.raises(UnsupportedError, match="layers can't be shared by 99 ranks"):
        cut(traced(folders["llama"]), 99)


def test_layers_that_share_a_state_across_a_cut_are_refused():
    b = new_builder()
    x = b.reshape(b.embedding(b.input("token_ids"), b.weight("table", (9, 8))), shape=("tokens", 1, 8))
    first, second = (b.state(name, PagedKV(1, 8)) for name in ("a", "b"))
    lengths = b.input("query_starts"), b.input("context_lens")
    first = b.kv_write(first, x, x)
    y = b.paged_attention(x, b.kv_write(second, x, x), *lengths, None, scale=1.0)
    y = b.add(y, b.paged_attention(x, first, *lengths, None, scale=1.0))  # reads the first again
    logits = b.gather_rows(b.reshape(y, shape=("tokens", 8)), b.input("sample_rows"))
    with pytest.raises(UnsupportedError, match="share states"):
        cut(b.finish({"logits": logits}, vocab_size=8), 2)


def both(tensor, pipeline, **more):
    return {**LOAD, "backend_options": {"tensor_parallel": tensor, "pipeline_parallel": pipeline}, **more}


def test_heads_and_layers_are_shared_out_together(wide):
    with LLM(wide, "torch:cpu", **LOAD) as llm:
        alone = llm.loaded.session.memory()
    with LLM(wide, "torch:cpu", **both(2, 2)) as llm:
        want = reference(wide)
        assert ids(llm.generate(PROMPTS, ASKED)) == want == ids(llm.generate(PROMPTS, ASKED))
        llm.engine.check()
        together = llm.loaded.session.memory()
        assert together.kv == alone.kv  # four ranks, and no head of a layer is stored twice


@pytest.mark.parametrize(("ahead", "backend"), [("reference", "torch:cpu"), ("torch:cpu", "reference")])
def test_pages_go_from_one_device_to_stages_of_ranks_and_back(deep_heads, ahead, backend):
    four = {"backend_options": {"tensor_parallel": 2, "pipeline_parallel": 2}}
    split = four if backend == "torch:cpu" else {"prefill_options": four}
    with LLM(deep_heads, backend, prefill=ahead, **LOAD, **split) as llm:
        assert ids(llm.generate(PROMPTS[2:], ASKED[2:])) == reference(deep_heads)[2:]


def test_every_part_of_every_weight_has_a_rank_and_no_rank_two(deep_heads):
    """By brute force: what is loaded where, laid over each other, covers each matrix of a layer once."""
    program = traced(deep_heads)
    spec = plan_groups(program.states, 16, "float32")
    division = divide(program, spec, Ways(2, 2))
    shapes = {c.value.name: c.value.shape for c in program.constants}
    covered = {name: np.zeros(shape, np.int64) for name, shape in shapes.items() if ".layers." in name and len(shape) == 2}
    for weight, dim, names in loads(division, {name: name for name in shapes}):
        for rank, own in enumerate(names):
            if own and weight in covered:
                which, count = division.shares[rank].piece
                whole = covered[weight]
                (whole if dim is None else np.split(whole, count, axis=dim)[which])[...] += 1
    assert covered and all((times == 1).all() for times in covered.values())


def test_more_ranks_of_both_kinds_than_devices_are_refused_with_the_numbers():
    backend = Lanes()
    first, _ = backend.probe().devices
    with pytest.raises(InvalidRequestError, match="tensor_parallel 2 times pipeline_parallel 3 needs as many devices of this mach"):
        rank_devices(backend, first, Ways(2, 3))


@pytest.mark.parametrize("ranks", [0, -1, "2", True, 1.5])
def test_a_senseless_number_of_ranks_is_refused(wide, ranks):
    with pytest.raises(InvalidRequestError, match="tensor_parallel must be a positive integer"):
        LLM(wide, "torch:cpu", **over(ranks))


class Lanes(TorchBackend):
    """Two devices of one kind."""

    def device_names(self):
        return ["lane:0", "lane:1"]

    def describe(self, index, name):
        return Device(index, name)


def test_more_ranks_than_devices_are_refused_with_both_numbers():
    backend = Lanes()
    first, second = backend.probe().devices
    assert rank_devices(backend, first, Ways(2, 1)) == [first, second]
    with pytest.raises(InvalidRequestError, match=r"tensor_parallel 2 needs as many devices of this machine from lane:1.*are 1"):
        rank_devices(backend, second, Ways(2, 1))


def test_adapters_over_ranks_are_refused(wide):
    with pytest.raises(UnsupportedError, match="which adapters and draft heads need"):
        LLM(wide, "torch:cpu", enable_lora=True, **over(2))


@pytest.mark.slow
def test_rounded_weights_are_shared_out_too(wide):
    with LLM(wide, "torch:cpu", quantize="int8", **over(2)) as llm:
        assert len(llm.generate(PROMPTS[:1], GREEDY)[0].outputs[0].token_ids) == 12
