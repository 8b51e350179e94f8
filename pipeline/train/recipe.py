"""A training run resolved and checked before any worker starts: drafter, cache, steps, and what must not change."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cache_store.errors import CacheIncomplete
from cache_store.identity import fingerprint
from cache_store.mixture import SampleSet, Source, describe
from cache_store.schema import CacheSpec
from cache_store.selection import Selection, Split
from cache_store.storage import open_storage
from model.config import DrafterConfig, DrafterShape
from model.errors import ModelError
from model.family import new_drafter
from model.losses import LossConfig
from model.warm_start import warm_start
from pipeline.config import Config, TrainingSection
from pipeline.config_cache import MixedCache
from pipeline.drafter_check import compare_identity, current_identity
from pipeline.engines.hf import (
    indispensable_tokens,
    resolve_mask_token,
    resolve_target,
    stop_token_ids,
    target_facts,
    tokenizer_of,
    worker_section,
)
from pipeline.errors import ConfigError
from pipeline.identity import check_target
from pipeline.plan import total_steps
from pipeline.train.draft_vocab import DraftVocabulary, draft_vocabulary

# Recipe fields that a resumed run must keep. The rest (workers, micro-batches, ZeRO stage, logging) may change.
_KEPT = (
    "seed",
    "epochs",
    "global_batch_size",
    "num_anchors",
    "max_length",
    "lr",
    "betas",
    "weight_decay",
    "warmup_ratio",
    "gradient_clip",
    "precision",
    "init_from",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingJob:
    """Everything a worker needs; paths are absolute, and it travels to other processes."""

    config: Config
    sources: tuple[Source, ...]
    """Caches to train on, what is taken of each, and how often."""
    held_out: tuple[Source, ...]
    """The other side of the split; empty when nothing is held out."""
    num_held_out: int
    drafter: DrafterConfig
    loss: LossConfig
    cache: CacheSpec
    """Settings of the first cache."""
    num_samples: int
    """Samples of an epoch."""
    data: tuple[str, ...]
    """Where the samples of each cache went, one line per cache."""
    total_steps: int
    recipe: dict[str, Any]
    """Flat: field -> value; a checkpoint of another recipe is refused."""
    draft_vocab: DraftVocabulary | None
    """None: every token of the target may be drafted."""

    @property
    def training(self) -> TrainingSection:
        """The recipe's section of the config."""
        return self.config.training

    @property
    def output(self) -> Path:
        """Folder of the run."""
        return Path(self.training.output)

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.output / "checkpoints"

    @property
    def draft_ids(self) -> Tensor | None:
        """int64 [V_d]: the target token of each draft token; None for the whole vocabulary."""
        return None if self.draft_vocab is None else self.draft_vocab.tensor()

    @property
    def provenance(self) -> dict[str, Any]:
        """What the exported drafter says about where it comes from."""
        identity = {f"cache.{name}": value for name, value in self.cache.identity.items()}
        return {"cache_fingerprint": fingerprint(self.cache), **identity, "recipe": self.recipe}


def prepare_job(config: Config) -> TrainingJob:
    """Read the target's config and the cache's manifest, compare them, and resolve the drafter.

    Raises ConfigError when the config, target and cache disagree, and CacheError when the cache cannot be used.
    """
    sources = training_sources(config)
    samples = SampleSet(sources, verify=config.cache.verify)
    held_out, num_held_out = _held_out(config)
    drafter = drafter_config(config)
    check_cache(samples.spec, drafter, config.cache.url)
    check_origin(samples.spec, config)
    training = config.training
    steps = total_steps(len(samples), training.epochs, training.global_batch_size)
    if steps < 1:
        raise ConfigError(
            f"training: {training.epochs:g} epochs of {len(samples)} samples do not fill one global batch of "
            f"{training.global_batch_size}; lower training.global_batch_size, or raise training.epochs"
        )
    draft_vocab = _draft_vocab(config, drafter, samples)
    absolute = config.model_copy(
        update={
            "target": worker_section(config.target),
            "training": training.model_copy(
                update={"output": str(Path(training.output).absolute()), "init_from": _start(training, drafter)}
            ),
        }
    )
    return TrainingJob(
        config=absolute,
        sources=sources,
        held_out=held_out,
        num_held_out=num_held_out,
        drafter=drafter,
        loss=LossConfig(**training.loss.model_dump(), rows_per_chunk=training.loss_rows_per_chunk),
        cache=samples.spec,
        num_samples=len(samples),
        data=tuple(map(describe, samples.reports)),
        total_steps=steps,
        recipe=recipe_of(training, drafter, samples)
        | ({"drafter.draft_vocab": draft_vocab.digest} if draft_vocab else {}),
        draft_vocab=draft_vocab,
    )


def _held_out(config: Config) -> tuple[tuple[Source, ...], int]:
    """The held-out samples of all caches, and how many there are. Raises ConfigError when the split leaves none."""
    if config.training.data.held_out_fraction == 0.0:
        return (), 0
    sources = training_sources(config, "held_out")
    try:
        return sources, len(SampleSet(sources, verify="never"))
    except CacheIncomplete as error:
        raise ConfigError(
            f"training.data.held_out_fraction {config.training.data.held_out_fraction} holds out no sample; raise it, "
            "or set it to 0"
        ) from error


def _draft_vocab(config: Config, drafter: DrafterConfig, samples: SampleSet) -> DraftVocabulary | None:
    if not drafter.reduces_vocabulary:
        return None
    folder = resolve_target(config.target)
    tokenizer = tokenizer_of(config.target.model_copy(update={"path": str(folder)}))
    return draft_vocabulary(
        samples,
        size=drafter.draft_vocab_size,
        vocab_size=drafter.vocab_size,
        always=indispensable_tokens(tokenizer, stop_token_ids(folder, tokenizer)),
        output=Path(config.training.output),
    )


def _start(training: TrainingSection, drafter: DrafterConfig) -> str | None:
    """The checkpoint to start from, as an absolute path; refused before any worker starts when it does not fit."""
    if training.init_from is None:
        return None
    with torch.device("meta"):
        fresh = new_drafter(drafter)
    try:
        warm_start(fresh, training.init_from)
    except ModelError as error:
        raise ConfigError(f"training.init_from: {error}") from error
    return str(Path(training.init_from).absolute())


def training_sources(config: Config, split: Split = "train") -> tuple[Source, ...]:
    """The caches of `training.data`: their samples on one side of the split. `cache.url` comes first."""
    data, cache = config.training.data, config.cache
    main = MixedCache(
        url=cache.url,
        endpoint_url=cache.endpoint_url,
        weight=data.weight,
        domains=data.domains,
        masks=data.masks,
        exclusions=cache.exclusions,
    )
    return tuple(
        Source(
            storage=open_storage(one.url, endpoint_url=one.endpoint_url, options=cache.storage),
            selection=Selection(
                split=split,
                held_out_fraction=data.held_out_fraction,
                sample_fraction=data.sample_fraction,
                max_tokens=data.max_tokens,
                domains=one.domains,
            ),
            weight=one.weight if split == "train" else 1.0,
            masks=one.masks,
            exclusions=one.exclusions,
            disk_cache=cache.disk_cache,
        )
        for one in (main, *data.mix)
    )


def drafter_config(config: Config) -> DrafterConfig:
    """The drafter of a config: its own section, the captured layers, and the target's config.json.

    Raises ConfigError naming what does not fit.
    """
    section = config.drafter
    local = config.target.model_copy(update={"path": str(resolve_target(config.target))})
    facts = target_facts(local.path)
    named = isinstance(section.mask_token, str)
    mask_token = resolve_mask_token(
        section.mask_token, tokenizer_of(local) if named else None, int(facts["vocab_size"])
    )
    try:
        return DrafterConfig.from_target(
            facts,
            shape=DrafterShape(
                kind=section.kind,
                sliding_window=section.sliding_window,
                layer_types=section.layer_types or (),
                target_layer_ids=config.extraction.layer_ids,
                mask_token_id=mask_token,
                block_size=section.block_size,
                num_draft_layers=section.num_draft_layers,
                markov_head_type=section.markov_head,
                markov_rank=section.markov_rank,
                enable_confidence_head=section.confidence_head,
                confidence_head_with_markov=section.confidence_with_markov,
                sample_from_anchor=section.sample_from_anchor,
                intermediate_size=section.intermediate_size,
                num_attention_heads=section.num_attention_heads,
                num_key_value_heads=section.num_key_value_heads,
                head_dim=section.head_dim,
                draft_vocab_size=section.draft_vocab_size or 0,
            ),
        )
    except ModelError as error:
        raise ConfigError(str(error)) from error


def check_cache(cache: CacheSpec, drafter: DrafterConfig, url: str) -> None:
    """Refuse a cache that was built from another target or with other layers.

    Raises ConfigError naming every field that differs, with both values.
    """
    pairs = (
        ("layer_ids", list(cache.layer_ids), list(drafter.target_layer_ids)),
        ("hidden_size", cache.hidden_size, drafter.hidden_size),
        ("num_target_layers", cache.num_target_layers, drafter.num_target_layers),
        ("vocab_size", cache.vocab_size, drafter.vocab_size),
    )
    different = [
        f"{name} is {stored} in the cache, {wanted} here" for name, stored, wanted in pairs if stored != wanted
    ]
    if different:
        raise ConfigError(
            f"{url} does not fit target and extraction.layer_ids: {'; '.join(different)}; train with the config that "
            "built the cache, or build another cache"
        )


def check_origin(cache: CacheSpec, config: Config) -> None:
    """Refuse a cache whose states and tokens came from another target than the one at hand.

    Its embedding and lm_head are what the drafter is trained with, and its template is what it will be served with. A
    cache that does not name its weights (an import of the reference's) is not compared. Raises ConfigError naming
    every difference.
    """
    if "weights" not in cache.identity:
        return
    built = {f"cache.{name}": value for name, value in cache.identity.items()}
    different, _ = compare_identity(built, current_identity(config, check_target(config)))
    if different:
        raise ConfigError(
            f"{config.cache.url} was built with another target than {config.target.path}: {'; '.join(different)}; "
            "train with the config that built the cache, or build another cache"
        )


def recipe_of(training: TrainingSection, drafter: DrafterConfig, samples: SampleSet) -> dict[str, Any]:
    """What must stay the same within a run, as flat JSON."""
    values = training.model_dump(mode="json")
    recipe = {f"training.{name}": values[name] for name in _KEPT}
    recipe |= {f"training.loss.{name}": value for name, value in values["loss"].items()}
    recipe |= {f"drafter.{name}": value for name, value in drafter.to_dict().items()}
    return recipe | samples.identity()
