"""A process of its own: vLLM serves a target with an exported drafter and says what it drafted, as one JSON line.

`python vllm_probe.py '{"target": DIR, "speculative": {...}, "prompts": [[id, ...]], "max_tokens": n}'`
"""

from __future__ import annotations

import json
import sys
from typing import Any

MARK = "PROBE "


def serve(request: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=request["target"],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=1,
        max_num_batched_tokens=128,
        enable_prefix_caching=False,
        speculative_config=request["speculative"],
    )
    blocks: list[list[int]] = []

    def listen(worker: Any) -> dict[str, Any]:
        speculator = worker.model_runner.speculator
        original = speculator.propose

        def propose(*args: Any, **kwargs: Any) -> Any:
            drafts = original(*args, **kwargs)
            blocks.append(drafts[0].tolist())
            return drafts

        speculator.propose = propose
        config = worker.vllm_config.speculative_config
        return {
            "speculator": type(speculator).__name__,
            "model": type(speculator.model).__name__,
            "method": config.method,
            "num_speculative_tokens": config.num_speculative_tokens,
        }

    found = llm.collective_rpc(listen)[0]
    params = SamplingParams(temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False)
    runs = []
    for prompt in request["prompts"]:
        blocks.clear()
        output = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0].outputs[0]
        runs.append({"output": list(output.token_ids), "blocks": [list(block) for block in blocks]})
    return {**found, "runs": runs}


if __name__ == "__main__":
    sys.stdout.write(MARK + json.dumps(serve(json.loads(sys.argv[1]))) + "\n")
