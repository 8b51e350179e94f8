from __future__ import annotations

import dataclasses

import torch

from model.drafter import DSparkDrafter
from model.eagle3 import Eagle3Drafter
from model.eagle3_loss import eagle3_loss
from model.family import build_drafter, drafter_loss
from model.losses import dspark_loss
from tests.golden_data import load_case
from tests.golden_eagle3 import eagle3_config, load_eagle3


def test_each_kind_has_its_module_and_its_loss() -> None:
    case, eagle = load_case("dflash_b7"), load_eagle3()
    dflash = dataclasses.replace(case.drafter.config, kind="dflash")
    assert type(build_drafter(dflash)) is DSparkDrafter
    assert type(build_drafter(eagle3_config())) is Eagle3Drafter
    first = drafter_loss(case.drafter, case.heads, case.inputs, case.loss_config)
    assert torch.equal(first.total, dspark_loss(case.drafter, case.heads, case.inputs, case.loss_config).total)
    second = drafter_loss(eagle.drafter, eagle.heads, eagle.inputs, eagle.loss_config)
    assert torch.equal(second.total, eagle3_loss(eagle.drafter, eagle.heads, eagle.inputs, eagle.loss_config).total)
