"""Real samples for the cache benchmark: the demo target's own answers to the demo's prompts, and its hidden states.

Made once into `build/bench` and kept: conversations by sampling from the target, states by the extractor that builds
use, stored raw; every other cache of the benchmark is written from those.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from cache_store.calibration import calibrate, commit_calibration
from cache_store.ledger import seal
from cache_store.reader import CacheReader
from cache_store.schema import CacheSpec, TargetSample
from cache_store.storage import Storage, open_storage
from cache_store.writer import CacheWriter, create_cache
from pipeline.chat import Chat
from pipeline.config import TargetSection
from pipeline.demo_target import prepare_demo_target
from pipeline.engines.hf import HiddenStateExtractor, load_target, tokenizer_of

LAYERS = (1, 8, 15, 22, 28)
SAMPLES, NEW_TOKENS, PROMPTS_PER_BATCH = 128, 160, 64
CALIBRATION_SAMPLES = 32
SHARD_BYTES = 64 << 20
SEED = 0


def raw_cache(folder: Path, target: Path, prompts: Path) -> CacheReader:
    """The states of all samples, uncompressed, every position; built unless it stands there already."""
    storage = open_storage(str(folder / "raw"))
    if not (folder / "raw" / "manifest.json").exists():
        _build(storage, prepare_demo_target(target), prompts)
    return CacheReader(storage, verify="never")


def variant(source: CacheReader, folder: Path, name: str, **changes: str) -> Storage:
    """The same samples under other settings (format, codec, last_codec, last_hidden), written unless it stands there.

    Channel scales come from a few samples, and are then applied to all.
    """
    storage = open_storage(str(folder / name))
    if (folder / name / "manifest.json").exists():
        return storage
    values = {field: getattr(source.spec, field) for field in ("layer_ids", "hidden_size", "num_target_layers")}
    values |= {"vocab_size": source.spec.vocab_size, "shard_bytes": SHARD_BYTES, "identity": source.spec.identity}
    spec = create_cache(storage, CacheSpec(**{"codec": "bss1", "last_hidden": "all", **values, **changes}))
    if spec.calibrated:
        step = max(1, len(source) // CALIBRATION_SAMPLES)
        found = calibrate(spec, (source.read(position) for position in range(0, len(source), step)))
        commit_calibration(storage, spec, found)
    with CacheWriter(storage, spec) as writer:
        for position in range(len(source)):
            writer.write(source.read(position))
    seal(storage, expected_ids=None)
    return storage


def _build(storage: Storage, target: Path, prompts: Path) -> None:
    section = TargetSection(path=str(target), dtype="bfloat16")
    model = load_target(section, "cpu")
    facts = model.config
    spec = CacheSpec(
        layer_ids=LAYERS,
        hidden_size=facts.hidden_size,
        num_target_layers=facts.num_hidden_layers,
        vocab_size=facts.vocab_size,
        codec="raw",
        last_hidden="all",
        shard_bytes=SHARD_BYTES,
        identity={"target": "demo target", "made_by": "benchmarks/cache_data.py"},
    )
    create_cache(storage, spec)
    sampler = load_target(TargetSection(path=str(target), dtype="float32"), "cpu")  # a CPU samples faster in float32
    conversations = list(_conversations(sampler, Chat(tokenizer_of(section)), prompts))
    del sampler
    extractor = HiddenStateExtractor(model, LAYERS, tokens_per_batch=4096)
    with CacheWriter(storage, spec) as writer:
        for states in extractor.extract([ids for _, _, ids, _ in conversations]):
            sample_id, domain, ids, start = conversations[states.index]
            sample = TargetSample(
                sample_id=sample_id,
                input_ids=np.array(ids, dtype=np.int32),
                loss_mask=np.arange(len(ids)) >= start,
                hidden_states=states.hidden_states,
                last_hidden_state=states.last_hidden_state,
                metadata={"domain": domain, "finish_reasons": ["stop"]},
            )
            writer.write(sample)
    seal(storage, expected_ids=None)


def _conversations(model: torch.nn.Module, chat: Chat, prompts: Path) -> Iterator[tuple[str, str, list[int], int]]:
    """(id, domain, token ids, first supervised position) of the target's sampled answers."""
    rows = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines() if line.strip()][:SAMPLES]
    stop = model.generation_config.eos_token_id
    torch.manual_seed(SEED)
    for first in range(0, len(rows), PROMPTS_PER_BATCH):
        batch = rows[first : first + PROMPTS_PER_BATCH]
        print(f"sampling answers: {first}/{len(rows)}", file=sys.stderr, flush=True)
        contexts = [chat.prompt_ids(None, [row["messages"][0]["content"]], []) for row in batch]
        width = max(map(len, contexts))
        ids = torch.tensor([[stop] * (width - len(context)) + context for context in contexts])
        seen = torch.tensor([[0] * (width - len(context)) + [1] * len(context) for context in contexts])
        with torch.inference_mode():
            made = model.generate(  # type: ignore[operator]
                ids, attention_mask=seen, do_sample=True, temperature=0.7, max_new_tokens=NEW_TOKENS, pad_token_id=stop
            )
        for row, context, answer in zip(batch, contexts, made[:, width:].tolist(), strict=True):
            length = answer.index(stop) + 1 if stop in answer else len(answer)
            yield row["id"], row["domain"], context + answer[:length], len(context)
