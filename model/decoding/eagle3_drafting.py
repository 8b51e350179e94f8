"""EAGLE-3 as decoding sees it: rows of contexts that grow, one step of the layer per draft token.

The key of a position needs the token behind it, so the newest position of a row waits, as a feature, for that row's
next token: the anchor when drafting, the same token again when it is committed.
Legend: as drafting.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from model.decoding.drafting import Proposal
from model.decoding.sampling import Sampling, draw, warp
from model.eagle3 import Eagle3Drafter
from model.row_cache import RowCache
from model.target_heads import TargetHeads


class Eagle3Rows:
    """Implements drafting.Drafter. The cache keeps step-0 keys and values of the context; a block's are forgotten."""

    def __init__(self, drafter: Eagle3Drafter, heads: TargetHeads) -> None:
        self._drafter, self._heads = drafter, heads
        self._device = drafter.fc.weight.device
        self._cache = RowCache(1, 0)
        self._waiting_BD = torch.empty(0, drafter.config.hidden_size, dtype=drafter.dtype, device=self._device)

    @property
    def block_size(self) -> int:
        """See Drafter."""
        return self._drafter.config.block_size

    @property
    def captured_width(self) -> int:
        """See Drafter."""
        return self._drafter.fc.in_features

    @property
    def has_confidence(self) -> bool:
        """See Drafter."""
        return False

    def add(self, hidden_BnC: Tensor, token_ids: Sequence[Sequence[int]]) -> None:
        """See Drafter."""
        features = self._drafter.fuse(hidden_BnC.to(self._device))
        joining = RowCache(1, len(token_ids))
        self._extend(joining, features, [ids[1:] for ids in token_ids])
        self._cache.join(joining)
        self._waiting_BD = torch.cat([self._waiting_BD, _last(features, token_ids)])

    def commit(self, hidden_BnC: Tensor, token_ids: Sequence[Sequence[int]]) -> None:
        """See Drafter."""
        features = self._drafter.fuse(hidden_BnC.to(self._device))
        self._extend(self._cache, torch.cat([self._waiting_BD[:, None], features], dim=1), token_ids)
        self._waiting_BD = _last(features, token_ids)

    def keep(self, rows: Sequence[int]) -> None:
        """See Drafter."""
        self._cache.keep(rows)
        self._waiting_BD = self._waiting_BD[torch.tensor(rows, dtype=torch.int64, device=self._device)]

    def propose(self, anchor_ids: Sequence[int], sampling: Sampling, uniforms_BK: Tensor) -> Proposal:
        """See Drafter."""
        token, feature_BD = torch.tensor(anchor_ids, device=self._device), self._waiting_BD
        lengths, tokens, probabilities = list(self._cache.lengths), [], []
        for k in range(self.block_size):
            feature_BD = self.step(token, feature_BD)
            self._cache.lengths = [length + 1 for length in self._cache.lengths]
            logits = self._heads.draft_logits(self._drafter.norm(feature_BD)).to(self._drafter.dtype)
            logits = self._heads.to_target(logits)
            if sampling.greedy:
                token = logits.argmax(dim=-1)
            else:
                probabilities.append(warp(logits, sampling))
                token = draw(probabilities[-1], uniforms_BK[:, k])
            tokens.append(token)
        self._cache.lengths = lengths
        return Proposal(
            torch.stack(tokens, dim=1), torch.stack(probabilities, dim=1) if probabilities else None, confidences=None
        )

    def step(self, token_B: Tensor, feature_BD: Tensor) -> Tensor:
        """One step of the layer behind each row's cache: features [B, D] and the tokens after them to features [B, D].

        Its keys and values are written, but the lengths stay.
        """
        positions = self._cache.positions(1, self._device)
        key_value, query_B1HE = self._drafter.read(token_B[:, None], feature_BD[:, None], positions, self._heads)
        keys, values = self._cache.write(0, *key_value)
        seen = torch.arange(keys.shape[1], device=self._device) <= positions
        attended = F.scaled_dot_product_attention(
            query_B1HE.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=seen[:, None, None],
            enable_gqa=True,
        )
        return self._drafter.finish(feature_BD, attended[:, :, 0])

    def _extend(self, cache: RowCache, features_BnD: Tensor, followers: Sequence[Sequence[int]]) -> None:
        """Keys and values of each row's first len(followers[b]) features, beside the tokens after them."""
        counts = [len(ids) for ids in followers]
        width = max(1, *counts)  # a first write makes the buffers, even when no row has a follower yet
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in followers], device=self._device)
        padding = torch.arange(width, device=self._device) >= torch.tensor(counts, device=self._device)[:, None]
        # Masked keys still meet a weight of 0, and 0 times whatever padding holds must be 0.
        known = features_BnD[:, :width].masked_fill(padding[..., None], 0.0)
        key_value, _ = self._drafter.read(ids, known, cache.positions(width, self._device), self._heads)
        cache.write(0, *key_value)
        cache.lengths = [length + count for length, count in zip(cache.lengths, counts, strict=True)]


def _last(features_BnD: Tensor, token_ids: Sequence[Sequence[int]]) -> Tensor:
    """The feature [B, D] of each row's last position."""
    last = torch.tensor([len(ids) - 1 for ids in token_ids], device=features_BnD.device)
    return features_BnD[torch.arange(len(last), device=last.device), last]
