"""The target through transformers: its facts, its tokenizer and its hidden states (hf_verifier: its verification).

The only file that loads target weights with transformers. Importing it imports neither torch nor transformers' models
until something is loaded. Layer id k (0-based) is the OUTPUT of decoder layer k, the residual stream; -1 is the
embedding output; the last hidden state is the one after the final norm.
Letters: B batch, T sequence, L captured layers, D hidden size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config import TargetSection
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import torch

NORM_CONVENTION = "captured layers: residual stream after layer k; last hidden state: after the final norm"


def resolve_target(section: TargetSection) -> Path:
    """The local directory that holds the target; a hub id is fetched into the hub's cache.

    Raises ConfigError when neither a directory nor a model of that name is found.
    """
    local = Path(section.path)
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise ConfigError(f"target.path {section.path}: no config.json in it; wanted a Hugging Face model folder")
        return local.absolute()
    if local.is_absolute() or section.path.count("/") != 1 or section.path.startswith("."):
        raise ConfigError(f"target.path {section.path}: no such directory; give a local folder or a hub id")
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(section.path, revision=section.revision))
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        raise ConfigError(
            f"target.path {section.path}: no such directory, and the hub did not give a model of that name "
            f"({type(error).__name__}); check the path, or download the model first"
        ) from error


def worker_section(section: TargetSection) -> TargetSection:
    """The section as processes elsewhere must see it: a local path becomes absolute, a hub id stays as it is."""
    local = Path(section.path)
    return section.model_copy(update={"path": str(local.absolute())}) if local.is_dir() else section


def target_facts(path: str | Path) -> dict[str, Any]:
    """The target's config.json as a dict, the text part merged over the outer one for multi-modal models.

    Raises ConfigError when it cannot be read or lacks what a drafter needs.
    """
    file = Path(path) / "config.json"
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot read the target's config: {error}") from error
    facts = {**facts, **facts.get("text_config", {})}
    missing = [key for key in ("hidden_size", "num_hidden_layers", "vocab_size") if key not in facts]
    if missing:
        raise ConfigError(f"{file}: lacks {', '.join(missing)}; wanted the config of a decoder-only language model")
    return facts


def check_layer_ids(layer_ids: Sequence[int], facts: Mapping[str, Any]) -> None:
    """Refuse layers that the target does not have, and the last one (its output is never seen by a drafter).

    Raises ConfigError naming the layer and the legal range.
    """
    layers = facts["num_hidden_layers"]
    for layer in layer_ids:
        if layer == layers - 1:
            raise ConfigError(
                f"extraction.layer_ids: {layer} is the target's last layer, which is not a legal captured layer; "
                f"use -1 to {layers - 2}"
            )
        if not -1 <= layer < layers:
            raise ConfigError(
                f"extraction.layer_ids: layer {layer} does not exist in a target of {layers} layers; "
                f"use -1 to {layers - 2}"
            )


@cache
def load_tokenizer(path: str, revision: str | None = None, *, trust_remote_code: bool = False) -> Any:
    """The target's tokenizer, loaded once per process. Raises ConfigError naming the folder."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"target.path {path}: no usable tokenizer there: {first_line}") from error


def tokenizer_of(section: TargetSection) -> Any:
    """The tokenizer of a config's target."""
    return load_tokenizer(section.path, section.revision, trust_remote_code=section.trust_remote_code)


def chat_template_hash(tokenizer: Any) -> str:
    """sha256 of the chat template's text. Raises ConfigError when the tokenizer has none."""
    template = tokenizer.chat_template
    if not template:
        raise ConfigError(
            f"{tokenizer.name_or_path}: the tokenizer has no chat template; add chat_template.jinja to the folder"
        )
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def stop_token_ids(path: str | Path, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends an answer: of generation_config.json, config.json and the tokenizer, ascending."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        file = Path(path) / name
        value = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
        found.update([value] if isinstance(value, int) else value or [])
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    if not found:
        raise ConfigError(f"{path}: neither the configs nor the tokenizer name an end-of-sequence token")
    return tuple(sorted(found))


def resolve_mask_token(mask_token: int | str, tokenizer: Any, vocab_size: int) -> int:
    """The id of `drafter.mask_token`: an id inside the embedding, or a token string of the tokenizer.

    `vocab_size` is the number of rows of the target's embedding. Raises ConfigError.
    """
    if isinstance(mask_token, str):
        vocabulary = tokenizer.get_vocab()
        if mask_token not in vocabulary:
            raise ConfigError(
                f"drafter.mask_token {mask_token!r} is no token of the target's tokenizer ({len(vocabulary)} tokens); "
                "give one of its rarely used special tokens, or an id"
            )
        mask_token = int(vocabulary[mask_token])
    if not 0 <= mask_token < vocab_size:
        raise ConfigError(
            f"drafter.mask_token {mask_token} lies outside the target's vocabulary: its embedding has rows "
            f"0 to {vocab_size - 1}"
        )
    return mask_token


def indispensable_tokens(tokenizer: Any, stop_ids: Sequence[int]) -> frozenset[int]:
    """Tokens that a reduced draft vocabulary must keep: stop and special tokens, and those that spell single bytes."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    special = {token for token, entry in tokenizer.added_tokens_decoder.items() if entry.special}
    if "<0x00>" in vocabulary:  # byte fallback
        single_bytes = {vocabulary[name] for byte in range(256) if (name := f"<0x{byte:02X}>") in vocabulary}
    else:
        from tokenizers.pre_tokenizers import ByteLevel

        single_bytes = {vocabulary[name] for name in ByteLevel.alphabet() if name in vocabulary}
    return frozenset({*stop_ids, *tokenizer.all_special_ids, *special, *single_bytes})


def torch_dtype(section: TargetSection) -> torch.dtype:
    """The torch dtype that the target runs in."""
    import torch

    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[section.dtype]


def load_target(section: TargetSection, device: str | torch.device, *, with_head: bool = True) -> torch.nn.Module:
    """The frozen target in evaluation mode on `device`; without the lm_head it is the backbone alone.

    Raises ConfigError when transformers cannot load it.
    """
    from transformers import AutoModel, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    loader = AutoModelForCausalLM if with_head else AutoModel
    try:
        model = loader.from_pretrained(
            section.path,
            revision=section.revision,
            dtype=torch_dtype(section),
            trust_remote_code=section.trust_remote_code,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"target.path {section.path}: transformers cannot load it: {error}") from error
    frozen: torch.nn.Module = model
    return frozen.to(device).eval().requires_grad_(False)


class LayerTap:
    """Hooks on exactly the chosen layers of a decoder; each forward leaves their [B,T,D] outputs in `states`."""

    def __init__(self, decoder: torch.nn.Module, layer_ids: Sequence[int]) -> None:
        layers = getattr(decoder, "layers", None)
        if layers is None:
            raise ConfigError(f"{type(decoder).__name__}: found no `layers`; wanted a decoder-only transformer")
        self._layer_ids = tuple(layer_ids)
        self._states: dict[int, torch.Tensor] = {}
        self._handles = [self._attach(layers, layer_id) for layer_id in self._layer_ids]

    def _attach(self, layers: Any, layer_id: int) -> Any:
        if layer_id == -1:  # what enters the first layer: the embeddings, scaled where the family scales them

            def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                self._states[-1] = args[0] if args else kwargs["hidden_states"]

            return layers[0].register_forward_pre_hook(before, with_kwargs=True)

        def after(module: Any, args: Any, output: Any) -> None:
            self._states[layer_id] = output[0] if isinstance(output, tuple) else output

        return layers[layer_id].register_forward_hook(after)

    def take(self) -> list[torch.Tensor]:
        """The captured states of the forward just run, layers ascending, each [B,T,D]."""
        states = [self._states[layer_id] for layer_id in self._layer_ids]
        self._states = {}
        return states

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


@dataclass(frozen=True, slots=True)
class SequenceStates:
    """One sequence's states as bf16 bit patterns: hidden_states uint16 [L,T,D], last_hidden_state uint16 [T,D]."""

    index: int
    hidden_states: np.ndarray
    last_hidden_state: np.ndarray


class HiddenStateExtractor:
    """Forward of the target's decoder without its lm_head; batches sequences of similar length.

    Right padding needs no attention mask: attention is causal, so a real position never sees padding behind it.
    """

    def __init__(self, model: torch.nn.Module, layer_ids: Sequence[int], *, tokens_per_batch: int) -> None:
        self._decoder = model.get_decoder()  # type: ignore[operator]
        self._tap = LayerTap(self._decoder, layer_ids)
        self._tokens_per_batch = tokens_per_batch

    def extract(self, sequences: Sequence[Sequence[int]]) -> Iterator[SequenceStates]:
        """States of each sequence, in the order of their lengths; `index` is the sequence's place in the argument."""
        for batch in length_batches([len(sequence) for sequence in sequences], self._tokens_per_batch):
            yield from self._forward(sequences, batch)

    def _forward(self, sequences: Sequence[Sequence[int]], batch: Sequence[int]) -> Iterator[SequenceStates]:
        import torch

        device = next(self._decoder.parameters()).device
        width = max(len(sequences[index]) for index in batch)
        input_ids_BT = torch.zeros(len(batch), width, dtype=torch.long)
        for row, index in enumerate(batch):
            input_ids_BT[row, : len(sequences[index])] = torch.as_tensor(sequences[index], dtype=torch.long)
        with torch.inference_mode():
            last_BTD = self._decoder(input_ids=input_ids_BT.to(device), use_cache=False).last_hidden_state
            captured = [bf16_bits(state) for state in self._tap.take()]
        last = bf16_bits(last_BTD)
        for row, index in enumerate(batch):
            length = len(sequences[index])
            yield SequenceStates(
                index=index,
                hidden_states=torch.stack([state[row, :length] for state in captured]).numpy(),
                last_hidden_state=last[row, :length].numpy(),
            )


def bf16_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's values rounded to bfloat16, as uint16 bit patterns on the CPU, same shape."""
    import torch

    return tensor.to(torch.bfloat16).cpu().view(torch.uint16)


def length_batches(lengths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
    """Group indices by ascending length; longest x count stays within `tokens_per_batch` (one is always allowed)."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if batches and lengths[index] * (len(batches[-1]) + 1) <= tokens_per_batch:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
