"""A reduced draft vocabulary: the V_d target tokens that a drafter may propose, and their mapping.

A drafter over V_d rows drafts with a smaller lm_head and a smaller W2. Decoding stays lossless: q is zero outside the
draft vocabulary, so what the target wants from there comes as a correction. Draft token d stands for target token
`ids[d]`; checkpoints hold the offsets `d2t[d] = ids[d] - d`, as vLLM and the released EAGLE-3 drafters do.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from model.errors import DrafterConfigError


def check_draft_ids(ids: Tensor, vocab_size: int, *, always: Iterable[int] = ()) -> Tensor:
    """`ids` as int64 [V_d] on the CPU, checked: distinct, inside the vocabulary, all of `always` among them.

    Raises DrafterConfigError naming the first offender.
    """
    checked = ids.detach().to(device="cpu", dtype=torch.int64)
    if checked.dim() != 1 or not 0 < len(checked) <= vocab_size:
        raise DrafterConfigError(
            f"draft vocabulary of shape {list(ids.shape)}; wanted one row of 1 to {vocab_size} target token ids"
        )
    outside = checked[(checked < 0) | (checked >= vocab_size)]
    if len(outside):
        raise DrafterConfigError(
            f"draft vocabulary holds {len(outside)} ids outside the target's 0 to {vocab_size - 1}, the first "
            f"{int(outside[0])}; it was made for another target"
        )
    distinct, counts = torch.unique(checked, return_counts=True)
    if len(distinct) != len(checked):
        raise DrafterConfigError(
            f"draft vocabulary maps {len(checked) - len(distinct)} draft tokens to a target token that another one "
            f"stands for already, the first {int(distinct[counts > 1][0])}"
        )
    lacking = sorted(set(always) - set(distinct.tolist()))
    if lacking:
        raise DrafterConfigError(
            f"draft vocabulary lacks {len(lacking)} tokens that a drafter must be able to propose (stop, special and "
            f"byte tokens), the first {lacking[0]}"
        )
    return checked


def most_frequent(counts_V: Tensor, size: int, *, always: Iterable[int]) -> Tensor:
    """The `size` most frequent token ids, int64 ascending, `always` included; of equals the smaller id.

    counts_V: int64 [V], how often each token was generated. Raises DrafterConfigError when `always` does not fit.
    """
    kept = sorted(set(always))
    if not len(kept) <= size <= len(counts_V):
        raise DrafterConfigError(
            f"draft vocabulary of {size}: wanted at least the {len(kept)} stop, special and byte tokens and at most "
            f"the target's {len(counts_V)}"
        )
    rank = counts_V.detach().to(device="cpu", dtype=torch.int64, copy=True)
    rank[kept] = torch.iinfo(torch.int64).max
    order = torch.argsort(rank, descending=True, stable=True)
    return check_draft_ids(order[:size].sort().values, len(counts_V), always=kept)


def to_offsets(ids: Tensor) -> Tensor:
    """d2t: int64 [V_d] offsets from draft token to target token."""
    return ids - torch.arange(len(ids), device=ids.device)


def from_offsets(d2t: Tensor, vocab_size: int) -> Tensor:
    """The ids that offsets stand for, checked. Raises DrafterConfigError."""
    return check_draft_ids(d2t.to(torch.int64) + torch.arange(len(d2t), device=d2t.device), vocab_size)


def membership(ids: Tensor, vocab_size: int) -> Tensor:
    """t2d: bool [V], which target tokens the draft vocabulary holds."""
    member = torch.zeros(vocab_size, dtype=torch.bool)
    member[ids.cpu()] = True
    return member
