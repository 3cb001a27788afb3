"""Sessions and roots, found again in prompts of which only sketches are known."""

import numpy as np
import pytest

from tuner.prefix import block_hashes, sketch
from tuner.sharing import LEVELS, Prompts, share, tokens_per_block

UNKNOWN = float("nan")


def text(rng: np.random.Generator, nbytes: int) -> bytes:
    return rng.integers(97, 122, nbytes, dtype=np.uint8).tobytes()


def prompts(rows: list[tuple[bytes, int, float]], per_token: int = 4) -> Prompts:
    """Rows of prompt, output tokens and cached tokens."""
    hashes = np.zeros((len(rows), LEVELS), dtype=np.uint64)
    sketches = [sketch(block_hashes(prompt)) for prompt, _, _ in rows]
    for row, found in enumerate(sketches):
        hashes[row, : len(found)] = found
    nbytes = np.array([len(prompt) for prompt, _, _ in rows], dtype=float)
    return Prompts(
        sketch=hashes,
        depth=np.array([len(found) for found in sketches], dtype=np.int64),
        nbytes=nbytes,
        tokens=nbytes // per_token,
        total_tokens=nbytes // per_token + np.array([output for _, output, _ in rows], dtype=float),
        cached_tokens=np.array([cached for _, _, cached in rows], dtype=float),
    )


def conversations(
    rng: np.random.Generator, system: bytes, hit: float, sessions: int = 60, turns: int = 5
) -> tuple[Prompts, np.ndarray]:
    """Interleaved chats behind one system prompt; a share `hit` of later turns meets the cache of the one before."""
    history = [system] * sessions
    held = [len(system) / 4] * sessions
    rows, truth = [], []
    for _, session in sorted((start + 7 * turn, start) for turn in range(turns) for start in range(sessions)):
        first = history[session] is system
        history[session] += text(rng, int(rng.integers(300, 1500)))
        cached = held[session] if first or rng.random() < hit else len(system) / 4
        rows.append((history[session], 100, cached))
        truth.append(session)
        held[session] = len(history[session]) / 4 + 100
        history[session] += text(rng, 400)
    return prompts(rows), np.array(truth)


def extending(session: np.ndarray) -> float:
    """Share of prompts that go on a session."""
    return 1 - len(np.unique(session)) / len(session)


def test_prompts_without_anything_in_common_are_alone():
    rng = np.random.default_rng(1)
    found = share(prompts([(text(rng, int(rng.integers(10, 9000))), 10, UNKNOWN) for _ in range(200)]))
    assert len(np.unique(found.session)) == len(np.unique(found.root)) == 200
    assert not found.root_tokens.any()


def test_no_prompts_share_nothing():
    assert len(share(prompts([])).session) == 0


def test_turns_of_one_conversation_are_one_session():
    rng = np.random.default_rng(2)
    first = text(rng, 3000)
    second = first + text(rng, 2500)
    third = second + text(rng, 6000)
    found = share(prompts([(prompt, 50, UNKNOWN) for prompt in (first, text(rng, 5000), second, third)]))
    assert found.session[0] == found.session[2] == found.session[3] != found.session[1]


@pytest.mark.parametrize("system_bytes", [600, 2048, 5000])
@pytest.mark.parametrize("hit", [0.1, 1.0])
def test_conversations_behind_one_system_prompt_are_told_apart(system_bytes: int, hit: float):
    rng = np.random.default_rng(3)
    chats, truth = conversations(rng, text(rng, system_bytes), hit)
    found = share(chats)
    assert extending(found.session) == pytest.approx(extending(truth), abs=0.1)
    of_root = found.root_tokens[found.root_tokens > 0]
    assert np.median(of_root) == pytest.approx(system_bytes / 4, rel=0.05)


def test_questions_on_one_document_are_sessions_of_their_own_with_the_document_as_root():
    rng = np.random.default_rng(4)
    document = text(rng, 10_000)
    asked = [(document + text(rng, int(rng.integers(50, 3000))), 80, 2500.0) for _ in range(100)]
    found = share(prompts(asked))
    assert len(np.unique(found.session)) == 100
    assert len(np.unique(found.root)) == 1
    assert set(found.root_tokens) == {2500}


def test_without_caches_a_root_is_known_within_a_factor_of_two():
    rng = np.random.default_rng(5)
    document = text(rng, 6000)
    found = share(prompts([(document + text(rng, int(rng.integers(50, 9000))), 80, UNKNOWN) for _ in range(100)]))
    assert 1024 <= found.root_tokens.max() <= 2048


def test_a_root_is_never_longer_than_a_prompt_that_has_it():
    rng = np.random.default_rng(6)
    chats, _ = conversations(rng, text(rng, 3000), 0.5)
    found = share(chats)
    assert (found.root_tokens < chats.tokens).all()


def test_the_same_prompt_again_is_the_same_session():
    rng = np.random.default_rng(7)
    prompt = text(rng, 4000)
    found = share(prompts([(prompt, 10, 0.0), (prompt, 10, 1000.0), (prompt, 10, 1000.0)]))
    assert len(np.unique(found.session)) == 1


def test_tokens_per_block_follow_the_prompts():
    rng = np.random.default_rng(8)
    rows = [(text(rng, 5120), 1, UNKNOWN)] * 3
    assert tokens_per_block(prompts(rows, per_token=5)) == pytest.approx(512 / 5, rel=0.01)
    assert tokens_per_block(prompts([])) == 128
