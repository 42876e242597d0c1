"""Every kernel, compiled ahead of time as its launcher would launch it on each chip: nothing spilled, shared memory within what the
chip has, matrix instructions where matrices are multiplied."""

from collections.abc import Callable
from typing import Any

import pytest
from triton_aot import CHIPS, build, builds, meta, recorded, torch

from trivium_cuda import tuning
from trivium_cuda.kernels import (
    activations, adapters, attention, experts, fp8, int4, int8, norms, products, quantise, recurrent, rotary, sampler,
)  # fmt: skip

F32, I32, I64, I8, U8, E4M3 = torch.float32, torch.int32, torch.int64, torch.int8, torch.uint8, torch.float8_e4m3fn
MULTIPLY = {"_attend", "_product", "_whole", "_bytes", "_solve", "_delta_chunks"}
"""Kernels that must use the matrix units."""
NEWEST = {90: "wgmma.mma_async", 100: "tcgen05.mma"}
"""What tiles of 64 rows and more must use there; smaller ones are mma.sync everywhere."""


def store(heads: int, n: int, dtype: Any) -> rotary.Store:
    scales = meta(heads, 8192, 1) if dtype in (I8, E4M3) else None
    return rotary.Store(meta(heads, 8192, n, dtype=dtype), scales)


def where() -> tuple[Any, ...]:
    """Block table, query starts and context lengths of 8 sequences."""
    return meta(8, 256, dtype=I32), meta(9, dtype=I32), meta(8, dtype=I32)


BOUNDS: dict[str, Any] = {"page_size": 16, "max_queries": 512, "max_context": 4096, "scale": 0.1}


def paged(n: int, kv: Any = torch.bfloat16, dtype: Any = torch.bfloat16, sinks: bool = False, **attrs: Any) -> Callable[[], Any]:
    return lambda: attention.paged_attention(
        meta(520, 32, n, dtype=dtype), store(8, n, kv), store(8, n, kv), *where(), meta(32) if sinks else None, **BOUNDS, **attrs
    )


def latent(kv: Any = torch.bfloat16) -> Any:
    q, q_rope = meta(520, 16, 512), meta(520, 16, 64)
    return attention.latent_attention(q, q_rope, store(1, 512, kv), store(1, 64, kv), *where(), **BOUNDS)


def packed(
    out: int, inputs: int, group: int, scales: Any = torch.float16, order: bool = False, experts: tuple[int, ...] = ()
) -> int4.Packed:
    points = None if scales == U8 else meta(*experts, inputs // group, out, dtype=scales)
    codes, of_groups = meta(*experts, inputs // 2, out, dtype=U8), meta(*experts, inputs // group, out, dtype=scales)
    return int4.Packed(codes, of_groups, points, meta(inputs, dtype=I32) if order else None, group, inputs)


def small(kind: str, m: int) -> Callable[[], Any]:
    """Products of m rows of 4096 with 4096 outputs."""
    x, channel, blocks = meta(m, 4096), meta(4096, 1, dtype=F32), meta(32, 32, dtype=F32)
    whole, floats = meta(4096, 4096, dtype=I8), meta(4096, 4096, dtype=E4M3)
    rows = {dtype: quantise.Rows(meta(m, 4096, dtype=dtype), meta(m, 1, dtype=F32)) for dtype in (I8, E4M3)}
    in_blocks = quantise.Rows(rows[E4M3].numbers, meta(m, 32, dtype=F32))
    made: dict[str, Callable[[], Any]] = {
        "int4 of 128": lambda: int4.linear(x, packed(4096, 4096, 128)),
        "int4 of 32": lambda: int4.linear(x, packed(4096, 4096, 32), meta(4096)),
        "int4 in another order": lambda: int4.linear(x, packed(4096, 4096, 128, order=True)),
        "mxfp4": lambda: int4.linear(x, packed(4096, 4096, 32, U8)),
        "int8": lambda: int8.linear(x, whole, channel),
        "int8 rows": lambda: int8.linear_rows(rows[I8], whole, channel, None, x.dtype),
        "fp8": lambda: fp8.linear(x, floats, channel),
        "fp8 in blocks": lambda: fp8.linear(x, floats, blocks),
        "fp8 rows": lambda: fp8.linear_rows(rows[E4M3], floats, channel, None, x.dtype),
        "fp8 rows in blocks": lambda: fp8.linear_rows(in_blocks, floats, blocks, None, x.dtype),
    }
    return made[kind]


KINDS = (
    "int4 of 128", "int4 of 32", "int4 in another order", "mxfp4", "int8", "int8 rows", "fp8", "fp8 in blocks", "fp8 rows",
    "fp8 rows in blocks",
)  # fmt: skip


def routed(tokens: int, how: str) -> Callable[[], Any]:
    """8 experts of 1024 by 2048, each token with 2."""
    shapes = (1024, 2048), (1024, 2048), (2048, 1024)
    if how == "float":
        weights: Any = [meta(8, *shape) for shape in shapes]
    elif how == "int8":
        weights = [int8.matrix(meta(8, *shape, dtype=I8), meta(8, shape[0], 1, dtype=F32)) for shape in shapes]
    elif how == "fp8":
        blocks = [meta(8, out // 128, inputs // 128, dtype=F32) for out, inputs in shapes]
        weights = [fp8.matrix(meta(8, *shape, dtype=E4M3), of) for shape, of in zip(shapes, blocks, strict=True)]
    else:
        of, group = (U8, 32) if how == "mxfp4" else (torch.float16, 128)
        weights = (*(packed(1024, 2048, group, of, experts=(8,)) for _ in range(2)), packed(2048, 1024, group, of, experts=(8,)))
    return lambda: experts.moe_experts(meta(tokens, 2048), meta(tokens, 2, dtype=F32), meta(tokens, 2, dtype=I32), *weights)


def turned(kv: Any) -> Any:
    q, k, norm = meta(64, 32, 128), meta(64, 8, 128), meta(128)
    tables = meta(64, dtype=I32), meta(64, dtype=F32)
    return rotary.norm_rope_write(q, k, k, norm, norm, *tables, store(8, 128, kv), store(8, 128, kv), meta(64, dtype=I64), eps=1e-5)


def single(kv: Any = torch.bfloat16) -> Any:
    """One sequence's decode: sizes of one become constants of a kernel."""
    q, where = meta(1, 32, 128), (meta(1, 64, dtype=I32), meta(2, dtype=I32), meta(1, dtype=I32))
    return attention.paged_attention(
        q, store(8, 128, kv), store(8, 128, kv), *where, page_size=16, max_queries=1, max_context=200, scale=0.1
    )


def greedy() -> Any:
    """One row of a small vocabulary without a temperature."""
    f, i, wide, none = meta(1, dtype=F32), meta(1, dtype=I32), meta(1, dtype=I64), meta(0, dtype=I32)
    columns = sampler.Columns(f, i, f, f, wide, wide, f, f, f, i, none, none, none, none, none, meta(0, dtype=F32))
    return sampler.sample(meta(1, 4000), columns, vocab_size=4000, features=sampler.Features(), top_logprobs=0)


def sampled() -> Any:
    """All stages, of 8 rows of 128,256."""
    f, i, wide = meta(8, dtype=F32), meta(8, dtype=I32), meta(8, dtype=I64)
    entries, numbers = meta(64, dtype=I32), meta(64, dtype=F32)
    seen, bias, mask = (entries, entries, entries), (entries, entries, numbers), meta(8, 4008, dtype=I32)
    columns = sampler.Columns(f, i, f, f, wide, wide, f, f, f, i, *seen, *bias, mask)
    every = sampler.Features(True, True, True, True)
    return sampler.sample(meta(8, 128256), columns, vocab_size=128256, features=every, top_logprobs=5)


def delta() -> Any:
    qk, gates, where = meta(64, 32, 128), meta(64, 32), (meta(8, dtype=I32), meta(9, dtype=I32), meta(8, dtype=I32))
    return recurrent.gated_delta_rule(qk, qk, qk, gates, gates, meta(9, 32, 128, 128, dtype=F32), *where, scale=0.1, max_queries=64)


def adapted(rank: int, tokens: int) -> Callable[[], Any]:
    """8 adapters of one rank on products of 4096 with 4096."""
    a, b = (meta(8, rank, 4096, dtype=F32) for _ in range(2))
    return lambda: adapters.lora(meta(tokens, 4096), meta(tokens, 4096), a, b, meta(tokens, dtype=I32))


CALLS: dict[str, Callable[[], Any]] = {
    "add and norm": lambda: norms.add_rms_norm(meta(64, 4096), meta(64, 4096), meta(4096), 1e-5),
    "add and norm to int8": lambda: norms.add_rms_norm_quantise(meta(64, 8192), meta(64, 8192), meta(8192), 1e-5, kind="int8"),
    "norm to fp8": lambda: norms.rms_norm_quantise(meta(64, 4096), meta(4096), 1e-5, kind="fp8"),
    "gate": lambda: activations.gated(meta(64, 14336), meta(64, 14336), limit=7.0, alpha=1.702, up_offset=1.0),
    "norm to int8 by a scale that is given": lambda: norms.add_rms_norm_quantise(
        meta(64, 4096), meta(64, 4096), meta(4096), 1e-5, kind=quantise.Given(0.02, 3)
    ),
    "norm to fp8 in blocks": lambda: norms.add_rms_norm_quantise(
        meta(64, 7168), meta(64, 7168), meta(7168), 1e-5, kind="fp8 blocks"
    ),
    "gate to fp8 in blocks": lambda: activations.gated_quantise(meta(64, 18432), meta(64, 18432), quantise="fp8 blocks"),
    "gate to int8": lambda: activations.gated_quantise(meta(64, 14336), meta(64, 14336), kind="gelu_tanh", quantise="int8"),
    "blocks to fp8": lambda: quantise.quantise_blocks(meta(64, 4096)),
    "norm, rope and write": lambda: turned(torch.bfloat16),
    "norm, rope and write int8": lambda: turned(I8),
    "norm, rope and write fp8": lambda: turned(E4M3),
    **{f"attention, heads of {n}": paged(n) for n in (64, 80, 128, 256)},
    "attention with all options": paged(128, sinks=True, window=1024, softcap=30.0),
    "attention in float32": paged(64, F32, F32),
    "attention over int8": paged(128, I8),
    "attention over fp8": paged(128, E4M3, window=4096),
    "latent attention": latent,
    "latent attention over fp8": lambda: latent(E4M3),
    "delta rule": delta,
    **{f"adapters of rank {rank}, {tokens} tokens": adapted(rank, tokens) for rank, tokens in ((16, 1), (64, 600), (256, 600))},
    "sampler": sampled,
    "sampler of one row": greedy,
    "decode of one sequence": single,
    "one token with one expert": lambda: experts.moe_experts(
        meta(1, 512), meta(1, 1, dtype=F32), meta(1, 1, dtype=I32), meta(4, 256, 512), meta(4, 256, 512), meta(4, 512, 256)
    ),
    "one row": lambda: norms.add_rms_norm(meta(1, 2048), meta(1, 2048), None, 1e-5),
    **{f"{kind}, {m} rows": small(kind, m) for kind in KINDS for m in (1, 64, 2048)},
    **{
        f"experts of {how}, {tokens} tokens": routed(tokens, how)
        for how in ("float", "int4", "mxfp4", "int8", "fp8")
        for tokens in (4, 512)
    },
}


@pytest.mark.parametrize("capability", CHIPS)
@pytest.mark.parametrize("name", CALLS)
def test_a_launch_fits_the_chip_and_uses_its_matrix_units(name: str, capability: int) -> None:
    made = builds(CALLS[name], capability)
    used = [kind for b in made if b.name in MULTIPLY and name != "attention in float32" for kind in [b.matrix]]
    assert all(used), f"{name}: a product without matrix instructions"
    if (name[:9], capability) == ("int8 rows", 100):
        return  # Triton has mma.sync alone for whole numbers there
    if capability in NEWEST and name.endswith(("64 rows", "2048 rows", "heads of 128")):
        assert any(NEWEST[capability] in kinds for kinds in used), f"{name}: {used}"


@pytest.mark.parametrize(("kind", "rows"), [("int4", 1), ("int8 rows", 2048)])
def test_every_tile_that_is_timed_can_be_compiled(kind: str, rows: int) -> None:
    """What the chip has no room for is left out when it is timed; what could not be compiled would end the loading of a model."""
    with recorded(90) as found:
        if kind == "int4":
            x, matrix = meta(rows, 4096), packed(4096, 4096, 128).matrix()
            tiles = tuning.neighbours(products.plan(rows, matrix, x.dtype, x.device, invariant=False))
            for tile in tiles:
                products.product(x, matrix, None, x.dtype, tile=tile)
        else:
            given = quantise.Rows(meta(rows, 4096, dtype=I8), meta(rows, 1, dtype=F32))
            tiles = tuning.neighbours(products.rows_plan(rows, 4096, 4096, given.numbers.device, kind="int8", invariant=False))
            for tile in tiles:
                int8.linear_rows(given, meta(4096, 4096, dtype=I8), meta(4096, 1, dtype=F32), None, torch.bfloat16, tile=tile)
    made = [build(launch, 90) for launch in found if launch.name in MULTIPLY]
    assert len(made) == len(tiles) == len(set(tiles)) >= 3
    assert all(b.matrix for b in made)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_sampler_rounds_each_product_and_each_sum_by_itself(capability: int) -> None:
    """A fused multiply-add would give other weights than the reference; divisions must be those of IEEE."""
    made = [b for b in builds(sampled, capability) if b.name in ("_digits", "_weigh", "_choose", "_penalise")]
    assert made and not any("fma.rn.f32" in b.ptx for b in made)
    assert all("div.rn.f32" in b.ptx for b in made) and not any("div.full.f32" in b.ptx for b in made)
