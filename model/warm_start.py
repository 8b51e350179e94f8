"""Start a drafter from another one's checkpoint: DSpark from DFlash, whose backbone is the same.

What the checkpoint holds is taken over exactly; only the heads, which DFlash does not have, may stay as initialised.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from model.errors import CheckpointError
from model.export import load_drafter
from model.family import AnyDrafter

# Parameters that a checkpoint may lack, by prefix.
_NEW_HEADS = ("markov_head.", "confidence_head.")
# Settings that change what the shared weights compute, beside those that their shapes show.
_SAME = ("target_layer_ids", "num_target_layers", "num_attention_heads", "rms_norm_eps", "rope_theta", "layer_types",
         "sliding_window", "mask_token_id", "sample_from_anchor")  # fmt: skip


@dataclass(frozen=True, slots=True)
class WarmStart:
    """Which trainable tensors came from where."""

    source: str
    taken: tuple[str, ...]
    new: tuple[str, ...]

    def text(self) -> str:
        """One line for the run's log, the new tensors named."""
        named = f"; new: {', '.join(self.new)}" if self.new else ""
        return f"started from {self.source}: {len(self.taken)} tensors taken{named}"


@torch.no_grad()
def warm_start(drafter: AnyDrafter, directory: str | Path) -> WarmStart:
    """Copy a checkpoint's weights into a freshly initialised drafter, rounded to its dtype.

    Raises CheckpointError, and changes nothing, when the checkpoint was trained to read something else (layers, mask
    token, block layout), lacks a tensor that is not part of a new head, holds one that has no place, or one of another
    shape.
    """
    source = load_drafter(directory)
    problems = [
        f"{name} is {getattr(source.config, name)!r} there, {getattr(drafter.config, name)!r} here"
        for name in _SAME
        if getattr(source.config, name) != getattr(drafter.config, name)
    ]
    own, other = dict(drafter.named_parameters()), dict(source.named_parameters())
    new = [name for name in own if name not in other]
    problems += [f"{name} is missing there" for name in new if not name.startswith(_NEW_HEADS)]
    problems += [f"{name} has no place here" for name in other if name not in own]
    shared = [name for name in own if name in other]
    problems += [
        f"{name} is {list(other[name].shape)} there, {list(own[name].shape)} here"
        for name in shared
        if other[name].shape != own[name].shape
    ]
    pair = [ids for ids in (source.draft_ids, drafter.draft_ids) if ids is not None]
    if len(pair) == 2 and not torch.equal(pair[0].cpu(), pair[1].cpu()):
        problems.append("the draft vocabulary maps to other tokens there")
    if problems:
        raise CheckpointError(
            f"{directory}: cannot start from it: {'; '.join(problems)}; give the drafter the checkpoint's shape, or "
            "train without training.init_from"
        )
    for name in shared:
        own[name].copy_(other[name])
    return WarmStart(str(directory), tuple(shared), tuple(new))
