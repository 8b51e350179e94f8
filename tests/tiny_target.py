"""The tiny golden Qwen3 target as a verifier, and a table-driven toy target for statistics."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from safetensors.torch import load_file
from torch import Tensor

from model.decoding.speculative import Reading
from pipeline.engines.hf_verifier import HfVerifier
from tests.golden_data import GOLDEN


def tiny_verifier(layer_ids: tuple[int, ...] = (1, 3, 5)) -> HfVerifier:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(Qwen3Config.from_json_file(GOLDEN / "target_tiny_config" / "config.json"))
    model.load_state_dict(load_file(GOLDEN / "target_tiny.safetensors"))
    return HfVerifier(model.eval(), layer_ids)


class TableVerifier:
    """A first-order Markov chain as the target: logits are a row of a table; hidden states show the token itself."""

    def __init__(self, table_VV: Tensor, width: int) -> None:
        self.table = table_VV
        self.width = width
        self.rows: list[list[int]] = []

    def add(self, prompts: Sequence[Sequence[int]]) -> Reading:
        self.rows += [list(prompt) for prompt in prompts]
        reading = self._read(prompts)
        last = torch.tensor([len(prompt) - 1 for prompt in prompts])
        return Reading(reading.logits[torch.arange(len(prompts)), last][:, None], reading.hidden)

    def extend(self, token_ids: Sequence[Sequence[int]]) -> Reading:
        for row, ids in zip(self.rows, token_ids, strict=True):
            row.extend(ids)
        return self._read(token_ids)

    def _read(self, token_ids: Sequence[Sequence[int]]) -> Reading:
        """Padding is NaN: nobody may look at it."""
        width = max(len(ids) for ids in token_ids)
        logits = torch.full((len(token_ids), width, len(self.table)), float("nan"))
        hidden = torch.full((len(token_ids), width, self.width), float("nan"))
        for row, ids in enumerate(token_ids):
            index = torch.tensor(list(ids))
            logits[row, : len(ids)] = self.table[index]
            hidden[row, : len(ids)] = torch.nn.functional.one_hot(index, self.width).float()
        return Reading(logits, hidden)

    def crop(self, lengths: Sequence[int]) -> None:
        for row, length in zip(self.rows, lengths, strict=True):
            del row[length:]

    def keep(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]
