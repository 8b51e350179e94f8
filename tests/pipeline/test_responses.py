from __future__ import annotations

from pathlib import Path

from cache_store.storage import open_storage
from pipeline.responses import Response, index_turn, load_responses, write_responses
from pipeline.tables import list_tables


def response(name: str, *, turn: int = 0, ids: tuple[int, ...] = (1, 2, 3), ended: str | None = None) -> Response:
    return Response(
        sample_id=name,
        turn=turn,
        turns=2,
        token_ids=list(ids),
        spans=[(1, len(ids))] if ids else [],
        finish_reasons=["stop"] if ids else [],
        answers=["text"] if ids else [],
        domain=None,
        ended=ended,
    )


def test_rows_come_back_and_duplicates_resolve_by_name(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    write_responses(storage, [response("a"), response("b", ended="cut")])
    write_responses(storage, [response("a", ids=(9, 9)), response("c", ids=(), ended="failed")])
    write_responses(storage, [response("a", turn=1)])
    write_responses(storage, [])
    assert len(list_tables(storage, "responses/")) == 3
    index = index_turn(storage, 0)
    assert set(index.places) == {"a", "b", "c"}
    assert index.places["a"][0] == list_tables(storage, "responses/turn-00/")[0]
    assert index.places == index_turn(storage, 0).places
    assert index.ended == {"b": "cut", "c": "failed"}
    assert index.unanswered == {"c"}
    assert [row.sample_id for row in load_responses(storage, [index.places["c"], index.places["b"]])] == ["c", "b"]
    assert load_responses(storage, [index.places["b"]])[0] == response("b", ended="cut")
    assert set(index_turn(storage, 1).places) == {"a"}
    assert index_turn(storage, 7).places == {}
