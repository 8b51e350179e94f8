"""Sequential heads (DSpark §3.2): a low-rank correction of the logits that depends on the previous token.

Every head is `U_k + W2 f_k` with features f_k [rank]; they differ in f alone. The loss relies on that: f goes through
autograd, W2 joins the fused chunks. W1 is indexed by target tokens, W2 gives logits over the draft vocabulary.
Legend: A blocks, K draft positions, R rank, V vocabulary, D hidden.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from model.config import DrafterConfig


class MarkovHead(Protocol):
    """What training and decoding use of a sequential head."""

    markov_w1: nn.Embedding
    markov_w2: nn.Linear
    reads_hidden: ClassVar[bool]
    """Whether features depend on more than the previous token."""

    def features(self, embedded_AKR: Tensor, hidden_AKD: Tensor) -> Tensor:
        """Features [A, K, R] of whole blocks under teacher forcing; embedded = W1[x_{k-1}]."""

    def step(self, embedded_R: Tensor, hidden_D: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Features [R] of one position and the state for the next; state None at the start of a block."""


class VanillaMarkov(nn.Module):
    """f_k = W1[x_{k-1}]."""

    reads_hidden = False

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size, bias=False)

    def features(self, embedded_AKR: Tensor, hidden_AKD: Tensor) -> Tensor:
        """See MarkovHead."""
        return embedded_AKR

    def step(self, embedded_R: Tensor, hidden_D: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See MarkovHead."""
        return embedded_R, None


class GatedMarkov(nn.Module):
    """f_k = σ(W_g [h_k ; W1[x_{k-1}]] + b) ⊙ W1[x_{k-1}]."""

    reads_hidden = True

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size, bias=False)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def features(self, embedded_AKR: Tensor, hidden_AKD: Tensor) -> Tensor:
        """See MarkovHead."""
        gate = self.gate_proj(torch.cat([hidden_AKD, embedded_AKR], dim=-1))
        return torch.sigmoid(gate) * embedded_AKR

    def step(self, embedded_R: Tensor, hidden_D: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See MarkovHead."""
        return self.features(embedded_R, hidden_D), None


class RnnMarkov(nn.Module):
    """[g ; c ; o] = W [s_{k-1} ; W1[x_{k-1}] ; h_k] + b,  s_k = σ(g) s_{k-1} + (1 - σ(g)) tanh(c),  f_k = tanh(o)."""

    reads_hidden = True

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        rank = config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        self.joint_proj = nn.Linear(2 * rank + config.hidden_size, 3 * rank)

    def features(self, embedded_AKR: Tensor, hidden_AKD: Tensor) -> Tensor:
        """See MarkovHead."""
        state: Tensor | None = None
        outputs = []
        for k in range(embedded_AKR.shape[-2]):
            output, state = self.step(embedded_AKR[..., k, :], hidden_AKD[..., k, :], state)
            outputs.append(output)
        return torch.stack(outputs, dim=-2)

    def step(self, embedded_R: Tensor, hidden_D: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See MarkovHead; accepts leading dimensions."""
        before = torch.zeros_like(embedded_R) if state is None else state
        gate, candidate, output = self.joint_proj(torch.cat([before, embedded_R, hidden_D], dim=-1)).chunk(3, dim=-1)
        keep = torch.sigmoid(gate)
        return torch.tanh(output), keep * before + (1 - keep) * torch.tanh(candidate)


def build_markov_head(config: DrafterConfig) -> VanillaMarkov | GatedMarkov | RnnMarkov | None:
    """The head that the configuration names; None for `none` (DFlash)."""
    kinds: dict[str, type[VanillaMarkov | GatedMarkov | RnnMarkov]] = {
        "vanilla": VanillaMarkov,
        "gated": GatedMarkov,
        "rnn": RnnMarkov,
    }
    return None if config.markov_head_type == "none" else kinds[config.markov_head_type](config)
