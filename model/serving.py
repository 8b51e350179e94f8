"""What inference engines do with an exported drafter: which method runs it, the command line, and what they lack.

vLLM 0.32: read in its classes and run on a CPU through Triton's interpreter. SGLang: read, not run.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Literal

from model.config import DrafterConfig
from model.layouts import Layout, layout_of, needs_zero_head

Engine = Literal["vllm", "sglang"]

# Target families (model_type) from which vLLM hands captured layers to a drafter; the test asks vLLM's own classes.
VLLM_TARGETS = frozenset({"llama", "mistral", "qwen2", "qwen3", "qwen3_moe"})
_VLLM_METHODS: Mapping[Layout, str] = {"dspark": "dspark", "dflash": "dflash", "eagle3": "eagle3"}
_SGLANG_ALGORITHMS: Mapping[Layout, str] = {"dspark": "DSPARK", "dflash": "DFLASH", "eagle3": "EAGLE3"}


@dataclasses.dataclass(frozen=True, slots=True)
class ServingWarning:
    """Something that an engine does not do with this drafter."""

    engine: Engine
    blocks: bool
    """The engine cannot serve the drafter at all."""
    text: str

    def line(self) -> str:
        """For people."""
        return f"{self.engine}: {'cannot serve it: ' if self.blocks else ''}{self.text}"


def serving_warnings(config: DrafterConfig, *, target_family: str, scales_embedding: bool) -> list[ServingWarning]:
    """What each engine lacks for this drafter, those that block first.

    target_family: the target's `model_type`; scales_embedding: whether its embeddings enter the first layer scaled.
    """
    found = _vllm(config, target_family) + _sglang(config, scales_embedding)
    return sorted(found, key=lambda warning: (not warning.blocks, warning.engine))


def serve_commands(config: DrafterConfig, *, target: str, drafter: str) -> dict[Engine, str]:
    """The command line of each engine. γ drafts per round in every layout."""
    layout = layout_of(config)
    speculative = {
        "method": _VLLM_METHODS[layout],
        "model": drafter,
        "num_speculative_tokens": config.block_size,
    }
    sglang = (
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {_SGLANG_ALGORITHMS[layout]} "
        f"--speculative-draft-model-path {drafter} --speculative-num-draft-tokens {config.block_size + 1}"
    )
    if layout == "eagle3":
        sglang += f" --speculative-num-steps {config.block_size} --speculative-eagle-topk 1"
    return {"vllm": f"vllm serve {target} --speculative-config '{json.dumps(speculative)}'", "sglang": sglang}


def tensor_readers(name: str, config: DrafterConfig) -> str:
    """Who reads a tensor of the export: a few words for a table."""
    if name in ("embed_tokens.weight", "lm_head.weight", "d2t"):
        return "vLLM; SGLang skips it" if layout_of(config) != "eagle3" else "vLLM, SGLang"
    if name.startswith("confidence_head."):
        return "vLLM (adaptive verification), SGLang"
    return "vLLM, SGLang"


def flag_readers(key: str) -> str:
    """Who reads a key of config.json: a few words for a table."""
    if key in _OURS:
        return "this project"
    return _FLAG_READERS.get(key, "vLLM, SGLang")


_OURS = frozenset({"drafter_kind", "zero_markov_head", "rope_theta", "num_target_layers", "confidence_temperatures"})
_FLAG_READERS = {
    "markov_head_type": "SGLang (vLLM takes it for vanilla)",
    "sample_from_anchor": "vLLM (SGLang takes it for true)",
    "draft_vocab_size": "vLLM",
    "block_size": "vLLM, SGLang: drafts per round",
    "target_layer_ids": "vLLM, SGLang: captured at id + 1",
    "mask_token_id": "vLLM, SGLang: fills the slots after the anchor",
}


def _vllm(config: DrafterConfig, target_family: str) -> list[ServingWarning]:
    def say(text: str, *, blocks: bool = False) -> None:
        found.append(ServingWarning("vllm", blocks, text))

    found: list[ServingWarning] = []
    if target_family not in VLLM_TARGETS:
        say(
            f"it captures no layers of a {target_family} target (it does of {', '.join(sorted(VLLM_TARGETS))})",
            blocks=True,
        )
    if config.markov_head_type in ("gated", "rnn"):
        say(
            f"its loader knows no {config.markov_head_type} head and stops at the first of its tensors; train "
            "drafter.markov_head=vanilla to serve there",
            blocks=True,
        )
    if needs_zero_head(config):
        say("the drafter has no sequential head, so it carries one of zeros, which adds exactly 0")
    if config.enable_confidence_head:
        say("the confidence head is used with enable_adaptive_verification only (GPUs, full CUDA graphs)")
    if config.kind == "eagle3" and "sliding_attention" in config.layer_types:
        say("a sliding layer looks back only; EAGLE-3 does so anyway")
    if 0 < config.layer_types.count("sliding_attention") < config.num_draft_layers:
        say("sliding beside full layers needs the V2 model runner (the default on GPUs)")
    return found


def _sglang(config: DrafterConfig, scales_embedding: bool) -> list[ServingWarning]:
    def say(text: str, *, blocks: bool = False) -> None:
        found.append(ServingWarning("sglang", blocks, text))

    found: list[ServingWarning] = []
    if layout_of(config) == "eagle3":
        say("its known EAGLE-3 drafters are Llama-shaped; this one normalises queries and keys", blocks=True)
    if layout_of(config) == "dspark" and not config.sample_from_anchor:
        say("it knows the anchor-first block layout alone; train drafter.sample_from_anchor=true", blocks=True)
    if config.target_layer_ids[0] == -1:
        say("layer id -1 (the embedding output) is out of its range; capture layers from 0 on", blocks=True)
    if config.reduces_vocabulary and config.kind != "eagle3":
        say("it skips the drafter's own lm_head and d2t, so a reduced vocabulary does not work", blocks=True)
    if scales_embedding:
        say("it skips the drafter's own embedding; the target's unscaled rows are not what was trained on", blocks=True)
    say("nothing was run there: by reading its loader alone")
    return found
