"""Requests whose context grows by some positions per round, as a decoder hands it to a drafter."""

from __future__ import annotations

import torch


class Feeder:
    """Hands out the next positions of every row of `states` [rows, T, C] and `ids` [rows, T]."""

    def __init__(self, states: torch.Tensor, ids: torch.Tensor) -> None:
        self.states, self.ids = states, ids
        self.lengths = [0] * len(states)
        """Positions handed out, per row."""

    def next(self, counts: list[int]) -> tuple[torch.Tensor, list[list[int]]]:
        """The next counts[b] positions of each row; padding is NaN, which must not spread."""
        hidden = torch.full((len(counts), max(counts), self.states.shape[-1]), float("nan"))
        tokens = []
        for row, (start, n) in enumerate(zip(self.lengths, counts, strict=True)):
            hidden[row, :n] = self.states[row, start : start + n]
            tokens.append(self.ids[row, start : start + n].tolist())
        self.lengths = [length + n for length, n in zip(self.lengths, counts, strict=True)]
        return hidden, tokens
