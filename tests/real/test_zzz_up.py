"""`trimtab up` with real engines, as the README says. The name puts it last: its engines take the cores of the pair."""

import re
import signal
import subprocess
import sys

import httpx
import pytest

from engines.sglang.launcher import PYTHON_VARIABLE
from tests.support.sglang import BYTES_PER_TOKEN, START_S, environment, model_folder
from tests.support.sglang_questions import MESSAGES, chat
from tests.support.up import Up, end_hard, environment_of, records, until_announced, wait_until

TRIMTAB = [sys.executable, "-m", "controller.cli"]
ANSWER_S = 120.0


@pytest.fixture
def surroundings(tmp_path):
    return {**environment_of(tmp_path), PYTHON_VARIABLE: environment()[PYTHON_VARIABLE]}


@pytest.fixture
def up(pair, surroundings, tmp_path):
    for engine in pair.engines:
        engine.kill()
    output = tmp_path / "up.out"
    flags = ["--engine", "sglang", "--model", str(model_folder()), "--port", "0", "--admin-port", "0"]
    with output.open("w") as out:
        process = subprocess.Popen([*TRIMTAB, "up", *flags], env=surroundings, stdout=out, stderr=out, text=True)
    try:
        yield Up(process, until_announced(process, tmp_path / "trimtab", output, START_S), output)
    finally:
        end_hard(process)


def trimtab(surroundings, *arguments: str) -> str:
    done = subprocess.run([*TRIMTAB, *arguments], env=surroundings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def ask(stack, content: str) -> str:
    body = chat(messages=[{"role": "user", "content": content}])
    answer = httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=ANSWER_S)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_two_engines_a_router_and_a_plan_that_splits_prefill_from_decode(up, surroundings):
    stack = up.stack
    question = MESSAGES[0]["content"]
    assert "Paris" in ask(stack, question)
    roles = ["--role", "e0=prefill", "--role", "e1=decode"]
    knobs = ["--min-remote-tokens", "1", "--bypass-cached-fraction", "1"]
    trimtab(surroundings, "plan", "set", "disaggregated", *roles, *knobs, "--wait-s", "30")
    assert re.search("pinned: mode is manual", trimtab(surroundings, "plan", "pin"))
    assert "Paris" in ask(stack, f"Answer in one sentence. {question}")
    wait_until(lambda: len(records(stack)) == 2, "both requests are recorded")
    record = records(stack)[-1]
    assert (record.pattern, record.prefill_engine, record.decode_engine) == ("disaggregated", "e0", "e1")
    assert record.cached_tokens == record.split_end == record.prompt_tokens - 1
    assert record.transferred_bytes == BYTES_PER_TOKEN * (record.split_end - record.split_begin)
    assert up.end(signal.SIGINT) == 0
    wait_until(up.nothing_is_left, "nothing is left")
