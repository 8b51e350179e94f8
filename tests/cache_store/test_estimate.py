from __future__ import annotations

from pathlib import Path

import pytest

from cache_store.estimate import Ratios, estimate_bytes, measure_ratios, size_text
from cache_store.storage import open_storage
from tests.cache_store.samples import build_cache, make_spec

COUNT, TOKENS = 8, 200


@pytest.mark.parametrize("tag", ["bss1", "raw"])
@pytest.mark.parametrize("last_hidden", ["needed", "all"])
def test_within_three_percent_of_a_built_cache(tmp_path: Path, tag: str, last_hidden: str) -> None:
    spec = make_spec(layer_ids=(0, 1, 2, 3), hidden_size=256, codec=tag, last_hidden=last_hidden)
    storage = open_storage(str(tmp_path / "cache"))
    samples = build_cache(storage, spec, COUNT, tokens=TOKENS)
    real = sum(info.size for info in storage.list(""))
    supervised = sum(int(sample.loss_mask.sum()) for sample in samples) / (COUNT * TOKENS)
    assert_close(estimate_bytes(spec, COUNT * TOKENS, supervised, samples=COUNT).stored_bytes, real, 0.03)
    measured = measure_ratios(spec, samples[:2])
    found = estimate_bytes(spec, COUNT * TOKENS, supervised, samples=COUNT, ratios=measured)
    assert_close(found.stored_bytes, real, 0.005)
    assert found.raw_bytes == COUNT * TOKENS * 5 * 256 * 2
    assert found.shards == -(-found.stored_bytes // spec.shard_bytes)


def assert_close(found: int, wanted: int, tolerance: float) -> None:
    assert abs(found / wanted - 1) < tolerance, f"estimated {found:,}, real {wanted:,}"


def test_the_size_of_the_paper_s_cache() -> None:
    # faults.md D1: 38 TB of raw states at 6 x 2560 bf16 are 1.24 B tokens of 30.7 kB.
    spec = make_spec(
        layer_ids=(1, 9, 17, 25, 33), hidden_size=2560, num_target_layers=36, shard_bytes=1 << 28, last_hidden="all"
    )
    found = estimate_bytes(spec, 1_240_000_000, 0.67)
    assert found.raw_bytes == 1_240_000_000 * 30_720
    assert 0.68 < found.stored_bytes / found.raw_bytes < 0.70


def test_ratios_of_other_data_count(tmp_path: Path) -> None:
    spec = make_spec()
    assert estimate_bytes(spec, 1000, 0.5, ratios=Ratios(captured=0.1, last=0.1)).stored_bytes < (
        estimate_bytes(spec, 1000, 0.5).stored_bytes
    )
    assert measure_ratios(spec, []) == Ratios(captured=0.0, last=0.0)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999_999, "1.00 MB"),
        (1536, "1.54 kB"),
        (2_500_000, "2.50 MB"),
        (37.94e12, "37.94 TB"),
    ],
)
def test_sizes_for_people(count: float, text: str) -> None:
    assert size_text(count) == text
