"""What vLLM is asked for. That it does it is in tests/e2e/test_build_survives.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipeline.config import Config
from pipeline.engines import vllm


def test_sampling_of_a_row(make_config: Callable[..., Config]) -> None:
    config = make_config(generation={"sampling": {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "max_new_tokens": 8}})
    sampling = vllm._sampling(config, (2, 5), greedy=False)
    row = vllm._row_sampling(sampling, {"max_tokens": 6, "seed": 2**62})
    assert row == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "max_tokens": 6,
        "seed": 2**62,
        "stop_token_ids": [2, 5],
        "detokenize": False,
    }


@pytest.mark.parametrize("greedy", [True, False])
def test_temperature_zero_is_greedy_without_a_seed(make_config: Callable[..., Config], greedy: bool) -> None:
    config = make_config(generation={"sampling": {"temperature": 0.5 if greedy else 0.0, "max_new_tokens": 8}})
    row = vllm._row_sampling(vllm._sampling(config, (2,), greedy=greedy), {"max_tokens": 6, "seed": 1})
    assert row == {"temperature": 0.0, "max_tokens": 6, "stop_token_ids": [2], "detokenize": False}


def test_only_settings_that_change_tokens_are_identity(make_config: Callable[..., Config]) -> None:
    config = make_config(generation={"engine_kwargs": {"max_num_seqs": 3, "quantization": "fp8"}})
    assert vllm.identity_kwargs(config.generation) == {"quantization": "fp8"}


def test_the_engine_has_a_version() -> None:
    assert vllm.engine_version().startswith("vllm")
