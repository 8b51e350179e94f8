"""Measured costs: the sizes, the line of the drafting pass, and a real measurement of a tiny target."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jobs.measure_cost import main
from model.decoding.cost_table import load_cost_table
from model.export import save_drafter
from model.family import new_drafter
from pipeline import costs
from pipeline.config import Config, dump_config
from pipeline.costs import CostRecipe, fit_line, measure_costs, token_counts
from pipeline.errors import ConfigError, EvaluationFailed
from pipeline.train.recipe import drafter_config


@given(st.integers(1, 5000))
def test_sizes_ascend_from_one_to_the_largest_densely_at_first(largest: int) -> None:
    sizes = token_counts(largest)
    assert sizes[:32] == list(range(1, min(largest, 32) + 1))
    assert sizes[-1] == largest
    gaps = [b - a for a, b in itertools.pairwise(sizes)]
    assert all(0 < gap <= max(1, size // 16) for gap, size in zip(gaps, sizes, strict=False))


def test_drafting_is_a_line_with_nothing_below_zero() -> None:
    assert fit_line([7, 14, 28], [0.17, 0.24, 0.38]) == pytest.approx((0.1, 0.01))
    start, slope = fit_line([7, 14, 28], [0.05, 0.15, 0.34])
    assert start == 0.0
    assert slope == pytest.approx(0.012, rel=0.05)
    assert fit_line([7, 14, 28], [0.3, 0.2, 0.1]) == (pytest.approx(0.2), 0.0)


@pytest.fixture
def config(make_config: Callable[..., Config]) -> Config:
    return make_config(
        cost={"max_tokens": 6, "context_tokens": 12, "repeats": 2, "warm_up": 1, "threads": 1},
        drafter={"num_draft_layers": 1, "markov_rank": 8},
    )


def test_target_and_drafter_are_really_run(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[tuple[int, int]] = []
    drafted: list[int] = []
    with_gradients: list[bool] = []
    from model.decoding.drafting import BlockDrafter
    from pipeline.engines.hf_verifier import HfVerifier

    extend, propose = HfVerifier.extend, BlockDrafter.propose

    def counting_extend(self, token_ids):  # type: ignore[no-untyped-def]
        reads.append((self._cache.lengths[0], len(token_ids[0])))
        return extend(self, token_ids)

    def counting_propose(self, anchor_ids, sampling, uniforms):  # type: ignore[no-untyped-def]
        drafted.append(len(anchor_ids))
        with_gradients.append(torch.is_grad_enabled())
        return propose(self, anchor_ids, sampling, uniforms)

    monkeypatch.setattr(HfVerifier, "extend", counting_extend)
    monkeypatch.setattr(BlockDrafter, "propose", counting_propose)
    table = measure_costs(CostRecipe(config=config, device="cpu"))
    assert table.tokens == (1, 2, 3, 4, 5, 6)
    assert sorted(set(reads)) == [(12, tokens) for tokens in range(1, 7)]  # always behind the same context
    assert len(reads) == 6 * 3
    assert sorted(set(drafted)) == [1, 2, 4, 8]
    assert (table.kind, table.context_tokens) == ("measured", 12)
    assert "1 threads" in table.device
    assert "an untrained drafter of the config's shape" in table.note
    assert table.draft_cost(7) > 0
    assert not any(with_gradients), "decoding builds no graphs, so neither does what is timed"


def test_an_exported_drafter_is_measured_when_there_is_one(config: Config) -> None:
    folder = Path(config.training.output) / "drafter"
    save_drafter(folder, new_drafter(drafter_config(config)).init_weights(0), {})
    assert f"the drafter {folder}" in measure_costs(CostRecipe(config=config, device="cpu")).note


def test_the_job_writes_table_and_picture(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    monkeypatch.setattr(costs, "_measure_on_ray", lambda c: measure_costs(CostRecipe(config=c, device="cpu")))
    assert main(["--config", str(path), "--dry-run"]) == 0
    assert not (tmp_path / "run").exists()
    assert main(["--config", str(path)]) == 0
    table = load_cost_table(tmp_path / "run" / "cost_table.json")
    assert json.loads(table.to_json())["device"] == table.device
    assert (tmp_path / "run" / "cost_table.png").read_bytes().startswith(b"\x89PNG")
    assert "steps per second" in capsys.readouterr().out


def test_cpu_seconds_can_be_measured_where_the_cpu_does_the_work(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = config.model_copy(update={"cost": config.cost.model_copy(update={"clock": "cpu"})})
    ticks = itertools.count(0.0, 0.5)
    monkeypatch.setitem(costs._CLOCKS, "cpu", lambda: next(ticks))
    table = measure_costs(CostRecipe(config=changed, device="cpu"))
    assert set(table.steps_per_second) == {2.0}
    assert "cpu seconds" in table.note
    with pytest.raises(ConfigError, match=r"cost\.clock cpu does not see what cuda does"):
        measure_costs(CostRecipe(config=changed, device="cuda"))


@pytest.mark.slow
def test_the_measurement_runs_as_a_ray_task(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = costs.run_measurement(config)
    assert table is not None
    assert table == load_cost_table(tmp_path / "run" / "cost_table.json")
    (Path(config.target.path) / "model.safetensors").rename(tmp_path / "away")
    try:
        with pytest.raises(ConfigError, match=r"^target\.path .*: transformers cannot load it"):
            costs.run_measurement(config)
    finally:
        (tmp_path / "away").rename(Path(config.target.path) / "model.safetensors")
    monkeypatch.setattr(costs, "_TICK_S", 0.01)
    endless = config.model_copy(update={"cost": config.cost.model_copy(update={"timeout_s": 0.01})})
    with pytest.raises(EvaluationFailed, match=r"measure: no table after 0 s: .* \(1 CPUs, 0 GPUs\)"):
        costs.run_measurement(endless)
