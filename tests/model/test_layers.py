from __future__ import annotations

import torch

from model.layers import BlockAttention, RMSNorm, rotate, rotation
from tests.golden_data import drafter_config


def test_rms_norm_divides_in_float32_and_keeps_the_dtype() -> None:
    norm = RMSNorm(4, 1e-6).bfloat16()
    x = torch.tensor([[300.0, -300.0, 300.0, 300.0]], dtype=torch.bfloat16)
    assert norm(x).dtype == torch.bfloat16
    assert torch.equal(norm(x), torch.tensor([[1.0, -1.0, 1.0, 1.0]], dtype=torch.bfloat16))


def test_rms_norm_gradient() -> None:
    norm = RMSNorm(5, 1e-2).double()
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-1, 2, 5))
    x = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    assert torch.equal(norm(x), norm.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-2)))
    assert torch.autograd.gradcheck(norm, x)
    assert torch.autograd.gradcheck(lambda weight: torch.func.functional_call(norm, {"weight": weight}, x), norm.weight)


def test_rotated_products_depend_on_the_distance_alone() -> None:
    config = drafter_config()
    query, key = torch.randn(2, 16, generator=torch.Generator().manual_seed(0)).unbind(0)

    def score(query_at: int, key_at: int) -> torch.Tensor:
        by = rotation(torch.tensor([query_at, key_at]), config, torch.float32)
        rotated = rotate(torch.stack([query, key])[:, None], by)
        return (rotated[0] * rotated[1]).sum()

    assert torch.allclose(score(9, 4), score(105, 100), atol=1e-4)
    assert not torch.allclose(score(9, 4), score(9, 5), atol=1e-2)


def test_values_are_not_rotated_and_keys_are() -> None:
    attention = BlockAttention(drafter_config())
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    near, far = (rotation(torch.tensor(p), drafter_config(), torch.float32) for p in ([0, 1], [50, 51]))
    assert torch.equal(attention.key_value(x, near)[1], attention.key_value(x, far)[1])
    assert not torch.allclose(attention.key_value(x, near)[0], attention.key_value(x, far)[0])
