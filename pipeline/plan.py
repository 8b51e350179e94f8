"""What a job will cost, before it starts: bytes, files, GPU memory and steps, from the config alone.

Pure arithmetic on the target's config.json; no weights, no GPU, no Ray. The measured factors are named below.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache_store.estimate import estimate_bytes, size_text
from cache_store.schema import EXACT_CODECS, CacheSpec
from pipeline.config import Config
from pipeline.errors import ConfigError

GIB = 2**30
BF16_BYTES = 2
# fp32 master, exp_avg and exp_avg_sq of AdamW: 12 bytes a parameter; ZeRO 1 and 2 split them over the workers.
OPTIMIZER_BYTES = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetSize:
    """What the arithmetic needs of the target."""

    hidden: int
    layers: int
    vocab: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> TargetSize:
        """Read a Hugging Face config.json."""
        heads = facts["num_attention_heads"]
        return cls(
            hidden=facts["hidden_size"],
            layers=facts["num_hidden_layers"],
            vocab=facts["vocab_size"],
            intermediate=facts["intermediate_size"],
            heads=heads,
            kv_heads=facts.get("num_key_value_heads", heads),
            head_dim=facts.get("head_dim") or facts["hidden_size"] // heads,
            tied=facts.get("tie_word_embeddings", False),
        )

    @property
    def parameters(self) -> int:
        """Parameters of the target, embeddings included."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * _layer_parameters(self, self.intermediate)


def _layer_parameters(size: TargetSize, intermediate: int) -> int:
    attention = size.hidden * size.head_dim * (2 * size.heads + 2 * size.kv_heads)
    return attention + 3 * size.hidden * intermediate + 2 * size.hidden + 2 * size.head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The price of a run; bytes are bytes, memory is per device."""

    samples: int
    tokens: int
    supervised_fraction: float
    raw_bytes: int
    stored_bytes: int
    shards: int
    target_parameters: int
    drafter_parameters: int
    generation_weights_bytes: int
    extraction_bytes: int
    training_bytes: int
    steps: int


def make_plan(config: Config, size: TargetSize, samples: int) -> Plan:
    """Price the build and the training of `samples` prompts.

    Raises CacheError for layers that the target lacks.
    """
    response = config.plan.response_tokens or config.generation.sampling.max_new_tokens
    per_sample = min(config.plan.prompt_tokens + response, config.max_length)
    tokens = round(samples * per_sample)
    fraction = min(1.0, response / per_sample)
    cache = estimate_bytes(_cache_spec(config, size), tokens, fraction, samples=samples)
    drafter = drafter_parameters(config, size)
    return Plan(
        samples=samples,
        tokens=tokens,
        supervised_fraction=fraction,
        raw_bytes=cache.raw_bytes,
        stored_bytes=cache.stored_bytes,
        shards=cache.shards,
        target_parameters=size.parameters,
        drafter_parameters=drafter,
        generation_weights_bytes=size.parameters * BF16_BYTES,
        extraction_bytes=_extraction_bytes(config, size),
        training_bytes=_training_bytes(config, size, drafter),
        steps=total_steps(samples, config.training.epochs, config.training.global_batch_size),
    )


def total_steps(num_samples: int, epochs: float, global_batch_size: int) -> int:
    """Optimizer steps of a run: floor(epochs · samples / global batch)."""
    return math.floor(round(epochs * num_samples, 6) / global_batch_size)  # 0.29 epochs of 100 samples are 29


def _cache_spec(config: Config, size: TargetSize) -> CacheSpec:
    return CacheSpec(
        layer_ids=config.extraction.layer_ids,
        hidden_size=size.hidden,
        num_target_layers=size.layers,
        vocab_size=size.vocab,
        format=config.cache.format,
        codec=config.cache.codec,
        last_codec=config.cache.last_codec or "",
        last_hidden=config.cache.last_hidden,
        shard_bytes=config.cache.shard_mb * 2**20,
        identity={},  # a price depends on shapes alone
    )


def drafter_parameters(config: Config, size: TargetSize) -> int:
    """Trainable parameters of the drafter; the frozen embedding and lm_head are not among them."""
    drafter = config.drafter
    shape = TargetSize(
        hidden=size.hidden,
        layers=drafter.num_draft_layers,
        vocab=size.vocab,
        intermediate=drafter.intermediate_size or size.intermediate,
        heads=drafter.num_attention_heads or size.heads,
        kv_heads=drafter.num_key_value_heads or size.kv_heads,
        head_dim=drafter.head_dim or size.head_dim,
        tied=True,
    )
    rank, hidden = drafter.markov_rank, size.hidden
    context = len(config.extraction.layer_ids) * hidden * hidden + 2 * hidden
    markov = 2 * size.vocab * rank
    if drafter.markov_head == "gated":
        markov += (hidden + rank) * rank + rank
    elif drafter.markov_head == "rnn":
        markov += (hidden + 2 * rank) * 3 * rank + 3 * rank
    features = hidden + (rank if drafter.confidence_with_markov else 0)
    confidence = features + 1 if drafter.confidence_head else 0
    return shape.layers * _layer_parameters(shape, shape.intermediate) + context + markov + confidence


def _extraction_bytes(config: Config, size: TargetSize) -> int:
    tokens = config.extraction.tokens_per_batch
    states = tokens * (len(config.extraction.layer_ids) + 1) * size.hidden * BF16_BYTES
    # One layer's widest activations live at a time: gate, up and their product, beside the residual stream.
    working = tokens * (3 * size.intermediate + 4 * size.hidden) * BF16_BYTES
    return size.parameters * BF16_BYTES + states + working


def _training_bytes(config: Config, size: TargetSize, drafter: int) -> int:
    training, layers = config.training, config.drafter.num_draft_layers
    split = training.num_workers if training.zero_stage else 1
    weights = drafter * 2 * BF16_BYTES + drafter * OPTIMIZER_BYTES // split
    frozen = size.vocab * size.hidden * BF16_BYTES * (1 if size.tied else 2)
    slots = training.micro_batch_size * training.num_anchors * config.drafter.block_size
    context = training.micro_batch_size * training.max_length
    intermediate = config.drafter.intermediate_size or size.intermediate
    # Per slot and layer, kept for backward: the MLP's gate, up and product, and about eight hidden-sized tensors.
    activations = slots * layers * (3 * intermediate + 8 * size.hidden) * BF16_BYTES
    states = context * (len(config.extraction.layer_ids) + 2) * size.hidden * BF16_BYTES
    # Attention scores of every layer, float32, kept for backward.
    heads = config.drafter.num_attention_heads or size.heads
    scores = slots * heads * (training.max_length + config.drafter.block_size) * 4 * layers
    # Rows of logits in the compute dtype (drafter's, target's and Markov bias count alike), and W2's float32 gradient.
    chunk = training.loss_rows_per_chunk * size.vocab * BF16_BYTES + size.vocab * config.drafter.markov_rank * 4
    return weights + frozen + activations + states + scores + chunk


def target_size(config: Config) -> TargetSize:
    """Sizes from the local target, else from plan.target_config. Raises ConfigError when neither is there."""
    local = Path(config.target.path) / "config.json"
    file = local if local.is_file() else Path(config.plan.target_config or "")
    if not file.is_file():
        raise ConfigError(
            f"target.path {config.target.path} is not on this machine; to price it without downloading, point "
            "plan.target_config at a config.json of the target"
        )
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
        return TargetSize.from_facts({**facts, **facts.get("text_config", {})})
    except KeyError as error:
        raise ConfigError(f"{file}: lacks {error}; wanted the config.json of a decoder-only model") from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file}: not the config.json of a decoder-only model: {error}") from error


def assumed_plan(config: Config) -> str | None:
    """The price of a run from the `plan` section alone, for a machine that sees neither bucket nor target.

    None when `plan.samples` is not set: then the job looks at the prompts or the cache itself.
    """
    if config.plan.samples is None:
        return None
    plan = make_plan(config, target_size(config), config.plan.samples)
    return f"{format_plan(plan, config)}\n  (from the plan section: prompts, bucket and target were not looked at)"


def _codecs(config: Config) -> str:
    """Container and codecs as one phrase: `tar i8cr, last hidden state bss1`."""
    cache = config.cache
    exact = cache.codec if cache.codec in EXACT_CODECS else "bss1"
    last = cache.last_codec or exact
    return f"{cache.format} {cache.codec}" + (f", last hidden state {last}" if last != cache.codec else "")


def _steps_text(plan: Plan, config: Config) -> str:
    batch = config.training.global_batch_size
    if plan.steps:
        return f"{plan.steps:,} of {batch} samples"
    return f"none: training.epochs x samples do not fill one training.global_batch_size of {batch}; training refuses"


def format_plan(plan: Plan, config: Config) -> str:
    """The plan as the table that `--dry-run` prints."""
    rows = [
        ("samples", f"{plan.samples:,}"),
        ("tokens", f"{plan.tokens:,} ({100 * plan.supervised_fraction:.0f} % supervised)"),
        ("hidden states, raw", size_text(plan.raw_bytes)),
        (f"Target Cache, {_codecs(config)}", f"{size_text(plan.stored_bytes)} in {plan.shards:,} shards"),
        ("target", f"{plan.target_parameters / 1e9:,.2f} B parameters"),
        ("drafter, trainable", f"{plan.drafter_parameters / 1e6:,.1f} M parameters"),
        (
            "memory per vLLM engine",
            f"{plan.generation_weights_bytes / GIB:,.1f} GiB of weights, the rest for its KV cache",
        ),
        ("memory per extraction actor", f"{plan.extraction_bytes / GIB:,.1f} GiB"),
        (
            "memory per training worker",
            f"{plan.training_bytes / GIB:,.1f} GiB (weights, optimizer states, one micro-batch and one loss chunk)",
        ),
        ("optimizer steps", _steps_text(plan, config)),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{config.name}: dry run, nothing was started"]
    return "\n".join(lines + [f"  {name:<{width}}  {value}" for name, value in rows])
