"""The DSpark drafter (DSpark §3): a parallel block backbone, a sequential head and a confidence head.

One class for every target family: only D, V and the frozen embedding and lm_head (TargetHeads, passed in) must match.
Parameter names are those of the released checkpoints. Legend: B batch, T sequence, C = L·D captured width, A blocks,
S query slots, K = γ draft positions, D hidden, V_d draft vocabulary, R Markov rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from model.anchors import Blocks, context_positions, predicting_slots
from model.attention import BlockLayout
from model.confidence import ConfidenceHead
from model.config import DrafterConfig
from model.flex import plan_attention
from model.layers import DraftLayer, RMSNorm, init_weights, rotation
from model.markov import build_markov_head
from model.target_heads import TargetHeads


@dataclasses.dataclass(frozen=True, slots=True)
class HeadOutputs:
    """What the small heads say about whole blocks under teacher forcing."""

    features_AKR: Tensor | None
    """Features of the sequential head, logits = lm_head(hidden) + W2 features; None without head."""
    confidence_AK: Tensor | None
    """Confidence logits; None without head."""


class DSparkDrafter(nn.Module):
    """See the module docstring. All parameters are trainable."""

    draft_ids: Tensor | None
    """int64 [V_d]: the target token of each draft token, kept for export; None: the whole vocabulary, or unset."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        captured = len(config.target_layer_ids) * config.hidden_size
        self.fc = nn.Linear(captured, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_draft_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.markov_head = build_markov_head(config)
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        self.register_buffer("draft_ids", None, persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the parameters."""
        return self.fc.weight.dtype

    def _draft_layers(self) -> Iterator[DraftLayer]:
        return (cast(DraftLayer, layer) for layer in self.layers)

    def init_weights(self, seed: int) -> DSparkDrafter:
        """See layers.init_weights; returns self."""
        init_weights(self, seed)
        return self

    def project_context(self, hidden_BTC: Tensor) -> Tensor:
        """RMSNorm(W_c · captured layers), [B, T, C] in any dtype to [B, T, D]."""
        return self.hidden_norm(self.fc(hidden_BTC.to(self.dtype)))

    def backbone(self, context_BTD: Tensor, blocks: Blocks, heads: TargetHeads) -> Tensor:
        """Final-normed hidden states [A, K, D] of the slots that predict draft tokens."""
        config = self.config
        x_ASD = heads.embed(blocks.input_ids).to(self.dtype)
        block_rotation = rotation(blocks.position_ids, config, self.dtype)
        num_rows, num_columns, _ = context_BTD.shape
        context_rotation = rotation(context_positions(blocks, num_rows, num_columns), config, self.dtype)
        windows = [config.window(index) for index in range(config.num_draft_layers)]
        attend = {
            window: plan_attention(
                BlockLayout(
                    rows=blocks.rows,
                    starts=blocks.starts,
                    anchors=blocks.anchors,
                    num_queries=config.num_inputs,
                    num_slots=config.num_inputs,
                    window=window,
                ),
                (num_rows, num_columns),
            )
            for window in set(windows)
        }
        for layer, window in zip(self._draft_layers(), windows, strict=True):
            normed = layer.input_layernorm(x_ASD)
            attended = attend[window](
                layer.self_attn.query(normed, block_rotation),
                layer.self_attn.key_value(normed, block_rotation),
                layer.self_attn.key_value(context_BTD, context_rotation),
            )
            x_ASD = layer.finish(x_ASD, attended)
        return predicting_slots(self.norm(x_ASD), config)

    def head_outputs(
        self, hidden_AKD: Tensor, previous_ids_AK: Tensor, *, detach_confidence: bool = False
    ) -> HeadOutputs:
        """Markov features and confidence logits, the previous tokens being known.

        `detach_confidence`: the logits' gradient ends at the confidence head's own weights.
        """
        embedded = features = confidence = None
        if self.markov_head is not None:
            embedded = self.markov_head.markov_w1(previous_ids_AK)
            features = self.markov_head.features(embedded, hidden_AKD)
        if self.confidence_head is not None:
            read = (hidden_AKD, embedded)
            if detach_confidence:
                read = (hidden_AKD.detach(), None if embedded is None else embedded.detach())
            confidence = self.confidence_head(*read)
        return HeadOutputs(features, confidence)

    def draft_logits(self, hidden: Tensor, features: Tensor | None, heads: TargetHeads) -> Tensor:
        """lm_head(hidden) + W2 features: [..., D] and [..., R] to [..., V_d] in the parameters' dtype."""
        logits = heads.draft_logits(hidden).to(self.dtype)
        return logits if self.markov_head is None else logits + self.markov_head.markov_w2(features)
