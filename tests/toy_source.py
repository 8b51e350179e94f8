"""A target that can be learnt in seconds: an order-2 Markov source whose hidden states name the last two tokens.

The favourite next token of a pair (a, b) is the entry of a random Latin square: for any one of the two tokens alone
every next token is equally likely, so a drafter without the hidden states cannot know anything. Legend: V source
tokens (one more row is the mask token), D = V² hidden size, one dimension per pair.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from cache_store.ledger import seal
from cache_store.schema import CacheSpec, TargetSample
from cache_store.storage import open_storage
from cache_store.writer import CacheWriter, create_cache
from model.decoding.speculative import Reading
from tests.pipeline.train.rig import bf16_bits

V = 12
D = V * V
MASK = V
PEAK = 0.95
"""Probability of the favourite next token."""
LAYERS = (0, 1)
TARGET_LAYERS = 3
Coder = Callable[[np.ndarray], np.ndarray]
"""Pair codes int [T] to the pair codes that the captured layers show."""


@dataclass(frozen=True, slots=True)
class MarkovSource:
    """log_probs float32 [D, V+1]: row a·V+b is the distribution after the tokens a, b."""

    log_probs: np.ndarray

    def sample(self, length: int, rng: np.random.Generator) -> list[int]:
        """A sequence whose first two tokens are uniform."""
        tokens = rng.integers(0, V, 2).tolist()
        while len(tokens) < length:
            row = np.exp(self.log_probs[tokens[-2] * V + tokens[-1]].astype(np.float64))
            tokens.append(int(rng.choice(V + 1, p=row / row.sum())))
        return tokens


def make_source(seed: int) -> MarkovSource:
    """A random Latin square (rows, columns and symbols of the cyclic one permuted) with PEAK on its entries."""
    rng = np.random.default_rng(seed)
    rows, columns, symbols = (rng.permutation(V) for _ in range(3))
    probabilities = np.full((D, V + 1), (1 - PEAK) / (V - 1))
    probabilities[:, MASK] = 1e-9
    for a in range(V):
        for b in range(V):
            probabilities[a * V + b, symbols[(rows[a] + columns[b]) % V]] = PEAK
    return MarkovSource(np.log(probabilities).astype(np.float32))


def pairs(tokens: Sequence[int]) -> np.ndarray:
    """int [T]: code of (previous, current) at every position; the first token counts itself as its previous."""
    ids = np.minimum(np.asarray(tokens), V - 1)
    return np.concatenate([ids[:1], ids[:-1]]) * V + ids


def one_hot(codes: np.ndarray) -> np.ndarray:
    """float32 [T, D]."""
    return np.eye(D, dtype=np.float32)[codes]


def truthful(codes: np.ndarray) -> np.ndarray:
    """The captured layers show the pair itself."""
    return codes


def shuffled(seed: int) -> Coder:
    """The captured layers show pairs from anywhere: as many bits, no information."""
    rng = np.random.default_rng(seed)
    return lambda codes: rng.integers(0, D, len(codes))


def captured(codes: np.ndarray) -> np.ndarray:
    """float32 [L, T, D]: two views of one code, so that the order of layers and channels matters too."""
    return np.stack([one_hot(codes), one_hot(codes)[:, ::-1]])


class ToyVerifier:
    """The source as a Verifier: its logits are the table's rows, its hidden states what `coder` shows."""

    def __init__(self, source: MarkovSource, coder: Coder) -> None:
        self._source, self._coder, self._rows = source, coder, list[list[int]]()

    def add(self, prompts: Sequence[Sequence[int]]) -> Reading:
        self._rows += [[] for _ in prompts]
        readings = self._read(range(len(self._rows) - len(prompts), len(self._rows)), prompts)
        last = [len(prompt) - 1 for prompt in prompts]
        return Reading(readings.logits[torch.arange(len(prompts)), last][:, None], readings.hidden)

    def extend(self, token_ids: Sequence[Sequence[int]]) -> Reading:
        return self._read(range(len(self._rows)), token_ids)

    def _read(self, rows: Sequence[int], token_ids: Sequence[Sequence[int]]) -> Reading:
        width = max(len(ids) for ids in token_ids)
        logits, hidden = [], []
        for row, ids in zip(rows, token_ids, strict=True):
            before = len(self._rows[row])
            self._rows[row] += ids
            codes = np.pad(pairs(self._rows[row])[before:], (0, width - len(ids)))
            logits.append(torch.from_numpy(self._source.log_probs[codes]))
            hidden.append(torch.from_numpy(np.concatenate(list(captured(self._coder(codes))), axis=-1)))
        return Reading(torch.stack(logits), torch.stack(hidden))

    def crop(self, lengths: Sequence[int]) -> None:
        for row, length in zip(self._rows, lengths, strict=True):
            del row[length:]

    def keep(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in rows]


def write_target(folder: Path, source: MarkovSource) -> None:
    """The target as training reads it: config.json, a random embedding, and the table as lm_head."""
    folder.mkdir(parents=True)
    config = {
        "model_type": "qwen3",
        "hidden_size": D,
        "intermediate_size": 2 * D,
        "num_hidden_layers": TARGET_LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": V + 1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    embedding = torch.randn(V + 1, D, generator=torch.Generator().manual_seed(1)) * 0.5
    head = torch.from_numpy(source.log_probs.T.copy())
    save_file({"model.embed_tokens.weight": embedding, "lm_head.weight": head}, folder / "model.safetensors")


def write_cache(url: str, source: MarkovSource, coder: Coder, *, samples: int, length: int) -> None:
    """A sealed Target Cache of sampled sequences; the first two tokens are the prompt."""
    storage, rng = open_storage(url), np.random.default_rng(0)
    spec = CacheSpec(
        layer_ids=LAYERS,
        hidden_size=D,
        num_target_layers=TARGET_LAYERS,
        vocab_size=V + 1,
        codec="bss1",
        last_hidden="needed",
        shard_bytes=4 * 2**20,
        identity={"architecture": "toy Markov source"},
    )
    create_cache(storage, spec)
    with CacheWriter(storage, spec) as writer:
        for number in range(samples):
            tokens = source.sample(length, rng)
            codes = pairs(tokens)
            writer.write(
                TargetSample(
                    sample_id=f"toy-{number:04d}",
                    input_ids=np.array(tokens, dtype=np.int32),
                    loss_mask=np.arange(length) >= 2,
                    hidden_states=bf16_bits(captured(coder(codes))),
                    last_hidden_state=bf16_bits(one_hot(codes)),
                    metadata={"domain": "toy"},
                )
            )
    seal(storage, expected_ids=None)
