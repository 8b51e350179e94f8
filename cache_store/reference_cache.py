"""Caches in the reference implementation's format version 2, as a source for `convert.py`; nothing is ever written so.

`manifest.json`, `samples.idx` (56-byte records) and raw shards, laid out back to back without alignment or checksums:
states are [T, L*D], a token's captured layers one after another, bfloat16 (FORMAT.md, "Importing the reference's
version 2"). Legend: L captured layers, T tokens, D hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cache_store.calibration import Calibration
from cache_store.errors import CacheError, ShardCorrupt
from cache_store.fields import TensorError
from cache_store.identity import digest_json, digest_tokenizer, digest_weights
from cache_store.ledger import Reject
from cache_store.schema import DEFAULT_FORMAT, DEFAULT_SHARD_MB, CacheSpec, TargetSample
from cache_store.shard import StoredSample
from cache_store.storage import Storage

VERSION = 2
_INDEX = "samples.idx"
_RECORD = np.dtype(
    [
        ("sample_id", "<u8"),
        ("shard", "<u4"),
        ("tokens", "<u4"),
        ("input_ids", "<u8"),
        ("attention_mask", "<u8"),  # readers derive it from the length
        ("loss_mask", "<u8"),
        ("hidden_states", "<u8"),
        ("last_hidden_state", "<u8"),
    ]
)
_WANTED = {"hidden_dtype": "bfloat16", "token_dtype": "int32", "mask_dtype": "uint8", "index_record_size": 56}
_ID_DIGITS = 10


def is_reference_cache(storage: Storage) -> bool:
    """Whether this place holds a cache of the reference."""
    return storage.exists(_INDEX)


class ReferenceCache:
    """Samples by position; ids are the reference's numbers with leading zeros, so that they sort as numbers do.

    target: folder of the target in Hugging Face layout; its config.json says what the reference's manifest does not
    (layers, vocabulary), and its weights and tokenizer, where they are there, enter the identity.
    Raises CacheError for another version, dtype or a target that does not fit.
    """

    def __init__(self, storage: Storage, target: Path) -> None:
        self._storage = storage
        self._facts = _manifest(storage)
        self._records = _index(storage, self._facts["num_samples"])
        self.spec = _spec(self._facts, target)
        names = {shard["shard_id"]: shard["file_name"] for shard in self._facts["shards"]}
        self._shards = [names.get(int(number)) for number in self._records["shard"]]
        if None in self._shards:
            raise CacheError(f"{storage.path(_INDEX)}: a sample names a shard that manifest.json does not list")

    @property
    def ids(self) -> Sequence[str]:
        """Sample ids by position."""
        return [f"{number:0{_ID_DIGITS}d}" for number in self._records["sample_id"].tolist()]

    def rejected(self) -> list[Reject]:
        """The reference keeps no list of what it dropped."""
        return []

    def scales(self) -> Calibration:
        """None: its states are exact."""
        return Calibration(captured=None, last=None)

    def errors(self) -> tuple[TensorError, ...]:
        """None: its states are exact."""
        return ()

    def sample(self, position: int) -> tuple[TargetSample, StoredSample | None]:
        """A sample. Raises ShardCorrupt when its bytes are not all there or its mask is no mask."""
        record = self._records[position]
        tokens, layers, size = int(record["tokens"]), self.spec.num_layers, self.spec.hidden_size
        hidden = self._array(position, "hidden_states", "<u2", tokens * layers * size)
        mask = self._array(position, "loss_mask", "u1", tokens)
        if not np.isin(mask, (0, 1)).all():
            raise ShardCorrupt(f"{self._where(position)}: its loss mask holds other values than 0 and 1")
        last = self._array(position, "last_hidden_state", "<u2", tokens * size)
        return (
            TargetSample(
                sample_id=self.ids[position],
                input_ids=self._array(position, "input_ids", "<i4", tokens).astype(np.int32),
                loss_mask=mask != 0,
                hidden_states=np.ascontiguousarray(hidden.reshape(tokens, layers, size).transpose(1, 0, 2)),
                last_hidden_state=last.reshape(tokens, size),
                metadata={},
            ),
            None,
        )

    def _array(self, position: int, field: str, dtype: str, count: int) -> np.ndarray:
        try:
            data = self._storage.read_range(
                str(self._shards[position]), int(self._records[position][field]), count * np.dtype(dtype).itemsize
            )
        except CacheError as error:
            raise ShardCorrupt(f"{self._where(position)}: {field}: {error}") from error
        return np.frombuffer(data, dtype)

    def _where(self, position: int) -> str:
        return f"{self._storage.path(str(self._shards[position]))}: sample {self.ids[position]}"


def _manifest(storage: Storage) -> dict[str, Any]:
    where = storage.path("manifest.json")
    try:
        data = json.loads(storage.read("manifest.json"))
    except ValueError as error:
        raise CacheError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(data, dict) or data.get("version") != VERSION:
        found = data.get("version") if isinstance(data, dict) else None
        raise CacheError(f"{where}: version {found!r} of the reference's cache, this program imports {VERSION}")
    if wrong := [
        f"{name} is {data.get(name)!r}, wanted {value!r}" for name, value in _WANTED.items() if data.get(name) != value
    ]:
        raise CacheError(f"{where}: {'; '.join(wrong)}")
    if missing := [name for name in ("hidden_size", "num_samples", "shards", "target_layer_ids") if name not in data]:
        raise CacheError(f"{where}: lacks {', '.join(missing)}")
    return data


def _index(storage: Storage, count: int) -> np.ndarray:
    content = storage.read(_INDEX)
    if len(content) != count * _RECORD.itemsize:
        raise CacheError(
            f"{storage.path(_INDEX)}: {len(content)} bytes, wanted {count} samples of {_RECORD.itemsize} bytes"
        )
    return np.frombuffer(content, _RECORD)


def _spec(facts: Mapping[str, Any], target: Path) -> CacheSpec:
    file = target / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        sizes = {**config, **config.get("text_config", {})}
        hidden, layers, vocabulary = (sizes[name] for name in ("hidden_size", "num_hidden_layers", "vocab_size"))
    except (OSError, ValueError, KeyError) as error:
        raise CacheError(f"{file}: wanted the config.json of the cache's target: {error}") from error
    if hidden != facts["hidden_size"]:
        raise CacheError(f"{file}: hidden_size {hidden}, the cache has {facts['hidden_size']}: another target")
    return CacheSpec(
        layer_ids=tuple(facts["target_layer_ids"]),
        hidden_size=hidden,
        num_target_layers=layers,
        vocab_size=vocabulary,
        format=DEFAULT_FORMAT,
        codec="raw",
        last_hidden="all",
        shard_bytes=DEFAULT_SHARD_MB << 20,
        identity=_identity(facts, target, config),
    )


def _identity(facts: Mapping[str, Any], target: Path, config: dict[str, Any]) -> dict[str, Any]:
    identity: dict[str, Any] = {
        "imported_from": f"reference target cache, version {VERSION}",
        "reference_manifest": digest_json(dict(facts)),
        "target": facts.get("target_model_name_or_path"),
        "template_name": facts.get("chat_template"),
        "max_length": facts.get("max_length"),
        "config": digest_json(config),
    }
    for name, digest in (("weights", digest_weights), ("tokenizer", digest_tokenizer)):
        try:
            identity[name] = digest(target)
        except CacheError:  # a folder with the config alone
            identity[name] = None
    return identity
