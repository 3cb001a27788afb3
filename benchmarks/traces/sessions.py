"""What Mooncake's block hashes say of who shares what, as far as a `Workload` can say it.

An id stands for a block of 512 tokens and all before it, so that equal ids mean equal beginnings. A request whose ids
go on from the whole blocks of an earlier one is the next turn of that one's session; any other begins a session. All
prompts begin with the same block: the root. What two sessions share beyond it, such as a document asked about twice or
an answer made again, has no place in a workload, which knows one root a session; `shared_tokens` and `kept_tokens` tell
how much that is.
"""

from collections.abc import Sequence

import numpy as np

from tuner.workload import Ints, Workload

BLOCK_TOKENS = 512
ROOT_BLOCKS = 1


def sessions_of(hash_ids: Sequence[Sequence[int]], prompt_tokens: Ints) -> Ints:
    """The session of each request; requests must be in the order in which they came."""
    ends: dict[int, int] = {}
    """Id of the last whole block of a session's latest prompt -> session."""
    last: list[int | None] = []
    """That id by session; `None` where the prompt has no whole block but the root's."""
    found = np.empty(len(hash_ids), dtype=np.int64)
    for row, ids in enumerate(hash_ids):
        session = next((ends[each] for each in reversed(ids[ROOT_BLOCKS:]) if each in ends), None)
        if session is None:
            session = len(last)
            last.append(None)
        if (earlier := last[session]) is not None:
            ends.pop(earlier, None)
        whole = int(prompt_tokens[row]) // BLOCK_TOKENS
        latest = last[session] = ids[whole - 1] if whole > ROOT_BLOCKS else None
        if latest is not None:
            ends[latest] = session
        found[row] = session
    return found


def shared_tokens(hash_ids: Sequence[Sequence[int]], prompt_tokens: Ints) -> int:
    """Prompt tokens in blocks that came before: what a cache without bounds would save."""
    seen: set[int] = set()
    saved = 0
    for ids, tokens in zip(hash_ids, prompt_tokens, strict=True):
        known = next((at for at, each in enumerate(ids) if each not in seen), len(ids))
        saved += min(known * BLOCK_TOKENS, int(tokens))
        seen.update(ids)
    return saved


def kept_tokens(workload: Workload) -> int:
    """The same of a workload, where a next turn also finds the answer before it."""
    sessions: dict[int, int] = {}
    roots: dict[int, int] = {}
    saved = 0
    columns = (workload.session, workload.root, workload.root_tokens, workload.prompt_tokens, workload.output_tokens)
    for session, root, root_tokens, prompt, output in zip(*(column.tolist() for column in columns), strict=True):
        own, common = sessions.get(session, 0), min(roots.get(root, 0), root_tokens)
        saved += min(max(own, common), prompt)
        sessions[session] = max(own, prompt + output)
        roots[root] = max(roots.get(root, 0), min(root_tokens, prompt))
    return saved
