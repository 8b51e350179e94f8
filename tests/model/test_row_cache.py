"""Ragged rows against plain lists of tensors."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.row_cache import RowCache

LAYERS, G, E = 2, 2, 3


def make(generator: torch.Generator, rows: int, n: int) -> tuple[Tensor, Tensor]:
    return tuple(torch.randn(rows, n, G, E, generator=generator) for _ in range(2))  # type: ignore[return-value]


class Plain:
    """What the cache stands for: per layer and row a list of key/value tokens."""

    def __init__(self, rows: int) -> None:
        self.rows: list[list[tuple[Tensor, ...]]] = [[] for _ in range(rows)]


def write(cache: RowCache, plain: Plain, counts: list[int], generator: torch.Generator) -> None:
    """Write ragged tokens (padding behind) to every layer; check what a layer then sees."""
    width = max(counts)
    new = [make(generator, len(counts), width) for _ in range(LAYERS)]
    before = list(cache.lengths)
    for layer, (key, value) in enumerate(new):
        keys, values = cache.write(layer, key, value)
        for row, n in enumerate(counts):
            for k in range(n):
                assert torch.equal(keys[row, before[row] + k], key[row, k])
                assert torch.equal(values[row, before[row] + k], value[row, k])
            for k, token in enumerate(plain.rows[row]):
                assert torch.equal(keys[row, k], token[2 * layer])
                assert torch.equal(values[row, k], token[2 * layer + 1])
        assert bool(torch.isfinite(keys).all())
    cache.lengths = [length + n for length, n in zip(before, counts, strict=True)]
    for row, n in enumerate(counts):
        for k in range(n):
            plain.rows[row].append(tuple(part[row, k] for pair in new for part in pair))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_sequence_of_writes_crops_joins_and_departures(data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(0)
    cache, plain = RowCache(LAYERS, 0), Plain(0)
    for _ in range(data.draw(st.integers(1, 6))):
        joining, joined = RowCache(LAYERS, rows := data.draw(st.integers(1, 3))), Plain(rows)
        write(joining, joined, data.draw(st.lists(st.integers(1, 70), min_size=rows, max_size=rows)), generator)
        cache.join(joining)
        plain.rows += joined.rows
        rows = len(plain.rows)
        write(cache, plain, data.draw(st.lists(st.integers(1, 9), min_size=rows, max_size=rows)), generator)
        lengths = [data.draw(st.integers(max(0, n - 4), n)) for n in cache.lengths]
        cache.lengths = lengths
        plain.rows = [tokens[:n] for tokens, n in zip(plain.rows, lengths, strict=True)]
        kept = data.draw(st.lists(st.sampled_from(range(rows)), unique=True))
        cache.keep(kept)
        plain.rows = [plain.rows[row] for row in kept]
        assert cache.lengths == [len(tokens) for tokens in plain.rows]


def test_positions_continue_each_row() -> None:
    cache = RowCache(1, 2)
    cache.lengths = [3, 0]
    assert cache.positions(2, torch.device("cpu")).tolist() == [[3, 4], [0, 1]]
