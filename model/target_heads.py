"""The target's embedding, lm_head and final norm, read by key from its safetensors; nothing else of it is loaded.

Legend: D hidden size, V vocabulary, V_d draft vocabulary (V_d = V unless reduced).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from model.draft_vocab import check_draft_ids
from model.errors import CheckpointError
from model.target_families import HeadFacts, head_facts

_PREFIXES = ("model.", "", "model.language_model.", "language_model.model.")
_HEAD_KEYS = ("lm_head.weight", "model.lm_head.weight", "language_model.lm_head.weight")


class TargetHeads(nn.Module):
    """Frozen embedding and lm_head, both [V, D]; one shared tensor when the target ties them.

    They are buffers: no optimizer, checkpoint or gradient ever touches them. `embed` and `logits` are the target's own
    (embedding scale and soft-cap included); `draft_logits` is what a drafter shares of it: the matrix alone, over the
    draft vocabulary. It is not capped, as in the engines that serve such a drafter.
    """

    embedding_VD: Tensor
    untied_head_VD: Tensor | None
    draft_ids: Tensor | None
    """int64 [V_d]: the target token of each draft token; None: the whole vocabulary, in order."""
    _reduced_head_VD: Tensor | None

    def __init__(
        self,
        embedding_VD: Tensor,
        lm_head_VD: Tensor | None,
        *,
        embedding_scale: float | None = None,
        logit_softcap: float | None = None,
        draft_ids: Tensor | None = None,
    ) -> None:
        super().__init__()
        if lm_head_VD is not None and lm_head_VD.shape != embedding_VD.shape:
            raise CheckpointError(
                f"lm_head is {list(lm_head_VD.shape)}, the embedding {list(embedding_VD.shape)}; they must agree"
            )
        self.embedding_scale, self.logit_softcap = embedding_scale, logit_softcap
        self.register_buffer("embedding_VD", embedding_VD.detach(), persistent=False)
        head = None if lm_head_VD is None else lm_head_VD.detach()
        self.register_buffer("untied_head_VD", head, persistent=False)
        if draft_ids is not None:
            draft_ids = check_draft_ids(draft_ids, len(embedding_VD)).to(embedding_VD.device)
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        rows = None if draft_ids is None else self.lm_head_VD[draft_ids]
        self.register_buffer("_reduced_head_VD", rows, persistent=False)

    @classmethod
    def from_tensors(
        cls, embedding_VD: Tensor, lm_head_VD: Tensor | None = None, *, draft_ids: Tensor | None = None
    ) -> TargetHeads:
        """From two [V, D] tensors; without the second the embedding is the head too."""
        return cls(embedding_VD, lm_head_VD, draft_ids=draft_ids)

    @property
    def lm_head_VD(self) -> Tensor:
        """The target's output matrix [V, D]."""
        return self.embedding_VD if self.untied_head_VD is None else self.untied_head_VD

    @property
    def draft_head_VD(self) -> Tensor:
        """Its rows of the draft vocabulary [V_d, D], row d for draft token d; all of it when that is not reduced."""
        return self.lm_head_VD if self._reduced_head_VD is None else self._reduced_head_VD

    @property
    def tied(self) -> bool:
        """Whether embedding and head are one tensor."""
        return self.untied_head_VD is None

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [...] int64 to what enters the target's first layer, [..., D] in the heads' dtype."""
        return self._scaled(F.embedding(ids, self.embedding_VD))

    def embedding_table(self, dtype: torch.dtype) -> Tensor:
        """Every row that `embed` gives in heads of that dtype, [V, D]."""
        return self._scaled(self.embedding_VD.to(dtype))

    def _scaled(self, vectors: Tensor) -> Tensor:
        if self.embedding_scale is None:
            return vectors
        # The factor is rounded to the dtype first, as the family does: √3840 is 61.97 but 62 in bf16.
        return vectors * torch.tensor(self.embedding_scale, dtype=vectors.dtype).item()

    def logits(self, hidden: Tensor) -> Tensor:
        """The target's logits [..., V] in the heads' dtype, from hidden states after its final norm [..., D]."""
        logits = F.linear(hidden.to(self.lm_head_VD.dtype), self.lm_head_VD)
        if self.logit_softcap is None:
            return logits
        return torch.tanh(logits / self.logit_softcap) * self.logit_softcap

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """A drafter's logits before its sequential head, [..., V_d] in the heads' dtype, from its hidden [..., D]."""
        return F.linear(hidden.to(self.draft_head_VD.dtype), self.draft_head_VD)

    def to_target(self, draft_logits: Tensor) -> Tensor:
        """Draft logits [..., V_d] over the target's vocabulary [..., V]: -inf where no draft token stands."""
        if self.draft_ids is None:
            return draft_logits
        wide = draft_logits.new_full((*draft_logits.shape[:-1], len(self.embedding_VD)), float("-inf"))
        wide[..., self.draft_ids] = draft_logits
        return wide


class FinalNorm(nn.Module):
    """The target's final RMS norm, frozen: from the last layer's output to the `last hidden state` of the cache."""

    weight_D: Tensor

    def __init__(self, weight_D: Tensor, *, eps: float, adds_one: bool) -> None:
        super().__init__()
        self.eps, self.adds_one = eps, adds_one
        self.register_buffer("weight_D", weight_D.detach(), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., D] to the same shape and dtype; statistics in float32, rounded where the family rounds."""
        wide = hidden.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.adds_one:
            return (normed * (1.0 + self.weight_D.float())).to(hidden.dtype)
        return self.weight_D * normed.to(hidden.dtype)


def load_target_heads(
    model_dir: str | Path,
    *,
    dtype: torch.dtype | None,
    device: torch.device | str = "cpu",
    draft_ids: Tensor | None = None,
) -> TargetHeads:
    """Read embedding and lm_head of a target in Hugging Face layout (one or many safetensors files, tied or not).

    dtype None keeps the stored one. draft_ids: int64 [V_d] of a reduced draft vocabulary.
    Raises CheckpointError when a file or a needed tensor is missing or misshapen, UnsupportedTarget for a family that
    the drafter does not know, DrafterConfigError for draft ids that do not fit.
    """
    folder = Path(model_dir)
    facts = read_facts(folder)
    files = _tensor_files(folder)
    if biases := [name for name in files if name.endswith("lm_head.bias")]:
        raise CheckpointError(f"{folder}: holds {biases[0]}; an lm_head with a bias is not supported")
    embedding = _load_first(folder, files, [f"{prefix}embed_tokens.weight" for prefix in _PREFIXES])
    head = None if facts.tied else _load_first(folder, files, _HEAD_KEYS)
    for name, tensor in (("embedding", embedding), ("lm_head", head)):
        if tensor is not None and list(tensor.shape) != [facts.vocab_size, facts.hidden_size]:
            raise CheckpointError(
                f"{folder}: the {name} is {list(tensor.shape)}, config.json says vocab_size {facts.vocab_size} and "
                f"hidden_size {facts.hidden_size}; the two do not belong together"
            )
    if embedding is None or (head is None and not facts.tied):
        name = "embedding" if embedding is None else "lm_head"
        raise CheckpointError(
            f"{folder}: no {name} among the {len(files)} tensors of the checkpoint, and config.json "
            f"{'ties' if facts.tied else 'does not tie'} the two; the checkpoint is incomplete"
        )
    embedding = embedding.to(device=device, dtype=dtype)
    return TargetHeads(
        embedding,
        None if head is None else head.to(device=device, dtype=dtype),
        embedding_scale=facts.embedding_scale,
        logit_softcap=facts.logit_softcap,
        draft_ids=draft_ids,
    )


def load_final_norm(model_dir: str | Path, *, dtype: torch.dtype | None) -> FinalNorm:
    """Read the final norm of a target. Raises CheckpointError and UnsupportedTarget as load_target_heads does."""
    folder = Path(model_dir)
    facts = read_facts(folder)
    weight = _load_first(folder, _tensor_files(folder), [f"{prefix}norm.weight" for prefix in _PREFIXES])
    if weight is None or list(weight.shape) != [facts.hidden_size]:
        found = "none" if weight is None else str(list(weight.shape))
        raise CheckpointError(f"{folder}: wanted a final norm of {facts.hidden_size} weights, found {found}")
    return FinalNorm(weight.to(dtype), eps=facts.norm_eps, adds_one=facts.norm_adds_one)


def read_facts(model_dir: str | Path) -> HeadFacts:
    """The target's facts from its config.json. Raises CheckpointError (unreadable) and UnsupportedTarget."""
    path = Path(model_dir) / "config.json"
    return head_facts(_read_json(path), source=str(path))


def _tensor_files(folder: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return dict(_read_json(index)["weight_map"])
    single = folder / "model.safetensors"
    if not single.exists():
        raise CheckpointError(f"{folder}: found neither {index.name} nor {single.name}; wanted a target in safetensors")
    try:
        with safe_open(single, framework="pt") as tensors:
            return dict.fromkeys(tensors.keys(), single.name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{single}: not readable as safetensors: {error}") from error


def _load_first(folder: Path, files: Mapping[str, str], keys: list[str] | tuple[str, ...]) -> Tensor | None:
    for key in keys:
        if key in files:
            try:
                with safe_open(folder / files[key], framework="pt") as tensors:
                    return tensors.get_tensor(key)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{folder / files[key]}: cannot read {key!r}: {error}") from error
    return None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
