"""The target, step by step with a key/value cache: `model.decoding`'s Verifier over transformers.

One batched forward serves prompts and rounds alike. Rows differ in length, so positions and masks are explicit, and the
cache is ours (model.row_cache): rejecting tokens is free, and nothing is copied from step to step.
Letters: B rows, n new tokens, T cached columns, C = L·D captured width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

from model.decoding.speculative import Reading
from model.row_cache import RowCache
from pipeline.engines.hf import LayerTap
from pipeline.errors import ConfigError

_FULL, _SLIDING = "full_attention", "sliding_attention"


class _Keys(Cache):
    """A RowCache as the model's attention layers see it."""

    def __init__(self, rows: RowCache) -> None:
        super().__init__(layers=[])
        self._rows = rows

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """New keys and values [B, G, n, E] in, all of them [B, G, T, E] out."""
        keys, values = self._rows.write(layer_idx, key_states.transpose(1, 2), value_states.transpose(1, 2))
        return keys.transpose(1, 2), values.transpose(1, 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Only asked where no positions are given; ours always are."""
        return max(self._rows.lengths, default=0)


class HfVerifier:
    """A causal LM (with its head) as a Verifier; see model.decoding.speculative for the contract."""

    def __init__(self, model: torch.nn.Module, layer_ids: Sequence[int]) -> None:
        """Raises ConfigError for a target whose attention layers this cache cannot serve."""
        self._model = model
        config: Any = model.config
        self._config = config.get_text_config(decoder=True)
        self._kinds = _attention_kinds(self._config)
        self._tap = LayerTap(model.get_decoder(), layer_ids)  # type: ignore[operator]
        self._device = next(model.parameters()).device
        self._cache = self._new_cache(0)

    @torch.no_grad()
    def add(self, prompts: Sequence[Sequence[int]]) -> Reading:
        """See Verifier."""
        joining = self._new_cache(len(prompts))
        reading = self._read(joining, prompts, last_only=True)
        self._cache.join(joining)
        return reading

    @torch.no_grad()
    def extend(self, token_ids: Sequence[Sequence[int]]) -> Reading:
        """See Verifier."""
        return self._read(self._cache, token_ids, last_only=False)

    def crop(self, lengths: Sequence[int]) -> None:
        """See Verifier."""
        self._cache.lengths = [min(old, new) for old, new in zip(self._cache.lengths, lengths, strict=True)]

    def keep(self, rows: Sequence[int]) -> None:
        """See Verifier."""
        self._cache.keep(rows)

    def _new_cache(self, rows: int) -> RowCache:
        return RowCache(self._config.num_hidden_layers, rows)

    def _read(self, cache: RowCache, token_ids: Sequence[Sequence[int]], *, last_only: bool) -> Reading:
        counts = [len(ids) for ids in token_ids]
        padded = torch.zeros(len(counts), max(counts), dtype=torch.long)
        for row, ids in enumerate(token_ids):
            padded[row, : len(ids)] = torch.as_tensor(ids, dtype=torch.long)
        positions = cache.positions(max(counts), self._device)
        last = torch.tensor([count - 1 for count in counts], device=self._device)
        # The head is wide: of a prompt only the columns where some row ends are wanted.
        columns = last.unique() if last_only else torch.arange(max(counts), device=self._device)
        output = self._model(
            input_ids=padded.to(self._device),
            attention_mask=self._masks(positions, max(cache.lengths) + max(counts)),
            position_ids=positions,
            past_key_values=_Keys(cache),
            use_cache=True,
            logits_to_keep=columns,
        )
        cache.lengths = [old + count for old, count in zip(cache.lengths, counts, strict=True)]
        logits = output.logits
        if last_only:
            logits = logits[torch.arange(len(counts), device=self._device), torch.searchsorted(columns, last)][:, None]
        return Reading(logits.float(), torch.cat(self._tap.take(), dim=-1))

    def _masks(self, positions_Bn: torch.Tensor, width: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """Which cached columns each new token sees, bool [B, 1, n, T]; by kind of layer where a model has several."""
        columns = torch.arange(width, device=positions_Bn.device)
        seen = columns <= positions_Bn[..., None]
        masks = {_FULL: seen[:, None]}
        if _SLIDING in self._kinds:
            inside = columns > positions_Bn[..., None] - self._config.sliding_window
            masks[_SLIDING] = (seen & inside)[:, None]
        return masks[self._kinds[0]] if len(self._kinds) == 1 else masks


def _attention_kinds(config: Any) -> tuple[str, ...]:
    """The kinds of attention layers of a text model. Raises ConfigError for one without plain keys and values."""
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None) or [_SLIDING if window else _FULL]
    kinds = tuple(sorted(set(layer_types)))
    unknown = sorted(set(kinds) - {_FULL, _SLIDING})
    if unknown:
        raise ConfigError(
            f"target {config.model_type}: layers of kind {', '.join(unknown)} keep more than keys and values; "
            f"evaluation can verify with {_FULL} and {_SLIDING} layers"
        )
    return kinds
