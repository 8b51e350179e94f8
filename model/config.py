"""The drafter's configuration: what a checkpoint says about itself, and how it follows from the target's config.

Nothing has a default that training, decoding or serving could guess differently: every field is written out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from model.errors import DrafterConfigError

MarkovHeadType = Literal["none", "vanilla", "gated", "rnn"]
DrafterKind = Literal["dspark", "dflash", "eagle3"]
LayerType = Literal["full_attention", "sliding_attention"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DrafterShape:
    """What a person chooses about a drafter; `None` follows the target."""

    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int
    num_draft_layers: int
    markov_head_type: MarkovHeadType
    markov_rank: int
    enable_confidence_head: bool
    confidence_head_with_markov: bool
    sample_from_anchor: bool
    kind: DrafterKind = "dspark"
    sliding_window: int | None = None
    layer_types: tuple[LayerType, ...] = ()
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    draft_vocab_size: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """A drafter, complete (DSpark §3; block layout: `sample_from_anchor`).

    `target_layer_ids` are 0-based ids of decoder layers whose OUTPUT the drafter reads, -1 the embedding output;
    `block_size` is γ, the number of draft tokens per round, whatever the layout (EAGLE-3: steps of its training-time
    test). `dflash` is a DSpark drafter without heads; `eagle3` never reads `mask_token_id`.
    """

    hidden_size: int
    intermediate_size: int
    num_draft_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    block_size: int
    mask_token_id: int
    markov_head_type: MarkovHeadType
    markov_rank: int
    enable_confidence_head: bool
    confidence_head_with_markov: bool
    sample_from_anchor: bool
    kind: DrafterKind = "dspark"
    sliding_window: int | None = None
    """w: in a sliding layer a query at position p sees keys at positions j with |p - j| < w."""
    layer_types: tuple[LayerType, ...] = ()
    """One per draft layer; () is written out as full attention everywhere."""
    draft_vocab_size: int = 0
    """V_d: tokens that may be drafted (draft_vocab.py maps them); 0 is written out as the target's vocabulary."""

    def __post_init__(self) -> None:
        """Refuse what cannot work. Raises DrafterConfigError naming the field, the value and the rule."""
        if not self.layer_types:
            object.__setattr__(self, "layer_types", ("full_attention",) * self.num_draft_layers)
        if self.draft_vocab_size == 0:
            object.__setattr__(self, "draft_vocab_size", self.vocab_size)
        for name in _POSITIVE_FIELDS:
            if getattr(self, name) < 1:
                raise DrafterConfigError(f"drafter {name} is {getattr(self, name)}; it must be at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise DrafterConfigError(
                f"drafter num_attention_heads {self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise DrafterConfigError(f"drafter head_dim {self.head_dim} must be even: RoPE rotates pairs")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise DrafterConfigError(
                f"mask token id {self.mask_token_id} is no row of the target's embedding (vocabulary "
                f"{self.vocab_size}); choose a rarely used special token of the target"
            )
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise DrafterConfigError(
                f"draft_vocab_size is {self.draft_vocab_size}; wanted 1 to the target's {self.vocab_size}"
            )
        self._check_layers()
        self._check_heads()
        self._check_kind()
        self._check_windows()

    def _check_layers(self) -> None:
        layers = self.target_layer_ids
        if not layers or list(layers) != sorted(set(layers)):
            raise DrafterConfigError(f"target_layer_ids {list(layers)} must be ascending, without repeats, not empty")
        last_legal = self.num_target_layers - 2
        illegal = [layer for layer in layers if not -1 <= layer <= last_legal]
        if illegal:
            raise DrafterConfigError(
                f"target_layer_ids {illegal} do not exist or are the final layer; a target of {self.num_target_layers} "
                f"layers allows -1 (embedding) to {last_legal}"
            )

    def _check_heads(self) -> None:
        if self.markov_head_type not in get_args(MarkovHeadType):
            raise DrafterConfigError(
                f"markov_head_type {self.markov_head_type!r} is unknown; wanted one of {list(get_args(MarkovHeadType))}"
            )
        if (self.markov_head_type == "none") != (self.markov_rank == 0) or self.markov_rank < 0:
            raise DrafterConfigError(
                f"markov_head_type {self.markov_head_type!r} and markov_rank {self.markov_rank} disagree: "
                "rank 0 goes with type none"
            )
        if self.enable_confidence_head and self.confidence_head_with_markov and self.markov_rank == 0:
            raise DrafterConfigError(
                "confidence_head_with_markov needs a Markov head; set it to false, or choose a markov_head_type"
            )

    def _check_kind(self) -> None:
        if self.kind not in get_args(DrafterKind):
            raise DrafterConfigError(
                f"drafter kind {self.kind!r} is unknown; wanted one of {list(get_args(DrafterKind))}"
            )
        fixed = KIND_FIELDS[self.kind]
        wrong = [
            f"{name} is {getattr(self, name)!r}, wanted {value!r}"
            for name, value in fixed.items()
            if getattr(self, name) != value
        ]
        if wrong:
            raise DrafterConfigError(f"a drafter of kind {self.kind} has no choice here: {'; '.join(wrong)}")

    def _check_windows(self) -> None:
        unknown = sorted(set(self.layer_types) - set(get_args(LayerType)))
        if unknown or len(self.layer_types) != self.num_draft_layers:
            raise DrafterConfigError(
                f"layer_types {list(self.layer_types)} must name one of {list(get_args(LayerType))} for each of the "
                f"{self.num_draft_layers} draft layers"
            )
        if (self.sliding_window is None) == ("sliding_attention" in self.layer_types):
            raise DrafterConfigError(
                f"sliding_window {self.sliding_window} and layer_types {list(self.layer_types)} disagree: a window "
                "goes with at least one sliding_attention layer"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise DrafterConfigError(f"sliding_window is {self.sliding_window}; it must be at least 1")

    def window(self, layer: int) -> int | None:
        """The sliding window of a draft layer; None: full attention."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    @property
    def reduces_vocabulary(self) -> bool:
        """Whether draft tokens are a subset of the target's, so that a mapping (draft_vocab.py) is needed."""
        return self.draft_vocab_size < self.vocab_size

    @property
    def num_inputs(self) -> int:
        """Query slots of a block: γ when the anchor's own slot predicts, else γ + 1."""
        return self.block_size if self.sample_from_anchor else self.block_size + 1

    @classmethod
    def from_target(cls, hf_config: Mapping[str, Any], *, shape: DrafterShape) -> DrafterConfig:
        """The drafter of a target, given the target's config.json as a mapping.

        Raises DrafterConfigError when the config lacks a needed field or the shape does not fit the target.
        """
        text = hf_config.get("text_config") or hf_config
        heads = shape.num_attention_heads or _required(text, "num_attention_heads")
        chosen = {field.name: getattr(shape, field.name) for field in dataclasses.fields(shape)}
        chosen["num_attention_heads"] = heads
        chosen["intermediate_size"] = shape.intermediate_size or _required(text, "intermediate_size")
        chosen["num_key_value_heads"] = shape.num_key_value_heads or text.get("num_key_value_heads") or heads
        chosen["head_dim"] = (
            shape.head_dim
            or text.get("head_dim")
            or _required(text, "hidden_size") // _required(text, "num_attention_heads")
        )
        return cls(
            hidden_size=_required(text, "hidden_size"),
            vocab_size=_required(text, "vocab_size"),
            rms_norm_eps=_required(text, "rms_norm_eps"),
            rope_theta=float(rope_theta_of(text)),
            max_position_embeddings=_required(text, "max_position_embeddings"),
            num_target_layers=_required(text, "num_hidden_layers"),
            **chosen,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, one key per field."""
        data = dataclasses.asdict(self)
        data["target_layer_ids"] = list(self.target_layer_ids)
        data["layer_types"] = list(self.layer_types)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DrafterConfig:
        """The inverse of to_dict. Raises DrafterConfigError for a missing, an unknown or a mistyped key."""
        names = {field.name for field in dataclasses.fields(cls)}
        if set(data) != names:
            raise DrafterConfigError(
                f"drafter config: missing keys {sorted(names - set(data))}, unknown keys {sorted(set(data) - names)}"
            )
        mistyped = {f.name: data[f.name] for f in dataclasses.fields(cls) if not _has_type(data[f.name], str(f.type))}
        if mistyped:
            raise DrafterConfigError(f"drafter config: {mistyped} of the wrong JSON types")
        tuples = {key: tuple(data[key]) for key in ("target_layer_ids", "layer_types")}
        return cls(**{**data, **tuples})


# What the baselines fix: DFlash has no heads; EAGLE-3 is one autoregressive layer, drafting from the anchor on.
_NO_HEADS = {
    "markov_head_type": "none",
    "markov_rank": 0,
    "enable_confidence_head": False,
    "confidence_head_with_markov": False,
}
KIND_FIELDS: dict[DrafterKind, dict[str, Any]] = {
    "dspark": {},
    "dflash": _NO_HEADS,
    "eagle3": {**_NO_HEADS, "num_draft_layers": 1, "sample_from_anchor": True, "sliding_window": None},
}


_POSITIVE_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_draft_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "num_target_layers",
    "block_size",
)


def _has_type(value: Any, annotation: str) -> bool:
    """Whether a JSON value fits a field's annotation; what the field's own checks name is left to them."""
    if annotation.startswith("tuple"):
        item = "int" if "int" in annotation else "str"
        return isinstance(value, list | tuple) and all(_has_type(one, item) for one in value)
    if annotation == "float":
        return isinstance(value, int | float) and not isinstance(value, bool)
    if annotation in ("int", "bool", "str"):
        return type(value).__name__ == annotation
    return value is None or isinstance(value, int | str)


def rope_theta_of(config: Mapping[str, Any]) -> float:
    """The RoPE base of a Hugging Face config, old (`rope_theta`) or new (`rope_parameters`) style.

    A target with one base per kind of layer (Gemma 3) gives that of its full-attention layers: a drafter's context is
    the whole text.
    """
    parameters = config.get("rope_parameters") or {}
    parameters = parameters.get("full_attention") or parameters
    return float(parameters["rope_theta"] if "rope_theta" in parameters else _required(config, "rope_theta"))


def _required(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise DrafterConfigError(f"the target's config.json has no {key!r}; is it a decoder-only language model?")
    return config[key]
