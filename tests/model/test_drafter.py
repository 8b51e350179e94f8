from __future__ import annotations

import dataclasses

import pytest
import torch

from model.attention import reference_attention
from model.drafter import DSparkDrafter
from tests.golden_data import drafter_config, golden_blocks, load_case, max_error, tensors, tiny_heads


@pytest.mark.parametrize("name", ["b7_none_conf-none", "b4_none_conf-none"])
def test_backbone_is_golden(name: str) -> None:
    case = load_case(name)
    context = case.drafter.project_context(case.inputs.hidden_states_BTC)
    hidden = case.drafter.backbone(context, case.blocks, case.heads)
    # Every slot, supervised or not: the backbone does not know the mask.
    assert max_error(hidden, case.kept(case.common["backbone_hidden"])) < 2e-5


def test_context_at_or_after_an_anchor_never_changes_its_block() -> None:
    drafter, heads, blocks = (
        DSparkDrafter(drafter_config()).init_weights(0),
        tiny_heads(),
        golden_blocks(drafter_config()),
    )
    states = tensors("inputs")["target_hidden_states"]
    with torch.no_grad():
        before = drafter.backbone(drafter.project_context(states), blocks, heads)
        for position in range(0, 48, 3):
            changed = states.clone()
            changed[:, position] += torch.randn(192, generator=torch.Generator().manual_seed(position))
            after = drafter.backbone(drafter.project_context(changed), blocks, heads)
            same = (before == after).flatten(1).all(dim=1)
            assert torch.equal(same, blocks.anchors <= position), f"position {position}"


def test_blocks_do_not_see_each_other_and_their_order_is_free() -> None:
    drafter, heads, blocks = (
        DSparkDrafter(drafter_config()).init_weights(0),
        tiny_heads(),
        golden_blocks(drafter_config()),
    )
    context = drafter.project_context(tensors("inputs")["target_hidden_states"])
    together = drafter.backbone(context, blocks, heads)
    order = torch.randperm(len(blocks.anchors), generator=torch.Generator().manual_seed(0))
    names = [f.name for f in dataclasses.fields(blocks) if f.name != "draftable_tokens"]
    permuted = dataclasses.replace(blocks, **{name: getattr(blocks, name)[order] for name in names})
    assert torch.equal(drafter.backbone(context, permuted, heads), together[order])
    for index in (0, 9, 25):
        alone = dataclasses.replace(blocks, **{name: getattr(blocks, name)[index : index + 1] for name in names})
        assert torch.allclose(drafter.backbone(context, alone, heads)[0], together[index], atol=1e-6)


def test_training_attention_is_the_reference_inside_the_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    case = load_case("b7_none_conf-none")
    context = case.drafter.project_context(case.inputs.hidden_states_BTC)
    fast = case.drafter.backbone(context, case.blocks, case.heads)
    monkeypatch.setattr(
        "model.drafter.plan_attention",
        lambda layout, shape: lambda query, block, ctx: reference_attention(query, block, ctx, layout),
    )
    assert max_error(fast, case.drafter.backbone(context, case.blocks, case.heads)) < 2e-6


def test_block_layouts_differ_in_slots_only() -> None:
    heads = tiny_heads()
    states = tensors("inputs")["target_hidden_states"]
    outputs = {}
    for flag in (True, False):
        config = drafter_config(sample_from_anchor=flag)
        blocks = golden_blocks(config)
        drafter = DSparkDrafter(config).init_weights(0)
        outputs[flag] = drafter.backbone(drafter.project_context(states), blocks, heads)
        assert blocks.input_ids.shape[1] == (7 if flag else 8)
    assert outputs[True].shape == outputs[False].shape
    assert max_error(outputs[True], outputs[False]) > 0.1


def test_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = DSparkDrafter(drafter_config()).init_weights(5).state_dict()
    torch.manual_seed(2)
    second = DSparkDrafter(drafter_config()).init_weights(5).state_dict()
    other = DSparkDrafter(drafter_config()).init_weights(6).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])
    assert float(first["fc.weight"].std()) == pytest.approx(0.02, rel=0.05)
