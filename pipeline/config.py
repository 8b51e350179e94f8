"""One YAML file configures every job: strict pydantic models, dotted overrides, one default in one place.

The file knows nothing about engines: it is data, and importing it imports neither torch nor ray.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from pipeline.config_cache import CacheSection, DataSection
from pipeline.config_evaluation import CalibrationSection, EvaluationSection
from pipeline.config_section import Section
from pipeline.config_serving import CostSection, SimulationSection
from pipeline.errors import ConfigError


class TargetSection(Section):
    """The frozen LLM."""

    path: str
    """Local directory or hub id of the target in Hugging Face layout."""
    revision: str | None = None
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    trust_remote_code: bool = False


class PromptsSection(Section):
    """Where the prompts come from."""

    sources: tuple[str, ...]
    """JSONL or Parquet files: local paths, globs or s3:// URLs; or `hf:<dataset id>[:<split>]`."""
    limit: int | None = Field(default=None, gt=0)
    """Keep the first `limit` rows; a prefix of the sources, in order."""


class SamplingSection(Section):
    """How the target generates. Every field is part of the cache's identity."""

    temperature: float = Field(default=0.7, ge=0.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=-1, ge=-1)
    max_new_tokens: int = Field(default=1024, gt=0)
    seed: int = 42


class GenerationSection(Section):
    """Regeneration of responses with vLLM inside Ray Data."""

    sampling: SamplingSection = SamplingSection()
    truncated: Literal["keep", "drop"] = "keep"
    """What to do with an answer that hit its token limit: keep it, or reject the prompt."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Extra variables of the chat template, for instance `enable_thinking: false`."""
    num_engines: int = Field(default=1, gt=0)
    batch_size: int = Field(default=64, gt=0)
    """Prompts handed to an engine at a time; the unit that a dead engine repeats."""
    rows_per_file: int = Field(default=1024, gt=0)
    """Responses per committed file: what a killed build has to repeat at most, per engine."""
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to vLLM's engine, for instance `tensor_parallel_size`."""
    engine_env: dict[str, str] = Field(default_factory=dict)
    """Environment of the engine's process, for instance `VLLM_CPU_OMP_THREADS_BIND`."""
    stall_timeout_s: float = Field(default=900.0, gt=0)
    """No finished row for this long means that the engine is dead: stop with a message."""
    max_attempts: int = Field(default=3, gt=0)
    """Passes over the rows still missing before the build gives up."""


class ExtractionSection(Section):
    """Hidden-state extraction with transformers."""

    layer_ids: tuple[int, ...]
    """Captured layers: 0-based ids of decoder layers whose OUTPUT is stored, ascending; never the last layer."""
    num_actors: int = Field(default=1, gt=0)
    cpus_per_actor: float = Field(default=1.0, gt=0)
    gpus_per_actor: float = Field(default=0.0, ge=0)
    tokens_per_batch: int = Field(default=8192, gt=0)
    """Padded tokens per forward pass."""
    samples_per_task: int = Field(default=64, gt=0)
    """Samples an actor turns into committed shards in one call: what a killed actor has to repeat."""
    stall_timeout_s: float = Field(default=1800.0, gt=0)
    max_attempts: int = Field(default=3, gt=0)


class DrafterSection(Section):
    """The drafter's shape. What is null follows the target's own config."""

    kind: Literal["dspark", "dflash", "eagle3"] = "dspark"
    """The baselines fix other fields (KIND_FIXES); a config that sets them otherwise is refused."""
    block_size: int = Field(default=7, gt=0)
    """γ: draft tokens per round; EAGLE-3: steps of the training-time test."""
    num_draft_layers: int = Field(default=5, gt=0)
    intermediate_size: int | None = Field(default=None, gt=0)
    num_attention_heads: int | None = Field(default=None, gt=0)
    num_key_value_heads: int | None = Field(default=None, gt=0)
    head_dim: int | None = Field(default=None, gt=0)
    mask_token: int | str
    """Token that fills the slots after the anchor: an id, or a token string of the target's tokenizer."""
    markov_head: Literal["none", "vanilla", "gated", "rnn"] = "vanilla"
    markov_rank: int = Field(default=256, ge=0)
    draft_vocab_size: int | None = Field(default=None, gt=0)
    """Draft only the tokens that the target generates most, counted in the cache; null: its whole vocabulary."""
    confidence_head: bool = True
    confidence_with_markov: bool = True
    sample_from_anchor: bool = True
    sliding_window: int | None = Field(default=None, gt=0)
    """Positions that a sliding layer looks back; needs a sliding_attention layer in layer_types."""
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None
    """One per draft layer; null: full attention everywhere."""


class LossSection(Section):
    """Weights of the loss terms (DSpark §3.3)."""

    ce: float = Field(default=0.1, ge=0)
    l1: float = Field(default=0.9, ge=0)
    confidence: float = Field(default=1.0, ge=0)
    confidence_detached: bool = False
    """true: the confidence term moves the confidence head alone, neither backbone nor Markov head."""
    decay_gamma: float = Field(default=4.0, gt=0)
    """w_k = exp(-(k-1)/decay_gamma). EAGLE-3's default is its step decay 0.8 in this form, 4.48."""


_NO_HEADS = {"markov_head": "none", "markov_rank": 0, "confidence_head": False, "confidence_with_markov": False}
_CE_ALONE = {"ce": 1.0, "l1": 0.0, "confidence": 0.0}
# What a kind of drafter leaves no choice about, as (fields of `drafter`, fields of `training.loss`): DFlash is rank 0
# with cross entropy alone; EAGLE-3 is one layer and cross entropy against the target's distribution.
KIND_FIXES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dspark": ({}, {}),
    "dflash": (_NO_HEADS, _CE_ALONE),
    "eagle3": (
        {**_NO_HEADS, "num_draft_layers": 1, "sample_from_anchor": True, "sliding_window": None, "layer_types": None},
        _CE_ALONE,
    ),
}
EAGLE3_DECAY_GAMMA = -1.0 / math.log(0.8)


class TrainingSection(Section):
    """The recipe and the DeepSpeed workers."""

    output: str
    """Local or shared folder of the run: checkpoints, metrics.jsonl, TensorBoard, the exported drafter."""
    num_workers: int = Field(default=8, gt=0)
    cpus_per_worker: float = Field(default=1.0, gt=0)
    gpus_per_worker: float = Field(default=1.0, ge=0)
    epochs: float = Field(default=10.0, gt=0)
    global_batch_size: int = Field(default=512, gt=0)
    micro_batch_size: int = Field(default=1, gt=0)
    num_anchors: int = Field(default=512, gt=0)
    max_length: int = Field(default=4096, gt=1)
    """Tokens of a sample that training uses: longer samples are cut on the right."""
    lr: float = Field(default=6e-4, gt=0)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """AdamW's moving averages. The paper names none; these are torch's, which the reference trainer leaves alone."""
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_ratio: float = Field(default=0.04, ge=0, lt=1)
    gradient_clip: float = Field(default=1.0, gt=0)
    precision: Literal["bf16", "fp32"] = "bf16"
    """bf16 keeps float32 master weights and optimizer states."""
    zero_stage: Literal[0, 1, 2] = 1
    seed: int = 42
    init_from: str | None = None
    """Folder of an exported drafter to start from, for instance DFlash's backbone under new DSpark heads."""
    loss: LossSection = LossSection()
    loss_rows_per_chunk: int = Field(default=512, gt=0)
    """Rows of [V] logits alive at a time in the loss."""
    checkpoint_every_steps: int = Field(default=200, gt=0)
    keep_checkpoints: int = Field(default=2, gt=0)
    log_every_steps: int = Field(default=10, gt=0)
    data: DataSection = DataSection()
    loader_workers: int = Field(default=2, ge=0)
    prefetch_batches: int = Field(default=2, gt=0)
    """Micro-batches that each loader process keeps ready."""
    prefetch_mb: int = Field(default=2048, gt=0)
    """Memory of all ready micro-batches of a training worker, the one in use included."""
    max_failures: int = Field(default=3, ge=0)
    """Times that Ray Train restarts dead workers from the last checkpoint."""


class ClusterSection(Section):
    """Which Ray to use: the cluster that the job was submitted to, or an embedded one."""

    address: str | None = None
    """null: join the submitted job's cluster, else start an embedded Ray in this process."""
    embedded_cpus: int = Field(default=8, gt=0)
    """Logical CPUs of an embedded Ray; Ray Data's stages hang with fewer than about 8."""
    object_store_mb: int = Field(default=512, gt=0)


class PlanSection(Section):
    """What `--dry-run` assumes where it cannot look: prompts in a bucket, a target that is not on this machine."""

    target_config: str | None = None
    """A config.json with the target's sizes, used when target.path is not a local folder."""
    samples: int | None = Field(default=None, gt=0)
    """null: count the prompts, which must then be readable."""
    prompt_tokens: float = Field(default=100.0, gt=0)
    """Mean tokens of a rendered prompt."""
    response_tokens: float | None = Field(default=None, gt=0)
    """Mean generated tokens; null: the upper bound, max_new_tokens."""


class Config(Section):
    """Everything that the jobs need, in one file."""

    name: str
    target: TargetSection
    prompts: PromptsSection
    generation: GenerationSection = GenerationSection()
    extraction: ExtractionSection
    cache: CacheSection
    drafter: DrafterSection
    training: TrainingSection
    evaluation: EvaluationSection = EvaluationSection()
    calibration: CalibrationSection = CalibrationSection()
    cost: CostSection = CostSection()
    simulation: SimulationSection = SimulationSection()
    cluster: ClusterSection = ClusterSection()
    plan: PlanSection = PlanSection()
    max_length: int = Field(default=4096, gt=1)
    """Longest prompt + response, in tokens."""

    @model_validator(mode="before")
    @classmethod
    def _kind_decides(cls, data: Any) -> Any:
        """Fill in what the kind of drafter fixes, and refuse what contradicts it."""
        drafter, training = (data.get(key) for key in ("drafter", "training")) if isinstance(data, dict) else (None, 0)
        if not isinstance(drafter, dict) or not isinstance(training, dict):
            return data  # the fields' own validation explains it
        kind, loss = drafter.get("kind", "dspark"), training.get("loss") or {}
        if kind not in KIND_FIXES or not isinstance(loss, dict):
            return data
        sections = (("drafter", drafter), ("training.loss", loss))
        wrong = [
            f"{section}.{key} is {given[key]!r}, wanted {value!r}"
            for (section, given), fixed in zip(sections, KIND_FIXES[kind], strict=True)
            for key, value in fixed.items()
            if key in given and given[key] != value
        ]
        if wrong:
            raise ValueError(
                f"drafter.kind {kind} has no choice here: {'; '.join(wrong)}; give these keys the wanted values or "
                "remove them, or choose kind dspark"
            )
        fixed_drafter, fixed_loss = KIND_FIXES[kind]
        if kind == "eagle3":
            loss = {"decay_gamma": EAGLE3_DECAY_GAMMA, **loss}
        return {
            **data,
            "drafter": {**drafter, **fixed_drafter},
            "training": {**training, "loss": {**loss, **fixed_loss}},
        }

    @field_validator("name")
    @classmethod
    def _name_is_a_word(cls, value: str) -> str:
        if not value or any(c in value for c in "/\\ "):
            raise ValueError(f"name {value!r} must be one word without slashes or spaces")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        layers = self.extraction.layer_ids
        if not layers or list(layers) != sorted(set(layers)):
            raise ValueError(f"extraction.layer_ids {list(layers)} must be ascending, without repeats, not empty")
        if self.generation.sampling.max_new_tokens >= self.max_length:
            raise ValueError(
                f"generation.sampling.max_new_tokens {self.generation.sampling.max_new_tokens} leaves no room for "
                f"a prompt within max_length {self.max_length}"
            )
        if (self.drafter.markov_head == "none") != (self.drafter.markov_rank == 0):
            raise ValueError(
                f"drafter.markov_head {self.drafter.markov_head!r} and markov_rank {self.drafter.markov_rank} "
                "disagree: rank 0 goes with head none"
            )
        loss = self.training.loss
        if loss.ce == loss.l1 == 0:
            raise ValueError(
                f"training.loss.ce {loss.ce:g} and training.loss.l1 {loss.l1:g}: one of them must be above 0, or no "
                "draft token is ever learnt"
            )
        return self


class _ConfigLoader(yaml.SafeLoader):
    """YAML without duplicate keys (the second of two would win silently), in which a date is the text it is."""

    yaml_implicit_resolvers = {  # noqa: RUF012  PyYAML's own way to say it
        first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:timestamp"]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise ConfigError(f"line {key_node.start_mark.line + 1}: found a {type(key).__name__}, wanted a key")
            if key in seen:
                raise ConfigError(f"line {key_node.start_mark.line + 1}: key {key!r} stands twice")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file and apply `section.key=value` overrides (values are YAML).

    Raises ConfigError naming the file, the key, what was found, and for an unknown key the nearest valid one.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the config: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from error
    try:
        data = yaml.load(text, Loader=_ConfigLoader)  # a SafeLoader subclass
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: found {type(data).__name__}, wanted a mapping of sections")
    for override in overrides:
        _apply_override(data, override)
    try:
        return Config.model_validate(_at_home(data))
    except ValidationError as error:
        raise ConfigError("; ".join(f"{path}: {line}" for line in _explain(error))) from error


def _at_home(value: Any) -> Any:
    """`~/...` as a shell reads it: no shell does it in a YAML file or behind the `=` of an override."""
    if isinstance(value, dict):
        return {key: _at_home(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_at_home(item) for item in value]
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value


def _apply_override(data: dict[str, Any], override: str) -> None:
    dotted, equals, value = override.partition("=")
    keys = dotted.split(".")
    if not equals or not all(keys):
        raise ConfigError(f"override {override!r}: wanted section.key=value")
    node = data
    for key in keys[:-1]:
        if node.get(key) is None:
            node[key] = {}
        node = node[key]
        if not isinstance(node, dict):
            raise ConfigError(f"override {override!r}: {key!r} is a value, not a section")
    try:
        node[keys[-1]] = yaml.load(value, Loader=_ConfigLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: {value!r} is not valid YAML; quote what is text") from error


def _explain(error: ValidationError) -> Iterable[str]:
    for item in error.errors():
        location = [str(part) for part in item["loc"]]
        dotted = ".".join(location) or "config"
        if item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            nearest = difflib.get_close_matches(location[-1], _fields_at(location[:-1]), n=1, cutoff=0.0)
            yield f"unknown key {dotted!r}" + (f"; did you mean {nearest[0]!r}?" if nearest else "")
        elif item["type"] == "missing":
            yield f"key {dotted!r} is missing"
        else:
            message = item["msg"].removeprefix("Value error, ")
            # A contradiction between sections names the values itself.
            yield f"{dotted}: {message} (found {item['input']!r:.120})" if location else message


def _fields_at(location: Sequence[str]) -> list[str]:
    section: Any = Config
    for key in (key for key in location if not key.isdigit()):
        known = getattr(section, "model_fields", {})
        annotation = known[key].annotation if key in known else None
        inner = get_args(annotation)
        candidates = (annotation, *inner, *(one for part in inner for one in get_args(part)))
        found = [c for c in candidates if isinstance(c, type) and (issubclass(c, BaseModel) or is_dataclass(c))]
        if not found:
            return []
        section = found[0]
    return [field.name for field in fields(section)] if is_dataclass(section) else list(section.model_fields)


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML, to be saved beside every artefact."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
