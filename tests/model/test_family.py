from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from model.drafter import DSparkDrafter
from model.eagle3 import Eagle3Drafter
from model.eagle3_loss import eagle3_loss
from model.export import load_drafter, save_drafter
from model.family import drafter_loss, new_drafter
from model.losses import dspark_loss
from tests.golden_data import drafter_config, load_case
from tests.golden_eagle3 import eagle3_config, load_eagle3
from tests.model.test_warm_start import NO_HEADS

CONFIGS = {
    "dspark": drafter_config(),
    "dspark, sliding": drafter_config(layer_types=("sliding_attention", "full_attention"), sliding_window=64),
    "dflash": drafter_config(**NO_HEADS),
    "dflash, anchor slot silent": drafter_config(**NO_HEADS, sample_from_anchor=False),
    "eagle3": eagle3_config(block_size=7),
}


def test_each_kind_has_its_module_and_its_loss() -> None:
    case, eagle = load_case("dflash_b7"), load_eagle3()
    dflash = dataclasses.replace(case.drafter.config, kind="dflash")
    assert type(new_drafter(dflash)) is DSparkDrafter
    assert type(new_drafter(eagle3_config())) is Eagle3Drafter
    first = drafter_loss(case.drafter, case.heads, case.inputs, case.loss_config)
    assert torch.equal(first.total, dspark_loss(case.drafter, case.heads, case.inputs, case.loss_config).total)
    second = drafter_loss(eagle.drafter, eagle.heads, eagle.inputs, eagle.loss_config)
    assert torch.equal(second.total, eagle3_loss(eagle.drafter, eagle.heads, eagle.inputs, eagle.loss_config).total)


@pytest.mark.parametrize("name", CONFIGS)
def test_saving_and_loading_every_kind_is_exact(tmp_path: Path, name: str) -> None:
    config = CONFIGS[name]
    drafter = new_drafter(config)
    drafter.init_weights(3)
    loaded = load_drafter(save_drafter(tmp_path, drafter, {}))
    assert type(loaded) is type(drafter)
    assert loaded.config == config
    expected = drafter.state_dict()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in loaded.state_dict().items())
