from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from cache_store.disk_cache import DiskCacheOptions
from cache_store.errors import CacheError
from cache_store.exclusions import Exclusion, write_exclusions
from cache_store.reader import CacheReader
from cache_store.storage import open_storage
from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.identity import check_target, make_spec
from pipeline.train.recipe import check_cache, check_origin, prepare_job, training_sources
from tests.cache_store.samples import build_cache
from tests.pipeline.train.rig import make_cache, make_config, make_target, mixed_masks


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    make_target(folder / "target")
    make_cache(str(folder / "cache"), mixed_masks(20))
    return folder


def test_job_is_resolved_and_absolute(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    job = prepare_job(make_config(Path("."), epochs=3.0))
    assert (job.num_samples, job.total_steps) == (20, 7)
    assert job.output == root / "run"
    assert job.config.target.path == str(root / "target")
    assert job.drafter.target_layer_ids == (0, 2)
    assert job.recipe["training.lr"] == 1e-2
    assert job.provenance["cache.chat_template"] == "abc"


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("training.lr", {"training": {"lr": 1e-3}}),
        ("training.betas", {"training": {"betas": [0.9, 0.95]}}),
        ("training.seed", {"training": {"seed": 1}}),
        ("training.epochs", {"training": {"epochs": 4}}),
        ("training.global_batch_size", {"training": {"global_batch_size": 4}}),
        ("training.num_anchors", {"training": {"num_anchors": 6}}),
        ("training.max_length", {"training": {"max_length": 20}}),
        ("training.precision", {"training": {"precision": "bf16"}}),
        ("training.loss.l1", {"training": {"loss": {"l1": 0.5}}}),
        ("drafter.block_size", {"drafter": {"block_size": 3}}),
        ("drafter.markov_rank", {"drafter": {"markov_rank": 4}}),
    ],
)
def test_recipe_covers_every_field_that_shapes_the_run(root: Path, field: str, change: dict[str, Any]) -> None:
    config = make_config(root)
    sections = {name: getattr(config, name).model_dump() | values for name, values in change.items()}
    changed = Config.model_validate(config.model_dump() | sections)
    before, after = prepare_job(config).recipe, prepare_job(changed).recipe
    assert {name for name in before if before[name] != after[name]} == {field}


def test_workers_and_micro_batches_may_change(root: Path) -> None:
    one = prepare_job(make_config(root)).recipe
    other = make_config(root, num_workers=5, micro_batch_size=1, zero_stage=2, loader_workers=2, output="elsewhere")
    assert prepare_job(other).recipe == one


def test_other_samples_are_another_recipe(root: Path, tmp_path: Path) -> None:
    make_target(tmp_path / "target")
    make_cache(str(tmp_path / "cache"), mixed_masks(19))
    one, other = prepare_job(make_config(root)).recipe, prepare_job(make_config(tmp_path)).recipe
    assert {name for name in one if one[name] != other[name]} == {"cache.samples", "cache.ids"}


def test_cache_with_other_layers_is_refused_naming_both(root: Path, tmp_path: Path) -> None:
    make_cache(str(tmp_path / "cache"), mixed_masks(2), layer_ids=(0, 1))
    config = make_config(root)
    elsewhere = config.model_copy(update={"cache": config.cache.model_copy(update={"url": str(tmp_path / "cache")})})
    with pytest.raises(ConfigError, match=r"layer_ids is \[0, 1\] in the cache, \[0, 2\] here"):
        prepare_job(elsewhere)


@pytest.mark.parametrize("field", ["hidden_size", "num_target_layers", "vocab_size"])
def test_cache_of_another_target_is_refused(root: Path, field: str) -> None:
    job = prepare_job(make_config(root))
    other = dataclasses.replace(job.cache, **{field: 96})
    with pytest.raises(ConfigError, match=f"{field} is 96 in the cache, {getattr(job.cache, field)} here"):
        check_cache(other, job.drafter, "somewhere")


def test_cache_of_other_weights_or_template_is_refused(
    request: pytest.FixtureRequest, tiny_target: Path, tmp_path: Path
) -> None:
    config: Config = request.getfixturevalue("make_config")()
    spec = make_spec(config, check_target(config), "prompts")
    storage = open_storage(config.cache.url)
    build_cache(storage, spec, 1, tokens=9)
    assert prepare_job(config).num_samples == 1
    other = shutil.copytree(tiny_target, tmp_path / "other")
    template = other / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    elsewhere = config.model_copy(update={"target": config.target.model_copy(update={"path": str(other)})})
    with pytest.raises(ConfigError, match=r"was built with another target than .*chat_template was .*, now "):
        prepare_job(elsewhere)
    trained_on = dataclasses.replace(spec, identity={**spec.identity, "weights": "others"})
    with pytest.raises(ConfigError, match="weights was others, now "):
        check_origin(trained_on, config)
    imported = dataclasses.replace(spec, identity={"converted_from": []})
    check_origin(imported, config)


def test_mask_token_outside_the_vocabulary_is_refused(root: Path) -> None:
    config = make_config(root)
    drafter = config.drafter.model_copy(update={"mask_token": 97})
    with pytest.raises(ConfigError, match="97"):
        prepare_job(config.model_copy(update={"drafter": drafter}))


def test_a_run_without_a_full_global_batch_is_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"epochs of \d+ samples do not fill one global batch of 4096; lower"):
        prepare_job(make_config(root, global_batch_size=4096))


def test_missing_cache_is_one_clear_error(root: Path) -> None:
    config = make_config(root)
    with pytest.raises(CacheError, match="nowhere"):
        prepare_job(config.model_copy(update={"cache": config.cache.model_copy(update={"url": str(root / "nowhere")})}))


def test_damaged_samples_are_replaced_without_touching_the_run(root: Path) -> None:
    config = make_config(root)
    storage = open_storage(config.cache.url)
    reader = CacheReader(storage)
    name = write_exclusions(storage, [Exclusion(reader.ids[4], reader.shard_of(4), "checksum")])
    before, after = (prepare_job(with_cache(config, exclusions=value)) for value in (None, name))
    assert after.recipe == before.recipe, "a run goes on from its checkpoint"
    assert (after.num_samples, after.total_steps) == (before.num_samples, before.total_steps)
    assert "1 damaged and replaced by others" in after.data[0]
    assert "damaged" not in before.data[0]


def test_storage_options_and_disk_cache_reach_the_sources(root: Path, tmp_path: Path) -> None:
    kept = {"path": str(tmp_path / "kept"), "max_gb": 0.5}
    config = with_cache(make_config(root), disk_cache=kept, storage={"attempts": 3})
    (source,) = training_sources(config)
    assert source.storage.options.attempts == 3
    assert source.disk_cache == DiskCacheOptions(path=str(tmp_path / "kept"), max_gb=0.5)
    prepare_job(config)
    assert not (tmp_path / "kept").exists(), "the machine that only plans needs no such disk"
    with pytest.raises(CacheError, match="cannot hold the largest sample"):
        prepare_job(with_cache(config, disk_cache={**kept, "max_gb": 1e-8}))


def with_cache(config: Config, **changes: Any) -> Config:
    data = config.model_dump(mode="json")
    return Config.model_validate(data | {"cache": {**data["cache"], **changes}})
