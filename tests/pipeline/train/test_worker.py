from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch

from cache_store.order import step_samples
from pipeline.config import Config
from pipeline.train.checkpoint import complete_checkpoints, read_parameters, read_state
from pipeline.train.loop import LoopResult
from pipeline.train.metrics import read_metrics
from tests.pipeline.train.rig import make_cache, make_config, make_target, mixed_masks, run_ranks
from tests.pipeline.train.scenarios import Continuation, checkpoint_of, train_all

STAGES = (0, 1, 2)
MODES = list(product(STAGES, ("fp32", "bf16")))


def name_of(world: int, stage: int, precision: str, origin: int | None = None) -> str:
    return f"{world}-{stage}-{precision}" + ("" if origin is None else f"-from-{origin}")


class Runs:
    """Six steps straight, and three after three, for every ZeRO stage and precision, on one rank and on two."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.configs: dict[str, Config] = {}
        self.results: list[list[LoopResult]] = []
        self.stopped_at: list[int] = []
        make_target(root / "target")
        make_cache(str(root / "cache"), mixed_masks(16))

    def run(self, world: int, wanted: list[tuple[int, str, int | None]], extra: tuple[str, ...] = ()) -> None:
        """(stage, precision, None: straight, else the number of ranks whose third step it continues).

        `extra`: names of configs that are there already, run last.
        """
        configs: list[Config] = []
        origins = {}
        for number, (stage, precision, origin) in enumerate(wanted):
            name = name_of(world, stage, precision, origin)
            self.configs[name] = make_config(
                self.root, output=name, zero_stage=stage, precision=precision, checkpoint_every_steps=3
            )
            configs.append(self.configs[name])
            if origin is not None:
                origins[number] = Continuation(self.configs[name_of(origin, stage, precision)], 3)
        configs += [self.configs[name] for name in extra]
        folder = self.root / f"ranks-{len(self.configs)}"
        self.results = run_ranks(world, folder, train_all, configs, origins)

    def __getitem__(self, name: str) -> Config:
        return self.configs[name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    made = Runs(tmp_path_factory.mktemp("resume"))
    poisoned = tmp_path_factory.mktemp("poisoned")
    make_target(poisoned / "target")
    make_cache(str(poisoned / "cache"), mixed_masks(16), huge_sample=5)
    made.configs["poisoned"] = make_config(poisoned, checkpoint_every_steps=1)
    straight: list[tuple[int, str, int | None]] = [(stage, precision, None) for stage, precision in MODES]
    made.run(1, [(stage, "fp32", None) for stage in STAGES])
    made.run(
        2,
        straight + [(stage, precision, 2) for stage, precision in MODES] + [(stage, "fp32", 1) for stage in STAGES],
        extra=("poisoned",),
    )
    made.stopped_at = [results[-1].step for results in made.results]
    made.run(1, [(stage, "fp32", 2) for stage in STAGES])
    return made


def distance(a: Config, b: Config) -> float:
    """Largest difference of any master or moment after step 6."""
    one, two = read_parameters(checkpoint_of(a, 6)), read_parameters(checkpoint_of(b, 6))
    assert one.keys() == two.keys()
    return max(
        float((getattr(one[name], key) - getattr(two[name], key)).abs().max())
        for name in one
        for key in ("master", "exp_avg", "exp_avg_sq")
    )


@pytest.mark.parametrize(("stage", "precision"), MODES)
def test_three_and_three_steps_are_six(runs: Runs, stage: int, precision: str) -> None:
    straight, resumed = runs[f"2-{stage}-{precision}"], runs[f"2-{stage}-{precision}-from-2"]
    assert distance(straight, resumed) <= 1e-7
    records = [read_metrics(Path(config.training.output) / "metrics.jsonl") for config in (straight, resumed)]
    assert [record["step"] for record in records[1]] == [4, 5, 6]
    for one, two in zip(records[0][3:], records[1], strict=True):
        assert two["lr"] == one["lr"]
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
        assert two["anchors"] == one["anchors"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("origin", "world"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_continues_the_same_trajectory(runs: Runs, stage: int, origin: int, world: int) -> None:
    assert distance(runs[f"{origin}-{stage}-fp32"], runs[f"{world}-{stage}-fp32-from-{origin}"]) <= 1e-5


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_stages_agree(runs: Runs, stage: int) -> None:
    """Same bias correction in every stage: DeepSpeed's own first update must not count."""
    assert distance(runs["2-0-fp32"], runs[f"2-{stage}-fp32"]) <= 1e-6
    losses = [
        [record["loss"] for record in read_metrics(Path(runs[name].training.output) / "metrics.jsonl")]
        for name in ("2-0-bf16", f"2-{stage}-bf16")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)


@pytest.mark.parametrize(("stage", "precision"), MODES)
def test_saved_state_is_complete(runs: Runs, stage: int, precision: str) -> None:
    path = checkpoint_of(runs[f"2-{stage}-{precision}"], 3)
    state, parameters = read_state(path), read_parameters(path)
    assert (state.step, state.adam_step, state.world_size) == (3, 3, 2)
    for name, parameter in parameters.items():
        assert parameter.master.dtype == torch.float32
        assert float(parameter.exp_avg.abs().max()) > 0, name
        assert float(parameter.exp_avg_sq.abs().max()) > 0, name
    if precision == "bf16":
        assert any(not torch.equal(p.master, p.master.bfloat16().float()) for p in parameters.values())


def test_metrics_do_not_depend_on_the_number_of_ranks(runs: Runs) -> None:
    one, two = (read_metrics(Path(runs[f"{world}-1-fp32"].training.output) / "metrics.jsonl") for world in (1, 2))
    for name in ("loss", "tau", "ce_loss", "l1_loss", "anchor_coverage", "accept_rate@1", "grad_norm"):
        assert [r[name] for r in two] == pytest.approx([r[name] for r in one], rel=1e-4), name


def test_run_folder_tells_where_it_comes_from(runs: Runs) -> None:
    folder = Path(runs["2-1-bf16"].training.output)
    provenance = json.loads((folder / "drafter" / "config.json").read_text())["provenance"]
    assert provenance["step"] == 6
    assert provenance["cache.chat_template"] == "abc"
    assert len(provenance["cache_fingerprint"]) == 64
    assert [worker["rank"] for worker in json.loads((folder / "workers.json").read_text())] == [0, 1]
    assert list((folder / "tensorboard").glob("events*"))


def test_poisoned_sample_stops_the_run_at_once_and_is_named(runs: Runs) -> None:
    """E16: finite in the cache, not finite in the loss; both ranks stop, only one of them has the sample."""
    output = Path(runs["poisoned"].training.output)
    _, positions = step_samples(42, 16, 8, 0)
    step = 0 if 5 in positions else 1
    assert runs.stopped_at == [step, step]
    failure = json.loads((output / "failure.json").read_text())["failures"][0]
    assert failure.startswith(f"step {step}: the loss is nan; samples: s05 (its input is finite; terms ")
    assert "l1_loss" in failure
    assert failure.count("s0") + failure.count("s1") == 1
    assert len(complete_checkpoints(output / "checkpoints", print)) == step
    assert not (output / "drafter").exists()
