"""The channel scales of a cache stored as i8cr: measured on a calibration set before any actor writes a shard.

The set is a pure function of the samples' ids, the scales one of its states; they are committed once, so that every
actor, and every later run of the same build, codes with the same ones (`cache_store/calibration.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from cache_store.calibration import (
    CALIBRATION,
    CALIBRATION_SAMPLES,
    Calibration,
    calibrate,
    commit_calibration,
)
from pipeline.cluster import has_accelerators
from pipeline.config import ExtractionSection
from pipeline.engines.hf import HiddenStateExtractor, load_target
from pipeline.errors import BuildFailed
from pipeline.extract import ExtractRecipe, load_piece, to_sample
from pipeline.responses import Place
from pipeline.work import one_line


def ensure_scales(settings: ExtractionSection, recipe: ExtractRecipe, places: dict[str, Place]) -> bool:
    """Measure the cache's scales by one task on the cluster, if it needs some and has none; returns whether it did.

    Raises BuildFailed when the task does, StorageError.
    """
    if not recipe.spec.calibrated or not places or recipe.storage.exists(CALIBRATION):
        return False
    import ray

    work = [(name, places[name]) for name in calibration_set(places)]
    gpus = settings.gpus_per_actor if has_accelerators() else 0
    task = ray.remote(num_cpus=settings.cpus_per_actor, num_gpus=gpus)(measure)
    try:
        found: Calibration = ray.get(task.remote(recipe, work))
    except ray.exceptions.RayTaskError as error:
        raise BuildFailed(f"calibration of the channel scales: {one_line(error)}") from error
    commit_calibration(recipe.storage, recipe.spec, found)
    return True


def calibration_set(ids: Collection[str]) -> list[str]:
    """The ids whose hash is smallest: spread over the inputs, whatever their order, and nothing else decides."""
    return sorted(ids, key=lambda name: hashlib.sha256(name.encode()).digest())[:CALIBRATION_SAMPLES]


def measure(recipe: ExtractRecipe, work: list[tuple[str, Place]]) -> Calibration:
    """In a worker: extract the set's states and take their scales."""
    import torch

    model = load_target(recipe.target, "cuda" if torch.cuda.is_available() else "cpu", with_head=False)
    extractor = HiddenStateExtractor(model, recipe.spec.layer_ids, tokens_per_batch=recipe.tokens_per_batch)
    rows = load_piece(recipe.storage, work).to_pylist()
    states = extractor.extract([row["token_ids"] for row in rows])
    return calibrate(recipe.spec, (to_sample(rows[item.index], item) for item in states))
