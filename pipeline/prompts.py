"""Read conversations in any usual form, one row at a time; what cannot be used is rejected with file, line and reason.

Of a conversation only the system message and the user turns are kept: assistant turns of the input are turn
boundaries, the target answers anew. Reading never stops for a bad row.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from cache_store.ledger import Reject
from cache_store.storage import Storage, open_storage
from pipeline.errors import ConfigError
from pipeline.tables import open_object

_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
}
_CONVERSATION_KEYS = ("messages", "conversations")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One conversation to answer: the system message, if any, and the user's turns."""

    sample_id: str
    system: str | None
    users: tuple[str, ...]
    domain: str | None
    source: str
    """`file:line`, for messages; not part of the prompt's identity."""
    language: str | None = None
    """A label for evaluations to group by; not part of the prompt's identity either."""

    def digest(self) -> bytes:
        """sha256 of everything that the target's answers depend on, and of the id."""
        content = json.dumps([self.sample_id, self.domain, self.system, self.users], ensure_ascii=False)
        return hashlib.sha256(content.encode("utf-8")).digest()


@dataclass(slots=True)
class PromptCounts:
    """What a reading of the sources met."""

    rows: int = 0
    blank: int = 0
    accepted: int = 0
    rejected: int = 0


class BadRow(ValueError):
    """A row that is not a conversation; the text says why."""


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row as read: `location` is `file:line` (JSONL) or `file:row` (Parquet, from 1); `error`: why no value."""

    location: str
    value: Any = None
    error: str | None = None


def read_prompts(
    sources: Iterable[str], *, limit: int | None = None, endpoint_url: str | None = None, counts: PromptCounts
) -> Iterator[Prompt | Reject]:
    """Every row of the sources, in order, as a Prompt or a Reject; blank lines are only counted.

    `limit` keeps the first rows. A prompt whose id was seen before is rejected as `<id>@<file>:<line>`; a row
    without a usable id as `<file>:<line>`. Raises ConfigError for a source that does not exist.
    """
    seen: set[str] = set()
    for raw in _rows(sources, endpoint_url, counts):
        if limit is not None and counts.rows >= limit:
            return
        counts.rows += 1
        item = _to_prompt(raw, seen)
        if isinstance(item, Prompt):
            counts.accepted += 1
            seen.add(item.sample_id)
        else:
            counts.rejected += 1
        yield item


def _to_prompt(raw: RawRow, seen: set[str]) -> Prompt | Reject:
    row_id = _own_id(raw.value)
    try:
        if raw.error is not None:
            raise BadRow(raw.error)
        prompt = normalise(raw.value, location=raw.location)
        if prompt.sample_id in seen:
            row_id = f"{prompt.sample_id}@{raw.location}"
            raise BadRow(f"the id {prompt.sample_id} was used by an earlier row")
    except BadRow as error:
        # An id that a good row carries must not appear among the rejects as well.
        reject_id = f"{row_id}@{raw.location}" if row_id in seen else row_id or raw.location
        seen.add(reject_id)
        return Reject(sample_id=reject_id, stage="prompts", reason=str(error), source=raw.location)
    return prompt


def _own_id(value: Any) -> str | None:
    if not isinstance(value, Mapping):
        return None
    own = value.get("id")
    if isinstance(own, str) and own.strip() and not _broken(own):
        return own
    return str(own) if isinstance(own, int) and not isinstance(own, bool) else None


def normalise(value: Any, *, location: str) -> Prompt:
    """One row (`messages`, `conversations`, `prompt` or `turns`, with `id`, `domain`) as a Prompt. Raises BadRow."""
    if not isinstance(value, Mapping):
        raise BadRow(f"found {_kind(value)}, wanted an object with messages, conversations or prompt")
    system, users = _turns(value)
    domain, language = (_label(value, name) for name in ("domain", "language"))
    if value.get("id") is not None and _own_id(value) is None:
        found = "not Unicode text" if _broken(value["id"]) else _kind(value["id"])
        raise BadRow(f"id is {found}, wanted a non-empty string or an integer")
    if value.get("tools"):
        raise BadRow("has tools, which the target would not be told of: they are not supported")
    sample_id = _own_id(value) or _content_id(system, users, domain)
    return Prompt(sample_id=sample_id, system=system, users=users, domain=domain, source=location, language=language)


def _label(value: Mapping[str, Any], name: str) -> str | None:
    label = value.get(name)
    if label is not None and (not isinstance(label, str) or _broken(label)):
        raise BadRow(f"{name} is {'not Unicode text' if _broken(label) else _kind(label)}, wanted a string")
    return label


def _broken(value: Any) -> bool:
    """Whether a string holds half a surrogate pair: JSON can write it, no file can keep it."""
    return isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value)


def _content_id(system: str | None, users: tuple[str, ...], domain: str | None) -> str:
    content = json.dumps([domain, system, users], ensure_ascii=False)
    return hashlib.sha256(content.encode("utf-8", errors="surrogatepass")).hexdigest()[:24]


def _turns(value: Mapping[str, Any]) -> tuple[str | None, tuple[str, ...]]:
    present = [key for key in (*_CONVERSATION_KEYS, "prompt") if value.get(key) is not None]
    if not present and isinstance(value.get("turns"), list) and value["turns"]:  # user turns alone, as in MT-Bench
        turns = enumerate(value["turns"], start=1)
        return None, tuple(_text(text, f"turn {number}", allow_empty=False) for number, text in turns)
    if not present:
        raise BadRow("has none of messages, conversations and prompt")
    if len(present) > 1:
        raise BadRow(f"has {' and '.join(present)} at once")
    if present[0] == "prompt":
        return None, (_text(value["prompt"], "prompt", allow_empty=False),)
    messages = value[present[0]]
    if not isinstance(messages, list) or not messages:
        raise BadRow(f"{present[0]} is {_kind(messages)}, wanted a non-empty list of messages")
    pairs = [_message(message, number) for number, message in enumerate(messages, start=1)]
    system = pairs.pop(0)[1] if pairs[0][0] == "system" else None
    for number, (role, _) in enumerate(pairs):
        wanted = "user" if number % 2 == 0 else "assistant"
        if role != wanted:
            position = number + 1 + (system is not None)
            raise BadRow(f"wrong role order: message {position} is from {role}, wanted {wanted}")
    if not pairs:
        raise BadRow("has no user message")
    return system, tuple(text for role, text in pairs if role == "user")


def _message(message: Any, number: int) -> tuple[str, str]:
    if not isinstance(message, Mapping):
        raise BadRow(f"message {number} is {_kind(message)}, wanted an object")
    role = message.get("role", message.get("from"))
    if not isinstance(role, str) or role not in _ROLES:
        raise BadRow(f"message {number} has the unknown role {role!r}")
    role = _ROLES[role]
    content = message.get("content", message.get("value"))
    return role, _text(content, f"message {number} ({role})", allow_empty=role != "user")


def _text(content: Any, what: str, *, allow_empty: bool) -> str:
    if not isinstance(content, str):
        raise BadRow(f"{what}: the content is {_kind(content)}, wanted a string")
    if not allow_empty and not content.strip():
        raise BadRow(f"{what}: the content is empty")
    if _broken(content):
        raise BadRow(f"{what}: the content holds half a surrogate pair")
    return content


def _kind(value: Any) -> str:
    return "null" if value is None else "empty" if value in ([], {}, "") else type(value).__name__


def _rows(sources: Iterable[str], endpoint_url: str | None, counts: PromptCounts) -> Iterator[RawRow]:
    for source in sources:
        if source.startswith("hf:"):
            yield from _hub_rows(source)
            continue
        for name, open_file in _files(source, endpoint_url):
            try:
                with open_file() as stream:
                    if name.endswith(".parquet"):
                        yield from _parquet_rows(name, stream)
                    else:
                        yield from _json_rows(name, stream, counts)
            except OSError as error:
                raise ConfigError(f"prompts {name}: cannot read it: {error}") from error


def _files(source: str, endpoint_url: str | None) -> Iterator[tuple[str, Any]]:
    """(display name, opener) of each file of a source, names ascending."""
    if "://" in source and not source.startswith("file://"):
        folder, _, pattern = source.rpartition("/")
        storage = open_storage(folder, endpoint_url=endpoint_url)
        found = sorted((i for i in storage.list("") if fnmatch.fnmatchcase(i.name, pattern)), key=lambda i: i.name)
        openers = [(f"{folder}/{info.name}", _remote_opener(storage, info.name, info.size)) for info in found]
    else:
        path = Path(source.removeprefix("file://"))
        if path.is_dir():
            raise ConfigError(f"prompts {source!r}: is a folder, wanted files, for instance {path / '*.jsonl'}")
        anchor = Path(path.anchor or ".")
        paths = [path] if path.is_file() else sorted(anchor.glob(str(path.relative_to(path.anchor))))
        openers = [(str(found), found.open) for found in paths if found.is_file()]
        openers = [(name, _binary(opener)) for name, opener in openers]
    if not openers:
        raise ConfigError(f"prompts {source}: no such file; give a path, a glob, an s3:// URL or hf:<dataset>")
    yield from openers


def _binary(opener: Any) -> Any:
    return lambda: opener("rb")


def _remote_opener(storage: Storage, name: str, size: int) -> Any:
    return lambda: open_object(storage, name, size)


def _json_rows(name: str, stream: IO[bytes], counts: PromptCounts) -> Iterator[RawRow]:
    for number, line in enumerate(stream, start=1):
        location = f"{name}:{number}"
        text = line.strip().removeprefix(b"\xef\xbb\xbf")
        if not text:
            counts.blank += 1
            continue
        try:
            yield RawRow(location, value=json.loads(text))
        except UnicodeDecodeError as error:
            yield RawRow(location, error=f"not UTF-8: {error.reason} at byte {error.start}")
        except (ValueError, RecursionError) as error:
            yield RawRow(location, error=f"broken JSON: {error}")


def _parquet_rows(name: str, stream: IO[bytes]) -> Iterator[RawRow]:
    try:
        file = pq.ParquetFile(stream)
    except (OSError, ValueError) as error:
        raise ConfigError(f"prompts {name}: not a readable Parquet file: {error}") from error
    number = 0
    for batch in file.iter_batches(batch_size=1024):
        try:
            rows: list[Any] = batch.to_pylist()
        except UnicodeDecodeError:
            rows = [_parquet_row(batch.slice(index, 1)) for index in range(batch.num_rows)]
        for row in rows:
            number += 1
            if isinstance(row, UnicodeDecodeError):
                yield RawRow(f"{name}:{number}", error=f"not UTF-8: {row.reason} at byte {row.start}")
            else:
                yield RawRow(f"{name}:{number}", value=row)


def _parquet_row(batch: pa.RecordBatch) -> dict[str, Any] | UnicodeDecodeError:
    try:
        return dict(batch.to_pylist()[0])
    except UnicodeDecodeError as error:
        return error


def _hub_rows(source: str) -> Iterator[RawRow]:
    name, _, split = source.removeprefix("hf:").partition(":")
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"prompts {source}: needs the package datasets: pip install datasets") from error
    try:
        rows = datasets.load_dataset(name, split=split or "train", streaming=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"prompts {source}: cannot load this dataset: {error}") from error
    for number, row in enumerate(rows, start=1):
        yield RawRow(f"{source}:{number}", value=dict(row))
