"""What the target answered: `<cache>/responses/turn-NN/<unique>.parquet`, token ids and all, kept for good.

A row holds the whole conversation so far, so the last turn's row is all that extraction needs, and other layers can
be captured later without generating again. A repeated row (a retried task) changes nothing: the first by file name
counts.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import pyarrow as pa

from cache_store.storage import Storage
from pipeline.tables import list_tables, read_table, write_table

Place = tuple[str, int]
"""(object name, row)."""

_SCHEMA = pa.schema(
    {
        "sample_id": pa.string(),
        "turn": pa.int32(),
        "turns": pa.int32(),
        "token_ids": pa.list_(pa.int32()),
        "spans": pa.list_(pa.list_(pa.int32())),
        "finish_reasons": pa.list_(pa.string()),
        "answers": pa.list_(pa.string()),
        "domain": pa.string(),
        "ended": pa.string(),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """A conversation after one turn of the target."""

    sample_id: str
    """Id of the conversation."""
    turn: int
    """0-based turn that this row answers."""
    turns: int
    """User turns that the conversation asks for."""
    token_ids: list[int]
    """The engine's own: context and generated ids. Empty: the turn was not answered, `ended` says why."""
    spans: list[tuple[int, int]]
    """[start, end) of the generated tokens of each answer in `token_ids`: what is supervised."""
    finish_reasons: list[str]
    """Of each answer so far: "stop" or "length"."""
    answers: list[str]
    """Text of each answer so far; for people, and for templates that rewrite history."""
    domain: str | None
    ended: str | None = None
    """Why no later turn follows although the conversation asks for more."""


@dataclass(frozen=True, slots=True)
class TurnIndex:
    """Where the responses of one turn are, and which conversations ended there."""

    places: dict[str, Place]
    ended: dict[str, str]
    """Reason by sample id."""
    unanswered: frozenset[str]
    """Conversations whose row says only that this turn was not answered."""


def write_responses(storage: Storage, rows: Sequence[Response]) -> None:
    """Commit rows of one turn as one new file."""
    if not rows:
        return
    table = pa.Table.from_pylist([asdict(row) for row in rows], schema=_SCHEMA)
    write_table(storage, f"{_folder(rows[0].turn)}{uuid.uuid4().hex}.parquet", table)


def index_turn(storage: Storage, turn: int) -> TurnIndex:
    """The committed responses of a turn."""
    places: dict[str, Place] = {}
    ended: dict[str, str] = {}
    unanswered: set[str] = set()
    for name in list_tables(storage, _folder(turn)):
        table = read_table(storage, name, columns=["sample_id", "ended", "spans"])
        spans = table.column("spans").combine_chunks().value_lengths().to_pylist()
        rows = zip(table.column("sample_id").to_pylist(), table.column("ended").to_pylist(), spans, strict=True)
        for row, (sample_id, reason, answers) in enumerate(rows):
            if sample_id in places:
                continue
            places[sample_id] = (name, row)
            if reason is not None:
                ended[sample_id] = reason
            if not answers:
                unanswered.add(sample_id)
    return TurnIndex(places=places, ended=ended, unanswered=frozenset(unanswered))


def load_responses(storage: Storage, places: Sequence[Place]) -> list[Response]:
    """The responses at the given places, in that order."""
    tables: dict[str, pa.Table] = {}
    found = []
    for name, row in places:
        if name not in tables:
            tables[name] = read_table(storage, name)
        value = tables[name].slice(row, 1).to_pylist()[0]
        value["spans"] = [(start, end) for start, end in value["spans"]]
        found.append(Response(**value))
    return found


def _folder(turn: int) -> str:
    return f"responses/turn-{turn:02d}/"
