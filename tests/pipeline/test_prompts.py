from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.ledger import Reject
from cache_store.storage import open_storage
from pipeline.errors import ConfigError
from pipeline.prompts import BadRow, Prompt, PromptCounts, normalise, read_prompts


def read(*sources: object, **options: object) -> tuple[list[Prompt], list[Reject], PromptCounts]:
    counts = PromptCounts()
    items = list(read_prompts([str(source) for source in sources], counts=counts, **options))  # type: ignore[arg-type]
    prompts = [item for item in items if isinstance(item, Prompt)]
    return prompts, [item for item in items if isinstance(item, Reject)], counts


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    ("row", "system", "users"),
    [
        ({"messages": [user("a")]}, None, ("a",)),
        ({"conversations": [user("a")]}, None, ("a",)),
        ({"prompt": "a"}, None, ("a",)),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, None, ("a",)),
        ({"messages": [{"role": "system", "content": "s"}, user("a")]}, "s", ("a",)),
        ({"messages": [{"role": "system", "content": ""}, user("a")]}, "", ("a",)),
        ({"messages": [user("a"), {"role": "assistant", "content": ""}, user("b")]}, None, ("a", "b")),
        ({"messages": None, "prompt": "a"}, None, ("a",)),
        ({"turns": ["a", "b"]}, None, ("a", "b")),
        ({"turns": 2, "prompt": "a"}, None, ("a",)),  # a count beside the conversation
    ],
)
def test_every_accepted_form(row: dict[str, object], system: str | None, users: tuple[str, ...]) -> None:
    prompt = normalise(row, location="f:1")
    assert (prompt.system, prompt.users) == (system, users)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (None, "found null"),
        ([], "found empty"),
        ({}, "has none of messages"),
        ({"turns": []}, "has none of messages"),
        ({"turns": ["a", ""]}, "turn 2: the content is empty"),
        ({"messages": []}, "messages is empty"),
        ({"messages": "hi"}, "messages is str"),
        ({"messages": [user("a")], "prompt": "a"}, "messages and prompt at once"),
        ({"prompt": ""}, "content is empty"),
        ({"prompt": "  \n"}, "content is empty"),
        ({"prompt": 7}, "content is int"),
        ({"messages": [user("")]}, r"message 1 \(user\): the content is empty"),
        ({"messages": [{"role": "user", "content": None}]}, "content is null"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "content is list"),
        ({"messages": ["a"]}, "message 1 is str"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "unknown role 'tool'"),
        ({"messages": [{"content": "a"}]}, "unknown role None"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "wrong role order: message 1 is from assistant"),
        ({"messages": [user("a"), user("b")]}, "message 2 is from user, wanted assistant"),
        (
            {"messages": [{"role": "system", "content": "s"}, {"role": "system", "content": "s"}]},
            "message 2 is from system",
        ),
        ({"messages": [{"role": "system", "content": "s"}]}, "has no user message"),
        ({"prompt": "a", "id": ""}, "id is empty"),
        ({"prompt": "a", "id": ["x"]}, "id is list"),
        ({"prompt": "a", "domain": 3}, "domain is int"),
        ({"prompt": "a", "language": 3}, "language is int"),
        ({"prompt": "\ud800"}, "surrogate"),
        ({"prompt": "a", "id": "\ud800"}, "id is not Unicode text"),
        ({"prompt": "a", "domain": "\ud800"}, "domain is not Unicode text"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "unknown role"),
        ({"messages": [{"role": {"a": 1}, "content": "a"}]}, "unknown role"),
        ({"prompt": "a", "tools": [{"name": "search"}]}, "has tools"),
    ],
)
def test_odd_rows_say_why(row: object, reason: str) -> None:
    with pytest.raises(BadRow, match=reason):
        normalise(row, location="f:1")


def test_a_file_of_odd_lines_never_stops(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    lines = [
        b'{"id": "a", "prompt": "1"}\r',
        b"",
        b"{broken",
        b'{"id": "a", "prompt": "2"}',
        b"\xff\xfe",
        b"   ",
        b"null",
    ]
    file.write_bytes(b"\n".join([*lines, b'{"id": 7, "prompt": "3"}']))
    prompts, rejects, counts = read(file)
    assert [prompt.sample_id for prompt in prompts] == ["a", "7"]
    assert [reject.sample_id for reject in rejects] == [f"{file}:3", f"a@{file}:4", f"{file}:5", f"{file}:7"]
    assert [reject.source for reject in rejects] == [f"{file}:{line}" for line in (3, 4, 5, 7)]
    assert "broken JSON" in rejects[0].reason
    assert "used by an earlier row" in rejects[1].reason
    assert (counts.rows, counts.blank, counts.accepted, counts.rejected) == (6, 2, 2, 4)


def test_a_rejected_row_never_takes_a_good_rows_id(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"id": "a", "prompt": "1"}\n{"id": "a", "prompt": ""}\n')
    prompts, rejects, _ = read(file)
    assert [prompts[0].sample_id, rejects[0].sample_id] == ["a", f"a@{file}:2"]


def test_content_ids_do_not_depend_on_the_place(tmp_path: Path) -> None:
    first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    first.write_text('{"prompt": "x"}\n{"prompt": "y"}\n')
    second.write_text('{"prompt": "y"}\n{"prompt": "x"}\n')
    assert {p.sample_id for p in read(first)[0]} == {p.sample_id for p in read(second)[0]}


def test_identical_rows_without_ids_are_duplicates(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "x"}\n{"prompt": "x"}\n')
    prompts, rejects, _ = read(file)
    assert (len(prompts), len(rejects)) == (1, 1)


def test_parquet_of_structs_and_globs_and_limit(tmp_path: Path) -> None:
    rows = [{"id": str(n), "messages": [user(f"q{n}")], "domain": "d"} for n in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    (tmp_path / "a.jsonl").write_text('{"id": "first", "prompt": "p"}\n')
    prompts, _, counts = read(tmp_path / "*", limit=3)
    assert [prompt.sample_id for prompt in prompts] == ["first", "0", "1"]
    assert prompts[1].source == f"{tmp_path}/b.parquet:1"
    assert counts.rows == 3


def test_missing_sources_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read(tmp_path / "nothing*.jsonl")
    (tmp_path / "x.parquet").write_bytes(b"not parquet")
    with pytest.raises(ConfigError, match="not a readable Parquet file"):
        read(tmp_path / "x.parquet")
    for folder in (tmp_path, "", "."):
        with pytest.raises(ConfigError, match="is a folder, wanted files"):
            read(folder)


def test_damaged_parquet_is_named_and_rows_of_other_bytes_are_rejected(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": [f"{number} " * 40 for number in range(3000)]}), file, compression="none")
    content = bytearray(file.read_bytes())
    content[4000:9000] = bytes(5000)
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{file}: cannot read it"):
        read(file)
    offsets = pa.array([0, 2, 4], pa.int32()).buffers()[1]
    latin = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"\xff\xfeok")])
    pq.write_table(pa.table({"prompt": latin}), file)
    prompts, rejects, _ = read(file)
    assert [prompt.users for prompt in prompts] == [("ok",)]
    assert rejects[0].reason.startswith("not UTF-8")


def test_hub_sources_need_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="pip install datasets"):
        read("hf:someone/chats:train")


def test_objects_of_a_bucket(tmp_path: Path) -> None:
    storage = open_storage("memory://prompts-test/folder")
    storage.put("one.jsonl", b'{"id": "a", "prompt": "1"}\n{"id": "b", "prompt": "2"}\n')
    pq.write_table(pa.table({"id": ["c"], "prompt": ["3"]}), tmp_path / "t.parquet")
    storage.put("two.parquet", (tmp_path / "t.parquet").read_bytes())
    prompts, _, _ = read("memory://prompts-test/folder/*")
    assert [prompt.sample_id for prompt in prompts] == ["a", "b", "c"]
    assert prompts[0].source == "memory://prompts-test/folder/one.jsonl:1"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["messages", "conversations", "prompt", "role", "from", "content", "value", "id", "domain", "tools"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(json_values)
def test_any_json_is_a_prompt_or_a_bad_row(value: object) -> None:
    try:
        prompt = normalise(json.loads(json.dumps(value)), location="f:1")
    except BadRow:
        return
    assert prompt.users
    assert all(text.strip() for text in prompt.users)
    assert prompt.sample_id
    assert len(prompt.digest()) == 32
