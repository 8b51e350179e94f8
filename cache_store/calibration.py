"""Channel scales for the codec i8cr: the root mean square of every channel over a calibration set.

A pure function of the set's samples, committed once as `calibration.json` before the first shard is written; every
writer and reader uses that object, and its digest stands in every shard's record.
Legend: L captured layers, T tokens, D hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from cache_store import codec
from cache_store.errors import AlreadyExists, CacheError, CacheIncomplete, NotFound
from cache_store.fields import FieldCodec, FieldCodecs
from cache_store.identity import digest_json
from cache_store.schema import CALIBRATED, FORMAT_VERSION, CacheSpec, TargetSample, parse_versioned
from cache_store.storage import Storage

CALIBRATION = "calibration.json"
CALIBRATION_COPIES = "calibration/"
CALIBRATION_SAMPLES = 64
"""Enough for scales: doubling it moves the error by less than 1 % of itself."""
DIGITS = 5
"""Significant decimal digits of a stored scale: any scale near the true one serves, but all must use the same."""

LAST_SHARE_OF_BOUND = 0.7
"""The last hidden state is the one whose error moves the target's distribution; finer rows cost 1 % of the cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Root mean squares, float32, of the fields whose codec is calibrated; the other one is None."""

    captured: np.ndarray | None
    """[L, D]."""
    last: np.ndarray | None
    """[1, D]."""

    def to_json(self) -> str:
        """The scales as JSON text."""
        fields = {"captured": self.captured, "last": self.last}
        lists = {name: None if value is None else _as_lists(value) for name, value in fields.items()}
        return json.dumps({"format_version": FORMAT_VERSION, **lists}) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, spec: CacheSpec, where: str = CALIBRATION) -> Calibration:
        """Read `to_json`'s text. Raises CacheError when it does not fit the settings."""
        data, _ = parse_versioned(text, where)
        if set(data) != {"captured", "last"}:
            raise CacheError(f"{where}: fields {sorted(data)}, wanted captured and last")
        fields = {"captured": (spec.codec, spec.num_layers), "last": (spec.last_codec, 1)}
        return cls(
            **{
                name: _parse(data[name], (groups, spec.hidden_size) if tag in CALIBRATED else None, f"{where}: {name}")
                for name, (tag, groups) in fields.items()
            }
        )

    @property
    def digest(self) -> str:
        """sha256 of the scales as stored."""
        return digest_json(json.loads(self.to_json()))


def calibrate(spec: CacheSpec, samples: Iterable[TargetSample]) -> Calibration:
    """Scales from whole samples (all positions of the last hidden state that are not zero).

    A row (token of a layer) counts by its own mean square, so that a massive activation on one token does not set
    the scale of its channel for all others. Raises CacheError for an empty set.
    """
    totals = [np.zeros((spec.num_layers, spec.hidden_size)), np.zeros((1, spec.hidden_size))]
    seen = 0
    for sample in samples:
        seen += 1
        for total, bits in zip(totals, (sample.hidden_states, sample.last_hidden_state[None]), strict=True):
            squares = np.square(codec.to_float(bits), dtype=np.float64)
            energy = squares.mean(axis=-1, keepdims=True)
            shares = np.divide(squares, energy, out=np.zeros_like(squares), where=energy > 0)
            np.add(total, shares.sum(axis=1), out=total)
    if not seen:
        raise CacheError("calibration: no samples to measure channel scales on")
    captured, last = (_rounded(total) for total in totals)
    return Calibration(
        captured=captured if spec.codec in CALIBRATED else None, last=last if spec.last_codec in CALIBRATED else None
    )


def commit_calibration(storage: Storage, spec: CacheSpec, found: Calibration) -> Calibration:
    """Store the scales if nobody has; returns the ones that the cache has from now on. Raises StorageError.

    A copy goes first, for `repair`: without its scales no state of the cache can be read.
    """
    content = found.to_json().encode()
    try:
        storage.put(f"{CALIBRATION_COPIES}{found.digest[:16]}.json", content)
        storage.put(CALIBRATION, content, if_absent=True)
    except AlreadyExists:
        return load_calibration(storage, spec)
    return found


def load_calibration(storage: Storage, spec: CacheSpec, *, empty: bool = False) -> Calibration:
    """The cache's scales. Raises CacheIncomplete when its codecs need some and there are none, unless it is empty."""
    if not spec.calibrated:
        return Calibration(captured=None, last=None)
    try:
        return Calibration.from_json(storage.read(CALIBRATION), spec, storage.path(CALIBRATION))
    except NotFound as error:
        if empty:
            return Calibration(captured=None, last=None)
        raise CacheIncomplete(
            f"{storage.url} stores states as i8cr but has no {CALIBRATION} yet; its build writes one before the first "
            "shard: run it again"
        ) from error


def field_codecs(spec: CacheSpec, calibration: Calibration) -> FieldCodecs:
    """The codecs of the cache's fields, ready to use."""
    return FieldCodecs(
        captured=FieldCodec(spec.codec, calibration.captured),
        last=FieldCodec(spec.last_codec, calibration.last, share_of_bound=LAST_SHARE_OF_BOUND),
    )


def digest_of(calibration: Calibration) -> str | None:
    """What a shard's record says of its calibration."""
    return calibration.digest if calibration.captured is not None or calibration.last is not None else None


def _rounded(total: np.ndarray) -> np.ndarray:
    """Scales relative to a row's own size, with a floor for channels that the set never used."""
    scales = np.sqrt(total / max(total.sum() / total.size, 1e-30))
    floor = 1e-3
    return np.array(_as_lists(np.maximum(scales, floor).astype(np.float32)), dtype=np.float32)


def _as_lists(scales: np.ndarray) -> list[list[float]]:
    return [[float(f"{value:.{DIGITS}g}") for value in row] for row in scales.tolist()]


def _parse(value: object, shape: tuple[int, int] | None, where: str) -> np.ndarray | None:
    if (value is None) != (shape is None):
        raise CacheError(f"{where} is {'missing' if value is None else 'there'}, the codecs say otherwise")
    if shape is None:
        return None
    try:
        scales = np.array(value, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise CacheError(f"{where} is not a list of lists of numbers: {error}") from error
    if scales.shape != shape or not np.isfinite(scales).all() or not (scales > 0).all():
        raise CacheError(f"{where} has shape {list(scales.shape)}, wanted {list(shape)} positive numbers")
    return scales
