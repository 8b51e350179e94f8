"""The reduced draft vocabulary of a run: the tokens that the target generates most, counted in its samples.

Counted once, kept as `<output>/draft_vocab.json`, and part of the recipe by its digest: a run never changes it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cache_store.identity import digest_json
from cache_store.mixture import SampleSet
from model.draft_vocab import check_draft_ids, most_frequent
from model.errors import DrafterConfigError
from pipeline.errors import ConfigError

FILE = "draft_vocab.json"
SAMPLES_COUNTED = 20_000
"""Samples read at most, evenly spaced over an epoch: some ten million tokens, far more than the ranks need."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftVocabulary:
    """The mapping and how it came about."""

    samples: str
    """sha256 of what identifies the run's samples, of all caches that are mixed."""
    vocab_size: int
    """V: the target's vocabulary."""
    always: tuple[int, ...]
    """Stop, special and byte tokens: always in."""
    counted_tokens: int
    """Supervised tokens that were counted."""
    coverage: float
    """Share of them that can be drafted: the others end a block."""
    ids: tuple[int, ...]
    """Target ids, ascending; draft token d stands for ids[d]."""

    @property
    def digest(self) -> str:
        """sha256 of the mapping, for the recipe."""
        return hashlib.sha256(np.asarray(self.ids, dtype="<i8").tobytes()).hexdigest()

    def tensor(self) -> Tensor:
        """The mapping as int64 [V_d]."""
        return torch.tensor(self.ids, dtype=torch.int64)

    def to_json(self) -> str:
        """The file's content."""
        return json.dumps(asdict(self)) + "\n"

    def line(self) -> str:
        """For the plan that a job prints."""
        return (
            f"{len(self.ids):,} of {self.vocab_size:,} tokens can be drafted: {self.coverage:.2%} of the "
            f"{self.counted_tokens:,} supervised tokens counted"
        )


def draft_vocabulary(
    samples: SampleSet, *, size: int, vocab_size: int, always: frozenset[int], output: Path
) -> DraftVocabulary:
    """The run's vocabulary: what `output` holds for exactly these samples and size, else counted anew.

    Writes nothing. Raises ConfigError when the tokens that must be in do not fit, or the file holds no mapping.
    """
    kept = _kept(output / FILE)
    wanted = (digest_json(samples.identity()), vocab_size, tuple(sorted(always)), size)
    if kept is not None and wanted == (kept.samples, kept.vocab_size, kept.always, len(kept.ids)):
        return kept
    counts = count_supervised(samples, vocab_size)
    try:
        ids = most_frequent(torch.from_numpy(counts), size, always=always)
    except DrafterConfigError as error:
        raise ConfigError(f"drafter.draft_vocab_size: {error}") from error
    total = int(counts.sum())
    return DraftVocabulary(
        samples=wanted[0],
        vocab_size=vocab_size,
        always=wanted[2],
        counted_tokens=total,
        coverage=float(counts[ids.numpy()].sum() / total) if total else 0.0,
        ids=tuple(ids.tolist()),
    )


def count_supervised(samples: SampleSet, vocab_size: int, *, limit: int = SAMPLES_COUNTED) -> np.ndarray:
    """How often each token was generated, int64 [V], in at most `limit` evenly spaced samples of the first epoch."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for position in np.unique(np.linspace(0, len(samples) - 1, min(limit, len(samples))).astype(np.int64)):
        reader, row = samples.find(0, int(position))
        sample = reader.read(row, states=False)
        counts += np.bincount(sample.input_ids[sample.loss_mask], minlength=vocab_size)
    return counts


def _kept(file: Path) -> DraftVocabulary | None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        content |= {"always": tuple(content["always"]), "ids": tuple(content["ids"])}
        kept = DraftVocabulary(**content)
        check_draft_ids(kept.tensor(), kept.vocab_size, always=kept.always)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, DrafterConfigError) as error:
        raise ConfigError(
            f"{file}: not a draft vocabulary: {error}; restore it, or delete it and choose another training.output"
        ) from error
    return kept
