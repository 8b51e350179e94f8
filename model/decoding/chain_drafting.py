"""EAGLE-3 as decoding sees it: one layer, run token by token on its own features (arXiv 2503.01840).

Entry i of the context is the pair (feature of position i, token at i + 1) at rotary position i. So the feature of the
last committed position waits until its token is known: for the first draft step that is the anchor. What the steps of
a block put into the cache is overwritten by the target's own features. Legend: as drafting.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from model.decoding.drafting import BlockDrafter, Drafter, Proposal, attend
from model.decoding.sampling import Sampling, draw, warp
from model.eagle3 import Eagle3Drafter
from model.family import AnyDrafter
from model.row_cache import RowCache
from model.target_heads import TargetHeads


class ChainDrafter:
    """EAGLE-3; it has no confidence head. See drafting.Drafter for the contract."""

    has_confidence = False

    def __init__(self, drafter: Eagle3Drafter, heads: TargetHeads) -> None:
        self._drafter, self._heads = drafter, heads
        self._device = drafter.fc.weight.device
        self._cache = RowCache(1, 0)
        self._pending_BD = torch.zeros(0, drafter.config.hidden_size, dtype=drafter.dtype, device=self._device)

    @property
    def block_size(self) -> int:
        """See Drafter."""
        return self._drafter.config.block_size

    @property
    def captured_width(self) -> int:
        """See Drafter."""
        return self._drafter.fc.in_features

    def add(self, hidden_BnC: Tensor, token_ids: Sequence[Sequence[int]]) -> None:
        """See Drafter."""
        joining = RowCache(1, len(token_ids))
        features_BnD = self._features(hidden_BnC, token_ids)
        self._append(joining, features_BnD, [ids[1:] for ids in token_ids])
        self._cache.join(joining)
        self._pending_BD = torch.cat([self._pending_BD, _last(features_BnD, token_ids)])

    def commit(self, hidden_BnC: Tensor, token_ids: Sequence[Sequence[int]]) -> None:
        """See Drafter."""
        features_BnD = self._features(hidden_BnC, token_ids)
        before_BnD = torch.cat([self._pending_BD[:, None], features_BnD[:, :-1]], dim=1)
        self._append(self._cache, before_BnD, token_ids)
        self._pending_BD = _last(features_BnD, token_ids)

    def keep(self, rows: Sequence[int]) -> None:
        """See Drafter."""
        self._cache.keep(rows)
        self._pending_BD = self._pending_BD[torch.tensor(rows, dtype=torch.long, device=self._device)]

    def propose(self, anchor_ids: Sequence[int], sampling: Sampling, uniforms_BK: Tensor) -> Proposal:
        """See Drafter."""
        committed = list(self._cache.lengths)
        previous, feature_BD = torch.tensor(anchor_ids, device=self._device), self._pending_BD
        tokens, probabilities = [], []
        for k in range(self.block_size):
            feature_BD = self._step(previous, feature_BD)
            logits = self._heads.to_target(self._heads.draft_logits(self._drafter.norm(feature_BD)))
            if sampling.greedy:
                previous = logits.argmax(dim=-1)
            else:
                probabilities.append(warp(logits, sampling))
                previous = draw(probabilities[-1], uniforms_BK[:, k].to(self._device))
            tokens.append(previous)
        self._cache.lengths = committed
        return Proposal(torch.stack(tokens, dim=1), torch.stack(probabilities, dim=1) if probabilities else None, None)

    def _step(self, ids_B: Tensor, feature_BD: Tensor) -> Tensor:
        """The layer's output for one token per row, whose key and value stay in the cache."""
        positions = self._cache.positions(1, self._device)
        key_value, query = self._drafter.read(ids_B[:, None], feature_BD[:, None], positions, self._heads)
        keys, values = self._cache.write(0, *key_value)
        seen = torch.arange(keys.shape[1], device=self._device) <= positions
        self._cache.lengths = [length + 1 for length in self._cache.lengths]
        return self._drafter.finish(feature_BD, attend(query, keys, values, seen[:, None])[:, 0])

    def _features(self, hidden_BnC: Tensor, token_ids: Sequence[Sequence[int]]) -> Tensor:
        """Fused features [B, n, D]; padding becomes 0: masked keys still meet a weight of 0, which must not be NaN."""
        counts = torch.tensor([len(ids) for ids in token_ids], device=self._device)
        hidden = hidden_BnC[:, : int(counts.max())].to(self._device)
        padding = torch.arange(hidden.shape[1], device=self._device) >= counts[:, None]
        return self._drafter.fuse(hidden.masked_fill(padding[..., None], 0.0))

    def _append(self, cache: RowCache, features_BnD: Tensor, token_ids: Sequence[Sequence[int]]) -> None:
        """Context entries: each row's next features beside the tokens that follow them."""
        counts = [len(ids) for ids in token_ids]
        width = max(1, *counts)  # a row of a single token has no entry yet, but must have its place in the cache
        padded = torch.zeros(len(counts), width, dtype=torch.long)
        for row, ids in enumerate(token_ids):
            padded[row, : len(ids)] = torch.as_tensor(ids, dtype=torch.long)
        positions = cache.positions(width, self._device)
        key_value, _ = self._drafter.read(padded.to(self._device), features_BnD[:, :width], positions, self._heads)
        cache.write(0, *key_value)
        cache.lengths = [old + count for old, count in zip(cache.lengths, counts, strict=True)]


def make_drafter(drafter: AnyDrafter, heads: TargetHeads) -> Drafter:
    """A fresh, empty Drafter for a model of any kind."""
    if isinstance(drafter, Eagle3Drafter):
        return ChainDrafter(drafter, heads)
    return BlockDrafter(drafter, heads)


def _last(features_BnD: Tensor, token_ids: Sequence[Sequence[int]]) -> Tensor:
    """Each row's last own feature, [B, D]."""
    last = torch.tensor([len(ids) - 1 for ids in token_ids], device=features_BnD.device)
    return features_BnD[torch.arange(len(token_ids), device=features_BnD.device), last]
