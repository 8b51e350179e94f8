"""Keys and values of several sequences at once: what decoding keeps of the target and of the drafter between rounds.

Every row has a length of its own. Rows are aligned on the left, so rejecting tokens only shortens a length: nothing is
copied, and what lies behind a row's length is overwritten by its next tokens. Who attends must mask it.
Legend: B rows, T columns, n new tokens, G key/value heads, E head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_COLUMNS = 64
"""Capacity grows in steps of this many columns, and by at least a quarter: growing copies."""


class RowCache:
    """Per layer keys and values [B, T, G, E]; shapes, dtype and device are those of the first write."""

    def __init__(self, num_layers: int, rows: int) -> None:
        self.lengths = [0] * rows
        """Tokens that each row holds; set it to forget tokens."""
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers
        self._last_places: tuple[tuple[tuple[int, ...], int], tuple[Tensor, Tensor]] | None = None

    def positions(self, count: int, device: torch.device) -> Tensor:
        """int64 [B, count]: the positions that each row's next tokens take."""
        starts = torch.tensor(self.lengths, dtype=torch.long, device=device)
        return starts[:, None] + torch.arange(count, device=device)

    def write(self, layer: int, key_BnGE: Tensor, value_BnGE: Tensor) -> tuple[Tensor, Tensor]:
        """Put a layer's next n tokens behind each row's length; returns all keys and values [B, T, G, E].

        T reaches to the longest row's end. The lengths do not change: several layers write the same tokens.
        """
        n = key_BnGE.shape[1]
        rows, columns = self._places(n, key_BnGE.device)
        used = max(self.lengths) + n
        views = []
        for buffers, new in ((self._keys, key_BnGE), (self._values, value_BnGE)):
            buffer = _with_columns(buffers[layer], new, used)
            buffer[rows, columns] = new
            buffers[layer] = buffer
            views.append(buffer[:, :used])
        return views[0], views[1]

    def _places(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Row and column indices of each row's next tokens; made once for all layers of a forward."""
        lengths = tuple(self.lengths)
        if self._last_places is None or self._last_places[0] != (lengths, count):
            rows = torch.arange(len(lengths), device=device)[:, None]
            self._last_places = ((lengths, count), (rows, self.positions(count, device)))
        return self._last_places[1]

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self.lengths = [self.lengths[row] for row in rows]
        for buffers in (self._keys, self._values):
            for layer, buffer in enumerate(buffers):
                if buffer is not None:
                    buffers[layer] = buffer[torch.tensor(rows, dtype=torch.long, device=buffer.device)]

    def join(self, other: RowCache) -> None:
        """Append another cache's rows; it must not be used afterwards."""
        for mine, others in ((self._keys, other._keys), (self._values, other._values)):
            for layer, theirs in enumerate(others):
                own = mine[layer]
                if own is None or not self.lengths or theirs is None:
                    mine[layer] = own if theirs is None else theirs
                    continue
                columns = max(own.shape[1], theirs.shape[1])
                mine[layer] = torch.cat([_padded(own, columns), _padded(theirs, columns)])
        self.lengths = [*self.lengths, *other.lengths]


def _with_columns(buffer: Tensor | None, like_BnGE: Tensor, used: int) -> Tensor:
    """A buffer of at least `used` columns with the old content."""
    if buffer is not None and buffer.shape[1] >= used:
        return buffer
    grown = max(used, buffer.shape[1] * 5 // 4 if buffer is not None else 0)
    columns = -(-grown // _COLUMNS) * _COLUMNS
    if buffer is None:
        return like_BnGE.new_zeros(like_BnGE.shape[0], columns, *like_BnGE.shape[2:])
    return _padded(buffer, columns)


def _padded(buffer: Tensor, columns: int) -> Tensor:
    """Zeros behind: an unwritten column is masked, but 0 times a NaN would still be one."""
    missing = columns - buffer.shape[1]
    if not missing:
        return buffer
    return torch.cat([buffer, buffer.new_zeros(buffer.shape[0], missing, *buffer.shape[2:])], dim=1)
