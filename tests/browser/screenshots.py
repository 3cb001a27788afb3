"""Take the README's pictures of the console anew: `python -m tests.browser.screenshots [--seconds 150]`.

Starts a stack of its own with load and SLOs for three classes, lets the tuner work for a while, and looks at it.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import httpx

from tests.browser.visiting import DESKTOP, PHONE, Visit, chromium, find_chromium, loaded_stack, new_tab
from tests.support.up import Up

IMAGES = Path(__file__).parents[2] / "docs" / "images"
MOST_BYTES = 300_000
PATIENT_MS = 180_000
"""For what takes long on a busy machine: the tuner's first decision, a prediction."""
SLOS: Mapping[str, Mapping[str, float]] = {
    "default": {"ttft_ms": 2000, "tpot_ms": 100, "attainment": 0.9},
    "chat": {"ttft_ms": 400, "tpot_ms": 40, "attainment": 0.9},
    "code": {"ttft_ms": 800, "tpot_ms": 40, "attainment": 0.9},
    "summary": {"ttft_ms": 1500, "tpot_ms": 80, "attainment": 0.85},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=150, help="how long the stack serves before it is looked at")
    seconds = parser.parse_args().seconds
    path = find_chromium()
    if path is None:
        sys.exit("no Chromium on the PATH: install one, or name it in $CHROMIUM")
    IMAGES.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        loaded_stack(Path(folder), engines=4, rate=6) as up,
        chromium(path) as browser,
    ):
        with httpx.Client(base_url=up.stack.admin_url, headers=_token(up), timeout=60) as admin:
            admin.put("/v1/slo", json={"classes": SLOS}).raise_for_status()
        time.sleep(seconds)
        with new_tab(browser, up.stack.admin_token) as tab:
            tab.go(f"{up.stack.admin_url}/", {**DESKTOP, "height": 1080})
            _take(tab, IMAGES / "console-desktop.png")
            tab.go(f"{up.stack.admin_url}/", {**PHONE, "height": 1080}, "dark")
            _take(tab, IMAGES / "console-phone.png")


def _token(up: Up) -> Mapping[str, str]:
    return {"authorization": f"Bearer {up.stack.admin_token}"}


def _take(visited: Visit, path: Path) -> None:
    visited.until_live()
    visited.page.locator("#decision-list li").first.wait_for(timeout=PATIENT_MS)
    _predict(visited)
    visited.page.screenshot(path=path)
    size = path.stat().st_size
    print(f"{path.relative_to(IMAGES.parents[1])}: {size:,} bytes")  # noqa: T201 — a command line tells
    if size > MOST_BYTES:
        sys.exit(f"{path.name} is larger than {MOST_BYTES:,} bytes")


def _predict(visited: Visit) -> None:
    visited.page.get_by_role("button", name="Predict on recent traffic").click()
    visited.page.locator("#what-if-answer").wait_for(timeout=PATIENT_MS)
    visited.page.evaluate("scrollTo(0, 0)")


if __name__ == "__main__":
    main()
