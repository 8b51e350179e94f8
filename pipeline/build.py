"""The build of a Target Cache, start to end: prompts -> preflight -> regenerate -> extract -> seal.

Every step resumes by the ids still missing, so the same command continues after any death. Phases run one after
another: all accelerators serve the phase at hand.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cache_store.calibration import CALIBRATION_SAMPLES
from cache_store.estimate import size_text
from cache_store.ledger import Ledger, seal
from cache_store.manifest import Manifest
from cache_store.schema import CacheSpec
from cache_store.storage import Storage, open_storage
from cache_store.writer import check_settings, create_cache
from pipeline.channel_scales import ensure_scales
from pipeline.cluster import ray_session
from pipeline.config import Config, dump_config
from pipeline.engines.vllm import make_engine
from pipeline.errors import ConfigError
from pipeline.extract import ExtractRecipe, ExtractReport, extract
from pipeline.identity import CheckedTarget, check_length, check_target, make_spec
from pipeline.plan import assumed_plan, format_plan, make_plan, target_size
from pipeline.preflight import (
    PROBE_PROMPTS,
    check_path,
    check_space,
    expected_lengths,
    passed_before,
    rendered_prompts,
)
from pipeline.prompt_store import PromptIndex, SpooledPrompts, load_index, publish_prompts, spool_prompts
from pipeline.regenerate import Engine, RegenerateReport, regenerate, sample_places
from pipeline.telemetry import format_duration
from pipeline.turns import Recipe, all_unit_ids, make_recipe

CONFIG_COPY = "config.yaml"
EXIT_COMPLETE_WITH_REJECTS = 3
"""What `jobs/build_cache.py` ends with when every prompt is accounted for, but not all of them by a sample."""
SHOWN_REJECTS = 3
EngineFactory = Callable[[bool], Engine]
"""Makes the engine; the argument asks for greedy decoding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildReport:
    """What a build ended with: the whole cache's totals, and this run's own work."""

    url: str
    samples: int
    tokens: int
    supervised_tokens: int
    bytes: int
    rejected: int
    rejects: dict[str, dict[str, int]]
    duplicates: int
    seconds: float
    regenerate: RegenerateReport = field(default_factory=RegenerateReport)
    extract: ExtractReport = field(default_factory=ExtractReport)

    def lines(self) -> list[str]:
        """A short summary for the terminal."""
        answers, states = self.regenerate, self.extract
        lines = [
            f"cache    {self.url}",
            f"samples  {self.samples:,} committed, {self.rejected:,} rejected; {self.tokens:,} tokens, "
            f"{self.supervised_tokens:,} supervised; {size_text(self.bytes)}",
        ]
        if answers.answers:
            rate = answers.generated_tokens / max(answers.seconds, 1e-9)
            lines.append(
                f"answers  {answers.answers:,} in {format_duration(answers.seconds)}, {rate:,.0f} tokens/s with "
                f"start-up; {answers.truncated:,} cut at their token limit"
            )
        if states.samples:
            rate = states.tokens / max(states.seconds, 1e-9)
            lines.append(
                f"states   {states.samples:,} samples in {format_duration(states.seconds)}, {rate:,.0f} tokens/s with "
                f"start-up; forward {states.forward_s:.1f} s, writing {states.write_s:.1f} s behind it, "
                f"waited {states.wait_s:.1f} s for it"
            )
        for stage, reasons in self.rejects.items():
            lines += [f"rejected {count:,} at {stage}: {reason}" for reason, count in reasons.items()]
        return [*lines, f"total    {format_duration(self.seconds)}"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A build whose cheap checks passed."""

    config: Config
    storage: Storage
    spec: CacheSpec
    target: CheckedTarget
    index: PromptIndex
    texts: list[str]
    """The first prompts, rendered."""


def run_build(config: Config, *, dry_run: bool = False, engine: EngineFactory | None = None) -> BuildReport | None:
    """Build the cache of a config, or finish one that was interrupted; returns None after a dry run.

    `engine` replaces vLLM (tests). Raises ConfigError, PreflightFailed, BuildFailed, CacheError.
    """
    started = time.monotonic()
    if dry_run and (assumed := assumed_plan(config)) is not None:
        _say(assumed)
        return None
    prepared = prepare(config, dry_run=dry_run)
    if prepared is None:
        return None
    target = prepared.target
    recipe = make_recipe(config, prepared.storage, target.section, target.history, target.stop_ids)
    make = engine or (lambda greedy: make_engine(config, target.section, target.stop_ids, greedy=greedy))
    answers, states = RegenerateReport(), ExtractReport()
    expected = [*all_unit_ids(prepared.index, target.history), *prepared.index.rejected_ids]
    if Ledger(prepared.storage).pending(expected):
        with ray_session(config.cluster):
            _preflight(prepared, make)
            answers = regenerate(config, recipe, prepared.index, lambda: make(False))
            places, work = _places(prepared, recipe), _extract_recipe(prepared)
            if ensure_scales(config.extraction, work, places):
                _say(f"channel scales: measured on {min(len(places), CALIBRATION_SAMPLES)} samples and committed")
            states = extract(config, work, places)
    else:
        _say("nothing is missing: every prompt is committed or rejected")
    manifest = seal(prepared.storage, expected_ids=expected)
    return _report(prepared, manifest, (answers, states), time.monotonic() - started)


def prepare(config: Config, *, dry_run: bool = False) -> Prepared | None:
    """Everything before the fleet: target, storage, prompts, identity, space. A dry run writes nothing; returns None.

    Raises ConfigError, PreflightFailed and CacheError, one clear line each, before anything expensive starts.
    """
    target = check_target(config)
    check_length(config.max_length, target.facts)
    storage = open_storage(
        _absolute_url(config.cache.url), endpoint_url=config.cache.endpoint_url, options=config.cache.storage
    )
    if not dry_run:
        storage.check_writable()
    with tempfile.TemporaryDirectory(prefix="prompts-") as scratch:
        spooled = spool_prompts(config, Path(scratch), keep_first=PROBE_PROMPTS)
        counts = spooled.counts
        _say(
            f"prompts: {counts.rows:,} rows, {counts.accepted:,} accepted, {counts.rejected:,} rejected, "
            f"{counts.blank:,} blank lines; turns are {_HISTORY[target.history]}"
        )
        for reject in spooled.rejects[:SHOWN_REJECTS]:
            _say(f"  rejected {reject.source}: {reject.reason}")
        if counts.rejected > SHOWN_REJECTS:
            _say(f"  and {counts.rejected - SHOWN_REJECTS:,} more; a build keeps all in {config.cache.url}/rejects")
        spec = make_spec(config, target, spooled.digest)
        texts = rendered_prompts(target.chat, spooled.first)
        expected = expected_lengths(config, target.chat, spooled)
        needed = check_space(config, storage, spec, counts.accepted, expected)
        _say(f"space: at most {size_text(needed)} for the states")
        if dry_run:
            check_settings(storage, spec)
            measured = config.model_copy(update={"plan": expected})
            _say(format_plan(make_plan(measured, target_size(config), counts.accepted), config))
            return None
        return _store(config, storage, spec, target, (spooled, texts))


_HISTORY = {
    "append": "appended (the template keeps its history)",
    "rerender": "rendered anew, one sample each (the template rewrites its history)",
}


def _store(
    config: Config,
    storage: Storage,
    spec: CacheSpec,
    target: CheckedTarget,
    prompts: tuple[SpooledPrompts, list[str]],
) -> Prepared:
    spooled, texts = prompts
    create_cache(storage, spec)
    storage.put(CONFIG_COPY, dump_config(config).encode("utf-8"))
    publish_prompts(storage, spooled)
    return Prepared(config=config, storage=storage, spec=spec, target=target, index=load_index(storage), texts=texts)


def _preflight(prepared: Prepared, make: EngineFactory) -> None:
    if passed_before(prepared.storage, prepared.spec):
        _say("preflight: passed before with the same settings")
        return
    for number, text in enumerate(prepared.texts, start=1):
        _say(f"prompt {number} as the target sees it:\n{_indent(text)}")
    _say("preflight: starting the engine for a few prompts through the whole path")
    report = check_path(
        prepared.config, prepared.storage, prepared.spec, prepared.target, prepared.texts, lambda: make(True)
    )
    _say(
        f"preflight: ok; argmax of lm_head(last hidden state) gives {report.agreement:.1%} of {report.supervised} "
        f"greedy tokens ({report.agreement_unnormed:.1%} without the norm); shapes, dtypes, finiteness, mask and the "
        "round trip through a shard hold"
    )


def _extract_recipe(prepared: Prepared) -> ExtractRecipe:
    return ExtractRecipe(
        storage=prepared.storage,
        spec=prepared.spec,
        target=prepared.target.section,
        tokens_per_batch=prepared.config.extraction.tokens_per_batch,
        num_actors=prepared.config.extraction.num_actors,
    )


def _places(prepared: Prepared, recipe: Recipe) -> dict[str, tuple[str, int]]:
    return sample_places(recipe, prepared.index, Ledger(prepared.storage).rejected().keys())


def _report(
    prepared: Prepared, manifest: Manifest, work: tuple[RegenerateReport, ExtractReport], seconds: float
) -> BuildReport:
    return BuildReport(
        url=prepared.config.cache.url,
        samples=manifest.num_samples,
        tokens=manifest.num_tokens,
        supervised_tokens=manifest.num_supervised,
        bytes=manifest.num_bytes,
        rejected=manifest.rejected,
        rejects=manifest.rejects,
        duplicates=manifest.duplicates,
        seconds=seconds,
        regenerate=work[0],
        extract=work[1],
    )


def _absolute_url(url: str) -> str:
    """A local folder as an absolute path: workers do not share the driver's working directory.

    Raises StorageError for an empty or mistyped URL, and ConfigError for a relative one inside a submitted job, whose
    working directory is a temporary copy.
    """
    folder = open_storage(url).local_root  # refuses what is neither a folder nor a URL
    if folder is None or "://" in url or Path(url).is_absolute():
        return url
    if "working_dir_files" in Path.cwd().parts:
        raise ConfigError(
            f"cache.url {url} is relative, and the working directory of a submitted job is a temporary copy that Ray "
            "deletes; give an absolute path or an s3:// URL"
        )
    return str(folder)


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.rstrip("\n").splitlines())


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
