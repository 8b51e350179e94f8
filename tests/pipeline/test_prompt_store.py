from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cache_store.ledger import Ledger
from cache_store.storage import open_storage
from pipeline import prompt_store
from pipeline.config import Config
from pipeline.errors import BuildFailed, ConfigError
from pipeline.prompt_store import load_index, load_prompts, publish_prompts, spool_prompts

ROWS = [{"id": f"r{n}", "prompt": f"question {n}", "domain": "d"} for n in range(20)]


def spool(config: Config, folder: Path) -> Any:
    folder.mkdir(exist_ok=True)
    return spool_prompts(config, folder, keep_first=3)


def test_digest_ignores_order_and_nothing_else(make_config: Callable[..., Config], tmp_path: Path) -> None:
    first = spool(make_config(ROWS), tmp_path / "1")
    shuffled = random.Random(3).sample(ROWS, len(ROWS))
    assert spool(make_config(shuffled), tmp_path / "2").digest == first.digest
    for number, change in enumerate(({"prompt": "other"}, {"id": "other"}, {"domain": "other"})):
        changed = [{**ROWS[0], **change}, *ROWS[1:]]
        assert spool(make_config(changed), tmp_path / f"c{number}").digest != first.digest


def test_stored_prompts_come_back(
    make_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_store, "_ROWS_PER_FILE", 6)
    config = make_config([*ROWS, "{broken"])
    storage = open_storage(config.cache.url)
    spooled = spool(config, tmp_path / "s")
    assert [prompt.sample_id for prompt in spooled.first] == ["r0", "r1", "r2"]
    publish_prompts(storage, spooled)
    index = load_index(storage)
    assert list(index.ids) == [row["id"] for row in ROWS]
    assert len({name for name, _ in index.places}) == 4
    found = load_prompts(storage, [index.places[number] for number in (13, 2)])
    assert [(prompt.sample_id, prompt.users, prompt.domain) for prompt in found] == [
        ("r13", ("question 13",), "d"),
        ("r2", ("question 2",), "d"),
    ]
    assert index.rejected_ids == Ledger(storage).rejected().keys()
    assert len(index.rejected_ids) == 1


def test_publishing_again_changes_nothing_and_other_prompts_are_refused(
    make_config: Callable[..., Config], tmp_path: Path
) -> None:
    config = make_config([*ROWS, "null"])
    storage = open_storage(config.cache.url)
    publish_prompts(storage, spool(config, tmp_path / "1"))
    before = {info.name for info in storage.list("")}
    publish_prompts(storage, spool(config, tmp_path / "2"))
    assert {info.name for info in storage.list("")} == before
    with pytest.raises(BuildFailed, match="built from other prompts"):
        publish_prompts(storage, spool(make_config(ROWS[:3]), tmp_path / "3"))


def test_no_usable_prompt(make_config: Callable[..., Config], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no usable prompt.*2 rows rejected; the first: .*:1: broken JSON"):
        spool(make_config(["{", "null"]), tmp_path / "s")
