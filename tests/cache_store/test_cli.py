from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

from cache_store.cli import main
from cache_store.commands.terminal import EXIT_CLOSED
from cache_store.ledger import Ledger, Reject, seal
from cache_store.storage import Storage, open_storage
from tests.cache_store.samples import build_cache, make_spec


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    storage = open_storage(str(tmp_path / "cache"))
    build_cache(storage, make_spec(shard_bytes=4000), 8, sealed=False)
    Ledger(storage).reject([Reject(sample_id="x", stage="prompts", reason="empty prompt")])
    seal(storage, expected_ids=None)
    return storage


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(100)}, unk_token="w0"))
    words.decoder = decoders.Fuse()
    words.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path)


def test_inspect_shows_everything(storage: Storage, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", storage.url]) == 0
    shown = capsys.readouterr().out
    for wanted in ("(sealed)", "bss1", "template", "empty prompt", "stop 8", "Tokens per sample", "█", "RMS", "last"):
        assert wanted in shown


def test_inspect_as_json(storage: Storage, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", storage.url, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["samples"] == 8
    assert facts["identity"]["template"] == "t0"
    assert facts["rejects"] == {"prompts": {"empty prompt": 1}}
    assert sum(item["samples"] for item in facts["lengths"]) == 8
    assert len(facts["layers"]) == 3


def test_unsealed_cache_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = open_storage(str(tmp_path / "cache"))
    build_cache(storage, make_spec(), 2, sealed=False)
    assert main(["inspect", storage.url]) == 0
    assert "NOT sealed" in capsys.readouterr().out
    assert main(["verify", storage.url]) == 1
    shown = capsys.readouterr().out
    assert "not-sealed" in shown
    assert "NOT SEALED: " in shown
    assert "run the same build again" in shown
    assert "DAMAGED" not in shown
    storage.put("cache.json", b"{")
    for command in ("inspect", "verify"):
        assert main([command, storage.url]) == 1
        assert f"{storage.url}/cache.json: not valid JSON" in capsys.readouterr().err


def test_verify_exit_codes(storage: Storage, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", storage.url]) == 0
    assert capsys.readouterr().out.startswith("sound: ")
    storage.put("shards/part-dead.parquet", b"left over")
    assert main(["verify", storage.url, "--json"]) == 3
    report = json.loads(capsys.readouterr().out)
    assert report["damaged"] is False
    assert [finding["kind"] for finding in report["findings"]] == ["orphan"]
    storage.delete(Ledger(storage).records()[0].name)
    assert main(["verify", storage.url]) == 1
    shown = capsys.readouterr().out
    assert "missing-shard" in shown
    assert "DAMAGED" in shown


def test_sample_shows_supervised_text_apart(
    storage: Storage, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = {f"s{number:04d}" for number in range(8)}
    assert main(["sample", storage.url, "--n", "3", "--tokenizer", tokenizer, "--json"]) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(shown) == 3
    for facts in shown:
        assert facts["sample_id"] in samples
        for part in facts["segments"]:
            assert part["text"] == "".join(f"w{token}" for token in part["ids"])
        assert [part["supervised"] for part in facts["segments"]] == [False, True]
    chosen = shown[0]
    command = ["sample", storage.url, "--id", chosen["sample_id"], "--tokenizer", tokenizer, "--plain"]
    assert main(command) == 0
    text = capsys.readouterr().out
    context, supervised = (part["text"] for part in chosen["segments"])
    assert f"{context}[[{supervised}]]" in text
    assert "\x1b" not in text


def test_sample_without_tokenizer_shows_ids(storage: Storage, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", storage.url, "--n", "99"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("[[") == 8


def test_estimate_scales_what_was_built(storage: Storage, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", storage.url, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert main(["estimate", storage.url, "--tokens", str(1000 * facts["tokens"]), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["samples"] == 8000
    assert found["raw_bytes"] == 1000 * facts["raw_bytes"]
    assert main(["estimate", storage.url, "--tokens", "1000"]) == 0
    assert "stored per raw byte" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["inspect"], ["verify"], ["sample"], ["estimate", "--tokens", "5"]])
def test_no_cache_is_one_line_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    assert main([*command, str(tmp_path / "nothing")]) == 1
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.strip().splitlines()[-1].startswith("NotFound: ")
    assert "holds no Target Cache" in found.err


@pytest.mark.parametrize("command", [[], ["inspect"], ["dance", "x"], ["estimate", "x", "--tokens", "many"]])
def test_wrong_usage(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(command)
    assert caught.value.code == 2
    assert "usage: cache_store" in capsys.readouterr().err


def test_missing_tokenizer_is_named(storage: Storage, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", storage.url, "--tokenizer", str(tmp_path / "x")]) == 1
    assert "tokenizer.json does not exist" in capsys.readouterr().err
    (tmp_path / "tokenizer.json").write_text("{broken")
    assert main(["sample", storage.url, "--tokenizer", str(tmp_path)]) == 1
    assert "tokenizer.json is not a readable tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", [("head", "--n"), ("head", "--start"), ("sample", "--n"), ("sample", "--seed"), ("stats", "--seed")]
)
def test_negative_numbers_are_wrong_usage(
    storage: Storage, capsys: pytest.CaptureFixture[str], option: tuple[str, str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([option[0], storage.url, option[1], "-1"])
    assert f"argument {option[1]}: found '-1', wanted a whole number of at least 0" in capsys.readouterr().err


@pytest.mark.parametrize("form", [(), ("--json",)], ids=["table", "json"])
def test_a_reader_that_has_seen_enough_gets_no_traceback(storage: Storage, form: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "cache_store.cli", "head", storage.url, *form]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == EXIT_CLOSED


def test_a_terminal_without_unicode(storage: Storage) -> None:
    plain = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "40"}
    command = [sys.executable, "-m", "cache_store.cli", "inspect", storage.url]
    done = subprocess.run(command, env=plain, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Tokens per sample" in done.stdout


def test_an_interrupted_command_says_so(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cache_store.commands.verify.verify_cache", interrupt)
    assert main(["verify", storage.url]) == 130
    assert capsys.readouterr().err.startswith("interrupted: ")
