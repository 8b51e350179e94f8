"""Chunks of random logits for the row-wise part of the loss, and how far the Triton kernel is from plain torch on them.

As a program (`python -m tests.model.row_cases`, under TRITON_INTERPRET=1 where there is no GPU) it prints the largest
difference of every case as JSON.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from model.row_loss import ChunkLogits, ChunkSlots, RowTerms, row_losses

TERMS = RowTerms(ce=0.1, l1=0.9, rows_per_chunk=512)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowCase:
    """`columns` of `vocab` are the draft vocabulary."""

    dtype: torch.dtype
    bias: bool
    vocab: int = 150
    columns: int = 150
    counts: tuple[int, ...] = (1, 2, 9)
    device: str = "cpu"

    def draw(self) -> tuple[ChunkLogits, ChunkSlots]:
        """The same tensors at every call."""
        generator = torch.Generator().manual_seed(1)
        slots, rows = sum(self.counts), len(self.counts)

        def normal(*shape: int) -> Tensor:
            wide = 3 * torch.randn(*shape, generator=generator, dtype=torch.float64)
            return wide.to(device=self.device, dtype=self.dtype)

        reduced = self.columns < self.vocab
        chosen = torch.randperm(self.vocab, generator=generator)[: self.columns].to(self.device)
        logits = ChunkLogits(
            draft_nW=normal(slots, self.columns),
            bias_uW=normal(rows, self.columns) if self.bias else None,
            target_uV=normal(rows, self.vocab),
            columns_W=chosen if reduced else None,
        )
        labels = torch.randint(-1 if reduced else 0, self.columns, (slots,), generator=generator)
        return logits, ChunkSlots(
            row_of_slot=torch.repeat_interleave(torch.arange(rows), torch.tensor(self.counts)).to(self.device),
            counts=list(self.counts),
            labels=labels.to(self.device),
            weights=torch.rand(slots, generator=generator).to(self.device),
        )


def row_cases(device: str) -> Iterator[RowCase]:
    for dtype, (bias, columns) in itertools.product(
        (torch.float32, torch.bfloat16), ((True, 150), (False, 101), (True, 101))
    ):
        yield RowCase(dtype=dtype, bias=bias, columns=columns, device=device)


def kernel_errors(case: RowCase) -> dict[str, float]:
    """Largest difference between kernel and plain torch: losses absolute, gradients relative to the largest one."""
    from model.loss_kernel import kernel_row_losses

    (ours, slots), (expected, _), (untouched, _) = case.draw(), case.draw(), case.draw()
    values = kernel_row_losses(ours, slots, TERMS, gradient=True)
    wanted = row_losses(expected, slots, TERMS, gradient=True)
    without = kernel_row_losses(untouched, slots, TERMS, gradient=False)
    errors = {
        "ce": float((values[0] - wanted[0]).abs().max()),
        "l1": float((values[1] - wanted[1]).abs().max()),
        "without gradient": max(float((a - b).abs().max()) for a, b in zip(values, without, strict=True)),
        "logits written without gradient": float((untouched.draft_nW - case.draw()[0].draft_nW).abs().max()),
    }
    pairs = {"gradient": (ours.draft_nW, expected.draft_nW)}
    if ours.bias_uW is not None and expected.bias_uW is not None:
        pairs["bias gradient"] = (ours.bias_uW, expected.bias_uW)
    for name, (a, b) in pairs.items():
        errors[name] = float((a.float() - b.float()).abs().max() / b.float().abs().max())
    return errors


def main() -> None:
    results = {f"{case.dtype} bias {case.bias} {case.columns}": kernel_errors(case) for case in row_cases("cpu")}
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
