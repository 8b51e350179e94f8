from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model.draft_vocab import check_draft_ids, from_offsets, membership, most_frequent, to_offsets
from model.errors import DrafterConfigError


def test_the_most_frequent_tokens_and_the_indispensable_ones() -> None:
    counts = torch.tensor([5, 0, 9, 7, 0, 7])
    assert most_frequent(counts, 3, always=[]).tolist() == [2, 3, 5]
    assert most_frequent(counts, 3, always=[4]).tolist() == [2, 3, 4]  # of equals the smaller id
    assert most_frequent(counts, 6, always=[4]).tolist() == list(range(6))
    with pytest.raises(DrafterConfigError, match=r"draft vocabulary of 1: wanted at least the 2 stop"):
        most_frequent(counts, 1, always=[4, 1])
    with pytest.raises(DrafterConfigError, match="at most the target's 6"):
        most_frequent(counts, 7, always=[])


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.data())
def test_any_selection_is_legal_and_keeps_no_rarer_token_than_it_leaves(counts: list[int], data: st.DataObject) -> None:
    vocab = len(counts)
    always = data.draw(st.sets(st.integers(0, vocab - 1)))
    size = data.draw(st.integers(max(1, len(always)), vocab))
    ids = most_frequent(torch.tensor(counts), size, always=always)
    assert torch.equal(check_draft_ids(ids, vocab, always=always), ids)
    assert len(ids) == size
    kept = set(ids.tolist())
    free = [counts[token] for token in kept - always]
    left = [counts[token] for token in set(range(vocab)) - kept]
    assert not free or not left or min(free) >= max(left)


@given(st.sets(st.integers(0, 99), min_size=1))
def test_offsets_and_membership_round_trip(tokens: set[int]) -> None:
    ids = torch.tensor(sorted(tokens))
    d2t = to_offsets(ids)
    assert d2t.dtype == torch.int64
    assert torch.equal(from_offsets(d2t, 100), ids)
    assert membership(ids, 100).nonzero().flatten().tolist() == ids.tolist()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 9, 10], "1 ids outside the target's 0 to 8, the first 9|2 ids outside .* the first 9"),
        ([-1, 0], "1 ids outside .* the first -1"),
        ([3, 1, 3], "maps 1 draft tokens to a target token that another one stands for already, the first 3"),
        ([], r"shape \[0\]"),
        ([[1, 2]], r"shape \[1, 2\]"),
        ([1, 2], r"lacks 1 tokens that a drafter must be able to propose .* the first 7"),
    ],
)
def test_broken_mappings_are_refused(ids: list[int], message: str) -> None:
    with pytest.raises(DrafterConfigError, match=message):
        check_draft_ids(torch.tensor(ids), 9, always=[7] if ids == [1, 2] else [])
