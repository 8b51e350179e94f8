"""Fixtures of the pipeline's tests: a tiny target, and a config that uses it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Config


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3 in float32."""
    from tests.pipeline.hf_target import save_tiny_target

    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def make_config(tiny_target: Path, tmp_path: Path) -> Callable[..., Config]:
    """`make_config(rows, generation={...}, ...)`: a build of these prompt rows into `tmp_path/cache`."""

    def make(rows: Iterable[Any] = (), **sections: Any) -> Config:
        source = tmp_path / "prompts.jsonl"
        if rows:
            lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
            source.write_text("\n".join(lines) + "\n", encoding="utf-8")
        values: dict[str, Any] = {
            "name": "test",
            "max_length": 96,
            "target": {"path": str(tiny_target), "dtype": "float32"},
            "prompts": {"sources": [str(source)]},
            "generation": {"batch_size": 4, "rows_per_file": 4, "sampling": {"max_new_tokens": 8}},
            "extraction": {"layer_ids": [0, 2], "samples_per_task": 4},
            "cache": {"url": str(tmp_path / "cache"), "shard_mb": 1},
            "drafter": {"mask_token": "<|endoftext|>"},
            "training": {"output": str(tmp_path / "run"), "global_batch_size": 1},
            "cluster": {"object_store_mb": 100},
        }
        for name, value in sections.items():
            values[name] = {**values[name], **value} if isinstance(value, dict) and name in values else value
        return Config.model_validate(values)

    return make
