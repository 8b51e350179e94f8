from __future__ import annotations

from pathlib import Path

import pytest

from jobs.train import main
from pipeline.config import dump_config
from tests.pipeline.train.rig import make_cache, make_config, make_target, mixed_masks


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    make_target(tmp_path / "target")
    make_cache(str(tmp_path / "cache"), mixed_masks(16))
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(make_config(tmp_path)))
    return path


def test_dry_run_checks_and_describes_without_starting(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(config_file), "--dry-run", "training.epochs=5"]) == 0
    assert "10 steps of 8 samples" in capsys.readouterr().out
    assert not (config_file.parent / "run").exists()


def test_wrong_layers_are_a_wrong_config(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(config_file), "extraction.layer_ids=[0, 1]"]) == 2
    assert "layer_ids is [0, 2] in the cache, [0, 1] here" in capsys.readouterr().err


def test_missing_cache_is_one_line(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(config_file), f"cache.url={config_file.parent / 'nowhere'}"]) == 1
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
