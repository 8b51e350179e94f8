"""Engines for tests, driven by real Ray Data: the tiny target decoding greedily, and its bad moods."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.config import TargetSection
from pipeline.engines.hf import load_target
from pipeline.turns import ERROR_COLUMN

STOP = 2
ANSWER_TOKENS = 5


@dataclass(frozen=True, kw_only=True)
class Mood:
    """How an engine misbehaves; `marker` is a file that counts its batches over restarts."""

    marker: Path
    die_on_batch: int | None = None
    """os._exit when this batch (1-based, over all lives) arrives."""
    hang: bool = False
    refuse: frozenset[str] = frozenset()
    """Sample ids that come back with an error."""
    probing: bool = False
    """Plain greedy decoding for the preflight; else answers are short and end with the stop token."""


class FakeEngine:
    """One life of an engine process: greedy decoding with the target, token by token."""

    def __init__(self, target: TargetSection, mood: Mood) -> None:
        self.model = load_target(target, "cpu")
        self.mood = mood

    def __call__(self, table: pa.Table) -> pa.Table:
        with self.mood.marker.open("a") as file:
            file.write("x")
        batch = self.mood.marker.stat().st_size
        if batch == self.mood.die_on_batch:
            os._exit(1)
        if self.mood.hang:
            time.sleep(3600)
        return pa.Table.from_pylist([self.answer(row) for row in table.to_pylist()])

    def answer(self, row: dict[str, Any]) -> dict[str, Any]:
        common = {name: row[name] for name in ("sample_id", "turn", "carry")}
        if row["sample_id"] in self.mood.refuse:
            return {**common, "prompt_token_ids": None, "generated_tokens": [], ERROR_COLUMN: "ValueError: refused"}
        prompt = row["tokenized_prompt"]
        generated = greedy(self.model, prompt, row["max_tokens"] if self.mood.probing else ANSWER_TOKENS)
        if not self.mood.probing and generated[-1] != STOP:
            generated = [*generated, STOP]
        return {**common, "prompt_token_ids": prompt, "generated_tokens": generated, ERROR_COLUMN: ""}


def greedy(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    """Greedy tokens after `prompt`, up to and including the stop token."""
    import torch

    ids = list(prompt)
    with torch.inference_mode():
        while len(ids) - len(prompt) < max_tokens:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == STOP:
                break
    return ids[len(prompt) :]


def engine_factory(target: TargetSection, mood: Mood) -> Callable[[bool], Any]:
    """What run_build takes as `engine`: moods apply to the real work, not to the preflight."""
    import ray

    def make(probing: bool) -> Any:
        used = Mood(marker=mood.marker.with_name("preflight"), probing=True) if probing else mood

        def run(dataset: Any) -> Any:
            return dataset.map_batches(
                FakeEngine,
                fn_constructor_args=(target, used),
                batch_size=None,
                batch_format="pyarrow",
                compute=ray.data.ActorPoolStrategy(size=1),
                num_cpus=1,
            )

        return run

    return make
