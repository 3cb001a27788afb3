"""Made-up log probabilities: well-formed, and the same for the same token."""

from collections.abc import Sequence
from typing import Any

from engines.emulated.language import Language
from engines.emulated.stops import Piece


def completion_logprobs(language: Language, pieces: Sequence[Piece], top: int, offset: int) -> dict[str, Any]:
    """The `logprobs` of a completion choice whose text of `pieces` begins at character `offset`."""
    offsets = []
    for piece in pieces:
        offsets.append(offset)
        offset += len(piece.text)
    return {
        "tokens": [piece.text for piece in pieces],
        "token_logprobs": [_own(piece.token) for piece in pieces],
        "top_logprobs": [dict(_ranked(language, piece, top)) if top else None for piece in pieces],
        "text_offset": offsets,
    }


def chat_logprobs(language: Language, pieces: Sequence[Piece], top: int) -> dict[str, Any]:
    """The `logprobs` of a chat choice."""
    content = [
        {
            **_entry(piece.text, _own(piece.token)),
            "top_logprobs": [_entry(*pair) for pair in _ranked(language, piece, top)],
        }
        for piece in pieces
    ]
    return {"content": content, "refusal": None}


def _own(token: int | None) -> float:
    """Between −0.5 and 0."""
    return -((token or 0) % 97 + 1) / 200


def _ranked(language: Language, piece: Piece, top: int) -> list[tuple[str, float]]:
    """The token itself, then made-up alternatives, ever less likely."""
    if top == 0:
        return []
    ids = language.token_ids
    others = [language.text(ids[((piece.token or 0) + 1 + rank) % len(ids)]) for rank in range(top)]
    ranked = [(text, _own(piece.token) - 1.0 - rank) for rank, text in enumerate(others) if text != piece.text]
    return [(piece.text, _own(piece.token)), *ranked][:top]


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
