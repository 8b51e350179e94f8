"""The drafter family: one place that knows which class and which loss go with a kind."""

from __future__ import annotations

from model.config import DrafterConfig
from model.drafter import DSparkDrafter
from model.eagle3 import Eagle3Drafter
from model.eagle3_loss import eagle3_loss
from model.losses import DrafterInputs, LossConfig, LossOutput, dspark_loss
from model.target_heads import TargetHeads

AnyDrafter = DSparkDrafter | Eagle3Drafter


def new_drafter(config: DrafterConfig) -> AnyDrafter:
    """The class that a configuration names, its weights not initialised."""
    return Eagle3Drafter(config) if config.kind == "eagle3" else DSparkDrafter(config)


def drafter_loss(drafter: AnyDrafter, heads: TargetHeads, inputs: DrafterInputs, config: LossConfig) -> LossOutput:
    """The training objective of the drafter's kind, as additive sums."""
    if isinstance(drafter, Eagle3Drafter):
        return eagle3_loss(drafter, heads, inputs, config)
    return dspark_loss(drafter, heads, inputs, config)
