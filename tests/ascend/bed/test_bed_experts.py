"""Emulated operators of mixtures of experts against numpy, and each documented limit violated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from trivium.ops import OPERATORS

T, E, K, H, N = 9, 8, 2, 32, 16
route = OPERATORS["moe_route"].reference


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def expert_ids(seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.tensor(np.array([rng.permutation(E)[:K] for _ in range(T)]), dtype=torch.int32)


def close(found: torch.Tensor, wanted: Any, tolerance: float = 2e-3) -> None:
    torch.testing.assert_close(found.cpu().double(), torch.as_tensor(wanted).double(), atol=tolerance, rtol=tolerance)


# ---- choosing ----


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_experts_are_chosen_like_the_reference(npu, scoring, groups, bias):
    x = rand(T, 32, dtype=torch.float32)
    b = rand(32, seed=1, dtype=torch.float32) if bias else None
    weights, ids = route(
        x.numpy(), None if b is None else b.numpy(), top_k=3, scoring=scoring, groups=groups[0], top_groups=groups[1],
        normalize=scoring == "sigmoid", scale=2.5,
    )  # fmt: skip
    y, experts, _ = torch.ops.npu.npu_moe_gating_top_k(
        x.npu(), 3, bias=None if b is None else b.npu(), k_group=groups[1], group_count=groups[0],
        group_select_mode=int(scoring == "sigmoid"), norm_type=int(scoring == "sigmoid"), routed_scaling_factor=2.5,
    )  # fmt: skip
    assert np.array_equal(experts.cpu().numpy(), ids)
    close(y, weights, 1e-5)


def test_softmax_weights_are_not_normalised_again(npu):
    x = rand(T, E)
    y, experts, rows = torch.ops.npu.npu_moe_gating_top_k_softmax(x.npu(), None, K)
    weights, ids = route(x.float().numpy(), None, top_k=K, normalize=False)
    assert np.array_equal(experts.cpu().numpy(), ids)
    close(y, weights)
    assert rows.cpu().tolist() == [[t, t + T] for t in range(T)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"renorm": 1}, "renorm is 0"),
        ({"norm_type": 2}, "norm_type 2"),
        ({"group_count": 3}, "groups divide the experts"),
        ({"group_count": 4, "k_group": 5}, r"k_group 5 is in 1\.\.4"),
        ({"group_count": 4, "k_group": 1, "k": 9}, r"k 9 is in 1\.\.8"),
        ({"x": rand(2, 4096)}, "at most 2048 experts"),
        ({"group_select_mode": 2}, "group_select_mode 2"),
        ({"bias": rand(32).float()}, "dtype of x and bias"),
    ],
)
def test_choosing_beyond_a_limit_is_refused(npu, changes, message):
    given = {"x": rand(T, 32), "k": 2, **changes}
    moved = {k: v.npu() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    with pytest.raises(RuntimeError, match=message):
        torch.ops.npu.npu_moe_gating_top_k(moved.pop("x"), moved.pop("k"), **moved)


# ---- sorting by expert ----


def routed(x: torch.Tensor, ids: torch.Tensor, **changes: Any) -> list[torch.Tensor]:
    given = {
        "active_num": ids.numel(), "expert_num": E, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True,
        "active_expert_range": [0, E], "quant_mode": -1, "row_idx_type": 0, **changes,
    }  # fmt: skip
    given = {k: v.npu() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    return [t.cpu() for t in torch.ops.npu.npu_moe_init_routing_v2(x.npu(), ids.npu(), **given)]


def places(ids: torch.Tensor, first: int = 0, last: int = E) -> list[tuple[int, int, int]]:
    """(expert, token, place in token-major order) of the active rows in the order of the sort."""
    flat = [(e, i // K, i) for i, e in enumerate(ids.flatten().tolist())]
    return sorted((p for p in flat if first <= p[0] < last), key=lambda p: (p[0], p[2]))


@pytest.mark.parametrize("active", [(0, E), (2, 5)])
@pytest.mark.parametrize("count_type", [0, 1])
def test_rows_are_sorted_by_expert(npu, count_type, active):
    x, ids = rand(T, H), expert_ids()
    rows, row_ids, counts, _ = routed(x, ids, active_expert_range=list(active), expert_tokens_num_type=count_type)
    wanted = places(ids, *active)
    assert torch.equal(rows[: len(wanted)], x[[t for _, t, _ in wanted]])
    per_expert = np.bincount([e for e, _, _ in wanted], minlength=E)[active[0] : active[1]]
    assert counts.dtype == torch.int64 and counts.tolist() == (per_expert if count_type else np.cumsum(per_expert)).tolist()
    positions = {place: row for row, (_, _, place) in enumerate(wanted)}
    assert row_ids.tolist() == [positions.get(i, -1) for i in range(T * K)]


def test_row_indices_of_type_1_name_the_places(npu):
    ids = expert_ids()
    assert routed(rand(T, H), ids, row_idx_type=1)[1].tolist() == [place for _, _, place in places(ids)]


def test_rows_are_quantised_on_their_way(npu):
    x, ids = rand(T, H), expert_ids()
    rows, _, _, scales = routed(x, ids, quant_mode=1)
    wanted = x[[t for _, t, _ in places(ids)]].double()
    close(scales, wanted.abs().amax(-1) / 127, 1e-6)
    assert rows.dtype == torch.int8
    assert ((rows.double() * scales.double()[:, None] - wanted).abs() <= scales.double()[:, None] * 0.501).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": expert_ids().long()}, "expert_idx is int32"),
        ({"ids": expert_ids() + 3}, r"expert_idx lies in 0\.\.7"),
        ({"active_expert_range": [0, 9]}, "lies within 8 experts"),
        ({"expert_tokens_num_type": 3}, "expert_tokens_num_type 3|not init|undefined|Undefined"),
        ({"row_idx_type": 2}, "row_idx_type 2"),
        ({"quant_mode": 4}, "quant_mode 4 is -1, 0 or 1"),
        ({"quant_mode": 0}, "quant_mode 0 takes a scale"),
    ],
)
def test_routing_beyond_a_limit_is_refused(npu, changes, message):
    with pytest.raises(RuntimeError, match=message):
        routed(rand(T, H), changes.pop("ids", expert_ids()), **changes)


# ---- grouped products ----

COUNTS = [3, 0, 4, 2, 0, 0, 5, 4]


def grouped(x: torch.Tensor, weight: torch.Tensor, **changes: Any) -> torch.Tensor:
    given = {"group_list": torch.tensor(COUNTS), "group_list_type": 1, "split_item": 2, "group_type": 0, **changes}
    listed = {"bias", "scale", "antiquant_scale", "antiquant_offset", "per_token_scale"}
    move = lambda k, v: [v.npu()] if k in listed else v.npu() if isinstance(v, torch.Tensor) else v
    weight = weight if weight.device.type == "npu" else weight.npu()
    return torch.ops.npu.npu_grouped_matmul([x.npu()], [weight], **{k: move(k, v) for k, v in given.items()})[0].cpu()


def by_expert(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    experts = np.repeat(np.arange(E), COUNTS)
    return torch.stack([x[i].double() @ weight[e].double() for i, e in enumerate(experts)])


ROWS = sum(COUNTS)
EXPERTS = np.repeat(np.arange(E), COUNTS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("list_type", [0, 1])
def test_groups_multiply_their_expert(npu, list_type, dtype):
    x, w = rand(ROWS, H, dtype=dtype), rand(E, H, N, seed=1, dtype=dtype)
    b = rand(E, N, seed=2, dtype=torch.float32 if dtype == torch.bfloat16 else dtype)
    groups = torch.tensor(COUNTS if list_type else np.cumsum(COUNTS))
    close(grouped(x, w, group_list=groups, group_list_type=list_type, bias=b), by_expert(x, w) + b[EXPERTS].double(), 0.15)


def test_groups_of_whole_numbers_with_scales(npu):
    x = torch.randint(-127, 128, (ROWS, H), dtype=torch.int8)
    w = torch.randint(-127, 128, (E, H, N), dtype=torch.int8)
    s, p = rand(E, N, dtype=torch.float32).abs() * 1e-3, rand(ROWS, seed=1, dtype=torch.float32).abs() * 1e-2
    wanted = by_expert(x, w) * s[EXPERTS].double() * p.double()[:, None]
    close(grouped(x, w, scale=s, per_token_scale=p, output_dtype=torch.float16), wanted, 4e-3)


def test_groups_with_weights_in_fractals(npu):
    torch.npu.config.allow_internal_format = True
    x, w = rand(ROWS, H), rand(E, H, N, seed=1)
    cast = torch.ops.npu.npu_format_cast(w.npu(), 29)
    torch.npu.config.allow_internal_format = False
    assert torch.equal(grouped(x, cast), grouped(x, w))
    assert npu.log.count("aclnnGroupedMatmulWeightNz") == 1


@pytest.mark.parametrize("bits", [8, 4])
def test_groups_with_weights_of_few_bits(npu, bits):
    x = rand(ROWS, H)
    w = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (E, H, N), dtype=torch.int32)
    s, o = rand(E, N, seed=1), rand(E, N, seed=2)
    stored = w.to(torch.int8)
    if bits == 4:
        stored = torch.ops.npu.npu_convert_weight_to_int4pack(w.flatten(0, 1).npu()).cpu().unflatten(0, (E, H))
    wanted = by_expert(x, (w.double() + o.double()[:, None]) * s.double()[:, None])
    close(grouped(x, stored, antiquant_scale=s, antiquant_offset=o), wanted, 0.1 * 2 ** (bits - 4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_list": torch.tensor(COUNTS).int()}, "group_list is int64"),
        ({"group_list": torch.tensor(COUNTS[:-1])}, "a number for each of 8 experts"),
        ({"group_list": torch.tensor([*COUNTS[:-1], 9])}, "group_list covers 23 of 18 rows"),
        ({"group_list": torch.tensor(COUNTS), "group_list_type": 0}, "cumulative"),
        ({"group_list": torch.tensor([-1, *COUNTS[1:]])}, "negative"),
        ({"weight": rand(E, H + 1, N)}, "x has K 32, weight 33|K"),
        ({"dtype": torch.bfloat16, "bias": rand(E, N, dtype=torch.bfloat16)}, "no documented row"),
        ({"scale": rand(E, N).float()}, "no documented row"),
        ({"group_list_type": 3}, "group_list_type 3"),
    ],
)
def test_groups_beyond_a_limit_are_refused(npu, changes, message):
    dtype = changes.pop("dtype", torch.float16)
    with pytest.raises(RuntimeError, match=message):
        grouped(rand(ROWS, H, dtype=dtype), changes.pop("weight", rand(E, H, N, dtype=dtype)), **changes)


# ---- back to tokens ----


def test_routed_rows_come_back_weighted(npu):
    x, ids, w = rand(T, H), expert_ids(), rand(E, H, N, seed=1)
    probs = rand(T, K, seed=3).abs()
    rows, row_ids, counts, _ = routed(x, ids)
    out = grouped(rows, w, group_list=counts)
    found = torch.ops.npu.npu_moe_token_unpermute(out.npu(), row_ids.npu(), probs.npu())
    wanted = [sum(probs[t, k].double() * (x[t].double() @ w[ids[t, k]].double()) for k in range(K)) for t in range(T)]
    close(found, torch.stack(wanted), 2e-2)


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (torch.arange(T * K), "sorted_indices are int32"),
        (torch.arange(T * K).int() + 1, r"sorted_indices lie in 0\.\.17"),
    ],
)
def test_unpermuting_beyond_a_limit_is_refused(npu, indices, message):
    with pytest.raises(RuntimeError, match=message):
        torch.ops.npu.npu_moe_token_unpermute(rand(T * K, N).npu(), indices.npu(), rand(T, K).npu())
