"""The EAGLE-3 drafter (arXiv 2503.01840): one autoregressive layer, trained by unrolling its own predictions.

The layer reads the embedding of a token beside a feature vector: the fused captured layers of the position before
(step 0), then its own output. Training-time test: from every anchor the layer runs γ steps on the true tokens and on
its own features, each step seeing what it will see when decoding. The context before the anchor is shared by all
blocks, so a block is a DSpark block (anchors.py) with one query per step, and the same loop trains both.

With the anchor at position a, step k reads token a+k, stands at rotary position a-1+k and predicts token a+1+k.
Legend: as drafter.py; K = γ steps, H query heads, G key/value heads, E head_dim.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from model.anchors import Blocks, context_positions
from model.attention import BlockLayout
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

    def init_weights(self, seed: int) -> Eagle3Drafter:
        """See layers.init_weights; returns self."""
        init_weights(self, seed)
        return self

    def fuse(self, hidden: Tensor) -> Tensor:
        """Captured layers [..., C] in any dtype to features [..., D]."""
        return self.fc(hidden.to(self.dtype))

    def unroll(self, hidden_BTC: Tensor, input_ids_BT: Tensor, blocks: Blocks, heads: TargetHeads) -> Tensor:
        """The layer's outputs [A, K, D] before the final norm: the training-time test of every block.

        hidden_BTC (any dtype) and input_ids_BT are read before the last anchor, the latter also at it.
        Raises AnchorError for an anchor without context: step 0 needs the feature before it.
        """
        if bool((blocks.anchors == blocks.starts).any()):
            raise AnchorError("an EAGLE-3 block cannot start at the first token of a sample: it has no feature before")
        needed = int(blocks.anchors.max())
        feature_BTD = self.fuse(hidden_BTC[:, :needed])
        # Padding may hold anything; no block reads it, but the embedding must not fail on it.
        next_ids = input_ids_BT[:, 1 : needed + 1].clamp(0, self.config.vocab_size - 1)
        positions_BT = context_positions(blocks, len(hidden_BTC), needed)
        context_kv = self._layer.self_attn.key_value(
            self._join(next_ids, feature_BTD, heads), rotation(positions_BT, self.config, self.dtype)
        )
        feature_AD = feature_BTD[blocks.rows, blocks.anchors - 1]
        outputs: list[Tensor] = []
        keys, values = ([part.new_empty(len(feature_AD), 0, *part.shape[2:])] for part in context_kv)
        for step in range(self.config.block_size):
            (key, value), query = self.read(
                blocks.previous_ids[:, step], feature_AD, blocks.position_ids[:, step] - 1, heads
            )
            if step > 0:  # step 0's own key stands in the context
                keys.append(key[:, None])
                values.append(value[:, None])
            attend = plan_attention(_layout(blocks, step), (len(hidden_BTC), needed))
            attended = attend(query[:, None], (torch.cat(keys, dim=1), torch.cat(values, dim=1)), context_kv)
            feature_AD = self.finish(feature_AD, attended[:, 0])
            outputs.append(feature_AD)
        return torch.stack(outputs, dim=1)

    def read(
        self, ids: Tensor, feature: Tensor, positions: Tensor, heads: TargetHeads
    ) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """(keys, values) [..., G, E] and queries [..., H, E] of tokens [...] beside the features [..., D] before them.

        `positions` [...] are the rotary ones: those of the features.
        """
        joined, by = self._join(ids, feature, heads), rotation(positions, self.config, self.dtype)
        return self._layer.self_attn.key_value(joined, by), self._layer.self_attn.query(joined, by)

    def finish(self, feature: Tensor, attended: Tensor) -> Tensor:
        """The layer's output [..., D], which is the next step's feature, from attention outputs [..., H, E]."""
        return self._layer.finish(feature, attended)

    @property
    def _layer(self) -> Eagle3Layer:
        return cast(Eagle3Layer, self.layers[0])

    def _join(self, ids: Tensor, feature: Tensor, heads: TargetHeads) -> Tensor:
        return self._layer.join(heads.embed(ids).to(self.dtype), feature)


def _layout(blocks: Blocks, step: int) -> BlockLayout:
    return BlockLayout(rows=blocks.rows, starts=blocks.starts, anchors=blocks.anchors, num_queries=1, num_slots=step)
