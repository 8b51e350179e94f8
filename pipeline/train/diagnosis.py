"""Naming the culprit of a non-finite loss: step, sample, term, and the captured layer when the input is to blame."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from cache_store.dataset import CacheBatch
from model.anchors import Blocks
from model.losses import DrafterInputs, LossOutput


def describe_loss(
    batch: CacheBatch,
    inputs: DrafterInputs,
    output: LossOutput,
    evaluate: Callable[[DrafterInputs], LossOutput],
) -> str:
    """One line about a micro-batch whose loss is not finite; evaluates the samples one by one to find which."""
    culprits = []
    for document, sample_id in enumerate(batch.sample_ids):
        alone = evaluate(_one_document(batch, inputs, document))
        if not torch.isfinite(alone.total):
            culprits.append(f"{sample_id} ({_cause(batch, document, alone)})")
    if not culprits:
        culprits = [f"none alone, together {', '.join(batch.sample_ids)} ({', '.join(_bad_terms(output))})"]
    return f"step {batch.step}: the loss is {float(output.total.detach())}; samples: {'; '.join(culprits)}"


def _cause(batch: CacheBatch, document: int, output: LossOutput) -> str:
    row, columns = _place(batch, document)
    width = batch.last_hidden_state.shape[-1]
    captured = torch.isfinite(batch.hidden_states[row, columns]).unflatten(-1, (-1, width)).all(dim=-1).all(dim=0)
    broken = [f"captured layer #{index}" for index, finite in enumerate(captured.tolist()) if not finite]
    if not torch.isfinite(batch.last_hidden_state[row, columns]).all():
        broken.append("last hidden state")
    terms = f"terms {', '.join(_bad_terms(output))}"
    return f"non-finite input in {', '.join(broken)}; {terms}" if broken else f"its input is finite; {terms}"


def _bad_terms(output: LossOutput) -> list[str]:
    names = ("ce_loss", "l1_loss", "confidence_loss")
    return [name for name in names if f"{name}/num" in output.metrics and not output.metrics[f"{name}/num"].isfinite()]


def _place(batch: CacheBatch, document: int) -> tuple[int, slice]:
    """Row and columns of a document."""
    row, start, length = (int(values[document]) for values in (batch.rows, batch.starts, batch.lengths))
    return row, slice(start, start + length)


def _one_document(batch: CacheBatch, inputs: DrafterInputs, document: int) -> DrafterInputs:
    row, columns = _place(batch, document)
    blocks = inputs.blocks
    chosen = (blocks.rows == row) & (blocks.starts == columns.start)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Blocks):
        value = getattr(blocks, field.name)
        values[field.name] = value[chosen] if isinstance(value, torch.Tensor) else value
    for name in ("starts", "anchors", "context_rows"):
        values[name] = values[name] - columns.start
    values["rows"] = torch.zeros_like(values["rows"])
    ids = inputs.input_ids_BT
    return DrafterInputs(
        hidden_states_BTC=inputs.hidden_states_BTC[row : row + 1, columns],
        last_hidden_BTD=inputs.last_hidden_BTD[row : row + 1, columns],
        blocks=Blocks(**values),
        input_ids_BT=None if ids is None else ids[row : row + 1, columns],
    )
