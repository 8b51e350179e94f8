"""What must not change the gradient, or a block, for every kind of drafter: how samples are laid out and shared.

The same for real ranks and ZeRO stages is in tests/pipeline/train/test_engine.py and test_kinds.py.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from model.anchors import Blocks, Documents, build_blocks
from model.config import DrafterConfig
from model.eagle3 import Eagle3Drafter
from model.family import AnyDrafter, drafter_loss, new_drafter
from model.losses import DrafterInputs, LossConfig, metric_values
from tests.golden_data import drafter_config, golden_anchors, max_error, tensors, tiny_heads
from tests.golden_eagle3 import eagle3_config
from tests.model.test_warm_start import NO_HEADS

SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5}
KINDS: dict[str, DrafterConfig] = {
    "dspark": drafter_config(),
    "rnn head, silent anchor slot": drafter_config(markov_head_type="rnn", sample_from_anchor=False, block_size=4),
    "one sliding layer of two": drafter_config(**SLIDING),
    "dflash": drafter_config(**NO_HEADS),
    "eagle3": eagle3_config(target_layer_ids=(1, 3, 5), block_size=5),
}
DSPARK_LOSS = LossConfig(ce=0.1, l1=0.9, confidence=1.0, confidence_detached=False, decay_gamma=4.0, rows_per_chunk=32)
CE_LOSS = dataclasses.replace(DSPARK_LOSS, ce=1.0, l1=0.0, confidence=0.0)
LENGTHS = (48, 37)


@pytest.fixture(params=list(KINDS))
def drafter(request: pytest.FixtureRequest) -> AnyDrafter:
    return new_drafter(KINDS[request.param]).init_weights(0)


@dataclasses.dataclass(frozen=True)
class Sample:
    ids: Tensor
    mask: Tensor
    hidden: Tensor
    last: Tensor
    anchors: np.ndarray


def samples() -> list[Sample]:
    """The golden sequences without their padding."""
    given = tensors("inputs")
    return [
        Sample(
            given["input_ids"][row, :length],
            given["loss_mask"][row, :length].bool(),
            given["target_hidden_states"][row, :length],
            given["target_last_hidden_states"][row, :length],
            anchors,
        )
        for row, (length, anchors) in enumerate(zip(LENGTHS, golden_anchors(), strict=True))
    ]


def rows_of(layout: list[list[Sample]], config: DrafterConfig, columns: int, *, padding: float = 0.0) -> DrafterInputs:
    """Documents of each row one after another, filled up to `columns`; `padding` fills the states behind them."""
    shape, documents = (len(layout), columns), [sample for row in layout for sample in row]
    ids, mask = torch.full(shape, -1 if padding else 0), torch.zeros(shape, dtype=torch.bool)
    hidden, last = (torch.full((*shape, width), padding) for width in (192, 64))
    starts = []
    for row, members in enumerate(layout):
        start = 0
        for sample in members:
            span = slice(start, start + len(sample.ids))
            ids[row, span], mask[row, span] = sample.ids, sample.mask
            hidden[row, span], last[row, span] = sample.hidden, sample.last
            starts.append(start)
            start = span.stop
    places = Documents(
        np.repeat(np.arange(len(layout)), [len(row) for row in layout]),
        np.array(starts),
        np.array([len(sample.ids) for sample in documents]),
    )
    blocks = build_blocks(ids, mask, [sample.anchors for sample in documents], config, 4.0, places)
    return DrafterInputs(hidden, last, blocks, ids)


def gradient(drafter: AnyDrafter, parts: list[DrafterInputs]) -> dict[str, Tensor]:
    """d(Σ w·loss / Σ w) of all parts together, every parameter reached."""
    loss = CE_LOSS if drafter.config.kind != "dspark" else DSPARK_LOSS
    outputs = [drafter_loss(drafter, tiny_heads(), part, loss) for part in parts]
    total = torch.stack([out.total for out in outputs]).sum() / torch.stack([out.weight for out in outputs]).sum()
    names, parameters = zip(*drafter.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(total, parameters), strict=True))


def assert_same(expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        assert max_error(value, found[name]) < 1e-6, name
    assert max(float(value.abs().max()) for value in expected.values()) > 1e-3


def padded(drafter: AnyDrafter) -> DrafterInputs:
    return rows_of([[sample] for sample in samples()], drafter.config, 48)


def test_padded_batch_equals_its_samples_alone(drafter: AnyDrafter) -> None:
    alone = [rows_of([[sample]], drafter.config, len(sample.ids)) for sample in samples()]
    assert_same(gradient(drafter, [padded(drafter)]), gradient(drafter, alone))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_packed_documents_equal_padded_rows(drafter: AnyDrafter, order: tuple[int, int]) -> None:
    """E5: neither blocks, attention, positions nor labels cross from one document into the next."""
    chosen = [samples()[index] for index in order]
    packed = rows_of([chosen, [samples()[1]]], drafter.config, 90, padding=1e3)
    apart = rows_of([[sample] for sample in (*chosen, samples()[1])], drafter.config, 48)
    assert_same(gradient(drafter, [apart]), gradient(drafter, [packed]))
    outputs = [drafter_loss(drafter, tiny_heads(), part, DSPARK_LOSS).metrics for part in (apart, packed)]
    values = [metric_values(metrics) for metrics in outputs]
    assert values[1] == pytest.approx(values[0], rel=1e-4, abs=1e-5)


def part_of(inputs: DrafterInputs, chosen: Tensor) -> DrafterInputs:
    names = [field.name for field in dataclasses.fields(Blocks) if field.name != "draftable_tokens"]
    blocks = dataclasses.replace(inputs.blocks, **{name: getattr(inputs.blocks, name)[chosen] for name in names})
    return dataclasses.replace(inputs, blocks=blocks)


def test_micro_batches_and_a_share_without_anchors_give_one_gradient(drafter: AnyDrafter) -> None:
    whole = padded(drafter)
    numbers = torch.arange(len(whole.blocks.anchors))
    parts = [part_of(whole, numbers % 4 == share) for share in range(4)] + [part_of(whole, numbers < 0)]
    assert_same(gradient(drafter, [whole]), gradient(drafter, parts))


def test_the_order_of_anchors_is_free(drafter: AnyDrafter) -> None:
    whole = padded(drafter)
    order = torch.randperm(len(whole.blocks.anchors), generator=torch.Generator().manual_seed(0))
    assert_same(gradient(drafter, [whole]), gradient(drafter, [part_of(whole, order)]))


def test_garbage_where_nothing_is_supervised_changes_nothing(drafter: AnyDrafter) -> None:
    """NaN in states, -1 and V among the ids: prompt labels and what lies behind the last anchor; padding is finite."""
    clean = padded(drafter)
    blocks, ids = clean.blocks, clean.input_ids_BT
    assert ids is not None
    mask = tensors("inputs")["loss_mask"].bool()
    needed, last_anchor = torch.zeros_like(mask), int(blocks.anchors.max())
    needed[blocks.rows[:, None], blocks.context_rows] = True
    columns, garbage = torch.arange(48), torch.where(torch.arange(48) % 2 == 0, -1, 199).expand(2, 48)
    hidden = clean.hidden_states_BTC.clone()
    hidden[:, last_anchor:] = torch.nan
    hidden[1, 37:last_anchor] = 1e3
    # EAGLE-3 reads the tokens of the prompt.
    free = ~mask & (columns >= 37) if isinstance(drafter, Eagle3Drafter) else ~mask
    spoiled = torch.where(free, garbage, ids)
    anchors = golden_anchors()
    rebuilt = build_blocks(spoiled, mask, anchors, drafter.config, 4.0)
    dirty = DrafterInputs(hidden, clean.last_hidden_BTD.masked_fill(~needed[..., None], torch.nan), rebuilt, spoiled)
    expected, found = gradient(drafter, [clean]), gradient(drafter, [dirty])
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def block_states(drafter: AnyDrafter, inputs: DrafterInputs) -> Tensor:
    """What the blocks say, [A, K, D]."""
    if isinstance(drafter, Eagle3Drafter):
        assert inputs.input_ids_BT is not None
        return drafter.unroll(inputs.hidden_states_BTC, inputs.input_ids_BT, inputs.blocks, tiny_heads())
    context = drafter.project_context(inputs.hidden_states_BTC)
    return drafter.backbone(context, inputs.blocks, tiny_heads())


@torch.no_grad()
def test_no_block_reads_context_at_or_after_its_anchor_or_of_another_document(drafter: AnyDrafter) -> None:
    """E1, with every golden anchor at once: the states of each column in turn are replaced."""
    inputs = rows_of([samples()], drafter.config, 90)
    blocks, expected = inputs.blocks, block_states(drafter, inputs)
    for column in range(0, 85, 3):
        changed = inputs.hidden_states_BTC.clone()
        changed[0, column] += 5.0
        out = block_states(drafter, dataclasses.replace(inputs, hidden_states_BTC=changed))
        moved = (out != expected).flatten(1).any(dim=1)
        readable = (blocks.starts <= column) & (column < blocks.anchors)
        assert not bool((moved & ~readable).any()), column
        if "sliding_attention" not in drafter.config.layer_types:
            assert bool((moved == readable).all()), column
