"""A stack with load and a real Chromium that visits its console, noting what the page asks for and complains about."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tests.support.up import Up, end_hard, environment_of, until_announced

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, ViewportSize

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE_MS = 45_000
TOKEN = "trimtab-admin-token"
DESKTOP: "ViewportSize" = {"width": 1440, "height": 900}
PHONE: "ViewportSize" = {"width": 390, "height": 844}


@contextmanager
def loaded_stack(folder: Path, engines: int, rate: float) -> Iterator[Up]:
    """A `trimtab up` with `rate` requests a second, gone at the end; it writes to `folder`."""
    output = folder / "up.out"
    ports = ("--port", "0", "--admin-port", "0")
    load = ("--engines", str(engines), "--load", "mixed", "--load-rate", str(rate))
    command = [sys.executable, "-m", "controller.cli", "up", *ports, *load]
    with output.open("w") as out:
        process = subprocess.Popen(command, env=environment_of(folder), stdout=out, stderr=out, text=True)
    try:
        yield Up(process, until_announced(process, folder / "trimtab", output), output)
    finally:
        end_hard(process)


def find_chromium() -> str | None:
    """`$CHROMIUM`, else the first browser on the PATH."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def chromium(path: str) -> Iterator["Browser"]:
    """A headless browser. Sandboxed unless run by root, for whom Chromium's sandbox does not work."""
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, chromium_sandbox=os.geteuid() != 0)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Visit:
    """A tab, which shares no cookies or storage with others, and what was noted of it."""

    page: "Page"
    requests: list[str] = field(default_factory=list)
    """Addresses of everything that the tab asked for."""
    complaints: list[str] = field(default_factory=list)
    """Errors of the page itself, and what its policy blocked; a refused request is none."""

    def go(self, url: str, viewport: "ViewportSize" = DESKTOP, colours: Literal["light", "dark"] = "light") -> "Page":
        """Load the console at `url` anew."""
        self.page.set_viewport_size(viewport)
        self.page.emulate_media(color_scheme=colours)
        self.page.goto(url)
        return self.page

    def note(self, message: "ConsoleMessage") -> None:
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            self.complaints.append(message.text)

    def until_live(self) -> None:
        """Wait for the first figures."""
        from playwright.sync_api import expect

        expect(self.page.locator("#fact-updated")).not_to_have_text("not yet")


@contextmanager
def new_tab(browser: "Browser", token: str | None = None) -> Iterator[Visit]:
    """An empty tab of its own; as of somebody who has given `token` already."""
    context = browser.new_context(reduced_motion="reduce")
    context.set_default_timeout(PATIENCE_MS)
    if token is not None:
        # In empty documents there is no storage to write to.
        keep = f"sessionStorage.setItem({json.dumps(TOKEN)}, {json.dumps(token)})"
        context.add_init_script(f"if (location.protocol !== 'about:') {keep}")
    visit = Visit(context.new_page())
    context.on("request", lambda request: visit.requests.append(request.url))
    visit.page.on("console", visit.note)
    visit.page.on("pageerror", lambda error: visit.complaints.append(str(error)))
    try:
        yield visit
    finally:
        context.close()
