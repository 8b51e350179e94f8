"""Proof that a cache is whole: every record has its shard, every byte its checksum, every sample finite states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np

from cache_store import codec, index
from cache_store.calibration import CALIBRATION, digest_of, field_codecs, load_calibration
from cache_store.containers import open_layout
from cache_store.errors import CacheError, NotFound, ObjectEndsEarly
from cache_store.fields import FieldCodecs
from cache_store.identity import fingerprint
from cache_store.ledger import Reject, parse_rejects, record_names, sealed_form
from cache_store.manifest import MANIFEST, REJECTS, SHARDS, Manifest, SampleRecord, ShardRecord
from cache_store.schema import CacheSpec
from cache_store.shard import ShardLayout, StoredSample, checksum, indexed_metadata, needed_positions, supervised_spans
from cache_store.storage import TEMPORARY, Storage
from cache_store.writer import load_spec, record_name


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong."""

    kind: str
    """Damage: bad-record, missing-record, wrong-settings, missing-shard, wrong-size, checksum, wrong-layout,
    wrong-counts, id-mismatch, wrong-tokens, wrong-metadata, not-finite, bad-calibration, bad-rejects, bad-manifest,
    not-sealed. orphan: left over from a crash, seen by no reader."""
    name: str
    """Object, below the cache's root."""
    detail: str
    sample_id: str | None = None
    """The damaged sample, where the damage is one sample's."""

    @property
    def damage(self) -> bool:
        """Whether readers are affected."""
        return self.kind != "orphan"


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What was looked at, and what was found."""

    shards: int
    samples: int
    num_bytes: int
    findings: tuple[Finding, ...]

    @property
    def damaged(self) -> bool:
        """Whether any finding affects readers."""
        return any(finding.damage for finding in self.findings)


@dataclass(frozen=True, slots=True)
class AuditProgress:
    """How far a verification is."""

    shards_done: int
    shards: int
    bytes_done: int
    num_bytes: int
    damaged_shards: int


def verify_cache(
    storage: Storage, *, quick: bool = False, progress: Callable[[AuditProgress], None] | None = None
) -> AuditReport:
    """Check a cache against its records: damage is reported, not raised. Reads every byte unless `quick`.

    progress is called after every shard. One shard is in memory at a time. Raises NotFound when there is no cache at
    this place, CacheError when its cache.json is unreadable, StorageError when the storage gives up.
    """
    spec = load_spec(storage)
    records, findings = read_records(storage)
    known, problems = _known(storage, spec, bool(records))
    findings += problems
    sizes = {info.name: info.size for info in storage.list(SHARDS)}
    total, done, damaged = sum(record.num_bytes for record in records), 0, 0
    for number, record in enumerate(records, start=1):
        found = _check_shard(storage, known, record, sizes.get(record.name), quick)
        findings += found
        done, damaged = done + record.num_bytes, damaged + bool(found)
        if progress is not None:
            progress(AuditProgress(number, len(records), done, total, damaged))
    recorded = {record.name for record in records}
    extra = sizes | {info.name: info.size for info in storage.list(f"{TEMPORARY}/")}
    findings += [
        Finding("orphan", name, f"{size:,} bytes without a commit record: a writer died, or is at work")
        for name, size in extra.items()
        if name not in recorded
    ]
    return AuditReport(
        shards=len(records),
        samples=sum(record.num_samples for record in records),
        num_bytes=total,
        findings=(*findings, *_check_seal(storage, known, records)),
    )


def read_records(storage: Storage) -> tuple[list[ShardRecord], list[Finding]]:
    """All records that can be read, and what is wrong with the others."""
    records, findings = [], []
    names = record_names(storage)
    for name, text in zip(names, storage.read_many(names), strict=True):
        try:
            record = ShardRecord.from_json(text, name)
        except CacheError as error:
            findings.append(Finding("bad-record", name, str(error)))
            continue
        if record_name(record.name) != name:
            findings.append(Finding("bad-record", name, f"is a record of {record.name}"))
            continue
        records.append(record)
    return records, findings


@dataclass(frozen=True, slots=True)
class _Known:
    """What all shards of a cache have in common."""

    spec: CacheSpec
    fingerprint: str
    calibration: str | None
    codecs: FieldCodecs | None


def _known(storage: Storage, spec: CacheSpec, needed: bool) -> tuple[_Known, list[Finding]]:
    """The settings with their channel scales; missing or damaged scales are a finding once a shard needs them."""
    try:
        scales = load_calibration(storage, spec)
    except CacheError as error:
        findings = [Finding("bad-calibration", CALIBRATION, str(error))] if needed else []
        return _Known(spec, fingerprint(spec), None, None), findings
    return _Known(spec, fingerprint(spec), digest_of(scales), field_codecs(spec, scales)), []


def _check_shard(storage: Storage, known: _Known, record: ShardRecord, size: int | None, quick: bool) -> list[Finding]:
    found: list[Finding] = []
    if record.fingerprint != known.fingerprint:
        found.append(Finding("wrong-settings", record.name, f"written under {record.fingerprint[:12]}"))
    if known.codecs is not None and record.calibration != known.calibration:
        found.append(Finding("wrong-settings", record.name, f"written with channel scales {record.calibration}"))
    if size is None:  # a listing may lag behind: ask for the object itself
        try:
            size = storage.size(record.name)
        except NotFound:
            size = None
    if size is None:
        found.append(Finding("missing-shard", record.name, f"record says {record.num_bytes:,} bytes"))
    elif size != record.num_bytes:
        found.append(Finding("wrong-size", record.name, f"{size:,} bytes, record says {record.num_bytes:,}"))
    elif not quick:
        found += [Finding(kind, record.name, *facts) for kind, *facts in _check_content(storage, known, record)]
    return found


def _read_shard(storage: Storage, record: ShardRecord) -> bytes:
    content = storage.read_range(record.name, 0, record.num_bytes)
    if checksum(content) != record.checksum:  # once more: perhaps it was damaged on its way
        content = storage.read_range(record.name, 0, record.num_bytes)
    return content


def _check_content(storage: Storage, known: _Known, record: ShardRecord) -> list[tuple[str, ...]]:
    """(kind, detail) or (kind, detail, sample id) of everything wrong with a shard of the right size."""
    found: list[tuple[str, ...]] = []
    try:
        content = memoryview(_read_shard(storage, record))
    except NotFound as error:
        return [("missing-shard", str(error))]
    except ObjectEndsEarly as error:
        return [("wrong-size", str(error))]
    if (crc := checksum(content)) != record.checksum:
        found.append(("checksum", f"crc32c {crc}, record says {record.checksum}"))
    try:
        layout = open_layout(record.format, bytes(content[len(content) - record.footer_bytes :]))
    except CacheError as error:
        return [*found, ("wrong-layout", str(error))]
    ranges = [(sample.offset, sample.length) for sample in record.samples]
    if problems := layout.problems(known.spec, content, ranges):
        return [*found, *problems]
    for row, sample in enumerate(record.samples):
        for kind, text in _check_row(known, layout, row, (sample, content)):
            found.append((kind, f"sample {sample.sample_id!r}: {text}", sample.sample_id))
    return found


def _check_row(
    known: _Known, layout: ShardLayout, row: int, found: tuple[SampleRecord, memoryview]
) -> list[tuple[str, str]]:
    sample, content = found
    data = content[sample.offset : sample.offset + sample.length]
    if (crc := checksum(data)) != sample.checksum:
        return [("checksum", f"crc32c {crc}, record says {sample.checksum}")]
    try:
        return _check_sample(known, sample, layout.read(row, sample.offset, bytes(data)))
    except CacheError as error:
        return [("wrong-layout", str(error))]


def _check_sample(known: _Known, sample: SampleRecord, stored: StoredSample) -> list[tuple[str, str]]:
    """(kind, detail) of everything wrong with a sample that could be decoded."""
    found, spec = [], known.spec
    if stored.sample_id != sample.sample_id:
        found.append(("id-mismatch", f"the shard holds {stored.sample_id!r} there"))
    tokens = len(stored.input_ids)
    if tokens != sample.tokens or len(stored.loss_mask) != tokens:
        return [*found, ("wrong-tokens", f"{tokens} ids and {len(stored.loss_mask)} mask values, not {sample.tokens}")]
    if supervised_spans(stored.loss_mask) != sample.supervised_spans:
        found.append(("wrong-tokens", "its supervised positions differ from the record's"))
    finish, domain = indexed_metadata(stored.metadata)
    if (sample.finish, sample.domain) != (finish, domain if spec.format_version > 1 else None):
        found.append(("wrong-metadata", f"its record says finish {sample.finish!r}, domain {sample.domain!r}"))
    if tokens and not 0 <= stored.input_ids.min() <= stored.input_ids.max() < spec.vocab_size:
        found.append(("wrong-tokens", f"token ids outside the vocabulary of {spec.vocab_size}"))
    rows = tokens if spec.last_hidden == "all" else len(needed_positions(stored.loss_mask))
    if known.codecs is None:  # without channel scales nothing can be decoded; that is a finding of its own
        return found
    fields = (
        ("hidden states", known.codecs.captured, stored.captured, (spec.num_layers, tokens)),
        ("last hidden state", known.codecs.last, stored.last, (1, rows)),
    )
    for what, field, planes, (groups, count) in fields:
        values = np.empty((groups, count, spec.hidden_size), np.uint16)
        try:
            field.decode_into(planes, count, values)
        except CacheError as error:
            found.append(("wrong-layout", f"{what}: {error}"))
            continue
        if bad := codec.count_nonfinite(values):
            found.append(("not-finite", f"{what}: {bad} infinite or NaN values"))
    return found


def _check_seal(storage: Storage, known: _Known, records: list[ShardRecord]) -> list[Finding]:
    """Rejects, manifest and index: the sealed list must be what the records and rejects make."""
    findings, rejected = [], dict[str, Reject]()
    names = [info.name for info in storage.list(REJECTS) if info.name.endswith(".jsonl")]
    for name, text in zip(names, storage.read_many(names), strict=True):
        try:
            rejected |= {reject.sample_id: reject for reject in parse_rejects(text, name)}
        except CacheError as error:
            findings.append(Finding("bad-rejects", name, str(error)))
    try:
        manifest = Manifest.from_json(storage.read(MANIFEST))
        index_bytes = storage.read(manifest.index) if storage.exists(manifest.index) else b""
    except NotFound:
        return [*findings, Finding("not-sealed", MANIFEST, "the build has not finished; run it again")]
    except CacheError as error:
        return [*findings, Finding("bad-manifest", MANIFEST, str(error))]
    return findings + _check_manifest(manifest, index_bytes, known, (records, rejected))


def _check_manifest(
    manifest: Manifest, index_bytes: bytes, known: _Known, found: tuple[list[ShardRecord], dict[str, Reject]]
) -> list[Finding]:
    if manifest.fingerprint != known.fingerprint:
        return [Finding("wrong-settings", MANIFEST, f"sealed under {manifest.fingerprint[:12]}")]
    recorded = {record.name for record in found[0]}
    if lost := [shard for shard in manifest.shards if shard.name not in recorded]:
        detail = "the manifest lists {} samples under it"
        return [Finding("missing-record", record_name(s.name), detail.format(s.num_samples)) for s in lost]
    try:
        if checksum(index_bytes) != manifest.index_checksum:
            raise CacheError(f"{manifest.index}: missing, or its crc32c is not {manifest.index_checksum}")
        table = index.from_bytes(index_bytes, manifest.index)
        wanted, _ = sealed_form(known.spec, known.calibration, *found)
        # The index's bytes depend on the Parquet writer's version; its rows do not.
        listed = replace(wanted, index=manifest.index, index_checksum=manifest.index_checksum)
        odd = [f.name for f in fields(Manifest) if getattr(listed, f.name) != getattr(manifest, f.name)]
        if not table.equals(index.build(found[0])):
            odd.append("the index")
        if odd:
            raise CacheError(
                f"{', '.join(odd)}: not what the commit records and rejects make; seal anew with 'cache_store repair' "
                "or the build"
            )
    except CacheError as error:
        return [Finding("bad-manifest", MANIFEST, str(error))]
    return []
