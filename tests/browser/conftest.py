"""A stack with load, a browser, and an operator who puts everything back."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.browser.visiting import Visit, chromium, find_chromium, loaded_stack, new_tab
from tests.support.up import Up

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

OpenConsole = Callable[..., "Page"]

DEFAULT_SLOS = {"classes": {"default": {"ttft_ms": 2000, "tpot_ms": 100}}}


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """Gone with the module: Playwright keeps an event loop running, beside which no asynchronous test can run."""
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium on the PATH: install one (`apt-get install chromium`) or name it in $CHROMIUM")
    with chromium(path) as browser:
        yield browser


@pytest.fixture(scope="session")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """One stack for all tests of a worker; `operator` takes back what a test has changed."""
    with loaded_stack(tmp_path_factory.mktemp("console"), engines=2, rate=3) as up:
        yield up


@pytest.fixture
def operator(up: Up) -> Iterator[httpx.Client]:
    """The admin API, to see what the console has done."""
    headers = {"authorization": f"Bearer {up.stack.admin_token}"}
    with httpx.Client(base_url=f"{up.stack.admin_url}/v1/", headers=headers, timeout=30) as client:
        yield client
        client.put("slo", json=DEFAULT_SLOS).raise_for_status()
        client.put("mode", json={"mode": "auto"}).raise_for_status()


@pytest.fixture(scope="module")
def tab(browser: "Browser", up: Up) -> Iterator[Visit]:
    """One tab for all tests, since a new one costs seconds of processor time; `open_console` loads the page anew."""
    with new_tab(browser, up.stack.admin_token) as tab:
        yield tab


@pytest.fixture
def open_console(tab: Visit, up: Up) -> Iterator[OpenConsole]:
    """`open_console(viewport=…, colours=…)`: a page with figures.

    Fails the test if the page complains of anything, or asks another host for anything.
    """
    tab.requests.clear()
    tab.complaints.clear()

    def open_one(**how: Any) -> "Page":
        page = tab.go(f"{up.stack.admin_url}/", **how)
        tab.until_live()
        return page

    yield open_one
    tab.page.context.set_offline(False)
    tab.page.goto("about:blank")
    own = urlsplit(up.stack.admin_url).netloc
    assert tab.complaints == []
    assert {urlsplit(url).netloc for url in tab.requests} - {own, ""} == set()
