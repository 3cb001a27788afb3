"""The boards on disk are those in the code, and Grafana's own schema takes them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards.board import Board, encode
from dashboards.boards import BOARDS
from tests.support.boards import BOARD_FILES

each_board = pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)


@each_board
def test_the_file_is_what_the_code_builds(board: Board) -> None:
    (file,) = (file for file in BOARD_FILES if file.stem == board.uid)
    assert file.read_text() == encode(board), "run `python -m dashboards.build`"


@each_board
def test_grafanas_schema_keeps_all_of_it(board: Board) -> None:
    """What the schema does not know would be lost on the way through it."""
    register_default_plugins()
    document = _without_queries_of_annotations(json.loads(encode(board)))
    through = json.loads(json.dumps(Dashboard.from_json(document), cls=JSONEncoder))
    assert list(_lost(document, through, "")) == []


def _without_queries_of_annotations(document: dict[str, Any]) -> dict[str, Any]:
    """These belong to the data source, and the schema of boards does not know them."""
    document["annotations"]["list"] = []
    return document


def _lost(given: Any, kept: Any, where: str) -> Iterator[str]:
    """Where `kept` lacks what was given; that it has defaults besides is fine."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for key, value in given.items():
            yield from _lost(value, kept.get(key), f"{where}.{key}")
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for at, value in enumerate(given):
            yield from _lost(value, kept[at], f"{where}[{at}]")
    elif given != kept and given not in (False, [], {}):
        yield where
