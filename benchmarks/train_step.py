"""Time and peak memory of one training step: the naive loss (all logits alive) against the chunked one.

One sample, forward + loss + backward, vanilla Markov head of rank 256 and a confidence head, γ 7, 5 layers. On the CPU
at SmolLM2 size: D 576, V 49152, T 512. With --gpu at Qwen3-4B size, in bf16: D 2560, V 151936, T 2048.

Every figure comes from fresh processes, naive and chunked in turn: each runs one step to warm up and then `--steps`
timed ones, and the table has the median over all timed steps of `--repeats` processes. Peak memory is the most that a
process held during its steps (Linux' VmHWM; on a GPU the allocator's peak) less what it held before the first, which is
the model, the heads and the inputs: so it is gradients, activations, logits and slack. The median over processes again.

    python benchmarks/train_step.py [--anchors 512 --dtype fp32] [--json]
    python benchmarks/train_step.py --gpu [--json]
"""

from __future__ import annotations

import argparse
import dataclasses
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
from pipeline.config import TrainingSection

PROMPT = 40
MASK_TOKEN = 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LOSSES = {"naive": reference_loss, "chunked": dspark_loss}
ROWS_PER_CHUNK = TrainingSection.model_fields["loss_rows_per_chunk"].default


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """A drafter and the length of its sample."""

    length: int
    config: DrafterConfig


def size_of(length: int, **target: Any) -> Size:
    """A five-layer drafter of five captured layers for a target with these dimensions."""
    layers = target["num_target_layers"]
    config = DrafterConfig(
        **target,
        num_draft_layers=5,
        max_position_embeddings=8192,
        target_layer_ids=tuple(1 + round(k * (layers - 4) / 4) for k in range(5)),
        block_size=7,
        mask_token_id=MASK_TOKEN,
        markov_head_type="vanilla",
        markov_rank=256,
        enable_confidence_head=True,
        confidence_head_with_markov=True,
        sample_from_anchor=True,
    )
    return Size(length, config)


SMOLLM2 = size_of(
    512,
    hidden_size=576,
    intermediate_size=1536,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    vocab_size=49152,
    rms_norm_eps=1e-5,
    rope_theta=1e5,
    num_target_layers=30,
)
QWEN3_4B = size_of(
    2048,
    hidden_size=2560,
    intermediate_size=9728,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    num_target_layers=36,
)


def make_inputs(size: Size, num_anchors: int, dtype: torch.dtype) -> DrafterInputs:
    """One sample whose response is everything after the prompt; fewer legal anchors than asked for: all of them."""
    generator = torch.Generator().manual_seed(0)
    config = size.config
    mask = np.arange(size.length) >= (PROMPT if num_anchors < size.length - PROMPT else 0)
    ids = torch.randint(0, config.vocab_size, (1, size.length), generator=generator)
    anchors = draw_anchors(mask, num_anchors, seed=0, epoch=0, position=0)
    width = config.hidden_size * len(config.target_layer_ids)
    return DrafterInputs(
        torch.randn(1, size.length, width, generator=generator).to(dtype),
        torch.randn(1, size.length, config.hidden_size, generator=generator).to(dtype),
        build_blocks(ids, torch.from_numpy(mask)[None], [anchors], config, 4.0),
    )


def step_flops(config: DrafterConfig, inputs: DrafterInputs) -> float:
    """Multiplications and additions that a step cannot do without: the chunked loss's own, two per multiply-add.

    Forward + backward is three times the forward product; twice where only one side has a gradient. Attention counts
    what the mask lets through.
    """
    blocks, length = inputs.blocks, inputs.hidden_states_BTC.shape[1]
    D, V, rank = config.hidden_size, config.vocab_size, config.markov_rank
    heads, kv_width = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    slots, labelled = blocks.input_ids.numel(), int(blocks.supervised.sum())
    distinct = len(torch.unique(blocks.context_rows[blocks.supervised]))
    per_slot = D * (2 * heads + 2 * kv_width + 3 * config.intermediate_size)
    pairs = config.num_inputs * (int(blocks.anchors.sum()) + slots)
    backbone = 3 * config.num_draft_layers * (slots * per_slot + length * 2 * D * kv_width + 2 * pairs * heads)
    context = 2 * length * inputs.hidden_states_BTC.shape[2] * D
    loss = 2 * labelled * V * D + distinct * V * D + 3 * distinct * V * rank
    return 2.0 * (backbone + context + loss)


def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a large matrix product on this device, the best of several."""
    n = 8192
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(10):
        synchronize(device)
        started = time.perf_counter()
        torch.mm(a, b)
        synchronize(device)
        times.append(time.perf_counter() - started)
    return 2 * n**3 / min(times)


def synchronize(device: torch.device) -> None:
    """Wait for a GPU's work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forget_peak(device: torch.device) -> None:
    """Start a new peak: loading the model must not hide that of the steps."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def held_mb(device: torch.device, *, peak: bool) -> float:
    """Memory that this process holds, or held at its peak: resident (/proc), or of the GPU's allocator."""
    if device.type == "cuda":
        return (torch.cuda.max_memory_allocated(device) if peak else torch.cuda.memory_allocated(device)) / 2**20
    field = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def measure(loss: str, size: Size, args: argparse.Namespace) -> dict[str, Any]:
    """One process's part: a warm-up step and `steps` timed ones."""
    torch.set_num_threads(args.threads)
    device = torch.device("cuda" if args.gpu else "cpu")
    dtype, config = DTYPES[args.dtype], size.config
    drafter = DSparkDrafter(config).init_weights(0).to(device, dtype)
    generator = torch.Generator().manual_seed(1)
    embedding = torch.randn(config.vocab_size, config.hidden_size, generator=generator) * 0.05
    heads = TargetHeads.from_tensors(embedding.to(device, dtype))
    del embedding
    made = make_inputs(size, args.anchors, dtype)
    inputs = DrafterInputs(made.hidden_states_BTC.to(device), made.last_hidden_BTD.to(device), made.blocks.to(device))
    settings = LossConfig(
        ce=0.1, l1=0.9, confidence=1.0, confidence_detached=False, decay_gamma=4.0, rows_per_chunk=args.rows_per_chunk
    )
    forget_peak(device)
    before = held_mb(device, peak=False)
    seconds = []
    for _ in range(args.steps + 1):
        drafter.zero_grad(set_to_none=True)
        synchronize(device)
        started = time.perf_counter()
        out = LOSSES[loss](drafter, heads, inputs, settings)
        synchronize(device)
        forward = time.perf_counter() - started
        (out.total / out.weight).backward()
        synchronize(device)
        seconds.append((time.perf_counter() - started, forward))
    return {
        "seconds": [both[0] for both in seconds[1:]],
        "forward_seconds": [both[1] for both in seconds[1:]],
        "peak_memory_mb": held_mb(device, peak=True) - before,
        "loss": float(out.total.detach() / out.weight),
        "flops": step_flops(config, made),
        "matmul_flops_per_s": matmul_peak(device, dtype) if args.gpu else None,
    }


def run_single(loss: str, anchors: int, dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """`measure` in a process of its own."""
    command = [sys.executable, __file__, "--single", loss, "--anchors", str(anchors), "--dtype", dtype]
    for name in ("threads", "steps", "rows_per_chunk"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    done = subprocess.run([*command, *(["--gpu"] if args.gpu else [])], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def summary(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over processes and their timed steps."""
    middle = {
        name: statistics.median(itertools.chain.from_iterable(run[name] for run in runs))
        for name in ("seconds", "forward_seconds")
    }
    return middle | {name: statistics.median(run[name] for run in runs) for name in ("peak_memory_mb", "loss")}


def compare(anchors: int, dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """Naive beside chunked, printed as two lines of a table."""
    runs: dict[str, list[dict[str, Any]]] = {loss: [] for loss in LOSSES}
    for _ in range(args.repeats):
        for loss, found in runs.items():
            found.append(run_single(loss, anchors, dtype, args))
    naive, ours = (summary(found) for found in runs.values())
    for loss, row in zip(runs, (naive, ours), strict=True):
        print(
            f"{loss:8} {dtype:5} {anchors:7d} {row['seconds']:8.3f} {row['forward_seconds']:9.3f} "
            f"{row['peak_memory_mb']:8.0f} {row['loss']:9.5f}",
            flush=True,
        )
    result = {
        "anchors": anchors,
        "dtype": dtype,
        "time_vs_naive": ours["seconds"] / naive["seconds"],
        "peak_memory_vs_naive": ours["peak_memory_mb"] / naive["peak_memory_mb"],
        "seconds": ours["seconds"],
        "peak_memory_mb": ours["peak_memory_mb"],
    }
    if args.gpu:
        first = runs["chunked"][0]
        result["tokens_per_s"] = QWEN3_4B.length / ours["seconds"]
        result["share_of_matmul_peak"] = first["flops"] / ours["seconds"] / first["matmul_flops_per_s"]
        result["matmul_tflops_per_s"] = first["matmul_flops_per_s"] / 1e12
        result["device"] = torch.cuda.get_device_name()
    print("  " + ", ".join(f"{name} {value}" for name, value in result.items() if "vs_naive" in name or args.gpu))
    return result


def main() -> None:
    """Print the table; with --json also one JSON line at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anchors", type=int, choices=(64, 512), help="only this number of anchors")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="only this dtype (default: both; with --gpu: bf16)")
    parser.add_argument("--gpu", action="store_true", help="on a CUDA device, at Qwen3-4B size")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, help="timed steps per process, after one to warm up (1; on a GPU 5)")
    parser.add_argument("--repeats", type=int, help="processes per figure (3; on a GPU, whose time is dear, 1)")
    parser.add_argument("--rows-per-chunk", type=int, default=ROWS_PER_CHUNK)
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--single", choices=tuple(LOSSES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.steps, args.repeats = args.steps or (5 if args.gpu else 1), args.repeats or (1 if args.gpu else 3)
    if args.gpu and not torch.cuda.is_available():
        parser.error("--gpu needs a CUDA device; without it the benchmark runs on the CPU")
    if args.single:
        print(json.dumps(measure(args.single, QWEN3_4B if args.gpu else SMOLLM2, args)))
        return
    print(
        f"{'loss':8} {'dtype':5} {'anchors':>7} {'step s':>8} {'forward s':>9} {'peak MB':>8} {'value':>9}", flush=True
    )
    dtypes = [args.dtype] if args.dtype else (["bf16"] if args.gpu else list(DTYPES))
    pairs = itertools.product([args.anchors] if args.anchors else [64, 512], dtypes)
    rows = [compare(anchors, dtype, args) for anchors, dtype in pairs]
    if args.json:
        print(json.dumps(rows[0] if len(rows) == 1 else {"rows": rows}))


if __name__ == "__main__":
    main()
