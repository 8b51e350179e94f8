"""DeepSpeed around the drafter: the only `import deepspeed`. Everything else of training works on plain tensors.

The frozen embedding and lm_head stay outside: the engine owns the drafter's trainable parameters alone. State comes
out and goes in as full float32 tensors by parameter name, so it fits any number of workers and any ZeRO stage.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from torch import Tensor, nn

from model.family import AnyDrafter
from model.losses import DrafterInputs, LossOutput
from pipeline.train.build_lock import exclusive_build, own_build_folder
from pipeline.train.checkpoint import ParameterState, checksum

MOMENTS = ("exp_avg", "exp_avg_sq")
LossFunction = Callable[[AnyDrafter, DrafterInputs], LossOutput]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """What DeepSpeed needs of the recipe."""

    precision: str
    """bf16 (float32 masters and moments) or fp32."""
    zero_stage: int
    micro_batch_size: int
    gradient_clip: float
    betas: tuple[float, float]
    weight_decay: float


def deepspeed_config(config: EngineConfig) -> dict[str, Any]:
    """DeepSpeed's configuration. Gradients are accumulated and reduced in float32 wherever DeepSpeed can.

    ZeRO 0 in bf16 is the exception: DeepSpeed accumulates in the parameters' dtype there.
    """
    bf16 = config.precision == "bf16"
    accumulate = "bf16" if bf16 and config.zero_stage == 0 else "fp32"
    return {
        "train_micro_batch_size_per_gpu": config.micro_batch_size,
        "gradient_accumulation_steps": 1,  # each step names its own last micro-batch
        "gradient_clipping": config.gradient_clip,
        # An update with a non-finite gradient is never applied; the loop stops the run.
        "bf16": {"enabled": bf16, "check_grad_overflow": True},
        "zero_optimization": {"stage": config.zero_stage},
        "data_types": {"grad_accum_dtype": accumulate},
        "communication_data_type": "fp32",
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    }


def _build_cpu_op() -> None:
    """Compile (once per machine) and load what DeepSpeed's CPU accelerator will ask for; nothing on GPUs."""
    accelerator = get_accelerator()
    builder = accelerator.create_op_builder("ShareMemCommBuilder") if accelerator.device_name() == "cpu" else None
    if builder is not None and builder.is_compatible():
        with exclusive_build(own_build_folder()):
            builder.load()


class _LossModule(nn.Module):
    """The drafter together with its objective. `loss` is a plain function: what it closes over is not trained."""

    def __init__(self, drafter: AnyDrafter, loss: LossFunction) -> None:
        super().__init__()
        self.drafter = drafter
        self._loss = loss

    def forward(self, inputs: DrafterInputs) -> LossOutput:
        return self._loss(self.drafter, inputs)


class TrainEngine:
    """The drafter under DeepSpeed with AdamW; a torch.distributed process group must exist already.

    Every method but `evaluate` and the properties is a collective: call it on all ranks.
    """

    def __init__(self, drafter: AnyDrafter, loss: LossFunction, config: EngineConfig) -> None:
        self._config, self._loss = config, loss
        self._parameters = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
        self._adamw = torch.optim.AdamW(
            list(self._parameters.values()), lr=0.0, betas=config.betas, weight_decay=config.weight_decay
        )
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints its memory tables unconditionally
            _build_cpu_op()
            self._engine, *_ = deepspeed.initialize(
                model=_LossModule(drafter, loss),
                optimizer=self._adamw,
                config=deepspeed_config(config),
                dist_init_required=False,
            )
        self.drafter = drafter
        self._create_adam_state()

    @property
    def device(self) -> torch.device:
        """Where the drafter lives."""
        return cast(torch.device, self._engine.device)

    def forward(self, inputs: DrafterInputs) -> LossOutput:
        """The objective of one micro-batch."""
        return cast(LossOutput, self._engine(inputs))

    def evaluate(self, inputs: DrafterInputs) -> LossOutput:
        """The objective without gradients and without DeepSpeed, on this rank alone."""
        with torch.no_grad():
            return self._loss(self.drafter, inputs)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Accumulate gradients; the `last` micro-batch of a step also reduces them over the ranks.

        DeepSpeed divides by the number of ranks.
        """
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss)
        if not last:
            self._engine.step()  # only counts the micro-batch

    def step(self, lr: float) -> float:
        """Clip and update; returns the global gradient norm before clipping (inf or NaN: nothing was updated).

        Plain fp32 without ZeRO has no such guard in DeepSpeed: there a bad gradient does reach the weights.
        """
        for group in self._adamw.param_groups:
            group["lr"] = lr
        own_norm = self._gradient_norm() if self._unwrapped else None
        self._engine.step()
        norm = self._engine.get_global_grad_norm() if own_norm is None else own_norm
        return math.inf if norm is None else float(norm)

    @property
    def adam_step(self) -> int:
        """Updates that AdamW has made: what its bias correction counts."""
        return int(next(iter(self._adamw.state.values()))["step"])

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """Every trainable parameter's full float32 master, one after another."""
        for index, (name, parameter) in enumerate(self._parameters.items()):
            if self._config.zero_stage == 0:
                yield name, self._whole_master(index).detach()
            else:
                yield name, safe_get_full_fp32_param(parameter)

    def state(self) -> Iterator[tuple[str, ParameterState]]:
        """Master and moments of every trainable parameter, one after another."""
        for index, (name, master) in enumerate(self.masters()):
            if self._config.zero_stage == 0:
                adam = self._adamw.state[self._whole_master(index)]
                moments = [adam[key] for key in MOMENTS]
            else:
                parameter = self._parameters[name]
                moments = [safe_get_full_optimizer_state(parameter, key) for key in MOMENTS]
            yield name, ParameterState(master, *moments)

    def restore(self, state: Mapping[str, ParameterState], adam_step: int) -> None:
        """Put back what `state` gave, on whatever number of ranks.

        Raises KeyError for a parameter that the state lacks.
        """
        with torch.no_grad():
            for index, (name, parameter) in enumerate(self._parameters.items()):
                saved = state[name]
                if self._config.zero_stage == 0:
                    whole = self._whole_master(index)
                    whole.copy_(saved.master)
                    for key in MOMENTS:
                        self._adamw.state[whole][key].copy_(getattr(saved, key))
                else:
                    safe_set_full_fp32_param(parameter, saved.master)
                    for key in MOMENTS:
                        safe_set_full_optimizer_state(parameter, getattr(saved, key), key)
                # The weights that compute are the masters rounded, exactly as after an update.
                parameter.copy_(saved.master)
        self._set_adam_step(adam_step)

    def checksums(self) -> dict[str, int]:
        """crc32 of every master's bytes: which tensors have moved, without keeping a copy of the weights."""
        return {name: checksum(master) for name, master in self.masters()}

    @property
    def _unwrapped(self) -> bool:
        return self._config.zero_stage == 0 and self._config.precision == "fp32"

    def _whole_master(self, index: int) -> Tensor:
        # Without ZeRO the optimizer holds one tensor per parameter, in the parameters' order.
        return cast(Tensor, self._adamw.param_groups[0]["params"][index])

    def _gradient_norm(self) -> float:
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))

    def _create_adam_state(self) -> None:
        """One update with zero gradients and lr 0, then AdamW's counter back to 0.

        DeepSpeed makes AdamW's state (and the links to it that restoring needs) only in the first step, and its
        ZeRO 0 wrapper counts an update of its own, which would shift the bias correction by one.
        """
        zero = sum(p.reshape(-1)[:0].sum().float() for p in self._parameters.values())
        self.backward(cast(Tensor, zero), last=True)
        self.step(lr=0.0)
        self._set_adam_step(0)

    def _set_adam_step(self, adam_step: int) -> None:
        for state in self._adamw.state.values():
            state["step"].fill_(adam_step)
