"""What a GPU makes of the cuda backend, in one call of less than ten minutes: the kit on the device, then decode and prefill of
Llama 3.2's shapes (1B, 3B, and 3.1's 8B) with random weights beside their floors and beside transformers with a static cache.

    python benchmarks/gpu_check.py [--backend cuda] [--seconds 540] [--shapes 1b,3b,8b] [--output benchmarks/results/NAME.json]
    python benchmarks/gpu_check.py --floors BYTES_PER_S OPERATIONS_PER_S  # the floors alone, for any card: no GPU is needed

Floors: of a decode step, the bytes of all weights that a step reads and of the keys and values of its sequences, over the bandwidth
that a copy within the device reaches just before; of a prefill, its operations (two a weight and token but for the head, which
computes one row; four a query, key, head and head dimension of causal attention) over the rate of a square product in its dtype.
What doesn't fit the time is listed under "left_out". The kit's failures make the exit code 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from trivium.conformance import collect_checks
from trivium.conformance.lab import Lab
from trivium.conformance.models import Numbers, fuse
from trivium.engine import Engine, EngineConfig, PoolingParams
from trivium.engine.executor import Model
from trivium.kv import Layout, plan_groups
from trivium.models import build
from trivium.ops import Weight
from trivium.plugin import resolve
from trivium.sampling import SamplingParams

_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "rope_theta": 500000.0, "max_position_embeddings": 131072, "num_key_value_heads": 8,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "1b": {
        **_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "head_dim": 64, "tie_word_embeddings": True,
    },
    "3b": {
        **_LLAMA, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
        "head_dim": 128, "tie_word_embeddings": True,
    },
    "8b": {
        **_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "head_dim": 128, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""meta-llama's Llama-3.2-1B, Llama-3.2-3B and Llama-3.1-8B, without the scaling of their rotations."""


class Sizes(NamedTuple):
    """What is measured. context: tokens of each sequence before its decode steps are timed. probe: bytes that are copied, and side
    of the square matrices that are multiplied, to find the ceilings."""

    batches: tuple[int, ...] = (1, 8, 64, 256)
    prefills: tuple[int, ...] = (2048, 16384)
    context: int = 512
    steps: int = 32
    chunk: int = 8192
    probe: tuple[int, int] = (1 << 31, 8192)

    def longest(self, seqs: int) -> int:
        """Tokens of a sequence in a decode measurement: the first ones go on while the last ones' prompts are computed."""
        return self.context + self.steps + 2 * -(-seqs * self.context // self.chunk) + 8


class Ceilings(NamedTuple):
    """Bytes a second (read and written) and operations a second."""

    bandwidth: float
    matrix: float


def timed(work: Callable[[], Any], wait: Callable[[], None], repeat: int = 5) -> float:
    """Median seconds of `work`, which is queued, once it has run."""
    work()
    times = []
    for _ in range(repeat):
        wait()
        began = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def ceilings(device: torch.device, dtype: torch.dtype, wait: Callable[[], None], sizes: Sizes) -> Ceilings:
    """What the device reaches just now."""
    nbytes, side = sizes.probe
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = timed(lambda: target.copy_(source), wait)
    a = torch.randn(side, side, device=device).to(dtype)
    multiplied = timed(lambda: torch.mm(a, a), wait)
    return Ceilings(2 * nbytes / copied, 2 * side**3 / multiplied)


# Models with random weights.


def weights_of(program: Any, dtype: str) -> Iterator[tuple[str, Weight, str]]:
    """(name, weight, resident format): matrices of small random numbers in `dtype`, all ones for vectors."""
    noise = (np.random.default_rng(1).standard_normal(1 << 20) * 0.02).astype(np.float32)
    stored = (noise.view(np.uint32) >> np.uint32(16)).astype(np.uint16) if dtype == "bfloat16" else noise.astype(dtype)
    for constant in program.constants:
        shape = constant.value.shape
        if constant.array is not None or len(shape) == 1:
            data = np.ones(shape, np.float32) if constant.array is None else np.asarray(constant.array, np.float32)
            yield constant.value.name, Weight("", shape, "float32", data, lambda x: x), "float32"
        else:
            data = np.resize(stored, shape)
            yield constant.value.name, Weight("", shape, dtype, data, _decoder(dtype), constant.source), dtype


def _decoder(dtype: str) -> Callable[[Any], Any]:
    if dtype != "bfloat16":
        return lambda data: np.asarray(data, np.float32)
    return lambda data: (data.astype(np.uint32) << np.uint32(16)).view(np.float32)


def open_model(lab: Lab, config: Mapping[str, Any], dtype: str, longest: int, seqs: int, sizes: Sizes) -> Model:
    """A model in a session of its own for `seqs` sequences of `longest` tokens."""
    pages = (longest // lab.capabilities.page_sizes[0] + 2) * seqs
    limits = {"max_batched_tokens": sizes.chunk, "max_seqs": seqs, "max_model_len": longest, "graph_sizes": (seqs,)}
    session = lab.backend.open(lab.device, {"dtype": dtype, **limits})
    program = build(config, max_model_len=longest).only("logits")
    loaded = {name: session.load(weight, resident) for name, weight, resident in weights_of(program, dtype)}
    spec = plan_groups(program.states, lab.capabilities.page_sizes[0], dtype)
    session.kv_store(spec, pages)
    executable = session.compile(fuse(lab, program), loaded)
    return Model(
        lab.backend, lab.capabilities, session, executable, spec, pages, program.vocab_size, longest, frozenset(), "random", None,
        0, PoolingParams("last", normalize=True), Layout("random", lab.backend.name, spec), None, None,
    )  # fmt: skip


def engine_of(model: Model, seqs: int, sizes: Sizes) -> Engine:
    """An engine that shares no prefixes, for all prompts are alike."""
    config = EngineConfig(seqs, max(sizes.chunk, seqs), enable_prefix_caching=False)
    return Engine(model, cast(Any, Numbers()), config)


def decode_seconds(model: Model, seqs: int, sizes: Sizes) -> tuple[float, float]:
    """(seconds a decode step, of these the host's share) with all sequences under way."""
    engine = engine_of(model, seqs, sizes)
    params = SamplingParams(temperature=0.0, max_tokens=sizes.longest(seqs) - sizes.context, ignore_eos=True)
    for i in range(seqs):
        engine.add_request([(7 * i + j) % 1000 for j in range(sizes.context)], params)
    while any(c.seq.computed < sizes.context for c in engine._completions.values()) or engine.stats.generated_tokens < 2 * seqs:
        engine.step()
    before, began = engine.snapshot(), time.perf_counter()
    for _ in range(sizes.steps):
        engine.step()
    seconds = (time.perf_counter() - began) / sizes.steps
    host = (engine.stats.host_seconds - before.host_seconds) / sizes.steps
    while engine.has_unfinished():
        engine.step()
    return seconds, host / seconds


def prefill_seconds(model: Model, tokens: int, sizes: Sizes) -> float:
    """Seconds to a prompt's first token."""

    def run() -> None:
        engine = engine_of(model, 1, sizes)
        engine.add_request([i % 1000 for i in range(tokens)], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
        while engine.has_unfinished():
            engine.step()

    return timed(run, lambda: None, 3)


# Floors.


def weight_bytes(config: Mapping[str, Any], itemsize: int) -> int:
    """Bytes of the weights that a step reads: all but an embedding table that is not the head, too. Vectors are float32."""
    program = build(config)
    tables = {v.name for call in program.calls if call.name == "embedding" for v in call.args if v is not None}
    heads = {c.source for c in program.constants if c.value.name == "lm_head.weight"}
    read = [c for c in program.constants if c.value.name not in tables or c.source in heads]
    shapes = {c.source or c.value.name: c.value.shape for c in read}
    return sum(int(np.prod(shape)) * (itemsize if len(shape) > 1 else 4) for shape in shapes.values())


def decode_floor(config: Mapping[str, Any], seqs: int, itemsize: int, bandwidth: float, sizes: Sizes) -> float:
    """Seconds that a decode step's bytes need, in the middle of the measurement."""
    context = sizes.context + sizes.steps / 2
    return (weight_bytes(config, itemsize) + seqs * context * kv_bytes(config, itemsize)) / bandwidth


def floors(shapes: Mapping[str, Mapping[str, Any]], top: Ceilings, sizes: Sizes, itemsize: int = 2) -> dict[str, Any]:
    """The floors of all figures for given ceilings: no device is needed."""
    return {
        name: {
            **{f"decode, {n} sequences": decode_floor(config, n, itemsize, top.bandwidth, sizes) for n in sizes.batches},
            **{f"prefill, {n} tokens": prefill_operations(config, n) / top.matrix for n in sizes.prefills},
        }
        for name, config in shapes.items()
    }


def kv_bytes(config: Mapping[str, Any], itemsize: int) -> int:
    """Bytes of a token's keys and values."""
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * itemsize


def prefill_operations(config: Mapping[str, Any], tokens: int) -> float:
    hidden, inter, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads, layers = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "num_hidden_layers"))
    matrices = layers * (hidden * dim * (2 * heads + 2 * kv_heads) + 3 * hidden * inter)
    return 2.0 * matrices * tokens + 2.0 * hidden * config["vocab_size"] + layers * 4.0 * heads * dim * tokens * (tokens + 1) / 2


# The peer.


def peer_seconds(config: Mapping[str, Any], device: torch.device, dtype: torch.dtype, wait: Callable[[], None], sizes: Sizes,
                 seqs: int) -> float:  # fmt: skip
    """Seconds a decode step of transformers with a static cache and greedy choice; random weights, made on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    shape = LlamaConfig(**{k: v for k, v in config.items() if k not in ("architectures", "model_type")})
    with torch.device(device):
        model = LlamaForCausalLM(shape).to(dtype).eval()
    length = sizes.context + sizes.steps + 8
    cache = StaticCache(config=shape, max_cache_len=length)
    ids = torch.ones(seqs, sizes.context, dtype=torch.int64, device=device)

    def step(ids: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        logits = model(
            ids, past_key_values=cache, cache_position=at, position_ids=at[None], use_cache=True, logits_to_keep=1
        ).logits
        return logits[:, -1:].argmax(dim=-1)

    with torch.inference_mode():
        ids = step(ids, torch.arange(sizes.context, device=device))
        times = []
        for i in range(sizes.steps):
            wait()
            began = time.perf_counter()
            ids = step(ids, torch.tensor([sizes.context + i], device=device))
            wait()
            times.append(time.perf_counter() - began)
    return statistics.median(times)


# The whole.


def kit(lab: Lab, until: float, areas: Sequence[str]) -> dict[str, Any]:
    """The kit's rows by status, and those that failed."""
    counts: Counter[str] = Counter()
    failed = {}
    for check in collect_checks(lab, areas):
        if time.monotonic() > until:
            counts["left out"] += 1
            continue
        row = check.run()
        counts[row.status] += 1
        if row.status == "failed":
            failed[f"{check.area}: {check.name}"] = row.detail
    return {"rows": dict(counts), "failed": failed}


def measure(lab: Lab, device: torch.device, dtype: str, shapes: Mapping[str, Mapping[str, Any]], sizes: Sizes, until: float,
            wait: Callable[[], None]) -> dict[str, Any]:  # fmt: skip
    """Every figure by shape; seconds, and what part of the time its floor is."""
    kind = getattr(torch, dtype)
    top = ceilings(device, kind, wait, sizes)
    found: dict[str, Any] = {"ceilings": {"bytes_per_s": top.bandwidth, "operations_per_s": top.matrix}, "left_out": []}
    for name, config in shapes.items():
        for what, run in cases(lab, config, dtype, device, top, sizes, wait):
            if time.monotonic() > until:
                found["left_out"].append(f"{name}: {what}")
                continue
            try:
                found.setdefault(name, {})[what] = run()
            except (ImportError, torch.OutOfMemoryError, RuntimeError, TypeError) as e:
                found.setdefault(name, {})[what] = {"failed": f"{type(e).__name__}: {e}"}
    return found


def cases(lab: Lab, config: Mapping[str, Any], dtype: str, device: torch.device, top: Ceilings, sizes: Sizes,
          wait: Callable[[], None]) -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:  # fmt: skip
    kind = getattr(torch, dtype)
    for seqs in sizes.batches:
        yield f"decode, {seqs} sequences", lambda seqs=seqs: _decode(lab, config, dtype, top, sizes, seqs)  # type: ignore[misc]
        if seqs <= 8:
            yield (
                f"decode, {seqs} sequences, transformers",
                lambda seqs=seqs: {  # type: ignore[misc]
                    "seconds": peer_seconds(config, device, kind, wait, sizes, seqs)
                },
            )
    for tokens in sizes.prefills:
        yield f"prefill, {tokens} tokens", lambda tokens=tokens: _prefill(lab, config, dtype, top, sizes, tokens)  # type: ignore[misc]


def _decode(lab: Lab, config: Mapping[str, Any], dtype: str, top: Ceilings, sizes: Sizes, seqs: int) -> dict[str, float]:
    model = open_model(lab, config, dtype, sizes.longest(seqs), seqs, sizes)
    try:
        seconds, host = decode_seconds(model, seqs, sizes)
    finally:
        model.session.close()
    floor = decode_floor(config, seqs, getattr(torch, dtype).itemsize, top.bandwidth, sizes)
    return {"seconds": seconds, "tokens_per_s": seqs / seconds, "floor_s": floor, "share": floor / seconds, "host_share": host}


def _prefill(lab: Lab, config: Mapping[str, Any], dtype: str, top: Ceilings, sizes: Sizes, tokens: int) -> dict[str, float]:
    model = open_model(lab, config, dtype, tokens + 16, 1, sizes)
    try:
        seconds = prefill_seconds(model, tokens, sizes)
    finally:
        model.session.close()
    floor = prefill_operations(config, tokens) / top.matrix
    return {"seconds": seconds, "tokens_per_s": tokens / seconds, "floor_s": floor, "share": floor / seconds}


def check(backend: str, shapes: Mapping[str, Mapping[str, Any]], sizes: Sizes, seconds: float, areas: Sequence[str],
          dtype: str | None = None) -> dict[str, Any]:  # fmt: skip
    """Everything, as it is printed. The kit gets at most two fifths of the time."""
    began = time.monotonic()
    chosen, device = resolve(backend)
    can = chosen.capabilities(device)
    lab = Lab(chosen, device, can, chosen.kernels(device))
    dtype = dtype or can.dtypes[0]
    place = torch.device(cast(Any, chosen).torch_device(device))
    wait = (lambda: None) if place.type == "cpu" else lambda: torch.accelerator.synchronize(place)
    warnings.simplefilter("ignore", RuntimeWarning)
    judged = kit(lab, began + seconds * 0.4, areas)
    figures = measure(lab, place, dtype, shapes, sizes, began + seconds, wait)
    return {"device": device.name, "about": device.details.get("about", ""), "dtype": dtype, "kit": judged, **figures}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--areas", default="operators,fusions,formats,pages,sampler,serving,models")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--floors", type=float, nargs=2)
    asked = parser.parse_args(argv)
    shapes = {name: SHAPES[name] for name in asked.shapes.split(",")}
    if asked.floors:
        print(json.dumps(floors(shapes, Ceilings(*asked.floors), Sizes()), indent=1))
        return 0
    found = check(asked.backend, shapes, Sizes(), asked.seconds, asked.areas.split(","))
    text = json.dumps(found, indent=1, default=float)
    print(text)
    if asked.output is not None:
        asked.output.write_text(text + "\n")
    return 1 if found["kit"]["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
