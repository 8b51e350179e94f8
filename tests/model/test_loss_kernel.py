"""The Triton kernel equals plain torch: in Triton's interpreter, on a GPU where there is one; and it compiles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings

import pytest
import torch

from model.row_loss import row_losses
from tests.model.row_cases import TERMS, RowCase, kernel_errors, row_cases

# Relative to the largest gradient. In bf16 the last bit may round differently, and the kernel sums rounded gradients.
GRADIENT_TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 1 / 32}


def check(case: RowCase, errors: dict[str, float], slack: float = 1.0) -> None:
    for name in ("ce", "l1", "without gradient"):
        assert errors[name] < slack * 5e-6, (case, errors)
    assert errors["logits written without gradient"] == 0.0
    for name in ("gradient", "bias gradient"):
        assert errors.get(name, 0.0) < slack * GRADIENT_TOLERANCE[case.dtype], (case, errors)


def test_interpreted_kernel_equals_plain_torch() -> None:
    # A process of its own: the interpreter is chosen when the kernel's module is imported.
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.row_cases"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    errors = json.loads(done.stdout.splitlines()[-1])
    for case in row_cases("cpu"):
        check(case, errors[f"{case.dtype} bias {case.bias} {case.columns}"])


BF16_ARGUMENTS = {
    "_log_sum_exp": {"logits": "*bf16", "out": "*fp32", "columns": "i32"},
    "_draft_rows": {
        **dict.fromkeys(("draft", "bias", "target"), "*bf16"),
        **dict.fromkeys(("target_lse", "weights", "ce_out", "l1_out"), "*fp32"),
        **dict.fromkeys(("row_of_slot", "labels"), "*i64"),
        **dict.fromkeys(("ce_weight", "l1_weight"), "fp32"),
        "columns": "i32",
    },
    "_sum_groups": {"gradient": "*bf16", "starts": "*i64", "out": "*bf16", "columns": "i32"},
}


@pytest.mark.parametrize("name", BF16_ARGUMENTS)
def test_compiles_for_an_h200_without_one(name: str) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    import model.loss_kernel as module

    kernel = getattr(module, name)
    constants = dict.fromkeys(("HAS_BIAS", "REDUCED", "GRADIENT"), True) if name == "_draft_rows" else {}
    constants["BLOCK"] = module._BLOCK
    source = ASTSource(
        fn=kernel,
        signature=BF16_ARGUMENTS[name] | dict.fromkeys(constants, "constexpr"),
        constexprs={(kernel.arg_names.index(key),): value for key, value in constants.items()},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": module._WARPS})
    assert compiled.asm["cubin"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "case", [*row_cases("cuda"), RowCase(dtype=torch.bfloat16, bias=True, vocab=151936, columns=151936, device="cuda")]
)
def test_kernel_equals_plain_torch_on_a_gpu(case: RowCase) -> None:
    check(case, kernel_errors(case), slack=4.0)  # a GPU's exp is good to two units in the last place


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernel_beats_plain_torch_on_a_gpu() -> None:
    from model.loss_kernel import kernel_row_losses

    case = RowCase(dtype=torch.bfloat16, bias=True, vocab=151936, columns=151936, counts=(7,) * 73, device="cuda")
    seconds = {}
    for rows in (kernel_row_losses, row_losses):
        times = []
        for _ in range(4):
            logits, slots = case.draw()
            torch.cuda.synchronize()
            started = time.perf_counter()
            rows(logits, slots, TERMS, gradient=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        seconds[rows] = min(times[1:])
    assert seconds[kernel_row_losses] < seconds[row_losses], seconds
