"""Putting a damaged cache right: what is damaged is moved aside, so that the same build makes exactly that anew.

Nothing is ever deleted. A shard's record goes before its shard, so that a crash in between leaves garbage and not a
record without a shard. A manifest or index that is damaged is written again from the records, but only when the records
are all that was sealed; otherwise the cache stays unsealed until the build has filled the gap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cache_store import index
from cache_store.audit import AuditProgress, AuditReport, Finding, read_records, verify_cache
from cache_store.calibration import CALIBRATION, CALIBRATION_COPIES, Calibration, digest_of, load_calibration
from cache_store.errors import CacheError, CacheIncomplete, NotFound, StorageError
from cache_store.exclusions import Exclusion, write_exclusions
from cache_store.gc import ASIDE
from cache_store.ledger import Ledger, seal
from cache_store.manifest import COMMITS, INDEXES, MANIFEST, SHARDS, SPEC, ShardRecord
from cache_store.reader import CacheReader
from cache_store.storage import Storage
from cache_store.writer import load_spec, record_name

SHARD_DAMAGE = {
    *("wrong-settings", "missing-shard", "wrong-size", "checksum", "wrong-layout", "wrong-counts", "id-mismatch"),
    *("wrong-tokens", "wrong-metadata", "not-finite"),
}
SEAL_DAMAGE = {"bad-manifest", "not-sealed", "missing-record"}
BUILD_AGAIN = "run the same build again"


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that was done, or (in a dry run) would be."""

    kind: str
    """set-aside, restored (from a copy), sealed, or left (damage that repair cannot mend)."""
    name: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RepairReport:
    """What repair did, and what is left to the build."""

    steps: tuple[Step, ...]
    lost: tuple[str, ...]
    """Ids of samples that were committed and are not any more."""
    needs_build: bool
    """Whether the same build has to run again: samples or the seal are missing."""

    @property
    def whole(self) -> bool:
        """Whether the cache can be read as it is now."""
        return not self.needs_build and not any(step.kind == "left" for step in self.steps)


class _Mender:
    """Moves objects aside, or only notes that it would."""

    def __init__(self, storage: Storage, dry_run: bool) -> None:
        self.storage, self.dry_run = storage, dry_run
        self.steps: list[Step] = []
        self._folder = f"{ASIDE}{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}/"

    def set_aside(self, name: str, reason: str) -> None:
        if self.dry_run:
            if not self.storage.exists(name):
                return
        else:
            try:
                self.storage.move(name, self._folder + name)
            except NotFound:  # missing already
                return
        self.steps.append(Step("set-aside", name, reason))

    def leave(self, finding: Finding) -> None:
        self.steps.append(Step("left", finding.name, f"{finding.kind}: {finding.detail}"))


def repair_cache(
    storage: Storage,
    *,
    quick: bool = False,
    dry_run: bool = False,
    progress: Callable[[AuditProgress], None] | None = None,
) -> RepairReport:
    """Verify (quick: sizes and records only), then put right what can be put right without the target.

    Raises NotFound when there is no cache at this place.
    """
    mender = _Mender(storage, dry_run)
    if spec_lost := _damaged_spec(storage):
        mender.set_aside(SPEC, str(spec_lost))
        return RepairReport(steps=tuple(mender.steps), lost=(), needs_build=True)
    if _restore_scales(mender) is False or (dry_run and mender.steps):  # then no shard can be judged
        return RepairReport(steps=tuple(mender.steps), lost=(), needs_build=False)
    report = verify_cache(storage, quick=quick, progress=progress)
    records, _ = read_records(storage)
    if _other_settings(report, records):
        mender.set_aside(SPEC, "no shard was written under these settings: the build writes them anew")
        return RepairReport(steps=tuple(mender.steps), lost=(), needs_build=True)
    evidence = _sealed_ids(storage)
    dropped, blind = _drop(mender, report, records)
    kept = [record for record in records if record.name not in dropped]
    remaining = {sample.sample_id for record in kept for sample in record.samples}
    # An id that its shard does not confirm may be a damaged record's invention.
    doubtful = {finding.sample_id for finding in report.findings if finding.kind == "id-mismatch"}
    evidence |= {sample.sample_id for record in records for sample in record.samples} - doubtful
    rejected = _rejected_ids(storage, report)
    lost = tuple(sorted(evidence - remaining - rejected))
    damaged_seal = [finding for finding in report.findings if finding.kind in SEAL_DAMAGE or finding.name == MANIFEST]
    bad_rejects = any(finding.kind == "bad-rejects" for finding in report.findings)
    needs_build = bool(lost) or bad_rejects or (bool(damaged_seal) and not _was_sealed(storage, kept, report)) or blind
    if needs_build:
        if dropped or lost or bad_rejects or damaged_seal:
            _unseal(mender, "the sealed list is not complete any more")
    elif dropped or damaged_seal:
        _seal(mender, damaged_seal)
    return RepairReport(steps=tuple(mender.steps), lost=lost, needs_build=needs_build)


def exclude_damage(
    storage: Storage,
    *,
    sample_ids: Sequence[str] = (),
    quick: bool = False,
    progress: Callable[[AuditProgress], None] | None = None,
) -> tuple[str | None, tuple[Exclusion, ...]]:
    """List the damaged samples of a sealed cache, and move nothing: (object name of the list, its entries).

    `sample_ids` are listed as well, damaged or not: samples that a training run cannot digest.
    The name is None when nothing is listed. Raises CacheIncomplete when manifest, index or records are damaged: what
    stands where must be known; CacheError when the cache lacks one of `sample_ids`.
    """
    report = verify_cache(storage, quick=quick, progress=progress)
    unclear = [finding for finding in report.findings if finding.damage and finding.kind not in SHARD_DAMAGE]
    if unclear:
        raise CacheIncomplete(
            f"{storage.url}: {unclear[0].name}: {unclear[0].kind}: {unclear[0].detail}; "
            "run 'cache_store repair' without --exclude first"
        )
    by_sample = {(f.name, f.sample_id): f for f in report.findings if f.sample_id is not None}
    # A shard whose checksum alone differs is damaged where no sample lies, once all of its samples are sound.
    whole = {f.name: f for f in report.findings if f.sample_id is None and f.kind in SHARD_DAMAGE - {"checksum"}}
    reader = CacheReader(storage, verify="never")
    unwanted, found = set(sample_ids), []
    absent = sorted(unwanted - set(reader.ids))
    if absent:
        raise CacheError(
            f"{storage.url}: holds no sample {absent[0]!r} ({len(absent)} of {len(unwanted)} ids are not in it); "
            "'cache_store head' shows what ids look like"
        )
    for position, sample_id in enumerate(reader.ids):
        shard = reader.shard_of(position)
        finding = whole.get(shard) or by_sample.get((shard, sample_id))
        if finding is not None:
            found.append(Exclusion(sample_id, shard, f"{finding.kind}: {finding.detail}"))
        elif sample_id in unwanted:
            found.append(Exclusion(sample_id, shard, "named by hand"))
    return (write_exclusions(storage, found) if found else None), tuple(found)


def _damaged_spec(storage: Storage) -> CacheError | None:
    try:
        load_spec(storage)
    except StorageError:
        raise
    except CacheError as error:
        return error
    return None


def _restore_scales(mender: _Mender) -> bool | None:
    """Put the copy of the channel scales back that the shards were written with.

    None: nothing was wrong; False: there is no such copy.
    """
    storage, spec = mender.storage, load_spec(mender.storage)
    wanted = {record.calibration for record in read_records(storage)[0]}
    if not spec.calibrated or len(wanted) != 1:
        return None
    try:
        if {digest_of(load_calibration(storage, spec))} == wanted:
            return None
        reason = "not the scales that the shards were written with"
    except CacheError as error:
        if isinstance(error, StorageError):
            raise
        reason = str(error)
    for info in storage.list(CALIBRATION_COPIES):
        content = storage.read(info.name)
        try:
            found = Calibration.from_json(content, spec, info.name)
        except CacheError:  # a damaged copy: perhaps there is another
            continue
        if {found.digest} == wanted:
            mender.set_aside(CALIBRATION, reason)
            if not mender.dry_run:
                storage.put(CALIBRATION, content)
            mender.steps.append(Step("restored", CALIBRATION, f"from {info.name}"))
            return True
    mender.leave(Finding("bad-calibration", CALIBRATION, f"{reason}; there is no copy of the right ones"))
    return False


def _other_settings(report: AuditReport, records: list[ShardRecord]) -> bool:
    """Whether all shards agree on other settings than cache.json, which then is what was replaced."""
    odd = {f.name for f in report.findings if f.kind == "wrong-settings" and "written under" in f.detail}
    return bool(records) and {record.name for record in records} <= odd


def _drop(mender: _Mender, report: AuditReport, records: list[ShardRecord]) -> tuple[set[str], bool]:
    """Move damaged shards, records and rejects aside; (shards dropped, whether samples of unknown ids went too)."""
    dropped, blind = set[str](), False
    known = {record_name(record.name) for record in records}
    for finding in report.findings:
        reason = f"{finding.kind}: {finding.detail}"
        if finding.kind in SHARD_DAMAGE and finding.name.startswith(SHARDS):
            if finding.name not in dropped:
                dropped.add(finding.name)
                mender.set_aside(record_name(finding.name), reason)
                if finding.kind != "missing-shard":
                    mender.set_aside(finding.name, reason)
        elif finding.kind == "bad-record":
            mender.set_aside(finding.name, reason)
            blind = blind or finding.name not in known
        elif finding.kind == "bad-rejects":
            mender.set_aside(finding.name, reason)
        elif finding.damage and finding.kind not in SEAL_DAMAGE and finding.name != MANIFEST:
            mender.leave(finding)
    return dropped, blind


def _sealed_ids(storage: Storage) -> set[str]:
    """Ids of every index whose content is still the one of its name: what has ever been sealed here."""
    ids: set[str] = set()
    for info in storage.list(INDEXES):
        content = storage.read(info.name)
        if index.object_name(content) == info.name:  # else damaged: verify reports the one in use
            ids.update(index.column_list(index.from_bytes(content, info.name), "sample_id"))
    return ids


def _rejected_ids(storage: Storage, report: AuditReport) -> set[str]:
    if any(finding.kind == "bad-rejects" for finding in report.findings):
        return set()  # the build decides anew
    return set(Ledger(storage).rejected())


def _was_sealed(storage: Storage, records: list[ShardRecord], report: AuditReport) -> bool:
    """Whether these records are all that was sealed: an index of exactly them, or a manifest and no orphans."""
    if storage.exists(index.object_name(index.to_bytes(index.build(records)))):
        return True
    orphans = any(finding.kind == "orphan" and finding.name.startswith(SHARDS) for finding in report.findings)
    return storage.exists(MANIFEST) and not orphans


def _unseal(mender: _Mender, reason: str) -> None:
    if mender.storage.exists(MANIFEST):
        mender.set_aside(MANIFEST, f"{reason}; {BUILD_AGAIN}")


def _seal(mender: _Mender, damaged: list[Finding]) -> None:
    reason = f"from the records in {COMMITS}"
    if not mender.dry_run:
        if any(finding.name == MANIFEST and finding.kind != "not-sealed" for finding in damaged):
            _unseal(mender, "damaged")
        seal(mender.storage, expected_ids=None)
    mender.steps.append(Step("sealed", MANIFEST, reason))
