"""The target's embedding and lm_head, read by key from its safetensors; nothing else of the target is loaded.

Legend: D hidden size, V vocabulary.
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

from model.errors import CheckpointError

_EMBEDDING_KEYS = ("model.embed_tokens.weight", "embed_tokens.weight", "model.language_model.embed_tokens.weight")
_HEAD_KEYS = ("lm_head.weight", "model.lm_head.weight", "language_model.lm_head.weight")
# Settings that change what the two matrices mean; a target with one of them would be read wrongly, so it is refused.
_UNSUPPORTED_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "embedding_multiplier")


class TargetHeads(nn.Module):
    """Frozen embedding and lm_head, both [V, D]; one shared tensor when the target ties them.

    They are buffers: no optimizer, checkpoint or gradient ever touches them.
    """

    embedding_VD: Tensor
    untied_head_VD: Tensor | None

    def __init__(self, embedding_VD: Tensor, lm_head_VD: Tensor | None) -> None:
        super().__init__()
        if lm_head_VD is not None and lm_head_VD.shape != embedding_VD.shape:
            raise CheckpointError(
                f"lm_head is {list(lm_head_VD.shape)}, the embedding {list(embedding_VD.shape)}; they must agree"
            )
        self.register_buffer("embedding_VD", embedding_VD.detach(), persistent=False)
        head = None if lm_head_VD is None else lm_head_VD.detach()
        self.register_buffer("untied_head_VD", head, persistent=False)

    @classmethod
    def from_tensors(cls, embedding_VD: Tensor, lm_head_VD: Tensor | None = None) -> TargetHeads:
        """From two [V, D] tensors; without the second the embedding is the head too."""
        return cls(embedding_VD, lm_head_VD)

    @property
    def lm_head_VD(self) -> Tensor:
        """The output matrix [V, D]."""
        return self.embedding_VD if self.untied_head_VD is None else self.untied_head_VD

    @property
    def tied(self) -> bool:
        """Whether embedding and head are one tensor."""
        return self.untied_head_VD is None

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [...] int64 to vectors [..., D] in the heads' dtype."""
        return F.embedding(ids, self.embedding_VD)

    def logits(self, hidden: Tensor) -> Tensor:
        """Normed hidden states [..., D] to logits [..., V] in the heads' dtype."""
        return F.linear(hidden.to(self.lm_head_VD.dtype), self.lm_head_VD)


def load_target_heads(model_dir: str | Path, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> TargetHeads:
    """Read embedding and lm_head of a target in Hugging Face layout (one or many safetensors files, tied or not).

    Raises CheckpointError when a file or a needed tensor is missing, or when the target scales or caps its logits
    or embeddings (Gemma, Cohere, Granite), which this drafter does not reproduce.
    """
    folder = Path(model_dir)
    config = _read_json(folder / "config.json")
    text = config.get("text_config") or config
    _refuse_scaled_targets(folder, text)
    files = _tensor_files(folder)
    embedding = _load_first(folder, files, _EMBEDDING_KEYS)
    if embedding is None:
        raise CheckpointError(f"{folder}: no embedding among the tensors; wanted one of {list(_EMBEDDING_KEYS)}")
    tied = bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))
    head = None if tied else _load_first(folder, files, _HEAD_KEYS)
    if head is None and not tied:
        raise CheckpointError(
            f"{folder}: config.json says that the embeddings are not tied, yet there is no {_HEAD_KEYS[0]!r}; "
            "the checkpoint is incomplete"
        )
    embedding = embedding.to(device=device, dtype=dtype)
    return TargetHeads(embedding, None if head is None else head.to(device=device, dtype=dtype))


def _refuse_scaled_targets(folder: Path, text: Mapping[str, Any]) -> None:
    neutral = (None, 1, 1.0)
    found = [key for key in _UNSUPPORTED_SETTINGS if text.get(key) not in neutral]
    if str(text.get("model_type", "")).startswith("gemma"):
        found.append("gemma's embedding scale")
    if found:
        raise CheckpointError(
            f"{folder}: this target uses {', '.join(found)}, which the drafter does not reproduce yet; "
            "supported families: Llama, SmolLM, Mistral, Qwen2, Qwen3"
        )


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


def _load_first(folder: Path, files: Mapping[str, str], keys: tuple[str, ...]) -> Tensor | None:
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
