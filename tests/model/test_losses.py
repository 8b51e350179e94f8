"""The loss, reference and chunked, against every golden case, and the properties that training relies on."""

from __future__ import annotations

import pytest
import torch

from model.losses import dspark_loss, metric_values, reference_loss
from tests.golden_data import case_names, grads_of, load_case, max_error

IMPLEMENTATIONS = {"chunked": dspark_loss, "reference": reference_loss}


@pytest.mark.parametrize("name", case_names())
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_loss_metrics_and_gradients_are_golden(implementation: str, name: str) -> None:
    case = load_case(name)
    out = IMPLEMENTATIONS[implementation](case.drafter, case.heads, case.inputs, case.loss_config)
    terms, expected = case.scalars["loss_terms"], case.scalars["metrics"]
    close = {"rel": 1e-5, "abs": 1e-6}
    assert float(out.total / out.weight) == pytest.approx(case.scalars["loss_total"], **close)
    assert float(out.weight) == pytest.approx(terms["ce_loss_den"], **close)
    values = metric_values(out.metrics)
    for term in ("ce_loss", "l1_loss", "confidence_loss"):
        if terms[f"{term}_den"]:
            assert float(out.metrics[f"{term}/num"]) == pytest.approx(terms[f"{term}_num"], **close)
            assert float(out.metrics[f"{term}/den"]) == pytest.approx(terms[f"{term}_den"], **close)
            assert values[term] == pytest.approx(expected[term]["value"], **close)
    for k in range(case.drafter.config.block_size):
        assert values[f"accept_rate@{k + 1}"] == pytest.approx(expected[f"accept_rate@{k}"]["value"], **close)
    assert values["tau"] == pytest.approx(expected["tau_probabilistic"]["value"], **close)
    assert values["loss"] == pytest.approx(case.scalars["loss_total"], **close)
    for metric in ("confidence_abs_error", "confidence_bias", "confidence_cumprod_bias"):
        assert (metric in values) == (metric in expected)
        if metric in expected:
            assert values[metric] == pytest.approx(expected[metric]["value"], **close)
    gradients = grads_of(case.drafter, out.total / out.weight)
    assert set(gradients) == set(case.grads)
    for parameter, gradient in gradients.items():
        assert max_error(gradient, case.grads[parameter]) < 1e-6, parameter
