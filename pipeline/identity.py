"""The settings that a cache is built with, as its CacheSpec: what a second build into the same place must repeat."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cache_store.identity import digest_json, digest_tokenizer, digest_weights
from cache_store.schema import CacheSpec
from model.errors import UnsupportedTarget
from model.target_families import head_facts
from pipeline.chat import Chat, History, detect_history
from pipeline.config import Config, TargetSection
from pipeline.engines import hf
from pipeline.engines.vllm import engine_version, identity_kwargs
from pipeline.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedTarget:
    """The target after its cheap checks: everything that needs no weights in memory."""

    folder: Path
    section: TargetSection
    """As worker processes must see it."""
    facts: dict[str, Any]
    stop_ids: tuple[int, ...]
    template_hash: str
    history: History
    chat: Chat
    mask_token_id: int


def check_target(config: Config) -> CheckedTarget:
    """Check path, layers, tokenizer, chat template and mask token, cheapest first.

    Raises ConfigError, one clear line for each.
    """
    folder = hf.resolve_target(config.target)
    facts = hf.target_facts(folder)
    _check_family(folder / "config.json")
    hf.check_layer_ids(config.extraction.layer_ids, facts)
    section = hf.worker_section(config.target)
    tokenizer = hf.tokenizer_of(section)
    mask_token_id = hf.resolve_mask_token(config.drafter.mask_token, tokenizer, facts["vocab_size"])
    template_hash = hf.chat_template_hash(tokenizer)
    stop_ids = hf.stop_token_ids(folder, tokenizer)
    chat = Chat(tokenizer, config.generation.chat_template_kwargs, stop_ids)
    return CheckedTarget(
        folder=folder,
        section=section,
        facts=facts,
        stop_ids=stop_ids,
        template_hash=template_hash,
        history=detect_history(chat),
        chat=chat,
        mask_token_id=mask_token_id,
    )


def _check_family(file: Path) -> None:
    # Before anything is built: a cache of a target that no drafter can serve would be built for nothing.
    try:
        head_facts(json.loads(file.read_text(encoding="utf-8")), source=str(file))
    except UnsupportedTarget as error:
        raise ConfigError(f"target.path: {error}") from error


def check_length(max_length: int, facts: dict[str, Any]) -> None:
    """Refuse rows longer than the target can read, which the engine does only once its machine is up.

    A scaled rotary embedding has its own arithmetic and is left to the engine. Raises ConfigError.
    """
    limit = facts.get("max_position_embeddings")
    rope = facts.get("rope_parameters") or facts.get("rope_scaling") or {}
    scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
    if isinstance(limit, int) and max_length > limit and not scaled:
        raise ConfigError(
            f"max_length {max_length:,} is beyond the target's max_position_embeddings {limit:,}; lower it"
        )


def make_spec(config: Config, target: CheckedTarget, prompts_digest: str) -> CacheSpec:
    """The CacheSpec of a build. Training, evaluation and export compare its `identity` with what they load."""
    sampling = config.generation.sampling
    quantization = target.facts.get("quantization_config")
    return CacheSpec(
        layer_ids=config.extraction.layer_ids,
        hidden_size=target.facts["hidden_size"],
        num_target_layers=target.facts["num_hidden_layers"],
        vocab_size=target.facts["vocab_size"],
        format=config.cache.format,
        codec=config.cache.codec,
        last_codec=config.cache.last_codec or "",
        last_hidden=config.cache.last_hidden,
        shard_bytes=config.cache.shard_mb * 2**20,
        identity={
            "architecture": (target.facts.get("architectures") or [target.facts.get("model_type", "unknown")])[0],
            "weights": digest_weights(target.folder),
            "config": digest_json(target.facts),
            "tokenizer": digest_tokenizer(target.folder),
            "chat_template": target.template_hash,
            "chat_template_kwargs": json.dumps(config.generation.chat_template_kwargs, sort_keys=True),
            "stop_ids": list(target.stop_ids),
            "revision": config.target.revision,
            "dtype": config.target.dtype,
            "quantization": json.dumps(quantization, sort_keys=True) if quantization else None,
            "norm": hf.NORM_CONVENTION,
            "history": target.history,
            "prompts": prompts_digest,
            "temperature": float(sampling.temperature),
            "top_p": float(sampling.top_p),
            "top_k": sampling.top_k,
            "max_new_tokens": sampling.max_new_tokens,
            "seed": sampling.seed,
            "max_length": config.max_length,
            "truncated": config.generation.truncated,
            "engine": engine_version(),
            "engine_settings": json.dumps(identity_kwargs(config.generation), sort_keys=True, default=str),
            "transformers": version("transformers"),
            "torch": version("torch"),
        },
    )
