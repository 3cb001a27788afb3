"""What a plain SGLang engine is asked once, so that engines with the verbs can be held to its answers."""

import json
from collections.abc import Mapping
from typing import Any

from tests.support.sglang import MODEL, Question

SHARED = (
    "The harbour of the old town was built by merchants who traded salt, wool and copper along the coast. Every "
    "spring the ships came in from the north with amber and furs, and left again with wine and cloth before the first "
    "storms of autumn. The customs house kept a book of every cargo, and the book says who paid, who was late and who "
    "was never seen again. A lighthouse stood at the end of the long mole, and its keeper wrote down the weather. "
)
TOPICS = ("rivers", "bread", "clocks", "horses", "bridges", "glass", "winter", "letters", "maps", "bees")
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def own_prompt(number: int) -> str:
    """About 150 tokens that share no prefix with those of another number."""
    topic = TOPICS[number]
    return f"{number}. A short text about {topic}. " + SHARED.replace("harbour", topic)


def shared_prompt(number: int) -> str:
    """The same 110 tokens, then some of its own."""
    topic = TOPICS[number]
    return SHARED + f"In those years, {topic} were what people of the town spoke about most, because the {topic} "


def completion(prompt: str, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 10, "temperature": 0, "ignore_eos": True, **more}


def chat(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, "temperature": 0, **more}


JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
ENDPOINTS: Mapping[str, Question] = {
    "models": ("/v1/models", {}),
    "chat": ("/v1/chat/completions", chat()),
    "chat stream": ("/v1/chat/completions", chat(stream=True, stream_options={"include_usage": True})),
    "chat logprobs": ("/v1/chat/completions", chat(logprobs=True, top_logprobs=2, max_tokens=4)),
    "chat json": ("/v1/chat/completions", chat(response_format=JSON_FORMAT, max_tokens=60)),
    "completion": ("/v1/completions", completion("The capital of France is")),
    "completion stream": ("/v1/completions", completion("The capital of France is", stream=True)),
    "completion logprobs": ("/v1/completions", completion("The capital of France is", logprobs=2, max_tokens=4)),
    "completion stop": ("/v1/completions", completion("Count: one two three", stop=[" six"])),
    "generate": ("/generate", {"text": "The sea is", "sampling_params": {"temperature": 0, "max_new_tokens": 6}}),
    "bad temperature": ("/v1/completions", completion("hi", temperature=-7)),
    "no messages": ("/v1/chat/completions", {"model": MODEL}),
}
"""SGLang's own endpoints, which the plugin must leave as they are."""
OWN = {f"own {number}": ("/v1/completions", completion(own_prompt(number))) for number in range(7)}
SHARING = {f"shared {number}": ("/v1/completions", completion(shared_prompt(number))) for number in range(7, 10)}
QUESTIONS: Mapping[str, Question] = {**ENDPOINTS, **OWN, **SHARING}

VOLATILE = ("id", "created", "request_id")


def comparable(answer: Any) -> Any:
    """An answer without what differs between any two answers: ids, times, cache hits and the last digits of floats."""
    if isinstance(answer, list):
        return [comparable(part) for part in answer]
    if isinstance(answer, float):
        return round(answer, 1)
    if not isinstance(answer, dict):
        return answer
    kept = {name: part for name, part in answer.items() if name not in VOLATILE}
    kept.pop("prompt_tokens_details", None)
    if "meta_info" in kept:
        kept["meta_info"] = {"completion_tokens": kept["meta_info"]["completion_tokens"]}
    return {name: comparable(part) for name, part in kept.items()}


def text_of(answer: Any) -> str:
    """What was generated, of a completion or chat, plain or streamed."""
    if isinstance(answer, list):
        return "".join(_piece(choice) for event in answer for choice in event["choices"])
    return "".join(_piece(choice) for choice in answer["choices"])


def _piece(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("message") or choice.get("delta") or {}).get("content") or "")


def city_of(answer: Any) -> str:
    return str(json.loads(text_of(answer))["city"])
