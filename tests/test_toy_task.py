"""The whole path on a task with a known answer: sampled cache -> DeepSpeed training -> export -> speculative decoding.

An order-2 Markov source is the target. A trained drafter must reach an accepted length that only the hidden states make
possible; an untrained one, and one trained on shuffled hidden states by the same pipeline, must not.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from model.target_heads import load_target_heads
from pipeline.acceptance import ALL_DOMAINS, AcceptanceSummary, check_greedy, summarise
from pipeline.config import Config
from pipeline.drafter_check import expected_tau
from pipeline.eval_actor import (
    TRAINED,
    UNTRAINED,
    EvalRecipe,
    EvalTask,
    PromptDecoder,
    Turn,
    load_drafters,
)
from pipeline.eval_run import Measured
from pipeline.prompts import Prompt
from pipeline.report import TauAgreement
from pipeline.train.recipe import prepare_job
from pipeline.train.worker import DRAFTER, run_rank
from tests.pipeline.train.rig import run_ranks
from tests.toy_source import (
    LAYERS,
    MASK,
    Coder,
    MarkovSource,
    ToyVerifier,
    make_source,
    shuffled,
    truthful,
    write_cache,
    write_target,
)

pytestmark = pytest.mark.usefixtures("one_thread")
BLOCK, PROMPTS, NEW_TOKENS, SEED = 4, 16, 32, 7
CEILING = sum(0.95**k for k in range(BLOCK + 1))
"""τ of a drafter that always proposes the favourite token: 4.5."""


def make_config(root: Path, cache: str) -> Config:
    return Config.model_validate(
        {
            "name": "toy",
            "target": {"path": str(root / "target")},
            "prompts": {"sources": ["unused"]},
            "extraction": {"layer_ids": list(LAYERS)},
            "cache": {"url": str(root / cache)},
            "drafter": {"num_draft_layers": 2, "block_size": BLOCK, "mask_token": MASK, "markov_rank": 16},
            "training": {
                "output": str(root / f"run-{cache}"),
                "num_workers": 1,
                "gpus_per_worker": 0,
                "epochs": 9,
                "global_batch_size": 16,
                "micro_batch_size": 8,
                "num_anchors": 12,
                "max_length": 32,
                "lr": 4e-3,
                "betas": [0.9, 0.95],
                "loader_workers": 0,
                "log_every_steps": 5,
                "seed": SEED,
            },
        }
    )


@dataclass(frozen=True)
class Run:
    config: Config
    source: MarkovSource

    def decode(self, coder: Coder, *, temperature: float) -> Measured:
        """Held-out prompts through the real decoder of an evaluation, with a toy Verifier in place of transformers."""
        recipe = EvalRecipe(
            target=self.config.target,
            drafter=str(Path(self.config.training.output) / DRAFTER),
            untrained_seed=self.config.training.seed,
            template_kwargs={},
            history="append",
            stop_ids=(),
            max_new_tokens=NEW_TOKENS,
            max_length=256,
            seed=SEED,
            device="cpu",
            threads=None,
            batch_size=8,
            top_p=1.0,
            top_k=-1,
            confidence_threshold=0.0,
        )
        drafters = load_drafters(recipe)
        heads = load_target_heads(self.config.target.path, dtype=drafters[TRAINED].dtype)
        decoder = PromptDecoder(ToyVerifier(self.source, coder), heads, drafters, recipe)
        rng, turns = np.random.default_rng(99), []
        for number in range(PROMPTS):
            prompt = Prompt(sample_id=f"p{number}", system=None, users=("",), domain="toy", source="")
            task = EvalTask(prompt, temperature, with_baselines=True)
            turns.append(Turn(task, 0, tuple(self.source.sample(6, rng))))
        measured = Measured()
        for part in decoder.measure(turns):
            measured.add(part)
        return measured

    def taus(self, coder: Coder, *, temperature: float = 1.0) -> dict[str, AcceptanceSummary]:
        rounds = self.decode(coder, temperature=temperature).rounds
        summaries = summarise(rounds, block_size=BLOCK, seed=0)
        return {s.drafter: s for s in summaries if s.domain == ALL_DOMAINS}


def train(root: Path, source: MarkovSource, name: str, coder: Coder) -> Run:
    write_cache(str(root / name), source, coder, samples=256, length=32)
    config = make_config(root, name)
    run_ranks(1, root / f"ranks-{name}", run_rank, prepare_job(config))
    return Run(config, source)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The two trainings, side by side: each is one process with one thread."""
    root, source = tmp_path_factory.mktemp("toy"), make_source(seed=0)
    write_target(root / "target", source)
    coders = {"truthful": truthful, "shuffled": shuffled(seed=1)}
    with ThreadPoolExecutor(len(coders)) as pool:
        futures = {name: pool.submit(train, root, source, name, coder) for name, coder in coders.items()}
        return {name: future.result() for name, future in futures.items()}


@pytest.fixture(scope="module")
def trained(runs: dict[str, Run]) -> Run:
    return runs["truthful"]


def test_trained_drafter_uses_the_hidden_states(trained: Run) -> None:
    taus = trained.taus(truthful)
    assert 2.5 < taus[TRAINED].accepted_length.value <= CEILING + 0.1
    assert taus[UNTRAINED].accepted_length.value < 1.3
    assert taus[TRAINED].accepted_length.low > taus[UNTRAINED].accepted_length.high


def test_shuffled_hidden_states_teach_nothing(runs: dict[str, Run]) -> None:
    run = runs["shuffled"]
    assert run.taus(shuffled(seed=2))[TRAINED].accepted_length.value < 1.5
    assert run.taus(truthful)[TRAINED].accepted_length.value < 1.5


def test_greedy_output_is_the_targets_own(trained: Run) -> None:
    result = trained.decode(truthful, temperature=0.0)
    checks = {check.drafter: check for check in check_greedy(result.decodes)}
    assert {name: (check.compared, check.equal) for name, check in checks.items()} == {
        TRAINED: (PROMPTS, PROMPTS),
        UNTRAINED: (PROMPTS, PROMPTS),
    }


def test_training_predicts_the_accepted_length_unless_serving_shows_other_states(trained: Run) -> None:
    expected = expected_tau(Path(trained.config.training.output))
    measured = trained.taus(truthful)[TRAINED].accepted_length.value
    assert TauAgreement(expected=expected, measured=measured, temperature=1.0).agrees
    # Serving that shows the states of the wrong position is what the comparison is for.
    wrong = trained.taus(lambda codes: np.roll(codes, 1) * 5 % 144)[TRAINED].accepted_length.value
    assert not TauAgreement(expected=expected, measured=wrong, temperature=1.0).agrees
