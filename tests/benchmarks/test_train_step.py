"""The training-step benchmark: its figures come out complete, and its operation count agrees with a counter's."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import train_step
from model.drafter import DSparkDrafter
from model.losses import LossConfig, dspark_loss
from model.target_heads import TargetHeads

TINY = train_step.size_of(
    96,
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=1000,
    rms_norm_eps=1e-6,
    rope_theta=1e5,
    num_target_layers=30,
)


def test_a_measurement_has_every_figure_and_both_losses_agree() -> None:
    args = argparse.Namespace(gpu=False, threads=1, dtype="fp32", anchors=64, steps=1, rows_per_chunk=64)
    before = torch.get_num_threads()
    naive, ours = (train_step.measure(loss, TINY, args) for loss in train_step.LOSSES)
    torch.set_num_threads(before)
    assert ours["loss"] == pytest.approx(naive["loss"], rel=1e-5)
    for figures in (naive, ours):
        assert len(figures["seconds"]) == len(figures["forward_seconds"]) == 1
        assert 0 < figures["forward_seconds"][0] < figures["seconds"][0]
        assert figures["peak_memory_mb"] >= 0


def test_the_json_line_has_the_promised_keys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fake(loss: str, anchors: int, dtype: str, args: argparse.Namespace) -> dict[str, Any]:
        scale = 1.0 if loss == "naive" else 0.25
        return {"seconds": [8 * scale, 4 * scale], "forward_seconds": [1.0], "peak_memory_mb": 100 * scale, "loss": 1.0}

    monkeypatch.setattr(train_step, "run_single", fake)
    monkeypatch.setattr(sys, "argv", ["train_step.py", "--anchors", "512", "--dtype", "fp32", "--json"])
    train_step.main()
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row == {
        "anchors": 512,
        "dtype": "fp32",
        "time_vs_naive": 0.25,
        "peak_memory_vs_naive": 0.25,
        "seconds": 1.5,
        "peak_memory_mb": 25.0,
    }
    monkeypatch.setattr(sys, "argv", ["train_step.py", "--json"])
    train_step.main()
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["anchors"], row["dtype"]) for row in rows] == [
        (64, "fp32"),
        (64, "bf16"),
        (512, "fp32"),
        (512, "bf16"),
    ]


def test_counted_operations() -> None:
    """Torch's counter sees what the formula leaves out: masked attention, small heads."""
    inputs = train_step.make_inputs(TINY, 24, torch.bfloat16)
    drafter = DSparkDrafter(TINY.config).init_weights(0).bfloat16()
    heads = TargetHeads.from_tensors(torch.randn(1000, 64, dtype=torch.bfloat16))
    settings = LossConfig(
        ce=0.1, l1=0.9, confidence=1.0, confidence_detached=False, decay_gamma=4.0, rows_per_chunk=512
    )
    # The counter knows neither the CPU's fused attention nor an in-place addmm_ (which float32 would use).
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        dspark_loss(drafter, heads, inputs, settings).total.backward()
    assert 0.8 < train_step.step_flops(TINY.config, inputs) / counter.get_total_flops() < 1.0


def test_gpu_mode_refuses_a_machine_without_one() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    done = subprocess.run([sys.executable, train_step.__file__, "--gpu"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "needs a CUDA device" in done.stderr
