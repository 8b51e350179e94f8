"""The tiny golden Qwen3 target as a verifier, and a table-driven toy target for statistics."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from safetensors.torch import load_file
from torch import Tensor

from pipeline.engines.hf import HfVerifier
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
        self.ids: list[int] = []

    def start(self, prompt_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        self.ids = []
        return self.extend(prompt_ids)

    def extend(self, token_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        self.ids += list(token_ids)
        index = torch.tensor(list(token_ids))
        return self.table[index], torch.nn.functional.one_hot(index, self.width).float()

    def crop(self, length: int) -> None:
        del self.ids[length:]
