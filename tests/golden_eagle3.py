"""The golden EAGLE-3 case (see golden/README.md) in this project's terms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model.anchors import Blocks
from model.config import DrafterConfig
from model.eagle3 import Eagle3Drafter
from model.losses import DrafterInputs, LossConfig
from model.target_heads import TargetHeads
from tests.golden_data import drafter_config, read_json, tensors

STEPS, DECAY = 3, 0.8


def eagle3_config(**overrides: Any) -> DrafterConfig:
    settings: dict[str, Any] = {
        "kind": "eagle3",
        "num_draft_layers": 1,
        "target_layer_ids": (0, 2, 3, 5, 6),
        "block_size": STEPS,
        "markov_head_type": "none",
        "markov_rank": 0,
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
    }
    return drafter_config(**{**settings, **overrides})


@dataclass
class Eagle3Case:
    """The reference counts positions, not anchors: position i is our anchor i + 1."""

    drafter: Eagle3Drafter
    heads: TargetHeads
    inputs: DrafterInputs
    tensors: dict[str, Tensor]
    scalars: dict[str, Any]
    loss_config: LossConfig

    def at_blocks(self, name: str, step: int) -> Tensor:
        """[A, ...] of a golden [B, S, ...] tensor of one step."""
        blocks = self.inputs.blocks
        return self.tensors[f"step{step}.{name}"][blocks.rows, blocks.anchors - 1]


def load_eagle3() -> Eagle3Case:
    inputs, case, state = tensors("inputs"), tensors("eagle3/case"), tensors("eagle3/state")
    heads = TargetHeads.from_tensors(state.pop("embed_tokens.weight"), state.pop("lm_head.weight"))
    drafter = Eagle3Drafter(eagle3_config())
    drafter.load_state_dict(state)
    blocks = golden_eagle3_blocks(
        inputs["input_ids"], torch.stack([case[f"step{s}.position_mask"] for s in range(STEPS)])
    )
    return Eagle3Case(
        drafter=drafter,
        heads=heads,
        inputs=DrafterInputs(
            inputs["target_hidden_states_eagle3"], inputs["target_last_hidden_states"], blocks, inputs["input_ids"]
        ),
        tensors=case,
        scalars=read_json("eagle3/scalars.json"),
        loss_config=LossConfig(
            ce=1.0, l1=0.0, confidence=0.0, confidence_detached=False, decay_gamma=4.0, rows_per_chunk=16
        ),
    )


def golden_eagle3_blocks(input_ids_BT: Tensor, mask_SBT: Tensor) -> Blocks:
    """The reference's own supervision, which lies two tokens behind ours and is no prefix of a block's steps."""
    rows, positions = mask_SBT.any(dim=0).nonzero(as_tuple=True)
    anchors, steps = positions + 1, torch.arange(STEPS)
    columns = anchors[:, None] + steps
    padded = torch.nn.functional.pad(input_ids_BT, (0, STEPS + 1))
    supervised = mask_SBT[:, rows, positions].T > 0.5
    return Blocks(
        rows=rows,
        starts=torch.zeros_like(rows),
        anchors=anchors,
        input_ids=padded[rows[:, None], columns],
        position_ids=columns,
        labels=padded[rows[:, None], columns + 1],
        previous_ids=padded[rows[:, None], columns],
        context_rows=columns.clamp(max=input_ids_BT.shape[1] - 1),
        supervised=supervised,
        weights=supervised * DECAY**steps,
        draftable_tokens=1,
    )
