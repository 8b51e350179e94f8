"""The arithmetic of the build benchmark, and its plain forward baseline on a tiny target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.build import conversations, figures, plain_forward
from cache_store.storage import open_storage
from pipeline.build import BuildReport
from pipeline.config import Config
from pipeline.extract import ExtractReport
from pipeline.regenerate import RegenerateReport
from tests.cache_store.samples import build_cache, make_spec
from tests.pipeline.conftest import make_config, tiny_target

__all__ = ["make_config", "tiny_target"]


def report(answers: RegenerateReport, states: ExtractReport) -> BuildReport:
    return BuildReport(
        url="c",
        samples=1,
        tokens=1,
        supervised_tokens=1,
        bytes=1,
        rejected=0,
        rejects={},
        duplicates=0,
        seconds=1.0,
        regenerate=answers,
        extract=states,
    )


ONE = report(
    RegenerateReport(answers=1, generated_tokens=100, seconds=30.0),
    ExtractReport(samples=1, tokens=150, forward_s=1.0, seconds=12.0),
)
MANY = report(
    RegenerateReport(answers=9, generated_tokens=1100, seconds=40.0),
    ExtractReport(samples=9, tokens=1650, bytes=8_000_000, forward_s=5.0, write_s=2.0, wait_s=0.5, seconds=20.0),
)


def test_start_up_counts_for_nobody() -> None:
    stages = figures(ONE, MANY, {"tokens": 1100, "seconds": 8.8}, {"tokens": 1650, "seconds": 16.5})
    regenerate, extract = stages["regenerate"], stages["extract"]
    assert regenerate["tokens_per_second"] == pytest.approx(1000 / 10)
    assert regenerate["ratio_to_baseline"] == pytest.approx(100 / 125)
    assert regenerate["target_waits_share"] == pytest.approx((10 - 8) / 10)  # alone it needs 8 s for these tokens
    assert extract["tokens_per_second"] == pytest.approx(1500 / 8)
    assert extract["target_waits_share"] == pytest.approx((8 - 4) / 8)
    assert extract["start_seconds"] == 12.0
    assert stages["write"]["mb_per_second"] == pytest.approx(4.0)


def test_a_build_that_is_too_small_to_measure_is_refused() -> None:
    with pytest.raises(SystemExit, match="more --prompts"):
        figures(MANY, ONE, {"tokens": 1, "seconds": 1.0}, {"tokens": 1, "seconds": 1.0})


def test_conversations_come_with_the_spans_of_their_answers(tmp_path: Path) -> None:
    [sample] = build_cache(open_storage(str(tmp_path / "cache")), make_spec(), 1, tokens=12)
    [found] = conversations(tmp_path / "cache")
    mask = np.zeros(12, dtype=bool)
    for start, end in found["spans"]:
        mask[start:end] = True
    assert found["ids"] == sample.input_ids.tolist()
    assert mask.tolist() == sample.loss_mask.tolist()


def test_plain_forward_reads_every_token(make_config: Callable[..., Config]) -> None:
    result = plain_forward(make_config(), [{"ids": [5, 6, 7], "spans": []}, {"ids": [8], "spans": []}])
    assert result["tokens"] == 4
    assert result["seconds"] > 0
