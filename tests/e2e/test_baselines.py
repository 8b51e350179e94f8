"""DFlash and EAGLE-3 on the toy task: trained by DSpark's loop from DSpark's cache, exported, and decoded for real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.acceptance import check_greedy
from pipeline.config import Config
from pipeline.drafter_check import expected_tau
from pipeline.eval_actor import TRAINED, UNTRAINED
from pipeline.report import TauAgreement
from pipeline.train.recipe import prepare_job
from pipeline.train.worker import run_rank
from tests.pipeline.train.rig import run_ranks
from tests.test_toy_task import BLOCK, CEILING, MASK, PROMPTS, Run, make_config
from tests.toy_source import make_source, truthful, write_cache, write_target

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
KINDS: dict[str, dict[str, Any]] = {"dflash": {"num_draft_layers": 2}, "eagle3": {}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    root, source = tmp_path_factory.mktemp("baselines"), make_source(seed=0)
    write_target(root / "target", source)
    write_cache(str(root / "cache"), source, truthful, samples=256, length=32)
    trained = {}
    for kind, drafter in KINDS.items():
        settings = make_config(root, "cache").model_dump(mode="json")
        settings["drafter"] = {"kind": kind, "block_size": BLOCK, "mask_token": MASK, **drafter}
        settings["training"] |= {"output": str(root / kind)}
        settings["training"].pop("loss")
        trained[kind] = Run(Config.model_validate(settings), source)
    run_ranks(1, root / "ranks", _train_one_after_another, [prepare_job(run.config) for run in trained.values()])
    return trained


def _train_one_after_another(jobs: list[Any]) -> None:
    for job in jobs:
        run_rank(job)


# DFlash cannot see the tokens drafted before a slot, so on an order-2 source only its first drafts are good.
@pytest.mark.parametrize(("kind", "least"), [("dflash", 1.8), ("eagle3", 2.2)])
def test_trained_baselines_use_the_hidden_states(runs: dict[str, Run], kind: str, least: float) -> None:
    taus = runs[kind].taus(truthful)
    assert least < taus[TRAINED].accepted_length.value <= CEILING + 0.1
    assert taus[UNTRAINED].accepted_length.value < 1.3
    expected = expected_tau(Path(runs[kind].config.training.output))
    assert TauAgreement(expected=expected, measured=taus[TRAINED].accepted_length.value, temperature=1.0).agrees


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_output_is_the_targets_own(runs: dict[str, Run], kind: str) -> None:
    checks = check_greedy(runs[kind].decode(truthful, temperature=0.0).decodes)
    assert {(check.compared, check.equal) for check in checks} == {(PROMPTS, PROMPTS)}
