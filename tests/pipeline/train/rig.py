"""Real gloo processes with the real DeepSpeed engine on a toy target and a toy cache, for the tests of training."""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from cache_store.ledger import seal
from cache_store.schema import CacheSpec, TargetSample
from cache_store.storage import open_storage
from cache_store.writer import CacheWriter, create_cache
from pipeline.config import Config

HIDDEN, VOCAB, LAYERS, TARGET_LAYERS = 32, 97, (0, 2), 4
START_TIMEOUT_S = 240


def make_target(folder: Path) -> Path:
    """A Hugging Face folder with nothing but what training reads: config.json, embedding, lm_head."""
    folder.mkdir(parents=True)
    config = {
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": TARGET_LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(VOCAB, HIDDEN, generator=generator)
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """Float values cut to bf16, as uint16."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def make_cache(
    url: str,
    masks: Sequence[np.ndarray],
    *,
    layer_ids: tuple[int, ...] = LAYERS,
    huge_sample: int | None = None,
    vocab_size: int = VOCAB,
) -> None:
    """A sealed cache of one sample per loss mask, ids s00, s01, ... in the order of their positions.

    The last hidden states of `huge_sample` are finite, but so large that the target's logits are not.
    """
    storage, rng = open_storage(url), np.random.default_rng(0)
    spec = CacheSpec(
        layer_ids=layer_ids,
        hidden_size=HIDDEN,
        num_target_layers=TARGET_LAYERS,
        vocab_size=vocab_size,
        codec="raw",
        last_hidden="needed",
        shard_bytes=2**20,
        identity={"target": "toy", "chat_template": "abc"},
    )
    create_cache(storage, spec)
    with CacheWriter(storage, spec) as writer:
        for number, mask in enumerate(masks):
            scale = 1e38 if number == huge_sample else 1.0
            writer.write(
                TargetSample(
                    sample_id=f"s{number:02d}",
                    input_ids=rng.integers(0, vocab_size, len(mask)).astype(np.int32),
                    loss_mask=mask,
                    hidden_states=bf16_bits(rng.normal(size=(len(layer_ids), len(mask), HIDDEN))),
                    last_hidden_state=bf16_bits(scale * rng.normal(size=(len(mask), HIDDEN)).clip(-3, 3)),
                    metadata={},
                )
            )
    seal(storage, expected_ids=None)


def answer_mask(tokens: int, prompt: int) -> np.ndarray:
    """bool [tokens]: everything after the prompt is supervised."""
    return np.arange(tokens) >= prompt


def mixed_masks(count: int) -> list[np.ndarray]:
    """Conversations of unequal lengths."""
    rng = np.random.default_rng(3)
    return [answer_mask(int(rng.integers(8, 30)), int(rng.integers(2, 6))) for _ in range(count)]


def make_config(root: Path, *, output: str = "run", **training: Any) -> Config:
    """A config over `root/target` and `root/cache`; keyword arguments replace fields of the training section."""
    return Config.model_validate(
        {
            "name": "toy",
            "target": {"path": str(root / "target")},
            "prompts": {"sources": ["unused.jsonl"]},
            "extraction": {"layer_ids": list(LAYERS)},
            "cache": {"url": str(root / "cache")},
            "drafter": {"num_draft_layers": 1, "block_size": 4, "mask_token": 96, "markov_rank": 8},
            "training": {
                "output": str(root / output),
                "num_workers": 2,
                "gpus_per_worker": 0,
                "epochs": 3,
                "global_batch_size": 8,
                "micro_batch_size": 2,
                "num_anchors": 5,
                "max_length": 24,
                "lr": 1e-2,
                "precision": "fp32",
                "loader_workers": 0,
                "log_every_steps": 1,
                "keep_checkpoints": 9,
                **training,
            },
        }
    )


def run_ranks(world_size: int, folder: Path, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`function(*arguments)` in `world_size` fresh processes with a gloo group; what each returned, by rank."""
    folder.mkdir(parents=True, exist_ok=True)
    context = torch.multiprocessing.spawn(
        _enter, args=(world_size, str(folder), function, arguments), nprocs=world_size, join=False
    )
    try:
        while not context.join(timeout=START_TIMEOUT_S):
            pass
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world_size)]


def _enter(rank: int, world_size: int, folder: str, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    faulthandler.enable()  # a rank that dies of a signal says where
    os.environ.update(DS_ACCELERATOR="cpu", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    rendezvous = Path(folder) / f"rendezvous-{world_size}"
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    result = function(*arguments)
    (Path(folder) / f"result-{rank}").write_bytes(pickle.dumps(result))
    torch.distributed.barrier()
    # The result is on disk: leave without the teardown of native threads, whose order the ranks race for.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
