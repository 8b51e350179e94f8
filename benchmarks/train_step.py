"""Time and peak memory of one training step: the naive loss (all logits alive) against the chunked one.

One sample, forward + loss + backward, at SmolLM2 size: D 576, 5 layers, V 49152, T 512, γ 7, vanilla Markov head, rank
256, confidence head. Each figure comes from a process of its own: the median of warm steps, and the largest increase of
resident memory over what stood before the first step. Run: python benchmarks/train_step.py [--anchors 512 --dtype fp32]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from model.anchors import build_blocks, draw_anchors
from model.config import DrafterConfig
from model.drafter import DSparkDrafter
from model.losses import DrafterInputs, LossConfig, dspark_loss, reference_loss
from model.target_heads import TargetHeads

LENGTH = 512
PROMPT = 40
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LOSSES = {"naive": reference_loss, "chunked": dspark_loss}
CONFIG = DrafterConfig(
    hidden_size=576,
    intermediate_size=1536,
    num_draft_layers=5,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    vocab_size=49152,
    rms_norm_eps=1e-5,
    rope_theta=1e5,
    max_position_embeddings=8192,
    target_layer_ids=(1, 8, 15, 22, 28),
    num_target_layers=30,
    block_size=7,
    mask_token_id=3,
    markov_head_type="vanilla",
    markov_rank=256,
    enable_confidence_head=True,
    confidence_head_with_markov=True,
    sample_from_anchor=True,
)


def make_inputs(num_anchors: int, dtype: torch.dtype) -> DrafterInputs:
    """One sample whose response is everything after the prompt; fewer legal anchors than asked for: all of them."""
    generator = torch.Generator().manual_seed(0)
    mask = np.arange(LENGTH) >= (PROMPT if num_anchors < LENGTH - PROMPT else 0)
    ids = torch.randint(0, CONFIG.vocab_size, (1, LENGTH), generator=generator)
    anchors = draw_anchors(mask, num_anchors, seed=0, epoch=0, position=0)
    width = CONFIG.hidden_size * len(CONFIG.target_layer_ids)
    return DrafterInputs(
        torch.randn(1, LENGTH, width, generator=generator).to(dtype),
        torch.randn(1, LENGTH, CONFIG.hidden_size, generator=generator).to(dtype),
        build_blocks(ids, torch.from_numpy(mask)[None], [anchors], CONFIG, 4.0),
    )


def resident_mb(field: str) -> float:
    """VmRSS or VmHWM (peak) of this process, from Linux' /proc."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Run in a fresh process: warm-up step and `steps` timed ones."""
    torch.set_num_threads(args.threads)
    dtype = DTYPES[args.dtype]
    drafter = DSparkDrafter(CONFIG).init_weights(0).to(dtype)
    generator = torch.Generator().manual_seed(1)
    heads = TargetHeads.from_tensors((torch.randn(49152, 576, generator=generator) * 0.05).to(dtype))
    inputs = make_inputs(args.anchors, dtype)
    config = LossConfig(ce=0.1, l1=0.9, confidence=1.0, decay_gamma=4.0, rows_per_chunk=args.rows_per_chunk)
    before = resident_mb("VmRSS")
    seconds = []
    for _ in range(args.steps + 1):
        drafter.zero_grad(set_to_none=True)
        started = time.perf_counter()
        out = LOSSES[args.single](drafter, heads, inputs, config)
        forward = time.perf_counter()
        (out.total / out.weight).backward()
        seconds.append((time.perf_counter() - started, forward - started))
    total = statistics.median(both[0] for both in seconds[1:])
    forward_seconds = statistics.median(both[1] for both in seconds[1:])
    peak = resident_mb("VmHWM") - before
    return {
        "seconds": total,
        "forward_seconds": forward_seconds,
        "peak_memory_mb": peak,
        "loss": float(out.total.detach() / out.weight),
    }


def run_single(loss: str, anchors: int, dtype: str, args: argparse.Namespace) -> dict[str, float]:
    """The figures of one combination, from a subprocess."""
    command = [sys.executable, __file__, "--single", loss, "--anchors", str(anchors), "--dtype", dtype]
    command += [
        "--threads",
        str(args.threads),
        "--steps",
        str(args.steps),
        "--rows-per-chunk",
        str(args.rows_per_chunk),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def compare(anchors: int, dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """Naive beside chunked, printed as two lines of a table."""
    naive, ours = (run_single(loss, anchors, dtype, args) for loss in LOSSES)
    for name, row in (("naive", naive), ("chunked", ours)):
        print(
            f"{name:8} {dtype:5} {anchors:7d} {row['seconds']:8.2f} {row['forward_seconds']:9.2f} "
            f"{row['peak_memory_mb']:8.0f} {row['loss']:9.5f}"
        )
    return {
        "anchors": anchors,
        "dtype": dtype,
        "time_vs_naive": ours["seconds"] / naive["seconds"],
        "peak_memory_vs_naive": ours["peak_memory_mb"] / naive["peak_memory_mb"],
        "seconds": ours["seconds"],
        "peak_memory_mb": ours["peak_memory_mb"],
    }


def main() -> None:
    """Print the table; with --json also one JSON line at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anchors", type=int, choices=(64, 512), help="only this number of anchors")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="only this dtype")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="timed steps, after one to warm up")
    parser.add_argument("--rows-per-chunk", type=int, default=512)
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--single", choices=tuple(LOSSES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.single:
        print(json.dumps(measure(args)))
        return
    print(f"{'loss':8} {'dtype':5} {'anchors':>7} {'step s':>8} {'forward s':>9} {'peak MB':>8} {'value':>9}")
    pairs = itertools.product(
        [args.anchors] if args.anchors else [64, 512], [args.dtype] if args.dtype else list(DTYPES)
    )
    rows = [compare(anchors, dtype, args) for anchors, dtype in pairs]
    if args.json:
        print(json.dumps(rows[0] if len(rows) == 1 else {"rows": rows}))


if __name__ == "__main__":
    main()
