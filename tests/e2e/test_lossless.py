"""Greedy speculative output equals the target's own, token for token, on 50 prompts of a real model in float32.

A drafter that knows two answers by heart, and a random one, one request at a time and eight.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from model.anchors import build_blocks, legal_anchors
from model.drafter import DSparkDrafter
from model.export import save_drafter
from model.losses import DrafterInputs, LossConfig, dspark_loss
from model.target_heads import load_target_heads
from pipeline.acceptance import ALL_DOMAINS
from pipeline.config import Config, load_config
from pipeline.demo_target import prepare_demo_target
from pipeline.engines.hf import load_target
from pipeline.engines.hf_verifier import HfVerifier
from pipeline.evaluate import run_evaluation
from pipeline.html_report import output_folder
from pipeline.identity import check_target
from pipeline.train.recipe import drafter_config

ROOT = Path(__file__).resolve().parents[2]
PROMPTS, NEW_TOKENS, FITTED_PROMPTS, STEPS = 50, 24, 2, 80
LOSS = LossConfig(ce=1.0, l1=0.0, confidence=0.1, confidence_detached=False, decay_gamma=4.0, rows_per_chunk=512)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def make_config(folder: Path, batch_size: int) -> Config:
    overrides = [
        f"target.path={prepare_demo_target(folder / 'target')}",
        "target.dtype=float32",
        f"training.output={folder / 'run'}",
        f"evaluation.prompts=[{ROOT / 'jobs/prompts/demo_eval.jsonl'}, {ROOT / 'jobs/prompts/demo_train.jsonl'}]",
        f"evaluation.max_new_tokens={NEW_TOKENS}",
        "evaluation.temperatures=[0.0]",
        "evaluation.limit_per_domain=13",
        "evaluation.baseline_prompts_per_domain=null",
        "evaluation.compare_untrained=true",
        "evaluation.num_actors=2",
        f"evaluation.batch_size={batch_size}",
    ]
    return load_config(ROOT / "jobs/configs/smollm2_demo.yaml", overrides)


def fit(drafter: DSparkDrafter, config: Config, prompts: Sequence[str]) -> None:
    """Teach the drafter the target's greedy answers to a few prompts by heart: rounds of every length will follow."""
    target = check_target(config)
    model = load_target(target.section, "cpu")
    heads = load_target_heads(target.folder, dtype=torch.float32)
    verifier = HfVerifier(model, drafter.config.target_layer_ids)
    batches = []
    for prompt in prompts:
        context = target.chat.prompt_ids(None, [prompt], [])
        ids = model.generate(torch.tensor([context]), max_new_tokens=NEW_TOKENS, do_sample=False)[0]  # type: ignore[operator]
        mask = np.arange(len(ids)) >= len(context)
        verifier.keep([])
        hidden = verifier.add([ids.tolist()]).hidden
        blocks = build_blocks(ids[None], torch.from_numpy(mask)[None], [legal_anchors(mask)], drafter.config, 4.0)
        batches.append(DrafterInputs(hidden, torch.zeros(1, len(ids), heads.embedding_VD.shape[1]), blocks))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        out = dspark_loss(drafter, heads, batches[step % len(batches)], LOSS)
        (out.total / out.weight).backward()
        optimizer.step()


@pytest.mark.parametrize("batch_size", [1, 8])
def test_fifty_answers_of_a_real_model_are_the_targets_own(batch_size: int, tmp_path: Path) -> None:
    config = make_config(tmp_path, batch_size)
    rows = [json.loads(line) for line in (ROOT / "jobs/prompts/demo_eval.jsonl").read_text().splitlines()]
    drafter = DSparkDrafter(drafter_config(config)).init_weights(0)
    fit(drafter, config, [row["messages"][0]["content"] for row in rows[:FITTED_PROMPTS]])
    save_drafter(Path(config.training.output) / "drafter", drafter, {})

    report = run_evaluation(config)  # itself raises when one token differs

    assert report is not None
    checks = {check.drafter: check for check in report.greedy}
    assert min(checks["trained"].compared, checks["untrained"].compared) >= PROMPTS
    assert all(check.equal == check.compared for check in checks.values())
    summary = report.summary("trained", 0.0, ALL_DOMAINS)
    assert summary is not None
    assert summary.positions[0].accepted > 0  # drafts were accepted and rejected: both paths were walked
    assert summary.positions[0].accepted < summary.rounds
    assert (output_folder(config) / "report.md").exists()
