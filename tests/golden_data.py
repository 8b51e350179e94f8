"""Reader of tests/golden (see its README.md), in this project's terms."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from model.anchors import Blocks, build_blocks
from model.config import DrafterConfig
from model.drafter import DSparkDrafter
from model.losses import DrafterInputs, LossConfig
from model.target_heads import TargetHeads

GOLDEN = Path(__file__).parent / "golden"


def tensors(*names: str) -> dict[str, Tensor]:
    """Merged safetensors files; later ones win."""
    merged: dict[str, Tensor] = {}
    for name in names:
        merged |= load_file(GOLDEN / (name if name.endswith(".safetensors") else f"{name}.safetensors"))
    return merged


def read_json(name: str) -> Any:
    return json.loads((GOLDEN / name).read_text(encoding="utf-8"))


def drafter_config(**overrides: Any) -> DrafterConfig:
    settings: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_draft_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 199,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 512,
        "target_layer_ids": (1, 3, 5),
        "num_target_layers": 8,
        "block_size": 7,
        "mask_token_id": 190,
        "markov_head_type": "vanilla",
        "markov_rank": 8,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "sample_from_anchor": True,
    }
    return DrafterConfig(**{**settings, **overrides})


def split_state(state: dict[str, Tensor], config: DrafterConfig) -> tuple[DSparkDrafter, TargetHeads]:
    """A drafter and the target's heads from a state with the reference's names."""
    state = dict(state)
    heads = TargetHeads.from_tensors(state.pop("embed_tokens.weight"), state.pop("lm_head.weight"))
    drafter = DSparkDrafter(config)
    drafter.load_state_dict(state)
    return drafter, heads


def tiny_heads() -> TargetHeads:
    state = tensors("target_tiny")
    return TargetHeads.from_tensors(state["model.embed_tokens.weight"], state["lm_head.weight"])


def golden_anchors() -> list[np.ndarray]:
    """The fixed anchors of both samples, dummies left out."""
    inputs = tensors("inputs")
    pairs = zip(inputs["anchor_positions"], inputs["block_keep_mask"], strict=True)
    return [positions[keep].numpy() for positions, keep in pairs]


def golden_inputs(blocks: Blocks) -> DrafterInputs:
    inputs = tensors("inputs")
    return DrafterInputs(inputs["target_hidden_states"], inputs["target_last_hidden_states"], blocks)


def golden_blocks(config: DrafterConfig, decay_gamma: float | None = 4.0) -> Blocks:
    inputs = tensors("inputs")
    return build_blocks(inputs["input_ids"], inputs["loss_mask"].bool(), golden_anchors(), config, decay_gamma)


@dataclass
class Case:
    """One DSpark or DFlash case."""

    name: str
    scalars: dict[str, Any]
    drafter: DSparkDrafter
    heads: TargetHeads
    blocks: Blocks
    inputs: DrafterInputs
    loss_config: LossConfig
    common: dict[str, Tensor]
    logits: dict[str, Tensor]
    confidence_pred: Tensor | None
    grads: dict[str, Tensor]

    def kept(self, tensor_BN: Tensor) -> Tensor:
        """Rows of a golden [B, N, ...] tensor that belong to real anchors: [A, ...]."""
        return tensor_BN[tensors("inputs")["block_keep_mask"]]


def case_names() -> list[str]:
    return list(read_json("dspark/scalars.json")["cases"])


def load_case(name: str) -> Case:
    scalars = read_json("dspark/scalars.json")["cases"][name]
    settings = scalars["config"]
    files = settings["files"]
    config = drafter_config(
        block_size=settings["block_size"],
        markov_head_type=settings["markov_head_type"],
        markov_rank=settings["markov_rank"],
        enable_confidence_head=settings["enable_confidence_head"],
        confidence_head_with_markov=settings["confidence_head_with_markov"],
    )
    drafter, heads = split_state(tensors(*files["state"]), config)
    blocks = golden_blocks(config, settings["loss_decay_gamma"])
    case = tensors(files["case"])
    return Case(
        name=name,
        scalars=scalars,
        drafter=drafter,
        heads=heads,
        blocks=blocks,
        inputs=golden_inputs(blocks),
        loss_config=LossConfig(
            ce=settings["ce_loss_alpha"],
            l1=settings["l1_loss_alpha"],
            confidence=settings["confidence_head_alpha"],
            confidence_detached=False,
            decay_gamma=settings["loss_decay_gamma"],
            rows_per_chunk=32,
        ),
        common=tensors(files["common"]),
        logits=tensors(files["logits"]),
        confidence_pred=case.get("confidence_pred"),
        grads={key.removeprefix("grad."): value for key, value in case.items() if key.startswith("grad.")},
    )


def max_error(a: Tensor, b: Tensor) -> float:
    return float((a.detach().double() - b.detach().double()).abs().max()) if a.numel() else 0.0


def grads_of(drafter: DSparkDrafter, total: Tensor) -> dict[str, Tensor]:
    """Gradients of `total` by parameter name; every parameter must be reached."""
    names, parameters = zip(*drafter.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(total, parameters), strict=True))
