"""EAGLE-3 drafting token by token with a cache against its training-time unroll, and its losslessness."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from model.anchors import build_blocks
from model.decoding.chain_drafting import ChainDrafter, make_drafter
from model.decoding.drafting import BlockDrafter
from model.decoding.sampling import Sampling, warp
from model.decoding.speculative import BatchDecoder, DecodeConfig, Request, decode_all
from model.drafter import DSparkDrafter
from model.eagle3 import Eagle3Drafter
from tests.golden_data import drafter_config, max_error, tiny_heads
from tests.golden_eagle3 import eagle3_config, load_eagle3
from tests.model.decoding.feeder import Feeder
from tests.tiny_target import tiny_verifier

ROUNDS, LENGTH, K = 20, 200, 5


def test_drafting_with_a_cache_equals_the_unroll_over_twenty_rounds() -> None:
    drafter, heads = Eagle3Drafter(eagle3_config(block_size=K)).init_weights(1), load_eagle3().heads
    generator = torch.Generator().manual_seed(2)
    rows, sampling = 3, Sampling(temperature=1.0)
    states = torch.randn(rows, LENGTH, 320, generator=generator)
    ids = torch.randint(0, 199, (rows, LENGTH), generator=generator)
    accepted = torch.randint(1, 7, (ROUNDS, rows), generator=generator).tolist()
    chain, feeder = ChainDrafter(drafter, heads), Feeder(states, ids)

    with torch.no_grad():
        chain.add(*feeder.next([5, 1, 12]))
        for counts in accepted:
            chain.commit(*feeder.next(counts))
            anchors = [int(ids[row, feeder.lengths[row]]) for row in range(rows)]
            proposal = chain.propose(anchors, sampling, torch.rand(rows, K, generator=generator))
            written = ids.clone()
            for row, length in enumerate(feeder.lengths):
                written[row, length + 1 : length + 1 + K] = proposal.token_ids[row]
            mask = torch.ones(rows, LENGTH, dtype=torch.bool)
            blocks = build_blocks(
                written, mask, [np.array([length]) for length in feeder.lengths], drafter.config, None
            )
            features = drafter.unroll(states, written, blocks, heads)
            expected = warp(heads.draft_logits(drafter.norm(features)), sampling)
            assert proposal.probabilities is not None
            assert max_error(proposal.probabilities, expected) < 1e-5


@torch.no_grad()
def test_rows_that_leave_and_join_do_not_disturb_the_others() -> None:
    """One of the prompts is a single token: its row joins without any entry in the cache."""
    case = load_eagle3()
    generator, lengths = torch.Generator().manual_seed(3), [30, 1, 19, 26]
    states = torch.randn(4, 30, 320, generator=generator)
    greedy, none = Sampling(temperature=0.0), torch.zeros(3, 3)

    def add(chain: ChainDrafter, row: int) -> ChainDrafter:
        chain.add(states[row : row + 1, : lengths[row]], [list(range(lengths[row]))])
        return chain

    chain = ChainDrafter(case.drafter, case.heads)
    for row in range(3):
        add(chain, row)
    chain.keep([2, 1])
    found = add(chain, 3).propose([5] * 3, greedy, none).token_ids
    alone = [add(ChainDrafter(case.drafter, case.heads), row).propose([5], greedy, none) for row in (2, 1, 3)]
    assert torch.equal(found, torch.cat([proposal.token_ids for proposal in alone]))


@pytest.mark.parametrize("batch_size", [1, 8])
def test_greedy_output_is_the_targets_own(batch_size: int) -> None:
    verifier, case = tiny_verifier((0, 2, 3, 5, 6)), load_eagle3()
    rng = np.random.default_rng(1)
    requests = [Request(rng.integers(0, 199, size=rng.integers(1, 24)).tolist()) for _ in range(12)]
    config = DecodeConfig(max_new_tokens=16, temperature=0.0, stop_ids=frozenset({7}), seed=0)
    alone = decode_all(BatchDecoder(verifier, None, config, batch_size=8), requests)
    chain = ChainDrafter(case.drafter, case.heads)
    drafted = decode_all(BatchDecoder(verifier, chain, config, batch_size=batch_size), requests)
    assert [r.output_ids for r in drafted] == [r.output_ids for r in alone]
    assert {len(r.draft_ids) for result in drafted for r in result.rounds} == {case.drafter.config.block_size}


def test_prompts_of_one_token_join_running_rows() -> None:
    verifier, case = tiny_verifier((0, 2, 3, 5, 6)), load_eagle3()
    config = DecodeConfig(max_new_tokens=12, temperature=0.0, stop_ids=frozenset(), seed=0)
    requests = [Request(prompt) for prompt in ([1, 2, 3], [4], [5])]
    alone = decode_all(BatchDecoder(verifier, None, config, batch_size=1), requests)
    decoder = BatchDecoder(verifier, ChainDrafter(case.drafter, case.heads), config, batch_size=3)
    finished = {}
    for request in requests:
        decoder.submit(request)
        finished |= {id(done.request): done.result for done in decoder.step()}
    while decoder.busy:
        finished |= {id(done.request): done.result for done in decoder.step()}
    assert [finished[id(request)].output_ids for request in requests] == [r.output_ids for r in alone]


def test_every_kind_has_its_drafter() -> None:
    assert isinstance(make_drafter(DSparkDrafter(drafter_config()), tiny_heads()), BlockDrafter)
    assert isinstance(make_drafter(load_eagle3().drafter, tiny_heads()), ChainDrafter)
