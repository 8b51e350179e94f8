from __future__ import annotations

from collections import Counter
from pathlib import Path

from pipeline.demo_prompts import EVAL_PER_DOMAIN, TRAIN_PER_DOMAIN, demo_prompts, write_demo_prompts

COMMITTED = Path(__file__).resolve().parents[2] / "jobs" / "prompts"


def test_committed_files_are_the_generators(tmp_path: Path) -> None:
    write_demo_prompts(tmp_path)
    for name in ("demo_train.jsonl", "demo_eval.jsonl"):
        assert (tmp_path / name).read_bytes() == (COMMITTED / name).read_bytes()


def test_four_domains_and_nothing_shared() -> None:
    train, evaluation = demo_prompts()
    assert set(Counter(row["domain"] for row in train).values()) == {TRAIN_PER_DOMAIN}
    assert set(Counter(row["domain"] for row in evaluation).values()) == {EVAL_PER_DOMAIN}
    assert len(train) >= 200

    def first(row: dict) -> str:
        return row["messages"][0]["content"]

    assert not {first(row) for row in train} & {first(row) for row in evaluation}
    assert len({row["id"] for row in train + evaluation}) == len(train) + len(evaluation)
    assert any(len(row["messages"]) == 3 for row in train), "some conversations have two turns"
