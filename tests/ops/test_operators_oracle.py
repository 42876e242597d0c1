"""Operators against the functions that transformers uses in its models."""

from __future__ import annotations

import numpy as np
import pytest

from trivium import ops
from trivium.ops.examples import sequences
from trivium.ops.state import RecurrentState

pytestmark = pytest.mark.oracles


def test_gated_delta_rule_equals_the_one_of_qwen3_next():
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((9, 3, d)).astype(np.float32) for d in (8, 8, 6))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g, beta = -rng.uniform(0, 1, (9, 3)).astype(np.float32), rng.uniform(0, 1, (9, 3)).astype(np.float32)
    tensors = [torch.tensor(a)[None] for a in (q, k, v, g, beta)]
    want, last = modeling.torch_recurrent_gated_delta_rule(*tensors, initial_state=None, output_final_state=True)
    state = RecurrentState(np.zeros((1, 3, 8, 6), np.float32), np.zeros(1, np.int32))
    got, state = ops.OPERATORS["gated_delta_rule"](q, k, v, g, beta, state, *sequences([9], [9]), scale=8**-0.5)
    np.testing.assert_allclose(got, want[0].numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state.data[0], last[0].numpy(), rtol=1e-4, atol=1e-5)


def test_state_space_scan_equals_the_one_of_mamba2():
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    rng = np.random.default_rng(1)
    x, b, c = (rng.standard_normal(shape).astype(np.float32) for shape in ((11, 4, 8), (11, 2, 6), (11, 2, 6)))
    dt, a, d = (rng.uniform(0, 1, shape).astype(np.float32) for shape in ((11, 4), 4, 4))
    tensors = [torch.tensor(t)[None] for t in (x, dt)] + [torch.tensor(-a)] + [torch.tensor(t)[None] for t in (b, c)]
    limits = 0.2, 0.9
    want, last = modeling.mamba2_chunk_scan(*tensors, 4, D=torch.tensor(d), dt_limit=limits, return_final_states=True)
    state = RecurrentState(np.zeros((1, 4, 8, 6), np.float32), np.zeros(1, np.int32))
    got, state = ops.OPERATORS["selective_scan"](x, dt, -a, b, c, d, state, *sequences([11], [11]), dt_limits=limits)
    np.testing.assert_allclose(got, want[0].numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state.data[0], last[0].numpy(), rtol=1e-4, atol=1e-5)


def test_sparse_mixer_equals_that_of_phi_moe():
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.phimoe.modeling_phimoe")
    for jitter in (0.01, 0.3):
        logits = np.random.default_rng(2).standard_normal((200, 9)).astype(np.float32)
        weights, ids = modeling.sparsemixer(torch.tensor(logits), jitter, False)
        got, mine = ops.OPERATORS["sparse_mixer_route"](logits, top_k=2, jitter=jitter)
        np.testing.assert_array_equal(mine, ids.numpy())
        np.testing.assert_allclose(got, weights.numpy(), rtol=1e-5)
    assert 0.05 < (got < 0.9).mean() < 0.95, "some tokens have several near experts, some one"


@pytest.mark.parametrize("offset", [0, 1])
def test_position_scale_equals_the_temperatures_of_llama_4_and_ministral_3(offset):
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.ministral3.modeling_ministral3")
    positions, x = np.array([0, 6, 7, 8, 13, 14, 900], np.int32), np.ones((7, 2, 3), np.float32)
    want = modeling.get_llama_4_attn_scale(torch.tensor(positions + offset)[None], 0.1, 7)[0, 0].numpy()
    if offset:  # Llama 4's own line
        want = (torch.log1p(torch.floor((torch.tensor(positions).float() + 1.0) / 7)) * 0.1 + 1.0).numpy()[:, None]
    got = ops.OPERATORS["position_scale"](x, positions, beta=0.1, period=7, offset=offset)
    np.testing.assert_allclose(got, np.broadcast_to(want[..., None], x.shape), rtol=1e-6)


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu", "relu2", "quick_gelu", "sigmoid", "tanh"])
def test_activations_equal_those_of_transformers(kind):
    torch = pytest.importorskip("torch")
    activations = pytest.importorskip("transformers.activations")
    theirs = {"gelu_tanh": "gelu_pytorch_tanh"}.get(kind, kind)
    x = np.linspace(-6, 6, 101, dtype=np.float32)
    want = activations.ACT2FN[theirs](torch.tensor(x)).numpy()
    np.testing.assert_allclose(ops.OPERATORS["activation"](x, kind=kind), want, rtol=1e-5, atol=1e-6)


def test_routing_equals_that_of_deepseek_v3():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = transformers.DeepseekV3Config(
        hidden_size=16, moe_intermediate_size=8, n_routed_experts=16, num_experts_per_tok=3, n_group=4, topk_group=2,
        routed_scaling_factor=2.5, norm_topk_prob=True,
    )  # fmt: skip
    torch.manual_seed(0)
    router = modeling.DeepseekV3TopkRouter(config)
    torch.nn.init.normal_(router.weight)
    bias = torch.rand(16) * 0.1
    router.e_score_correction_bias.copy_(bias)
    with torch.no_grad():
        logits, weights, ids = router(torch.randn(20, 16))
    got, mine = ops.OPERATORS["moe_route"](
        logits.numpy(), bias.numpy(), top_k=3, scoring="sigmoid", scale=2.5, groups=4, top_groups=2
    )
    order, theirs = np.argsort(mine, axis=-1), np.argsort(ids.numpy(), axis=-1)
    np.testing.assert_array_equal(np.take_along_axis(mine, order, -1), np.take_along_axis(ids.numpy(), theirs, -1))
    want = np.take_along_axis(weights.numpy(), theirs, -1)
    np.testing.assert_allclose(np.take_along_axis(got, order, -1), want, rtol=1e-5)
