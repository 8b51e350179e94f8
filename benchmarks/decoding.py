"""Decoding in batches against one request at a time: rounds per second, accepted length and speed-up of one drafter.

    python benchmarks/decoding.py --config jobs/configs/smollm2_demo.yaml --json

The same prompts, seeds and drafter at every batch size, in this process, without Ray; the target alone is measured at
every batch size too, for η. Answers must not depend on the batch: with a float32 target they are compared token for
token.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pipeline.acceptance import summarise_speed
from pipeline.config import Config, load_config
from pipeline.drafter_check import check_drafter
from pipeline.eval_actor import TRAINED, EvalTask, PromptDecoder, Turn, load_decoder
from pipeline.eval_run import Measured
from pipeline.evaluate import make_recipe
from pipeline.held_out import read_held_out
from pipeline.identity import check_target
from pipeline.train.worker import DRAFTER


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One batch size; rates over drafting and verifying, prefill apart."""

    batch_size: int
    rounds: int
    rounds_per_second: float
    accepted_length: float
    target_tokens_per_second: float
    speedup: float
    """η against the target alone at the same batch size."""
    wall_seconds: float


def measure(decoder: PromptDecoder, turns: Sequence[Turn], batch_size: int) -> tuple[Result, Measured]:
    """Decode the contexts with the drafter and with the target alone."""
    started = time.perf_counter()
    measured = Measured()
    for part in decoder.measure(turns):
        measured.add(part)
    wall = time.perf_counter() - started
    [speed] = [s for s in summarise_speed(measured.rounds, measured.decodes) if s.drafter == TRAINED]
    rounds = [row for row in measured.rounds if row.drafter == TRAINED]
    return (
        Result(
            batch_size=batch_size,
            rounds=len(rounds),
            rounds_per_second=1 / (speed.draft_seconds_per_round + speed.verify_seconds_per_round),
            accepted_length=speed.accepted_length,
            target_tokens_per_second=1 / speed.target_seconds_per_token,
            speedup=speed.speedup,
            wall_seconds=wall,
        ),
        measured,
    )


def same_answers(left: Measured, right: Measured) -> bool:
    """Whether both decoded every prompt to the same tokens, by drafter."""
    one, two = (
        {(d.prompt_id, d.turn, d.drafter): d.output_ids for d in measured.decodes} for measured in (left, right)
    )
    return one == two


def run(config: Config, batch_sizes: Sequence[int], temperature: float) -> tuple[list[Result], bool]:
    """Every batch size on the config's held-out prompts (first turns); and whether all answers are the same."""
    config = config.model_copy(
        update={"evaluation": config.evaluation.model_copy(update={"compare_untrained": False, "num_actors": 1})}
    )
    target = check_target(config)
    prompts = read_held_out(config).prompts
    turns = [
        Turn(
            EvalTask(prompt, temperature, with_baselines=True),
            0,
            tuple(target.chat.prompt_ids(prompt.system, prompt.users[:1], [])),
        )
        for prompt in prompts
    ]
    folder = Path(config.training.output).absolute() / DRAFTER
    recipe = make_recipe(config, target, folder, check_drafter(folder, config, target))
    results, measurements = [], []
    for batch_size in batch_sizes:
        decoder = load_decoder(replace(recipe, batch_size=batch_size))
        decoder.warm_up(turns[0].context)
        result, measured = measure(decoder, turns, batch_size)
        results.append(result)
        measurements.append(measured)
        print(
            f"batch {batch_size:3d}: {result.rounds_per_second:7.1f} rounds/s, τ {result.accepted_length:.3f}, "
            f"target alone {result.target_tokens_per_second:7.1f} tokens/s, η {result.speedup:.2f}",
            file=sys.stderr,
        )
    return results, all(same_answers(measurements[0], measured) for measured in measurements[1:])


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print; with --json one line of JSON at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--batch-sizes", default="1,8")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_args(argv)
    sizes = [int(size) for size in args.batch_sizes.split(",")]
    results, same = run(load_config(args.config, args.overrides), sizes, args.temperature)
    first, last = results[0], results[-1]
    ratio = last.rounds_per_second / first.rounds_per_second
    print(
        f"batch {last.batch_size} against {first.batch_size}: {ratio:.2f} times the rounds per second, answers "
        + ("the same" if same else "NOT THE SAME"),
        file=sys.stderr,
    )
    if args.json:
        line = {"ratio": ratio, "same_answers": same, "results": [asdict(result) for result in results]}
        print(json.dumps(line))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
