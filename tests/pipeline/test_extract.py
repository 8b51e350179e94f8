"""One block of extraction without Ray: what is committed, what is rejected, what a repeated call changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache_store.errors import StorageError
from cache_store.ledger import Ledger, seal
from cache_store.reader import CacheReader
from cache_store.storage import open_storage
from cache_store.writer import CacheWriter, create_cache
from pipeline.config import Config
from pipeline.engines.hf import HiddenStateExtractor, SequenceStates, load_target
from pipeline.extract import ExtractRecipe, extract_block, load_piece
from pipeline.identity import check_target, make_spec
from pipeline.responses import Response, index_turn, write_responses

LENGTHS = {"a": 7, "b": 30, "c": 4, "d": 30, "e": 12}


def response(name: str, length: int) -> Response:
    return Response(
        sample_id=name,
        turn=0,
        turns=1,
        token_ids=[10 + (ord(name) * position) % 900 for position in range(length)],
        spans=[(length // 2, length)],
        finish_reasons=["stop"],
        answers=["text"],
        domain="d",
    )


@pytest.fixture
def ready(make_config: Callable[..., Config]) -> tuple[ExtractRecipe, HiddenStateExtractor, Any]:
    config = make_config()
    storage = open_storage(config.cache.url)
    spec = make_spec(config, check_target(config), "0" * 64)
    create_cache(storage, spec)
    write_responses(storage, [response(name, length) for name, length in LENGTHS.items()])
    recipe = ExtractRecipe(storage=storage, spec=spec, target=config.target, tokens_per_batch=64, num_actors=1)
    model = load_target(config.target, "cpu", with_head=False)
    extractor = HiddenStateExtractor(model, spec.layer_ids, tokens_per_batch=recipe.tokens_per_batch)
    return recipe, extractor, load_piece(storage, list(index_turn(storage, 0).places.items()))


def test_a_block_is_committed_when_the_call_returns(ready: Any) -> None:
    recipe, extractor, table = ready
    counts = extract_block(recipe, extractor, table)
    assert (counts["samples"], counts["tokens"], counts["rejected"]) == (5, sum(LENGTHS.values()), 0)
    assert Ledger(recipe.storage).committed_ids() == set(LENGTHS)
    assert counts["bytes"] == sum(record.num_bytes for record in Ledger(recipe.storage).records())
    seal(recipe.storage, expected_ids=LENGTHS)
    reader = CacheReader(recipe.storage)
    for name, length in LENGTHS.items():
        sample = reader.read_id(name)
        assert sample.input_ids.tolist() == response(name, length).token_ids
        assert np.flatnonzero(sample.loss_mask).tolist() == list(range(length // 2, length))
        alone = next(iter(extractor.extract([response(name, length).token_ids])))
        for stored, single in ((sample.hidden_states, alone.hidden_states),):
            difference = np.abs(as_floats(stored) - as_floats(single))
            assert difference.max() <= 0.02 * max(1.0, np.abs(as_floats(single)).max())


def as_floats(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def test_a_repeated_call_is_read_once(ready: Any) -> None:
    recipe, extractor, table = ready
    extract_block(recipe, extractor, table)
    extract_block(recipe, extractor, table)
    manifest = seal(recipe.storage, expected_ids=LENGTHS)
    assert (manifest.num_samples, manifest.duplicates) == (5, 5)


class PoisonedExtractor:
    """Gives one sequence NaN states and another a row too few."""

    def __init__(self, inner: HiddenStateExtractor) -> None:
        self.inner = inner

    def extract(self, sequences: list[list[int]]) -> Iterator[SequenceStates]:
        for states in self.inner.extract(sequences):
            if states.index == 1:
                poisoned = states.hidden_states.copy()
                poisoned[0, 3, 5] = 0x7FC0
                yield replace(states, hidden_states=poisoned)
            elif states.index == 3:
                yield replace(states, hidden_states=states.hidden_states[:, 2:])
            else:
                yield states


def test_bad_states_are_rejected_and_the_rest_is_kept(ready: Any) -> None:
    recipe, extractor, table = ready
    counts = extract_block(recipe, PoisonedExtractor(extractor), table)  # type: ignore[arg-type]
    names = table.column("sample_id").to_pylist()
    assert (counts["samples"], counts["rejected"]) == (3, 2)
    rejected = Ledger(recipe.storage).rejected()
    assert set(rejected) == {names[1], names[3]}
    assert "1 infinite or NaN values" in rejected[names[1]].reason
    assert "wanted" in rejected[names[3]].reason
    seal(recipe.storage, expected_ids=LENGTHS)


def test_a_full_disk_stops_the_call_and_commits_nothing_half(ready: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, extractor, table = ready
    written: list[str] = []

    def write(self: CacheWriter, sample: Any) -> None:
        if written:
            raise StorageError("disk: no space left")
        written.append(sample.sample_id)

    with monkeypatch.context() as patch:
        patch.setattr(CacheWriter, "write", write)
        with pytest.raises(StorageError, match="no space left"):
            extract_block(recipe, extractor, table)
    assert Ledger(recipe.storage).committed_ids() == set()
    extract_block(recipe, extractor, table)
    assert Ledger(recipe.storage).committed_ids() == set(LENGTHS)
    assert not list(Path(recipe.storage.scratch_dir()).glob("part-*"))
