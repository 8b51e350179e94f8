"""Which inputs are done: committed or rejected. Resume is a set difference; sealing proves that nothing is missing."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass

import pyarrow as pa

from cache_store import index
from cache_store.calibration import digest_of, load_calibration
from cache_store.errors import CacheError, CacheIncomplete, CacheMismatch, NotFound, StorageError
from cache_store.fields import merge_errors
from cache_store.identity import fingerprint
from cache_store.manifest import COMMITS, MANIFEST, REJECTS, Manifest, ShardRecord, ShardSummary
from cache_store.schema import CacheSpec
from cache_store.shard import checksum
from cache_store.storage import Storage
from cache_store.writer import load_spec, record_name

STAGES = ("prompts", "regenerate", "extract", "convert")
_NAMED = 5
_PROOF = "sha256-"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reject:
    """An input that did not make it, where and why."""

    sample_id: str
    stage: str
    """prompts, regenerate, extract or convert."""
    reason: str
    source: str | None = None
    """File and line of the input, where known."""

    def __post_init__(self) -> None:
        texts = (self.sample_id, self.reason, self.source or "")
        if self.stage not in STAGES or not all(isinstance(text, str) for text in texts):
            raise CacheError(f"reject {self!r}: stage must be one of {', '.join(STAGES)}, the rest text")


class Ledger:
    """What the records and rejects of a cache say. Records never change, so each is read once per Ledger."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._records: dict[str, ShardRecord] = {}
        self._rejects: dict[str, list[Reject]] = {}

    def records(self) -> list[ShardRecord]:
        """Records of all committed shards, sorted by name. Raises CacheError for an unreadable one."""
        names = record_names(self.storage, self._records)
        new = [name for name in names if name not in self._records]
        for name, text in zip(new, self.storage.read_many(new), strict=True):
            self._records[name] = ShardRecord.from_json(text, self.storage.path(name))
        return [self._records[name] for name in names]

    def committed_ids(self) -> set[str]:
        """Ids of all committed samples."""
        return {sample.sample_id for record in self.records() for sample in record.samples}

    def rejected(self) -> dict[str, Reject]:
        """Rejected inputs by id. The last file by name wins; an id that was committed after all stays listed here."""
        names = [info.name for info in self.storage.list(REJECTS) if info.name.endswith(".jsonl")]
        new = [name for name in names if name not in self._rejects]
        for name, text in zip(new, self.storage.read_many(new), strict=True):
            self._rejects[name] = parse_rejects(text, self.storage.path(name))
        return {reject.sample_id: reject for name in names for reject in self._rejects[name]}

    def reject(self, rejects: list[Reject]) -> None:
        """Store rejects, all or none of the list, under a name made from them: a changed byte is noticed."""
        if rejects:
            lines = "".join(json.dumps(asdict(reject), ensure_ascii=False) + "\n" for reject in rejects).encode()
            self.storage.put(f"{REJECTS}{_PROOF}{hashlib.sha256(lines).hexdigest()[:32]}.jsonl", lines)

    def pending(self, ids: Iterable[str]) -> list[str]:
        """Those of `ids` that are neither committed nor rejected, in their order, each once."""
        done = self.committed_ids() | self.rejected().keys()
        return [sample_id for sample_id in dict.fromkeys(ids) if sample_id not in done]


def record_names(storage: Storage, seen: Collection[str] = ()) -> list[str]:
    """Names of all records, sorted. A listing may lag behind: what was `seen` or sealed is asked for by name."""
    listed = {info.name for info in storage.list(COMMITS) if info.name.endswith(".json")}
    try:
        sealed = [record_name(shard.name) for shard in Manifest.from_json(storage.read(MANIFEST)).shards]
    except StorageError as error:
        if not isinstance(error, NotFound):
            raise
        sealed = []
    except CacheError:  # a damaged manifest names nothing; verify reports it
        sealed = []
    unlisted = {*seen, *sealed} - listed
    return sorted(listed | {name for name in unlisted if storage.exists(name)})


def seal(storage: Storage, *, expected_ids: Collection[str] | None) -> Manifest:
    """Write the index of samples, then manifest.json; may be repeated, also after more shards were committed.

    An id in several shards is read from the first record by name; the others are counted as duplicates. An id both
    committed and rejected counts as committed. Raises CacheIncomplete unless expected_ids (None: not checked) are
    exactly the committed and rejected ones, and CacheMismatch for a shard written under other settings.
    """
    spec, ledger = load_spec(storage), Ledger(storage)
    records, rejected = ledger.records(), ledger.rejected()
    print_wanted = fingerprint(spec)
    for record in records:
        if record.fingerprint != print_wanted:
            raise CacheMismatch(
                f"{storage.path(record.name)} was written under settings {record.fingerprint[:12]}, "
                f"cache.json has {print_wanted[:12]}; move this shard and its record away"
            )
    scales = _scales(storage, spec, records)
    if expected_ids is not None:
        ids = {sample.sample_id for record in records for sample in record.samples}
        _check_complete(storage, set(expected_ids), ids | rejected.keys())
    manifest, content = sealed_form(spec, scales, records, rejected)
    storage.put(manifest.index, content)
    storage.put(MANIFEST, manifest.to_json().encode())
    return manifest


def sealed_form(
    spec: CacheSpec, scales: str | None, records: list[ShardRecord], rejected: Mapping[str, Reject]
) -> tuple[Manifest, bytes]:
    """What a seal writes: the manifest, and the content of the index it names. scales: digest of the calibration."""
    table = index.build(records)
    ids = set(index.column_list(table, "sample_id"))
    rejected = {sample_id: reject for sample_id, reject in rejected.items() if sample_id not in ids}
    content = index.to_bytes(table)
    manifest = Manifest(
        fingerprint=fingerprint(spec),
        num_samples=len(ids),
        num_tokens=int(index.column(table, "tokens").sum()),
        num_supervised=int(index.column(table, "supervised").sum()),
        num_bytes=sum(record.num_bytes for record in records),
        duplicates=sum(record.num_samples for record in records) - len(ids),
        rejected=len(rejected),
        rejects=count_rejects(rejected.values()),
        calibration=scales,
        errors=merge_errors(error for record in records for error in record.errors),
        index=index.object_name(content),
        index_checksum=checksum(content),
        shards=summaries(records, table),
    )
    return manifest, content


def _scales(storage: Storage, spec: CacheSpec, records: list[ShardRecord]) -> str | None:
    """Digest of the channel scales, which all shards must have used; None while there is neither."""
    wanted = digest_of(load_calibration(storage, spec, empty=not records))
    for record in records:
        if record.calibration != wanted:
            raise CacheMismatch(
                f"{storage.path(record.name)} was written with channel scales {record.calibration}, the cache has "
                f"{wanted}; move this shard and its record away"
            )
    return wanted


def _check_complete(storage: Storage, expected: set[str], found: set[str]) -> None:
    missing, unexpected = sorted(expected - found), sorted(found - expected)
    if not missing and not unexpected:
        return
    parts = [
        f"{len(ids)} {what} ({', '.join(ids[:_NAMED])}{', …' if len(ids) > _NAMED else ''})"
        for what, ids in (("inputs are neither committed nor rejected", missing), ("ids are no input", unexpected))
        if ids
    ]
    raise CacheIncomplete(
        f"{storage.url} cannot be sealed: {len(expected)} inputs, but {' and '.join(parts)}; "
        "run the same build again to finish it"
    )


def count_rejects(rejects: Iterable[Reject]) -> dict[str, dict[str, int]]:
    """stage -> reason -> count, both in alphabetical order."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for reject in rejects:
        counts[reject.stage][reject.reason] += 1
    return {stage: dict(sorted(counts[stage].items())) for stage in sorted(counts)}


def summaries(records: list[ShardRecord], table: pa.Table) -> tuple[ShardSummary, ...]:
    """Lines of the manifest, one per record, with the number of samples that the index takes from it."""
    used = Counter(index.column(table, "shard").tolist())
    return tuple(
        ShardSummary(
            name=record.name,
            format=record.format,
            codec=record.codec,
            last_codec=record.last_codec,
            num_samples=record.num_samples,
            used=used[number],
            num_bytes=record.num_bytes,
            footer_bytes=record.footer_bytes,
            checksum=record.checksum,
        )
        for number, record in enumerate(records)
    )


def parse_rejects(text: bytes, where: str) -> list[Reject]:
    """Lines of a file of rejects. Raises CacheError naming file and line, or a content that its name does not allow."""
    proof = where.rpartition("/")[2].removesuffix(".jsonl")
    if proof.startswith(_PROOF) and hashlib.sha256(text).hexdigest()[:32] != proof.removeprefix(_PROOF):
        raise CacheError(f"{where}: its content has changed since it was written")
    rejects = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            rejects.append(Reject(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise CacheError(f"{where} line {number}: not a reject: {error}") from error
    return rejects
