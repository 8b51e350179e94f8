from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache_store.mixture import SampleSet, Source
from cache_store.storage import open_storage
from model.export import check_copies, load_drafter
from model.target_heads import load_target_heads
from pipeline.config import Config
from pipeline.engines.hf import indispensable_tokens, load_tokenizer
from pipeline.errors import ConfigError
from pipeline.train.checkpoint import check_recipe, read_parameters, read_state
from pipeline.train.draft_vocab import FILE, DraftVocabulary, count_supervised, draft_vocabulary
from pipeline.train.recipe import prepare_job
from pipeline.train.run import describe
from tests.pipeline.hf_target import VOCAB as TARGET_VOCAB
from tests.pipeline.train.rig import VOCAB, answer_mask, make_cache, make_config, run_ranks
from tests.pipeline.train.scenarios import checkpoint_of, train_all

ALWAYS = frozenset({0, 3, 96})


def sample_set(*urls: str) -> SampleSet:
    return SampleSet([Source(storage=open_storage(url)) for url in urls])


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    url = str(tmp_path_factory.mktemp("cache"))
    make_cache(url, [answer_mask(40, 10)] * 30)
    return sample_set(url)


def vocabulary(samples: SampleSet, output: Path, size: int = 24) -> DraftVocabulary:
    return draft_vocabulary(samples, size=size, vocab_size=VOCAB, always=ALWAYS, output=output)


def test_only_generated_tokens_are_counted(samples: SampleSet) -> None:
    expected = np.zeros(VOCAB, dtype=np.int64)
    for sample in map(samples.readers[0].read, range(len(samples))):
        np.add.at(expected, sample.input_ids[10:], 1)
    assert np.array_equal(count_supervised(samples, VOCAB), expected)
    assert count_supervised(samples, VOCAB, limit=7).sum() == 7 * 30


def test_all_caches_of_a_mix_are_counted(samples: SampleSet, tmp_path: Path) -> None:
    make_cache(str(tmp_path / "other"), [answer_mask(30, 5)] * 8)
    other = sample_set(str(tmp_path / "other"))
    both = sample_set(samples.readers[0].storage.url, str(tmp_path / "other"))
    alone = [count_supervised(one, VOCAB) for one in (samples, other)]
    assert alone[1].sum() == 8 * 25
    assert np.array_equal(count_supervised(both, VOCAB), sum(alone))
    assert vocabulary(both, tmp_path).samples != vocabulary(samples, tmp_path).samples


def test_the_vocabulary_covers_what_it_says(samples: SampleSet, tmp_path: Path) -> None:
    found = vocabulary(samples, tmp_path)
    counts = count_supervised(samples, VOCAB)
    assert len(found.ids) == 24
    assert set(found.ids) >= ALWAYS
    assert found.coverage == pytest.approx(counts[list(found.ids)].sum() / counts.sum())
    # The 21 free places went to the most frequent of the other tokens.
    others = np.sort(np.delete(counts, sorted(ALWAYS)))[::-1]
    free = sorted((counts[token] for token in set(found.ids) - ALWAYS), reverse=True)
    assert free == others[:21].tolist()
    assert found.line().startswith("24 of 97 tokens can be drafted: ")
    with pytest.raises(ConfigError, match=r"drafter.draft_vocab_size: draft vocabulary of 2: wanted at least the 3"):
        vocabulary(samples, tmp_path, size=2)


def test_a_run_keeps_its_vocabulary(samples: SampleSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = vocabulary(samples, tmp_path)
    (tmp_path / FILE).write_text(first.to_json())
    monkeypatch.setattr("pipeline.train.draft_vocab.count_supervised", lambda *a, **k: pytest.fail("counted again"))
    assert vocabulary(samples, tmp_path) == first
    monkeypatch.undo()
    assert len(vocabulary(samples, tmp_path, size=30).ids) == 30  # another size is another vocabulary


def test_a_damaged_mapping_is_refused(samples: SampleSet, tmp_path: Path) -> None:
    content = json.loads(vocabulary(samples, tmp_path).to_json())
    for broken in ([*content["ids"][:-1], content["ids"][0]], [*content["ids"][:-1], 97], content["ids"][1:]):
        (tmp_path / FILE).write_text(json.dumps({**content, "ids": broken}))
        with pytest.raises(ConfigError, match=rf"{FILE}: not a draft vocabulary"):
            vocabulary(samples, tmp_path)
    (tmp_path / FILE).write_text("{")
    with pytest.raises(ConfigError, match="not a draft vocabulary"):
        vocabulary(samples, tmp_path)


def reduced_config(root: Path, target: Path, size: int | None, **training: Any) -> Config:
    config = make_config(root, **training)
    drafter = config.drafter.model_copy(update={"draft_vocab_size": size})
    return config.model_copy(
        update={"drafter": drafter, "target": config.target.model_copy(update={"path": str(target)})}
    )


def test_a_run_trains_and_exports_a_reduced_vocabulary(tmp_path: Path, tiny_target: Path) -> None:
    """The real loop and engine; every tensor moves, and the export holds the mapping and the lm_head's own rows."""
    make_cache(str(tmp_path / "cache"), [answer_mask(24, 4)] * 8, vocab_size=TARGET_VOCAB)
    config = reduced_config(tmp_path, tiny_target, 400, epochs=3)
    job = prepare_job(config)
    ((result,),) = run_ranks(1, tmp_path / "ranks", train_all, [config])
    assert result.failure is None
    assert read_state(checkpoint_of(config, 3)).unchanged == []
    drafter = load_drafter(job.output / "drafter")
    assert drafter.draft_ids is not None
    assert tuple(drafter.draft_ids.tolist()) == job.draft_vocab.ids  # type: ignore[union-attr]
    masters = read_parameters(checkpoint_of(config, 3))
    assert list(masters["markov_head.markov_w1.weight"].master.shape) == [TARGET_VOCAB, 8]
    assert list(masters["markov_head.markov_w2.weight"].master.shape) == [400, 8]
    copies = check_copies(job.output / "drafter", load_target_heads(tiny_target, dtype=None))
    assert copies == ["lm_head.weight"]


def test_a_job_has_it_in_its_recipe_and_in_its_drafter(tmp_path: Path, tiny_target: Path) -> None:
    make_cache(str(tmp_path / "cache"), [answer_mask(40, 10)] * 4, vocab_size=TARGET_VOCAB)

    def job_of(size: int | None) -> Config:
        return reduced_config(tmp_path, tiny_target, size)

    job = prepare_job(job_of(400))
    assert job.draft_vocab is not None
    assert job.drafter.draft_vocab_size == 400
    assert "vocabulary  400 of 1,024 tokens can be drafted" in describe(job)
    tokenizer = load_tokenizer(str(tiny_target))
    special = indispensable_tokens(tokenizer, [2])
    assert special <= set(job.draft_vocab.ids)
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in special
    assert len(special) > 256  # the golden tokenizer is byte-level: 256 single bytes and its special tokens
    # A mapping that changed within a run is refused by name.
    other = dict(job.recipe, **{"drafter.draft_vocab": "0" * 64})
    with pytest.raises(ConfigError, match=r"drafter.draft_vocab was '0000"):
        check_recipe(other, job.recipe, tmp_path)
    whole = prepare_job(job_of(None))
    assert whole.draft_ids is None
    assert "drafter.draft_vocab" not in whole.recipe
    with pytest.raises(ConfigError, match="wanted at least the"):
        prepare_job(job_of(100))
