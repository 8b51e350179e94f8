"""The pieces of the drafter's backbone: RMS norm, rotary positions, attention projections, SwiGLU, one layer.

Qwen3-shaped whatever the target's family: pre-norm residuals, per-head RMS norm of queries and keys, no biases.
Legend: A blocks, S slots, B batch, T sequence, D hidden, H query heads, G key/value heads, E head_dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import DrafterConfig


class Rotation(NamedTuple):
    """cos and sin of the rotary angles, [..., 1, E], ready to broadcast over heads."""

    cos: Tensor
    sin: Tensor


def rotation(position_ids: Tensor, config: DrafterConfig, dtype: torch.dtype) -> Rotation:
    """Angles of position ids [...] in float32, cast to dtype at the end, as the released drafters were trained."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=position_ids.device)
    angles = position_ids[..., None].float() * config.rope_theta ** (-half / config.head_dim)
    angles = torch.cat([angles, angles], dim=-1)[..., None, :]
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Rotary embedding of [..., heads, E]; the two halves of E form the pairs."""
    first, second = x.chunk(2, dim=-1)
    return x * by.cos + torch.cat([-second, first], dim=-1) * by.sin


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last axis, the division in float32 (float64 for float64)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same shape and dtype."""
        out: Tensor = _RMSNorm.apply(x, self.weight, self.eps)
        return out


class _RMSNorm(torch.autograd.Function):
    """Keeps x and one number per row for backward, where plain autograd would keep three float32 copies of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(_wide_dtype(x))
        inverse = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return weight * (wide * inverse).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        (gradient,) = grad_outputs
        normed = x.to(inverse.dtype) * inverse
        rows = (gradient * normed.to(x.dtype)).flatten(0, -2)
        of_weight = rows.sum(0, dtype=inverse.dtype).to(weight.dtype)
        # d x = (g - n · mean(g · n)) / rms with n = x / rms and g the gradient of n.
        of_normed = (gradient * weight).to(inverse.dtype)
        along = torch.linalg.vecdot(of_normed, normed)[..., None] / normed.shape[-1]
        of_x = normed.mul_(-along).add_(of_normed).mul_(inverse)
        return of_x.to(x.dtype), of_weight, None


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class BlockAttention(nn.Module):
    """Projections of one layer's attention; the same ones serve context and block (DFlash §3).

    `input_size` is the width of what is projected: None is D; EAGLE-3 has 2·D.
    """

    def __init__(self, config: DrafterConfig, input_size: int | None = None) -> None:
        super().__init__()
        input_size = input_size or config.hidden_size
        self.head_dim = config.head_dim
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(input_size, query_size, bias=False)
        self.k_proj = nn.Linear(input_size, key_size, bias=False)
        self.v_proj = nn.Linear(input_size, key_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def query(self, x: Tensor, by: Rotation) -> Tensor:
        """[..., D] to rotated queries [..., H, E]."""
        return rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), by)

    def key_value(self, x: Tensor, by: Rotation) -> tuple[Tensor, Tensor]:
        """[..., D] to rotated keys and plain values, both [..., G, E]."""
        key = rotate(self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim))), by)
        return key, self.v_proj(x).unflatten(-1, (-1, self.head_dim))


class GatedMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """One layer. The attention itself is the caller's: training attends in groups, decoding over a cache.

    `input_size`: see BlockAttention; None is D.
    """

    def __init__(self, config: DrafterConfig, input_size: int | None = None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = BlockAttention(config, input_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Output projection, residuals and MLP: x [..., D] and attended [..., H, E] to [..., D]."""
        x = x + self.self_attn.o_proj(attended.flatten(-2))
        return x + self.mlp(self.post_attention_layernorm(x))


@torch.no_grad()
def init_weights(drafter: nn.Module, seed: int) -> None:
    """Matrices from N(0, 0.02²) by a generator of their own, norms one, biases zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in drafter.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * 0.02)
