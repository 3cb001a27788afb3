"""The page docs/api.md, from the admin API's OpenAPI document: `python -m controller.admin.api_page` writes it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from controller.admin.app import create_app
from controller.admin.services import Services
from controller.store import MemoryStore

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
HEAD = """# Admin API

Written by `python -m controller.admin.api_page` from the OpenAPI document that every controller serves at
`/openapi.json`; a test holds the two together. It listens on 127.0.0.1:8081 unless told otherwise; the command line
`trimtab` and the console at `/console/` are clients of it.

"""
METHODS = ("get", "put", "post", "delete")
PREFIX = "#/components/schemas/"

Schema = Mapping[str, Any]


def document() -> Schema:
    """The OpenAPI document, of an application that nobody serves."""
    return create_app(Services.wire(MemoryStore(), "model"), token=None).openapi()


def page(api: Schema) -> str:
    """The whole page as Markdown: what can be called, then the types that go in and out."""
    calls = "\n".join(_calls(api["paths"]))
    types = "\n".join(_type(name, schema) for name, schema in sorted(api["components"]["schemas"].items()))
    return (
        f"{HEAD}{api['info']['description']}\n\n{calls}\n## Types\n\nA field without a default is required.\n\n{types}"
    )


def _calls(paths: Schema) -> Iterator[str]:
    by_tag: dict[str, list[str]] = {}
    for path, methods in paths.items():
        for method in METHODS:
            if method in methods:
                call = methods[method]
                by_tag.setdefault(call["tags"][0], []).append(_row(f"{method.upper()} {path}", call))
    for tag, rows in by_tag.items():
        yield f"## Calls: {tag}\n\n| call | does | takes | answers |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"


def _row(called: str, call: Schema) -> str:
    takes = [
        f"`{each['name']}`: {_shown(each['schema'])}" for each in call.get("parameters", ()) if each["in"] == "query"
    ]
    if "requestBody" in call:
        takes.append(_shown(call["requestBody"]["content"]["application/json"]["schema"]))
    answer = call["responses"]["200"]["content"]["application/json"]["schema"]
    return f"| `{called}` | {call['summary']} | {', '.join(takes)} | {_shown(answer)} |"


def _type(name: str, schema: Schema) -> str:
    lines = [f"### {name}", ""]
    if "description" in schema:
        lines += [" ".join(schema["description"].split()), ""]
    if "enum" in schema:
        lines += [f"One of {_words(schema['enum'])}.", ""]
    if "properties" in schema:
        lines += ["| field | type | default | what |", "|---|---|---|---|"]
        lines += [
            _field(field, said, field in schema.get("required", ())) for field, said in schema["properties"].items()
        ]
        lines += [""]
    return "\n".join(lines)


def _field(name: str, said: Schema, required: bool) -> str:
    default = "" if required else f"`{_plain(said.get('default'))}`"
    return f"| `{name}` | {_shown(said)} | {default} | {_cell(said.get('description', ''))} |"


def _plain(default: object) -> str:
    """A default as JSON has it, except that whole documents are those of their own type."""
    words = {None: "null", True: "true", False: "false"}
    if isinstance(default, dict):
        return "{…}" if default else "{}"
    return words[default] if default is None or isinstance(default, bool) else str(default)


def _shown(said: Schema) -> str:
    """A schema in a few words, with its bounds; names of types lead to them."""
    if "$ref" in said:
        name = said["$ref"].removeprefix(PREFIX)
        return f"[{name}](#{name.lower()})"
    if "anyOf" in said:
        return " or ".join(_shown(each) for each in said["anyOf"])
    if "enum" in said:
        return _words(said["enum"])
    kind = said.get("type", "text")
    if kind == "array":
        return f"list of {_shown(said['items'])}" if "items" in said else _tuple(said)
    if kind == "object":
        return _map(said)
    return " ".join(filter(None, (str(kind), _bounds(said))))


def _tuple(said: Schema) -> str:
    return "list of " + " and ".join(_shown(each) for each in said.get("prefixItems", ()))


def _map(said: Schema) -> str:
    values: Sequence[Schema] = [*said.get("patternProperties", {}).values()]
    more = said.get("additionalProperties")
    values = values or ([more] if isinstance(more, Mapping) and more else [])
    return f"map of names to {_shown(values[0])}" if values else "object"


def _bounds(said: Schema) -> str:
    """≥, >, ≤ and <, as far as they are set."""
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    return ", ".join(f"{sign} {said[name]:g}" for name, sign in signs.items() if name in said)


def _words(values: Sequence[object]) -> str:
    return ", ".join(f"`{value}`" for value in values)


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


def main() -> None:
    PAGE.write_text(page(document()))


if __name__ == "__main__":
    main()
