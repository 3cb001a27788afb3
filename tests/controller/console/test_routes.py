"""The console's files: where they are, and what browsers are told about them."""

import re
from collections.abc import AsyncIterator
from importlib.resources import files

import httpx
import pytest
from pydantic import SecretStr

from controller.admin.app import create_app
from controller.admin.services import Services
from controller.console.routes import STATIC
from controller.store import MemoryStore


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    store = MemoryStore()
    transport = httpx.ASGITransport(create_app(Services.wire(store, "test-model"), SecretStr("operator")))
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
        yield client
    await store.aclose()


async def test_the_root_leads_to_the_console(client: httpx.AsyncClient) -> None:
    answer = await client.get("/", follow_redirects=True)
    assert (answer.status_code, answer.url.path) == (200, "/console/")
    assert "<title>Trimtab console</title>" in answer.text


@pytest.mark.parametrize("path", ["", "console.js", "console.css", "vendor/uPlot.js"])
async def test_every_answer_forbids_what_is_inline_or_from_elsewhere(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.get(f"/console/{path}")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-cache"


async def test_modules_are_served_as_scripts(client: httpx.AsyncClient) -> None:
    answer = await client.get("/console/console.js")
    assert "javascript" in answer.headers["content-type"]


async def test_an_unchanged_file_is_not_sent_again(client: httpx.AsyncClient) -> None:
    first = await client.get("/console/console.css")
    again = await client.get("/console/console.css", headers={"if-none-match": first.headers["etag"]})
    assert again.status_code == 304


async def test_nothing_outside_the_folder_is_served(client: httpx.AsyncClient) -> None:
    assert (await client.get("/console/..%2froutes.py")).status_code == 404


def test_the_page_has_nothing_inline_and_names_no_other_host() -> None:
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son[a-z]+=|https?://", page)
    own = [path for path in STATIC.glob("*.*") if path.suffix in {".js", ".css"}]
    assert own
    assert not [path.name for path in own if re.search(r"https?://", path.read_text())]


def test_every_file_that_the_page_and_its_modules_name_is_there() -> None:
    named = re.findall(r'(?:src|href)="([^"#]+)"', (STATIC / "index.html").read_text())
    for module in STATIC.glob("*.js"):
        named += [name.removeprefix("./") for name in re.findall(r'from "([^"]+)"', module.read_text())]
    assert {"console.js", "console.css", "vendor/uPlot.js"} <= set(named)
    assert [name for name in named if not (STATIC / name).is_file()] == []


def test_what_is_vendored_comes_with_its_licence() -> None:
    vendored = files("controller.console") / "static" / "vendor"
    assert "MIT" in (vendored / "uPlot.LICENSE.txt").read_text()
