"""Speed of the build's stages on a real target, and how long the target waits for anything else.

Two real builds into temporary caches: one of a single prompt (what starting costs) and one of `--prompts`. The stage's
own work is the difference, so start-up counts neither for nor against it. Beside them, each in a fresh process, the
same work without the pipeline: vLLM's own generate on the same contexts with the same number of tokens per answer, and
a plain transformers loop (one conversation at a time, hidden states asked for, nothing kept) over the same tokens.

    python benchmarks/build.py [--config FILE] [--prompts 64] [--json] [section.key=value ...]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from cache_store.reader import CacheReader
from cache_store.storage import open_storage
from pipeline.build import BuildReport, run_build
from pipeline.config import Config, load_config
from pipeline.engines.hf import load_target, resolve_target

CONFIG = "jobs/configs/smollm2_demo.yaml"
PROMPTS = 64


def build(config: Config, cache: Path, prompts: int) -> BuildReport:
    """A real build of the first `prompts` prompts into `cache`."""
    limited = config.model_copy(
        update={
            "cache": config.cache.model_copy(update={"url": str(cache)}),
            "prompts": config.prompts.model_copy(update={"limit": prompts}),
        }
    )
    report = run_build(limited)
    assert report is not None
    return report


def conversations(cache: Path) -> list[dict[str, Any]]:
    """Of every committed sample its token ids and the [start, end) of each answer, in the cache's order."""
    reader = CacheReader(open_storage(str(cache)))
    found = []
    for position in range(len(reader)):
        sample = reader.read(position, states=False)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], sample.loss_mask, [False]]).astype(np.int8)))
        found.append({"ids": sample.input_ids.tolist(), "spans": edges.reshape(-1, 2).tolist()})
    return found


def plain(kind: str, config: Config, samples: list[dict[str, Any]], folder: Path) -> dict[str, float]:
    """The baseline `kind` in a fresh process: {tokens, seconds, start_seconds}."""
    file = folder / f"{kind}.json"
    file.write_text(json.dumps({"config": config.model_dump(mode="json"), "samples": samples}))
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", **config.generation.engine_env}
    command = [sys.executable, __file__, "--baseline", kind, "--input", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"the {kind} baseline failed:\n{done.stderr[-2000:]}")
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def plain_vllm(config: Config, samples: list[dict[str, Any]]) -> dict[str, float]:
    """vLLM's offline generate: every answer's context at once, each answer exactly as long as the cached one."""
    from vllm import LLM, SamplingParams

    started = time.perf_counter()
    settings: dict[str, Any] = {"max_model_len": config.max_length, "dtype": config.target.dtype}
    settings |= {"generation_config": "vllm", "disable_log_stats": True}
    import torch

    if not torch.cuda.is_available():
        settings["enforce_eager"] = True  # as the pipeline does on CPUs
    llm = LLM(model=str(resolve_target(config.target)), **{**settings, **config.generation.engine_kwargs})
    ready = time.perf_counter()
    sampling = config.generation.sampling
    prompts: list[Any] = []
    parameters = []
    for sample in samples:
        for start, end in sample["spans"]:
            prompts.append({"prompt_token_ids": sample["ids"][:start]})
            parameters.append(
                SamplingParams(
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    top_k=sampling.top_k,
                    seed=sampling.seed,
                    max_tokens=end - start,
                    ignore_eos=True,
                    detokenize=False,
                )
            )
    answers = llm.generate(prompts, parameters, use_tqdm=False)
    tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
    return {"tokens": tokens, "seconds": time.perf_counter() - ready, "start_seconds": ready - started}


def plain_forward(config: Config, samples: list[dict[str, Any]]) -> dict[str, float]:
    """The target without lm_head on one conversation after another, all hidden states asked for."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    started = time.perf_counter()
    section = config.target.model_copy(update={"path": str(resolve_target(config.target))})
    model = load_target(section, device, with_head=False)
    ready = time.perf_counter()
    tokens = 0
    with torch.inference_mode():
        for sample in samples:
            ids = torch.tensor([sample["ids"]], device=device)
            states = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
            tokens += states[-1].shape[1]
        if device == "cuda":
            torch.cuda.synchronize()
    return {"tokens": tokens, "seconds": time.perf_counter() - ready, "start_seconds": ready - started}


BASELINES = {"vllm": plain_vllm, "forward": plain_forward}


def figures(
    one: BuildReport, many: BuildReport, vllm: dict[str, float], forward: dict[str, float]
) -> dict[str, dict[str, float]]:
    """Per stage: tokens, work seconds, tokens/s, the baseline's tokens/s, their ratio, and the target's waiting."""
    generated = many.regenerate.generated_tokens - one.regenerate.generated_tokens
    generating = many.regenerate.seconds - one.regenerate.seconds
    extracted = many.extract.tokens - one.extract.tokens
    extracting = many.extract.seconds - one.extract.seconds
    forwarding = many.extract.forward_s - one.extract.forward_s
    writing = many.extract.write_s
    alone = vllm["seconds"] * generated / vllm["tokens"]
    return {
        "regenerate": {
            **_rates(generated, generating, vllm["tokens"] / vllm["seconds"]),
            "start_seconds": one.regenerate.seconds,
            "target_waits_share": _share(generating - alone, generating),
        },
        "extract": {
            **_rates(extracted, extracting, forward["tokens"] / forward["seconds"]),
            "start_seconds": one.extract.seconds,
            "target_waits_share": _share(extracting - forwarding, extracting),
        },
        "forward alone": _rates(extracted, forwarding, forward["tokens"] / forward["seconds"]),
        "write": {
            "tokens": many.extract.tokens,
            "seconds": writing,
            "tokens_per_second": many.extract.tokens / writing,
            "mb_per_second": many.extract.bytes / writing / 1e6,
            "forward_waited_seconds": many.extract.wait_s,
        },
    }


def _rates(tokens: float, seconds: float, baseline: float) -> dict[str, float]:
    if seconds <= 0:
        raise SystemExit("the larger build took no longer than the one of a single prompt: give more --prompts")
    rate = tokens / seconds
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": rate,
        "baseline_tokens_per_second": baseline,
        "ratio_to_baseline": rate / baseline,
    }


def _share(waited: float, total: float) -> float:
    return min(1.0, max(0.0, waited / total))


_COLUMNS = ("stage", "tokens", "work s", "tokens/s", "plain tokens/s", "ratio", "target waits", "start-up s")


def show(stages: dict[str, dict[str, float]], title: str) -> None:
    """The table on the terminal."""
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.caption = (
        "plain: vLLM's own generate on the same contexts and answer lengths; a transformers loop over the same tokens. "
        f"Writing runs behind the forward at {stages['write']['mb_per_second']:.0f} MB/s; the forward waited "
        f"{stages['write']['forward_waited_seconds']:.1f} s for it."
    )
    for number, column in enumerate(_COLUMNS):
        table.add_column(column, justify="left" if number == 0 else "right")
    for name, row in stages.items():
        shown = [name, f"{row['tokens']:,.0f}", f"{row['seconds']:.1f}", f"{row['tokens_per_second']:,.0f}"]
        shown.append(_cell(row, "baseline_tokens_per_second", "{:,.0f}"))
        shown.append(_cell(row, "ratio_to_baseline", "{:.2f}"))
        shown.append(_cell(row, "target_waits_share", "{:.0%}"))
        shown.append(_cell(row, "start_seconds", "{:.1f}"))
        table.add_row(*shown)
    Console(width=120).print(table)


def _cell(row: dict[str, float], name: str, form: str) -> str:
    return form.format(row[name]) if name in row else "-"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table; with --json also one JSON line at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=CONFIG)
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="prompts of the measured build")
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--baseline", choices=tuple(BASELINES), help=argparse.SUPPRESS)
    parser.add_argument("--input", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_args(argv)
    if args.baseline:
        data = json.loads(Path(args.input).read_text())
        print(json.dumps(BASELINES[args.baseline](Config.model_validate(data["config"]), data["samples"])))
        return
    config = load_config(args.config, args.overrides)
    with tempfile.TemporaryDirectory(prefix="bench-build-") as scratch:
        folder = Path(scratch)
        one = build(config, folder / "one", 1)
        many = build(config, folder / "many", args.prompts)
        samples = conversations(folder / "many")
        vllm = plain("vllm", config, samples, folder)
        forward = plain("forward", config, samples, folder)
    stages = figures(one, many, vllm, forward)
    show(stages, f"Build of {many.samples} samples with {config.target.path}")
    if args.json:
        print(json.dumps({"benchmark": "build", "prompts": args.prompts, "stages": stages}))


if __name__ == "__main__":
    main()
