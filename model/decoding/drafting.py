"""Drafters as decoding sees them: rows of contexts that grow, and proposals for all rows at once.

`Drafter` is the seam: block drafters (DSpark, DFlash) are here; anything that fills a Proposal may take their place.
Legend: B rows, K = γ draft positions, S query slots, n tokens, C = L·D captured width, D hidden, V vocabulary,
T cached columns, H query heads, G key/value heads, E head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from model.anchors import block_inputs, predicting_slots
from model.decoding.sampling import Sampling, draw, warp
from model.drafter import DSparkDrafter
from model.layers import DraftLayer, rotation
from model.row_cache import RowCache
from model.target_heads import TargetHeads


class Proposal(NamedTuple):
    """K drafts for every row."""

    token_ids: Tensor
    """int64 [B, K], ids of the target's vocabulary."""
    probabilities: Tensor | None
    """float32 [B, K, V]: what each draft was drawn from; None when greedy."""
    confidences: Tensor | None
    """float32 [B, K]: probability that a draft is accepted, given that those before it were; None without head."""


class Drafter(Protocol):
    """Rows stand in the order in which they were added; a position is committed once, when the target has read it."""

    @property
    def block_size(self) -> int:
        """K."""

    @property
    def captured_width(self) -> int:
        """C: width of the hidden states that it reads."""

    @property
    def has_confidence(self) -> bool:
        """Whether proposals carry confidences."""

    def add(self, hidden_BnC: Tensor, token_ids: Sequence[Sequence[int]]) -> None:
        """Append new rows: their prompts, and the captured states at every position. Columns behind are padding."""

    def commit(self, hidden_BnC: Tensor, token_ids: Sequence[Sequence[int]]) -> None:
        """Extend every row by its newly committed positions: states and ids, in order."""

    def propose(self, anchor_ids: Sequence[int], sampling: Sampling, uniforms_BK: Tensor) -> Proposal:
        """Draft K tokens behind each row's anchor: the last committed token, which the target has not read yet."""

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""


class BlockDrafter:
    """DSpark and DFlash: the backbone runs once per block, the sequential head token by token (DSpark §3.2).

    The cache keeps keys and values of the context alone, made from the target's states; a block's own are written
    behind them for its one forward and overwritten by the next context. Incremental and from scratch agree.
    """

    def __init__(self, drafter: DSparkDrafter, heads: TargetHeads) -> None:
        self._drafter, self._heads = drafter, heads
        self._device = drafter.fc.weight.device
        self._cache = self._new_cache(0)

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
        return self._drafter.confidence_head is not None

    def add(self, hidden_BnC: Tensor, token_ids: Sequence[Sequence[int]]) -> None:
        """See Drafter."""
        joining = self._new_cache(len(token_ids))
        self._extend(joining, hidden_BnC, token_ids)
        self._cache.join(joining)

    def commit(self, hidden_BnC: Tensor, token_ids: Sequence[Sequence[int]]) -> None:
        """See Drafter."""
        self._extend(self._cache, hidden_BnC, token_ids)

    def keep(self, rows: Sequence[int]) -> None:
        """See Drafter."""
        self._cache.keep(rows)

    def propose(self, anchor_ids: Sequence[int], sampling: Sampling, uniforms_BK: Tensor) -> Proposal:
        """See Drafter."""
        hidden_BKD = self.block_states(anchor_ids)
        base_BKV = self._heads.draft_logits(hidden_BKD).to(self._drafter.dtype)
        markov, state = self._drafter.markov_head, None
        previous = torch.tensor(anchor_ids, device=self._device)
        tokens, probabilities, confidences = [], [], []
        for k in range(self.block_size):
            embedded, logits = None, base_BKV[:, k]
            if markov is not None:
                embedded = markov.markov_w1(previous)
                features, state = markov.step(embedded, hidden_BKD[:, k], state)
                logits = logits + markov.markov_w2(features)
            if self._drafter.confidence_head is not None:
                confidences.append(self._drafter.confidence_head(hidden_BKD[:, k], embedded))
            logits = self._heads.to_target(logits)
            if sampling.greedy:
                previous = logits.argmax(dim=-1)
            else:
                probabilities.append(warp(logits, sampling))
                previous = draw(probabilities[-1], uniforms_BK[:, k].to(self._device))
            tokens.append(previous)
        return Proposal(
            torch.stack(tokens, dim=1),
            torch.stack(probabilities, dim=1) if probabilities else None,
            torch.stack(confidences, dim=1).float().sigmoid() if confidences else None,
        )

    def block_states(self, anchor_ids: Sequence[int]) -> Tensor:
        """Final-normed hidden states [B, K, D] of one block per row, its anchor right behind the row's context."""
        config = self._drafter.config
        lengths = torch.tensor(self._cache.lengths, device=self._device)
        input_ids, position_ids = block_inputs(torch.tensor(anchor_ids, device=self._device), lengths, config)
        x_BSD = self._heads.embed(input_ids).to(self._drafter.dtype)
        by = rotation(position_ids, config, self._drafter.dtype)
        for index, layer in enumerate(self._layers()):
            normed = layer.input_layernorm(x_BSD)
            keys, values = self._cache.write(index, *layer.self_attn.key_value(normed, by))
            columns = torch.arange(keys.shape[1], device=self._device)
            seen = (columns < (lengths + config.num_inputs)[:, None])[:, None]
            window = config.window(index)
            if window is not None:
                seen = seen & ((position_ids[..., None] - columns).abs() < window)
            attended = attend(layer.self_attn.query(normed, by), keys, values, seen)
            x_BSD = layer.finish(x_BSD, attended)
        return predicting_slots(self._drafter.norm(x_BSD), config)

    def _extend(self, cache: RowCache, hidden_BnC: Tensor, token_ids: Sequence[Sequence[int]]) -> None:
        counts = [len(ids) for ids in token_ids]
        hidden = hidden_BnC[:, : max(counts)].to(self._device)
        padding = torch.arange(max(counts), device=self._device) >= torch.tensor(counts, device=self._device)[:, None]
        # Masked keys still meet a weight of 0, and 0 times whatever padding holds must be 0.
        context = self._drafter.project_context(hidden.masked_fill(padding[..., None], 0.0))
        by = rotation(cache.positions(max(counts), self._device), self._drafter.config, self._drafter.dtype)
        for index, layer in enumerate(self._layers()):
            cache.write(index, *layer.self_attn.key_value(context, by))
        cache.lengths = [length + count for length, count in zip(cache.lengths, counts, strict=True)]

    def _new_cache(self, rows: int) -> RowCache:
        return RowCache(self._drafter.config.num_draft_layers, rows)

    def _layers(self) -> Iterator[DraftLayer]:
        return (cast(DraftLayer, layer) for layer in self._drafter.layers)


def attend(query_BSHE: Tensor, keys_BTGE: Tensor, values_BTGE: Tensor, seen: Tensor) -> Tensor:
    """Attention [B, S, H, E] over the keys that a slot sees, bool [B, S, T], or [B, 1, T] where all see the same.

    Query heads that share a key head are laid side by side as queries, so keys are never repeated.
    """
    B, S, H, E = query_BSHE.shape
    G = keys_BTGE.shape[2]
    query = query_BSHE.view(B, S, G, H // G, E).permute(0, 2, 3, 1, 4).reshape(B, G, -1, E)
    mask = seen.repeat(1, H // G, 1) if seen.shape[1] > 1 else seen
    out = F.scaled_dot_product_attention(
        query, keys_BTGE.transpose(1, 2), values_BTGE.transpose(1, 2), attn_mask=mask[:, None]
    )
    return out.view(B, G, H // G, S, E).permute(0, 3, 1, 2, 4).reshape(B, S, H, E)
