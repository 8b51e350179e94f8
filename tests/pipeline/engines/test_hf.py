from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import TargetSection
from pipeline.engines import hf
from pipeline.errors import ConfigError
from tests.pipeline.hf_target import FAMILIES, HIDDEN, LAYERS, VOCAB, save_tiny_target

SEQUENCES = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [11], [12, 13, 14, 15]]


def section(path: Path, dtype: str = "float32") -> TargetSection:
    return TargetSection(path=str(path), dtype=dtype)  # type: ignore[arg-type]


def floats(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits).view(torch.bfloat16).float()


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    folder = save_tiny_target(tmp_path_factory.mktemp("family"), family=request.param)
    return hf.load_target(section(folder), "cpu")


@pytest.mark.parametrize("tokens_per_batch", [1, 8, 1000])
def test_states_are_those_of_the_chosen_layers(model: torch.nn.Module, tokens_per_batch: int) -> None:
    layers = [-1, 0, 2]
    extractor = hf.HiddenStateExtractor(model, layers, tokens_per_batch=tokens_per_batch)
    found = {states.index: states for states in extractor.extract(SEQUENCES)}
    assert sorted(found) == list(range(len(SEQUENCES)))
    for index, ids in enumerate(SEQUENCES):
        reference = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        assert found[index].hidden_states.shape == (len(layers), len(ids), HIDDEN)
        assert found[index].hidden_states.dtype == np.uint16
        for row, layer in enumerate(layers):
            torch.testing.assert_close(
                floats(found[index].hidden_states[row]), reference[layer + 1][0], rtol=1e-2, atol=1e-2
            )
        # transformers gives the normed state as the last one: a state before the norm would be far from it.
        torch.testing.assert_close(
            floats(found[index].last_hidden_state), reference[-1][0].float(), rtol=1e-2, atol=1e-2
        )


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3"])
def test_the_backbone_alone_gives_the_same_states(tmp_path: Path, family: str) -> None:
    folder = save_tiny_target(tmp_path, family=family)
    whole = hf.load_target(section(folder), "cpu")
    backbone = hf.load_target(section(folder), "cpu", with_head=False)
    assert not hasattr(backbone, "lm_head")
    states = [
        next(iter(hf.HiddenStateExtractor(model, [1], tokens_per_batch=64).extract([SEQUENCES[1]])))
        for model in (whole, backbone)
    ]
    assert np.array_equal(states[0].hidden_states, states[1].hidden_states)
    assert np.array_equal(states[0].last_hidden_state, states[1].last_hidden_state)


def test_a_swap_of_two_sequences_would_show(model: torch.nn.Module) -> None:
    embed = model.get_input_embeddings()  # scales for Gemma
    extractor = hf.HiddenStateExtractor(model, [-1], tokens_per_batch=16)
    for states in extractor.extract(SEQUENCES):
        expected = hf.bf16_bits(embed(torch.tensor(SEQUENCES[states.index])))
        assert np.array_equal(states.hidden_states[0], expected.numpy())


@given(st.lists(st.integers(1, 200), max_size=40), st.integers(1, 500))
def test_length_batches_hold_every_index_once_and_the_budget(lengths: list[int], budget: int) -> None:
    batches = hf.length_batches(lengths, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= budget


def test_check_layer_ids() -> None:
    facts = {"num_hidden_layers": LAYERS}
    hf.check_layer_ids([-1, 0, LAYERS - 2], facts)
    with pytest.raises(ConfigError, match="last layer"):
        hf.check_layer_ids([0, LAYERS - 1], facts)
    with pytest.raises(ConfigError, match="layer 40 does not exist in a target of 4 layers"):
        hf.check_layer_ids([0, 40], facts)


def test_wrong_paths(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere: no such directory"):
        hf.resolve_target(section(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"no config\.json"):
        hf.resolve_target(section(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="lacks hidden_size"):
        hf.target_facts(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read"):
        hf.target_facts(tmp_path)


def test_text_part_of_a_multimodal_config(tmp_path: Path) -> None:
    inner = {"hidden_size": 8, "num_hidden_layers": 3, "vocab_size": 11}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "outer", "text_config": inner}))
    assert hf.target_facts(tmp_path)["hidden_size"] == 8


def test_mask_token(tiny_target: Path) -> None:
    tokenizer = hf.load_tokenizer(str(tiny_target))
    assert hf.resolve_mask_token("<|endoftext|>", tokenizer, VOCAB) == tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert hf.resolve_mask_token(VOCAB - 1, tokenizer, VOCAB) == VOCAB - 1
    for bad in (VOCAB, -1):
        with pytest.raises(ConfigError, match=f"mask_token {bad} lies outside the target's vocabulary"):
            hf.resolve_mask_token(bad, tokenizer, VOCAB)
    with pytest.raises(ConfigError, match="is no token of the target's tokenizer"):
        hf.resolve_mask_token("<|nothing|>", tokenizer, VOCAB)


def test_stop_ids_and_template(tiny_target: Path, tmp_path: Path) -> None:
    tokenizer = hf.load_tokenizer(str(tiny_target))
    assert hf.stop_token_ids(tiny_target, tokenizer) == (2,)
    shutil.copytree(tiny_target, tmp_path / "copy")
    (tmp_path / "copy" / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert hf.stop_token_ids(tmp_path / "copy", tokenizer) == (2, 7)
    before = hf.chat_template_hash(tokenizer)
    template = tmp_path / "copy" / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    assert hf.chat_template_hash(hf.load_tokenizer(str(tmp_path / "copy"))) != before


def test_no_template_is_refused(tiny_target: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_target, tmp_path / "copy")
    (tmp_path / "copy" / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="has no chat template"):
        hf.chat_template_hash(hf.load_tokenizer(str(tmp_path / "copy")))


def test_indispensable_tokens_of_a_byte_fallback_tokenizer(tiny_target: Path) -> None:
    tokenizer = hf.load_tokenizer(str(tiny_target))

    class Fallback:
        added_tokens_decoder, all_special_ids = tokenizer.added_tokens_decoder, tokenizer.all_special_ids

        def get_vocab(self) -> dict[str, int]:
            return {f"<0x{byte:02X}>": 500 + byte for byte in range(256)} | {"a": 900}

    found = hf.indispensable_tokens(Fallback(), [7])
    assert found == {7, *tokenizer.all_special_ids, *tokenizer.added_tokens_decoder, *range(500, 756)}
