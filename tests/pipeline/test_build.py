"""The whole build on a tiny target with real Ray, and an engine of our own in vLLM's place."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cache_store.audit import verify_cache
from cache_store.calibration import CALIBRATION
from cache_store.codec import to_float
from cache_store.errors import CacheMismatch, StorageError
from cache_store.gc import collect_garbage
from cache_store.ledger import Ledger
from cache_store.reader import CacheReader
from cache_store.repair import repair_cache
from cache_store.storage import open_storage
from pipeline.build import BuildReport, prepare, run_build
from pipeline.cluster import ray_session
from pipeline.config import ClusterSection, Config
from pipeline.engines.hf import load_target
from pipeline.errors import BuildFailed, ConfigError, PreflightFailed
from tests.pipeline.fake_engine import ANSWER_TOKENS, STOP, Mood, engine_factory, greedy

ROWS = [{"id": f"p{n}", "domain": "d", "messages": [{"role": "user", "content": f"question {n}"}]} for n in range(10)]
TWO_TURNS = {
    "id": "two",
    "messages": [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "ORIGINAL"},
        {"role": "user", "content": "two"},
    ],
}
MakeConfig = Callable[..., Config]


@pytest.fixture(scope="module", autouse=True)
def ray_up() -> Iterator[None]:
    with ray_session(ClusterSection(object_store_mb=100)):
        yield


def build(config: Config, **mood: Any) -> BuildReport:
    marker = Path(config.cache.url).with_name("batches")
    marker.touch()
    report = run_build(config, engine=engine_factory(config.target, Mood(marker=marker, **mood)))
    assert report is not None
    return report


def ids_once(config: Config) -> tuple[list[str], set[str]]:
    """(ids in the cache, ids among the rejects); nothing may stand in both."""
    storage = open_storage(config.cache.url)
    cached, rejected = sorted(CacheReader(storage).ids), set(Ledger(storage).rejected())
    assert len(cached) == len(set(cached))
    assert not rejected & set(cached)
    return cached, rejected


def test_a_build_holds_the_targets_own_states_though_its_engine_died(make_config: MakeConfig) -> None:
    config = make_config([*ROWS, TWO_TURNS, "{broken", {"id": "long", "prompt": "word " * 200}])
    report = build(config, die_on_batch=2, refuse=frozenset({"p4"}))
    assert Path(config.cache.url).with_name("batches").stat().st_size > 3  # the dead engine's batch came again
    cached, rejected = ids_once(config)
    assert cached == sorted([*(row["id"] for row in ROWS if row["id"] != "p4"), "two"])
    assert rejected == {f"{config.prompts.sources[0]}:12", "long", "p4"}
    assert (report.samples, report.rejected) == (10, 3)
    assert report.rejects["regenerate"]["turn 0: the engine refused it: ValueError: refused"] == 1
    assert "3 rejected" in "\n".join(report.lines())

    model = load_target(config.target, "cpu")
    reader = CacheReader(open_storage(config.cache.url))
    for name in ("p3", "two"):
        sample = reader.read_id(name)
        ids = sample.input_ids.tolist()
        reference = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        for row, layer in enumerate(config.extraction.layer_ids):
            stored = torch.from_numpy(sample.hidden_states[row]).view(torch.bfloat16).float()
            torch.testing.assert_close(stored, reference[layer + 1][0], rtol=1e-2, atol=1e-2)
        spans = np.flatnonzero(np.diff(np.concatenate([[0], sample.loss_mask.astype(int), [0]]))).reshape(-1, 2)
        assert len(spans) == (2 if name == "two" else 1)
        for start, end in spans.tolist():
            answer = greedy(model, ids[:start], ANSWER_TOKENS)
            assert ids[start:end] == (answer if answer[-1] == STOP else [*answer, STOP])
        assert sample.metadata["domain"] == ("d" if name == "p3" else None)


@pytest.mark.slow
def test_what_is_lost_is_redone_and_nothing_else(make_config: MakeConfig, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config(ROWS)
    build(config)
    storage = open_storage(config.cache.url)
    lost_files = [info.name for info in storage.list("responses/")][:1] + [i.name for i in storage.list("commits/")][:1]
    for name in lost_files:
        storage.delete(name)
    lost_samples = len(ROWS) - len(Ledger(storage).committed_ids())
    report = build(config)
    assert 0 < report.regenerate.answers < len(ROWS)
    assert report.extract.samples == lost_samples < len(ROWS)
    assert ids_once(config) == (sorted(row["id"] for row in ROWS), set())

    names = {info.name for info in storage.list("")}
    shuffled = make_config(random.Random(1).sample(ROWS, len(ROWS)))
    report = build(shuffled)
    assert "nothing is missing" in capsys.readouterr().out
    assert report.samples == len(ROWS)
    assert {info.name for info in storage.list("")} == names


@pytest.mark.slow
def test_after_repair_the_same_build_makes_exactly_what_was_damaged(make_config: MakeConfig) -> None:
    config = make_config(ROWS)
    build(config)
    storage = open_storage(config.cache.url)
    before = {name: CacheReader(storage).read_id(name).input_ids.tolist() for name in CacheReader(storage).ids}
    record = Ledger(storage).records()[0]
    content = bytearray(storage.read(record.name))
    content[record.samples[0].offset + record.samples[0].length - 2] ^= 1
    storage.put(record.name, bytes(content))
    repaired = repair_cache(storage)
    assert repaired.needs_build
    assert repaired.lost == tuple(sorted(sample.sample_id for sample in record.samples))
    report = build(config)
    assert report.regenerate.answers == 0, "the answers are kept; only the states are made anew"
    assert report.extract.samples == len(repaired.lost)
    collect_garbage(storage, delete=True, older_than_s=0, aside=True)
    assert verify_cache(storage).findings == ()
    assert {name: CacheReader(storage).read_id(name).input_ids.tolist() for name in before} == before


@pytest.mark.slow
def test_a_build_in_tar_with_int8_measures_its_scales_once(
    make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(ROWS[:4], cache={"format": "tar", "codec": "i8cr", "last_codec": "i8cr"})
    build(config)
    assert "channel scales: measured on 4 samples" in capsys.readouterr().out
    storage = open_storage(config.cache.url)
    assert verify_cache(storage).findings == ()
    reader, model = CacheReader(storage), load_target(config.target, "cpu")
    sample = reader.read_id("p3")
    reference = model(torch.tensor([sample.input_ids.tolist()]), output_hidden_states=True).hidden_states
    for row, layer in enumerate(config.extraction.layer_ids):
        found, wanted = to_float(sample.hidden_states[row]), reference[layer + 1][0].numpy()
        error = np.linalg.norm(found - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)
        assert 0.001 < error.max() < 0.02, "1 % of the codec, and the noise of another batch"
    assert reader.manifest is not None
    assert {item.tensor for item in reader.manifest.errors} == {*map(str, config.extraction.layer_ids), "last"}

    scales = storage.read(CALIBRATION)
    storage.delete(Ledger(storage).records()[0].name.replace("shards/", "commits/").replace(".tar", ".json"))
    build(config)
    assert "channel scales" not in capsys.readouterr().out
    assert storage.read(CALIBRATION) == scales
    assert ids_once(config) == (sorted(row["id"] for row in ROWS[:4]), set())


@pytest.mark.slow
def test_an_engine_that_never_answers_is_reported_and_the_build_continues_later(make_config: MakeConfig) -> None:
    config = make_config(ROWS[:3], generation={"stall_timeout_s": 90})
    with pytest.raises(BuildFailed, match=r"regenerate: no row finished for 90 s.*the same command continues"):
        build(config, hang=True)
    build(config)
    assert ids_once(config) == (["p0", "p1", "p2"], set())


def test_another_build_into_the_same_place_is_refused_by_field(make_config: MakeConfig) -> None:
    prepare(make_config(ROWS[:2]))
    changes: list[tuple[dict[str, Any], str]] = [
        ({"generation": {"sampling": {"temperature": 0.3, "max_new_tokens": 8}}}, "temperature"),
        ({"generation": {"sampling": {"seed": 7, "max_new_tokens": 8}}}, "seed"),
        ({"generation": {"sampling": {"max_new_tokens": 9}}}, "max_new_tokens"),
        ({"generation": {"truncated": "drop"}}, "truncated"),
        ({"generation": {"chat_template_kwargs": {"a": 1}}}, "chat_template_kwargs"),
        ({"generation": {"engine_kwargs": {"quantization": "fp8"}}}, "engine_settings"),
        ({"extraction": {"layer_ids": [0, 1]}}, "layer_ids"),
        ({"max_length": 95}, "max_length"),
        ({"target": {"dtype": "bfloat16"}}, "dtype"),
        ({"cache": {"codec": "raw"}}, "codec"),
        ({"cache": {"format": "tar"}}, "format"),
        ({"cache": {"last_codec": "i8cr"}}, "last_codec"),
    ]
    for sections, field in changes:
        with pytest.raises(CacheMismatch, match=field):
            prepare(make_config(**sections))
    with pytest.raises(CacheMismatch, match="prompts"):
        prepare(make_config(ROWS[:3]))


@pytest.mark.slow
def test_a_preflight_with_another_models_tokens_fails(make_config: MakeConfig, tmp_path: Path) -> None:
    from tests.pipeline.hf_target import save_tiny_target

    other = save_tiny_target(tmp_path / "other", seed=5)
    config = make_config(ROWS[:2])
    wrong = config.target.model_copy(update={"path": str(other)})
    factory = engine_factory(wrong, Mood(marker=tmp_path / "batches"))
    with pytest.raises(PreflightFailed, match="greedy tokens of the engine"):
        run_build(config, engine=factory)
    assert not Ledger(open_storage(config.cache.url)).committed_ids()


@pytest.mark.parametrize(
    ("sections", "error", "message"),
    [
        ({"target": {"path": "/nowhere/model"}}, ConfigError, "/nowhere/model: no such directory"),
        ({"extraction": {"layer_ids": [0, 9]}}, ConfigError, "layer 9 does not exist"),
        ({"extraction": {"layer_ids": [0, 3]}}, ConfigError, "last layer"),
        ({"drafter": {"mask_token": 5000}}, ConfigError, "mask_token 5000 lies outside"),
        ({"prompts": {"sources": ["/nowhere/*.jsonl"]}}, ConfigError, "no such file"),
        ({"cache": {"url": "/proc/nowhere"}}, StorageError, "/proc/nowhere"),
        ({"cache": {"url": ""}}, StorageError, "names no place"),
        ({"cache": {"url": "s3:/bucket/cache"}}, StorageError, "found no '://'"),
    ],
)
def test_mistakes_are_one_line_before_any_engine(
    make_config: MakeConfig, sections: dict[str, Any], error: type[Exception], message: str
) -> None:
    def never(probing: bool) -> Any:
        raise AssertionError("no engine may start")

    with pytest.raises(error, match=message) as caught:
        run_build(make_config(ROWS[:2], **sections), engine=never)
    assert "\n" not in str(caught.value)
