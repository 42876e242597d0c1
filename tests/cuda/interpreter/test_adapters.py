"""Low-rank adapters against the operator's reference."""

import numpy as np
import pytest
from triton_cases import DTYPES, OPERATORS, cases, exact, near, rng, tensor, torch

from trivium_cuda.kernels import adapters

LORA = OPERATORS["lora"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_adapters_of_every_example_are_the_references_and_other_rows_stay(dtype):
    for (y, x, a, b, chosen), _ in cases("lora", dtype):
        got = adapters.lora(*(tensor(v, dtype) for v in (y, x, a, b)), tensor(chosen))
        near(got, LORA(y, x, a, b, chosen), dtype, "lora")
        exact(got[torch.from_numpy(chosen == -1)], y[chosen == -1])


def many(rank=20, inputs=1100, out=70, tokens=37, slots=3):
    """Inputs in two parts, a rank that is no power of two, tiles of several adapters and of none."""
    draw = rng(8)
    chosen = np.concatenate([np.full(16, -1), draw.integers(-1, slots, tokens - 16)]).astype(np.int32)
    shapes = (tokens, out), (tokens, inputs), (slots, rank, inputs), (slots, rank, out)
    return *(draw.normal(0, 1 / np.sqrt(s[-1]), s).astype(np.float32) for s in shapes), chosen


def test_a_long_sum_in_parts_is_the_references():
    args = many()
    np.testing.assert_allclose(adapters.lora(*map(tensor, args)).numpy(), LORA(*args), rtol=1e-5, atol=1e-6)


def test_a_row_has_the_same_bits_whatever_is_beside_it():
    y, x, a, b, chosen = many()
    together = adapters.lora(*map(tensor, (y, x, a, b, chosen)))
    for t in np.flatnonzero(chosen >= 0)[::7]:
        alone = adapters.lora(*map(tensor, (y[t : t + 1], x[t : t + 1], a, b, chosen[t : t + 1])))
        assert torch.equal(alone[0], together[t])
