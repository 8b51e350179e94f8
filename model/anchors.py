"""Anchors and block slots: the ONE place that maps a slot to its position, label, previous token and weight.

Training, decoding and export call these functions, so they cannot disagree about the layout (design: block layout).
Legend: B rows, T columns, N documents, A anchors of the whole micro-batch (ragged over documents, no dummies), K = γ
draft tokens, S query slots of a block (K, or K + 1 when the anchor's own slot predicts nothing).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from model.config import DrafterConfig
from model.errors import AnchorError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """The blocks of a micro-batch, one row per anchor.

    Where `supervised` is false, `labels`, `previous_ids` and `context_rows` hold harmless legal values (0 or the
    anchor), never what the batch holds there.
    """

    rows: Tensor
    """int64 [A]: row of the batch that the block belongs to."""
    starts: Tensor
    """int64 [A]: column of the row where the block's document begins."""
    anchors: Tensor
    """int64 [A]: column of the last committed token; its position a within the document is position_ids[:, 0]."""
    input_ids: Tensor
    """int64 [A, S]: the anchor token, then mask tokens."""
    position_ids: Tensor
    """int64 [A, S]: a, a+1, ..."""
    labels: Tensor
    """int64 [A, K]: the token at a+1+k, for k = 0..K-1."""
    previous_ids: Tensor
    """int64 [A, K]: the token at a+k (teacher forcing)."""
    context_rows: Tensor
    """int64 [A, K]: column before the label's, where the last hidden state predicts the label."""
    supervised: Tensor
    """bool [A, K]: every label up to this one lies in the document and is supervised."""
    weights: Tensor
    """float32 [A, K]: exp(-k / decay_gamma) where supervised, else 0."""
    draftable_tokens: int
    """Supervised tokens that some legal anchor of these samples could predict: the denominator of coverage."""

    def to(self, device: torch.device | str) -> Blocks:
        """The same blocks on another device."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "draftable_tokens"]
        return dataclasses.replace(self, **{name: getattr(self, name).to(device) for name in names})


@dataclasses.dataclass(frozen=True, slots=True)
class Documents:
    """Where the documents of a micro-batch stand: int64 [N] each."""

    rows: np.ndarray
    starts: np.ndarray
    """Column of the first token, whose position is 0."""
    lengths: np.ndarray

    @classmethod
    def one_per_row(cls, num_rows: int, num_columns: int) -> Documents:
        """Without packing: padding is unsupervised, so it may count as part of the document."""
        return cls(np.arange(num_rows), np.zeros(num_rows, np.int64), np.full(num_rows, num_columns))


def legal_anchors(loss_mask: np.ndarray) -> np.ndarray:
    """Positions a with supervised[a] and supervised[a+1], ascending, int64.

    The first response token comes from prefill and is never drafted, so nothing predicts it.
    """
    mask = np.asarray(loss_mask, dtype=bool)
    return np.flatnonzero(mask[:-1] & mask[1:]).astype(np.int64)


def draw_anchors(loss_mask: np.ndarray, num_anchors: int, *, seed: int, epoch: int, position: int) -> np.ndarray:
    """min(num_anchors, legal) distinct anchors, ascending, int64 [A].

    A pure function of (loss_mask, num_anchors, seed, epoch, position): Philox with the seed as key and (epoch,
    position) as counter, so neither rank, worker, process nor batch matters.
    """
    legal = legal_anchors(loss_mask)
    if len(legal) <= num_anchors:
        return legal
    stream = np.random.Philox(key=seed % 2**64, counter=[0, 0, epoch, position])
    # Raw words only: numpy promises their stream for ever, unlike that of Generator's methods.
    chosen = np.argsort(stream.random_raw(len(legal)), kind="stable")[:num_anchors]
    return np.sort(legal[chosen])


def decay_weights(block_size: int, decay_gamma: float | None) -> np.ndarray:
    """exp(-k / decay_gamma), float32 [K], k from 0 (DSpark eq. of the position weights); None or <= 0: no decay."""
    if decay_gamma is None or decay_gamma <= 0:
        return np.ones(block_size, dtype=np.float32)
    return np.exp(-np.arange(block_size, dtype=np.float32) / np.float32(decay_gamma)).astype(np.float32)


def block_weight_sum(
    loss_mask: np.ndarray, anchors: np.ndarray, config: DrafterConfig, decay_gamma: float | None
) -> float:
    """Σ of the weights that build_blocks would give one sample, from the loss mask alone."""
    lengths = _supervised_lengths(np.asarray(loss_mask, dtype=bool), anchors, config.block_size)
    totals = np.concatenate([[0.0], np.cumsum(decay_weights(config.block_size, decay_gamma), dtype=np.float64)])
    return float(totals[lengths].sum())


def _supervised_lengths(mask: np.ndarray, anchors: np.ndarray, block_size: int) -> np.ndarray:
    """Labels of each block before the first that is unsupervised or outside, at most block_size. int64 [A]."""
    unsupervised = np.append(np.flatnonzero(~mask), len(mask))
    first = np.asarray(anchors, dtype=np.int64) + 1
    return np.minimum(unsupervised[np.searchsorted(unsupervised, first)] - first, block_size)


def block_inputs(anchor_ids: Tensor, anchors: Tensor, config: DrafterConfig) -> tuple[Tensor, Tensor]:
    """Query slots of blocks: (input_ids, position_ids), both int64 [A, S], from anchor tokens and positions [A]."""
    input_ids = anchor_ids.new_full((len(anchor_ids), config.num_inputs), config.mask_token_id)
    input_ids[:, 0] = anchor_ids
    return input_ids, anchors[:, None] + torch.arange(config.num_inputs, device=anchors.device)


def predicting_slots(hidden: Tensor, config: DrafterConfig) -> Tensor:
    """Slot outputs [A, S, D] to those that predict draft tokens [A, K, D]: slot k predicts label a+1+k."""
    return hidden if config.sample_from_anchor else hidden[:, 1:]


def build_blocks(
    input_ids_BT: Tensor,
    loss_mask_BT: Tensor,
    anchors: Sequence[np.ndarray],
    config: DrafterConfig,
    decay_gamma: float | None,
    documents: Documents | None = None,
) -> Blocks:
    """Blocks of a micro-batch: `anchors[n]` are positions in document n, in any order; any may be empty.

    input_ids_BT is int64, loss_mask_BT bool (padding false). Without `documents` every row is one. No block reaches
    beyond its document. Everything is made on the CPU: move with Blocks.to.
    Raises AnchorError for anchors that are not legal in their document.
    """
    mask_BT = loss_mask_BT.cpu().numpy().astype(bool)
    places = Documents.one_per_row(*mask_BT.shape) if documents is None else documents
    if len(anchors) != len(places.rows):
        raise AnchorError(f"anchors for {len(anchors)} samples in a batch of {len(places.rows)}; wanted one array each")
    masks = [
        mask_BT[row, start : start + length]
        for row, start, length in zip(places.rows, places.starts, places.lengths, strict=True)
    ]
    legal = [legal_anchors(mask) for mask in masks]
    lengths = [_checked_lengths(masks[n], anchors[n], legal[n], config, n) for n in range(len(masks))]
    counts = [len(drawn) for drawn in anchors]
    rows, starts = (
        torch.from_numpy(np.repeat(values, counts).astype(np.int64)) for values in (places.rows, places.starts)
    )
    positions_A = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *anchors]).astype(np.int64))
    lengths_A = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *lengths]).astype(np.int64))
    ids_BT, anchors_A = input_ids_BT.cpu(), starts + positions_A

    slots_K = torch.arange(config.block_size)
    supervised = slots_K < lengths_A[:, None]
    context_rows = torch.where(supervised, anchors_A[:, None] + slots_K, anchors_A[:, None])
    previous_ids = ids_BT[rows[:, None], context_rows]
    label_columns = torch.where(supervised, context_rows + 1, anchors_A[:, None])
    labels = ids_BT[rows[:, None], label_columns].masked_fill(~supervised, 0)
    block_ids, position_ids = block_inputs(previous_ids[:, 0], positions_A, config)
    return Blocks(
        rows=rows,
        starts=starts,
        anchors=anchors_A,
        input_ids=block_ids,
        position_ids=position_ids,
        labels=labels,
        previous_ids=previous_ids,
        context_rows=context_rows,
        supervised=supervised,
        weights=supervised * torch.from_numpy(decay_weights(config.block_size, decay_gamma)),
        draftable_tokens=sum(len(a) for a in legal),
    )


def context_positions(blocks: Blocks, num_rows: int, num_columns: int) -> Tensor:
    """int64 [B, T]: position within its document of every context column that some block may see.

    Elsewhere (padding, documents without a block) the values mean nothing, and no block reads those columns.
    """
    columns = torch.arange(num_columns, device=blocks.starts.device)
    begins = torch.zeros(num_rows, num_columns, dtype=torch.int64, device=columns.device)
    inside = blocks.starts < num_columns
    begins[blocks.rows[inside], blocks.starts[inside]] = blocks.starts[inside]
    return columns - begins.cummax(dim=1).values


def _checked_lengths(
    mask: np.ndarray, anchors: np.ndarray, legal: np.ndarray, config: DrafterConfig, document: int
) -> np.ndarray:
    illegal = np.setdiff1d(anchors, legal)
    if len(illegal):
        raise AnchorError(
            f"document {document}: anchors {illegal[:5].tolist()} are not legal (they and the next position must be "
            "supervised); draw them with draw_anchors from the same, already truncated, loss mask"
        )
    return _supervised_lengths(mask, anchors, config.block_size)
