"""The EAGLE-3 drafter (arXiv 2503.01840): one autoregressive layer, trained by unrolling its own predictions.

The layer reads the embedding of a token beside a feature vector: the fused captured layers of the position before
(step 0), then its own output. Training-time test: from every anchor the layer runs γ steps on the true tokens and on
its own features, each step seeing what it will see when decoding. The context before the anchor is shared by all
blocks, so a block is a DSpark block (anchors.py) with one query per step, and the same loop trains both.

With the anchor at position a, step k reads token a+k, stands at rotary position a-1+k and predicts token a+1+k.
Legend: as drafter.py; K = γ steps, H query heads, G key/value heads, E head_dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from model.anchors import Blocks, context_positions
from model.attention import BlockLayout, cached_attention
from model.config import DrafterConfig
from model.errors import AnchorError
from model.flex import plan_attention
from model.layers import DraftLayer, RMSNorm, init_weights, rotation
from model.target_heads import TargetHeads


class Eagle3Layer(DraftLayer):
    """A draft layer whose attention reads [norm(embedding) ; norm(feature)]; the residual is the feature alone."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def join(self, embedded: Tensor, feature: Tensor) -> Tensor:
        """Two [..., D] to the attention's input [..., 2·D]."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(feature)], dim=-1)


@dataclasses.dataclass(slots=True)
class Eagle3Cache:
    """What decoding keeps: keys and values of step 0, [n-1, G, E], and the last position's feature [D].

    The key of a position needs the token after it, so that of the newest one waits for the anchor.
    """

    key: Tensor
    value: Tensor
    feature: Tensor | None = None

    @property
    def length(self) -> int:
        """Positions read: the next block's anchor position."""
        return len(self.key) + (self.feature is not None)


class Eagle3Drafter(nn.Module):
    """See the module docstring. All parameters are trainable; their names are those of released checkpoints."""

    draft_ids: Tensor | None
    """int64 [V_d]: the target token of each draft token, kept for export; None: the whole vocabulary."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        captured = len(config.target_layer_ids) * config.hidden_size
        self.fc = nn.Linear(captured, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(config)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.register_buffer("draft_ids", None, persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the parameters."""
        return self.fc.weight.dtype

    @property
    def _layer(self) -> Eagle3Layer:
        return cast(Eagle3Layer, self.layers[0])

    def init_weights(self, seed: int) -> Eagle3Drafter:
        """See layers.init_weights; returns self."""
        init_weights(self, seed)
        return self

    def unroll(self, hidden_BTC: Tensor, input_ids_BT: Tensor, blocks: Blocks, heads: TargetHeads) -> Tensor:
        """The layer's outputs [A, K, D] before the final norm: the training-time test of every block.

        hidden_BTC (any dtype) and input_ids_BT are read before the last anchor, the latter also at it.
        Raises AnchorError for an anchor without context: step 0 needs the feature before it.
        """
        if bool((blocks.anchors == blocks.starts).any()):
            raise AnchorError("an EAGLE-3 block cannot start at the first token of a sample: it has no feature before")
        needed = int(blocks.anchors.max())
        layer, config = self._layer, self.config
        feature_BTD = self.fc(hidden_BTC[:, :needed].to(self.dtype))
        # Padding may hold anything; no block reads it, but the embedding must not fail on it.
        next_ids = input_ids_BT[:, 1 : needed + 1].clamp(0, config.vocab_size - 1)
        positions = context_positions(blocks, len(hidden_BTC), needed)
        context_kv = layer.self_attn.key_value(
            layer.join(heads.embed(next_ids).to(self.dtype), feature_BTD), rotation(positions, config, self.dtype)
        )
        feature_AD = feature_BTD[blocks.rows, blocks.anchors - 1]
        outputs: list[Tensor] = []
        keys, values = ([part.new_empty(len(feature_AD), 0, *part.shape[2:])] for part in context_kv)
        for step in range(config.block_size):
            joined = layer.join(heads.embed(blocks.previous_ids[:, step]).to(self.dtype), feature_AD)
            by = rotation(blocks.position_ids[:, step] - 1, config, self.dtype)
            if step > 0:  # step 0's own key stands in the context
                key, value = layer.self_attn.key_value(joined, by)
                keys.append(key[:, None])
                values.append(value[:, None])
            attend = plan_attention(_layout(blocks, step), (len(hidden_BTC), needed))
            query_AQHE = layer.self_attn.query(joined, by)[:, None]
            attended = attend(query_AQHE, (torch.cat(keys, dim=1), torch.cat(values, dim=1)), context_kv)
            feature_AD = layer.finish(feature_AD, attended[:, 0])
            outputs.append(feature_AD)
        return torch.stack(outputs, dim=1)

    def new_cache(self) -> Eagle3Cache:
        """Nothing read yet."""
        shape = (0, self.config.num_key_value_heads, self.config.head_dim)
        empty = torch.empty(shape, dtype=self.dtype, device=self.fc.weight.device)
        return Eagle3Cache(empty, empty)

    def append_context(
        self, cache: Eagle3Cache, token_ids: Sequence[int], hidden_nC: Tensor, heads: TargetHeads
    ) -> None:
        """Read the next n committed positions: their tokens and captured hidden states [n, C]."""
        features = list(self.fc(hidden_nC.to(self.fc.weight)))
        waiting = [] if cache.feature is None else [cache.feature]
        known = [*waiting, *features][:-1]
        if known:
            followers = token_ids[1 - len(waiting) :]
            key, value, _ = self._read(followers, torch.stack(known), len(cache.key), heads)
            cache.key, cache.value = torch.cat([cache.key, key]), torch.cat([cache.value, value])
        cache.feature = features[-1]

    def draft_steps(
        self, cache: Eagle3Cache, anchor_id: int, heads: TargetHeads, pick: Callable[[Tensor], int]
    ) -> None:
        """Draft one block after the anchor at position cache.length; `pick` turns each step's normed hidden state [D]
        into the token that the next step reads. The cache stays as it is.

        Raises AnchorError before anything was appended.
        """
        if cache.feature is None:
            raise AnchorError("EAGLE-3 cannot draft before the prompt was appended: it has no feature to start from")
        key, value, feature, token = cache.key, cache.value, cache.feature[None], anchor_id
        for _ in range(self.config.block_size):
            new_key, new_value, query = self._read([token], feature, len(key), heads)
            key, value = torch.cat([key, new_key]), torch.cat([value, new_value])
            feature = self._layer.finish(feature, cached_attention(query, key, value))
            token = pick(self.norm(feature[0]))

    def _read(
        self, token_ids: Sequence[int], feature_nD: Tensor, position: int, heads: TargetHeads
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values [n, G, E] and queries [n, H, E] of n features and the tokens after them, from `position` on."""
        ids = torch.tensor(token_ids, dtype=torch.int64, device=feature_nD.device)
        joined = self._layer.join(heads.embed(ids).to(self.dtype), feature_nD)
        by = rotation(torch.arange(position, position + len(ids), device=ids.device), self.config, self.dtype)
        return *self._layer.self_attn.key_value(joined, by), self._layer.self_attn.query(joined, by)


def _layout(blocks: Blocks, step: int) -> BlockLayout:
    return BlockLayout(rows=blocks.rows, starts=blocks.starts, anchors=blocks.anchors, num_queries=1, num_slots=step)
