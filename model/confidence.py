"""Confidence head (DSpark §3.2): the probability that draft k is accepted, given that 1..k-1 were."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model.config import DrafterConfig


class ConfidenceHead(nn.Module):
    """c_k = σ(wᵀ [h_k ; W1[x_{k-1}]] + b), or of h_k alone; this module returns the logit."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        width = config.hidden_size + (config.markov_rank if self.with_markov else 0)
        self.proj = nn.Linear(width, 1)

    def forward(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """Logits [...] from hidden [..., D] and the raw W1 row of the previous token [..., R] (None without head)."""
        if self.with_markov and embedded is not None:
            hidden = torch.cat([hidden, embedded], dim=-1)
        return self.proj(hidden).squeeze(-1)
