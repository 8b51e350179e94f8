from __future__ import annotations

from pathlib import Path

import pytest

from jobs.build_cache import main
from jobs.train import main as train_main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("job", [main, train_main], ids=["build_cache", "train"])
def test_full_size_recipe_is_priced_without_gpu_or_network(job, capsys: pytest.CaptureFixture[str]) -> None:
    assert job(["--config", "jobs/configs/qwen3_4b.yaml", "--dry-run"]) == 0
    out = capsys.readouterr().out
    for expected in ("37.94 TB", "shards", "drafter, trainable", "25,390 of 512 samples", "not looked at"):
        assert expected in out


def test_a_missing_target_is_one_line_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = tmp_path / "cache"
    overrides = ["target.path=/no/such/target", f"cache.url={cache}"]
    assert main(["--config", "jobs/configs/smollm2_demo.yaml", *overrides]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert "/no/such/target" in error
    assert not cache.exists()
