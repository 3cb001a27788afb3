"""The console in a real Chromium, over a real stack with load."""

import re
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import pytest
from redis import Redis

from controller.decisions import DecisionRecord
from controller.store import Keys
from tests.browser.conftest import OpenConsole
from tests.browser.visiting import DESKTOP, PHONE, TOKEN, Visit, new_tab
from tests.support.up import Up, wait_until
from tuner.types import CHANGES, Mode, Reason

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: `make test` does that").expect

START_S = 90.0
"""Until the tuner of a new stack has warmed up and observed traffic."""

STOP = """(() => {
  const at = document.activeElement;
  const seen = getComputedStyle(at).outlineStyle !== "none" && at.getBoundingClientRect().width > 0;
  return { id: at.id || at.outerHTML.slice(0, 80), seen };
})()"""
"""What has the focus, and whether that can be seen."""


def number(text: str | None) -> float:
    found = re.search(r"[\d.]+", text or "")
    return float(found.group()) if found else 0.0


def routers_have_slos(operator: httpx.Client, version: int) -> bool:
    return all(each["slo_version"] >= version for each in operator.get("routers").json()["routers"])


def confirm(page: "Page", verb: str, reason: str | None = None) -> None:
    dialog = page.get_by_role("dialog")
    if reason is not None:
        dialog.get_by_label("Reason").fill(reason)
    dialog.get_by_role("button", name=verb).click()
    expect(dialog).to_be_hidden()


def painted(page: "Page", chart: str) -> int:
    """Pixels of a chart that are not empty."""
    count: int = page.locator(f"{chart} canvas").evaluate(
        "canvas => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data"
        ".filter((value, index) => index % 4 === 3 && value > 0).length"
    )
    return count


def test_goodput_moves(open_console: OpenConsole) -> None:
    page = open_console()
    goodput = page.locator("#now-goodput")
    expect(goodput).to_have_text(re.compile(r"^[1-9]\d*\.|^0\.[1-9]|^0\.0[1-9]"))
    first = goodput.text_content()
    expect(goodput).not_to_have_text(first or "")
    assert painted(page, "#goodput-chart") > 1000
    label = page.locator("#goodput-chart").get_attribute("aria-label") or ""
    assert label.startswith("Goodput: ")
    assert "offered" in label


def test_everything_in_force_is_shown(open_console: OpenConsole, up: Up, operator: httpx.Client) -> None:
    page = open_console()
    expect(page.locator("#fact-model")).to_have_text(up.stack.model)
    expect(page.locator("#fact-mode")).to_have_text("auto")
    for engine in ("e0", "e1"):
        expect(page.locator("#engines tbody tr", has_text=engine)).to_contain_text(re.compile("prefill|decode|mixed"))
    expect(page.locator("#routers tbody tr")).to_contain_text("in force")
    version = operator.get("plan").json()["version"]
    expect(page.locator("#plan-facts")).to_contain_text(re.compile(rf"v{version}|v{version + 1}"))
    expect(page.locator("#why")).to_contain_text("Mode is auto")
    expect(page.locator("#classes tbody tr")).to_contain_text("default")


def test_decisions_are_listed_with_reasons_newest_first(open_console: OpenConsole, up: Up) -> None:
    write_decisions(up, Reason.DWELL, Reason.BETTER_PLAN)
    page = open_console()
    newest, second = (page.locator("#decision-list li").nth(index) for index in (0, 1))
    expect(newest).to_contain_text("better plan")
    expect(newest).to_contain_text("v7 → v8")
    expect(newest).to_contain_text("as the test says: better_plan")
    expect(second).to_contain_text("dwell")
    write_decisions(up, Reason.ROLLED_BACK)
    expect(newest).to_contain_text("rolled back")
    page.get_by_label("Only changes of the plan").check()
    expect(page.locator("#decision-list li", has_text="as the test says: dwell")).to_have_count(0)
    expect(newest).to_be_visible()


def write_decisions(up: Up, *reasons: Reason) -> None:
    """As a leading controller that lives a day from now, so that the stack's own decisions do not come before."""
    with Redis.from_url(up.stack.redis_url) as client:
        for reason in reasons:
            record = DecisionRecord(
                at_s=time.time() + 86_400,
                controller_id="test",
                mode=Mode.AUTO,
                reason=reason,
                sentence=f"as the test says: {reason}",
                plan_version=7,
                published_version=8 if reason in CHANGES else None,
                tick_s=0.1,
            )
            client.xadd(Keys(up.stack.model).decisions, {"value": record.model_dump_json()})


def test_a_changed_slo_takes_effect(open_console: OpenConsole, operator: httpx.Client) -> None:
    page = open_console()
    form = page.locator("#slo-forms form[data-key=default]")
    form.get_by_label("TTFT bound, ms").fill("1234")
    form.get_by_role("button", name="Save").click()
    expect(page.locator("#slo-done")).to_have_text(re.compile(r"SLO version \d+: applied by 1 of 1 routers"))
    table = operator.get("slo").json()
    assert table["classes"]["default"]["ttft_ms"] == 1234
    assert routers_have_slos(operator, table["version"])
    expect(page.locator("#classes tbody tr")).to_contain_text("1.23 s".replace(" ", "\u202f"))


@pytest.mark.parametrize(
    ("field", "typed", "sentence"),
    [
        ("TTFT bound, ms", "0", "ttft_ms: Input should be greater than 0 (got 0)"),
        ("TPOT bound, ms", "fast", "tpot_ms: Input should be a valid number"),
    ],
)
def test_a_bad_value_is_a_sentence_at_its_field(
    open_console: OpenConsole, operator: httpx.Client, field: str, typed: str, sentence: str
) -> None:
    before = operator.get("slo").json()
    page = open_console()
    form = page.locator("#slo-forms form[data-key=default]")
    form.get_by_label(field).fill(typed)
    form.get_by_role("button", name="Save").click()
    expect(form.get_by_role("alert")).to_contain_text(sentence)
    expect(form.get_by_label(field)).to_have_attribute("aria-invalid", "true")
    expect(form.get_by_label(field)).to_be_focused()
    expect(form.get_by_label(field)).to_have_value(typed)
    assert operator.get("slo").json() == before


def test_a_class_is_added_and_removed(open_console: OpenConsole, operator: httpx.Client) -> None:
    page = open_console()
    page.get_by_text("Add a class").click()
    form = page.locator("#slo-add form")
    for field, value in {"Class": "chat", "TTFT bound, ms": "500", "TPOT bound, ms": "50"}.items():
        form.get_by_label(field, exact=True).fill(value)
    form.get_by_role("button", name="Add class").click()
    expect(page.locator("#classes tbody tr", has_text="chat")).to_be_visible()
    assert operator.get("slo").json()["classes"]["chat"]["attainment"] == 0.9
    page.get_by_role("button", name="Remove class chat").click()
    confirm(page, "Remove")
    expect(page.locator("#classes tbody tr", has_text="chat")).to_have_count(0)
    assert list(operator.get("slo").json()["classes"]) == ["default"]


def test_a_plan_is_pinned_and_unpinned(open_console: OpenConsole, operator: httpx.Client) -> None:
    page = open_console()
    page.get_by_role("button", name="Pin this plan").click()
    confirm(page, "Pin", reason="load test tonight")
    expect(page.locator("#fact-mode")).to_have_text("manual")
    mode = operator.get("mode").json()
    assert (mode["mode"], mode["reason"]) == ("manual", "load test tonight")
    page.get_by_role("button", name="Unpin").click()
    confirm(page, "Unpin")
    expect(page.locator("#fact-mode")).to_have_text("auto")
    assert operator.get("mode").json()["mode"] == "auto"


def test_an_earlier_plan_is_rolled_back_to(open_console: OpenConsole, operator: httpx.Client) -> None:
    operator.put("mode", json={"mode": "manual"}).raise_for_status()
    for pattern in ("disaggregated", "data_parallel"):
        operator.put("plan", json={"pattern": pattern}).raise_for_status()
    current = operator.get("plan").json()["version"]
    page = open_console()
    page.get_by_text("Earlier plans").click()
    page.get_by_role("button", name=f"Roll back to plan v{current - 1}", exact=True).click()
    confirm(page, "Roll back")
    expect(page.locator("#fact-plan")).to_have_text(f"v{current + 1} disaggregated")
    expect(page.locator("#routers tbody tr")).to_contain_text(f"v{current + 1}, in force")
    assert operator.get("plan").json()["pattern"] == "disaggregated"


def test_the_mode_is_switched(open_console: OpenConsole, operator: httpx.Client) -> None:
    page = open_console()
    page.get_by_label("advisory").check()
    page.locator("#mode").get_by_label("Reason").fill("only watching")
    page.get_by_role("button", name="Set mode").click()
    expect(page.locator("#fact-mode")).to_have_text("advisory")
    mode = operator.get("mode").json()
    assert (mode["mode"], mode["reason"]) == ("advisory", "only watching")


def test_an_engine_is_drained_and_takes_work_again(open_console: OpenConsole, operator: httpx.Client) -> None:
    page = open_console()
    page.get_by_role("button", name="Drain engine e0", exact=True).click()
    confirm(page, "Drain")
    expect(page.locator("#engines tbody tr", has_text="e0")).to_contain_text("drains")
    page.get_by_role("button", name="Undrain engine e0").click()
    expect(page.get_by_role("button", name="Drain engine e0", exact=True)).to_be_visible()
    wait_until(lambda: not operator.get("engines").json()["engines"][0]["load"]["draining"], "e0 takes work")


def test_everything_can_be_done_by_keyboard(open_console: OpenConsole, operator: httpx.Client) -> None:
    page = open_console()
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to the figures")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()
    reached = tab_until(page, "document.activeElement.name === 'tpot_ms'")
    assert {"span", "only-changes", "pin"} <= reached
    page.keyboard.press("Control+a")
    page.keyboard.type("77")
    page.keyboard.press("Enter")
    expect(page.locator("#slo-done")).to_have_text(re.compile("applied by 1 of 1 routers"))
    assert operator.get("slo").json()["classes"]["default"]["tpot_ms"] == 77


def tab_until(page: "Page", there: str, most: int = 80) -> set[str]:
    """Press Tab until `there` holds; ids of all stops. Fails at one that cannot be seen to have the focus."""
    stops: set[str] = set()
    for _ in range(most):
        page.keyboard.press("Tab")
        stop: dict[str, Any] = page.evaluate(STOP)
        assert stop["seen"], f"no visible focus on {stop['id']}"
        stops.add(stop["id"])
        if page.evaluate(there):
            return stops
    pytest.fail(f"not reached by {most} Tabs: {there}; stops were {sorted(stops)}")


def test_a_phone_shows_all_without_scrolling_sideways(open_console: OpenConsole) -> None:
    page = open_console(viewport=PHONE)
    expect(page.locator("#classes tbody tr")).to_be_visible()
    for width in (PHONE["width"], 320):
        page.set_viewport_size({"width": width, "height": PHONE["height"]})
        assert page.evaluate("document.documentElement.scrollWidth") == width
        for section in ("goodput", "fleet", "decisions", "plan", "what-if", "slo"):
            box = page.locator(f"#{section}").bounding_box()
            assert box is not None
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= width


def test_no_request_leaves_the_host(open_console: OpenConsole, tab: Visit, up: Up) -> None:
    page = open_console()
    expect(page.locator("#now-goodput")).not_to_have_text("–")
    assert {urlsplit(url).netloc for url in tab.requests} == {urlsplit(up.stack.admin_url).netloc}
    assert {"console.js", "uPlot.js", "live"} <= {urlsplit(url).path.rpartition("/")[2] for url in tab.requests}


def test_the_token_is_asked_once_and_kept_in_this_tab_only(browser: "Browser", up: Up) -> None:
    with new_tab(browser) as visited:
        page = visited.go(f"{up.stack.admin_url}/")
        dialog = page.get_by_role("dialog", name="Admin token")
        dialog.get_by_label("Token").fill("wrong")
        page.keyboard.press("Enter")
        expect(dialog.get_by_role("alert")).to_contain_text("not the admin token")
        dialog.get_by_label("Token").fill(up.stack.admin_token)
        page.keyboard.press("Enter")
        visited.until_live()
        page.reload()
        visited.until_live()
        expect(dialog).to_be_hidden()
        kept = page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]")
        assert kept == [1, 0, ""]
        page.get_by_role("button", name="Forget token").click()
        expect(dialog).to_be_visible()
        assert page.evaluate(f"sessionStorage.getItem('{TOKEN}')") is None
        page.keyboard.press("Escape")
        expect(page.locator("#trouble")).to_contain_text("admin token")
        expect(page.locator("#trouble").get_by_role("button", name="Enter token")).to_be_visible()


def test_a_controller_that_does_not_answer_is_said_and_so_is_its_return(open_console: OpenConsole) -> None:
    page = open_console()
    page.context.set_offline(True)
    expect(page.locator("#trouble")).to_contain_text("The controller cannot be reached. The figures are from")
    page.context.set_offline(False)
    expect(page.locator("#trouble")).to_be_empty()


@pytest.mark.parametrize(("viewport", "colours"), [(DESKTOP, "light"), (PHONE, "dark")])
def test_axe_finds_nothing_wrong(open_console: OpenConsole, viewport: Any, colours: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = open_console(viewport=viewport, colours=colours)
    expect(page.locator("#classes tbody tr")).to_be_visible()
    for summary in page.locator("summary").all():
        summary.click()
    found = axe.run(page)
    assert len(found.response["passes"]) > 20
    assert found.violations_count == 0, found.generate_report()


def test_what_if_draws_goodput_over_offload_ratio(open_console: OpenConsole, operator: httpx.Client) -> None:
    wait_until(lambda: operator.post("what-if", json={}).is_success, "the tuner has observed traffic", START_S)
    operator.put("mode", json={"mode": "manual"}).raise_for_status()
    page = open_console()
    page.get_by_label("Engines that prefill").select_option("1")
    page.get_by_role("button", name="Predict on recent traffic").click()
    expect(page.locator("#what-if-answer")).to_be_visible(timeout=START_S * 1000)
    assert painted(page, "#what-if-chart") > 500
    assert "Predicted goodput over offload ratio: highest" in str(
        page.locator("#what-if-chart").get_attribute("aria-label")
    )
    slider = page.get_by_label("Offload ratio: share")
    slider.focus()
    page.keyboard.press("Home")
    expect(page.locator("#forecast-asked")).to_have_text("disaggregated")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#forecast-asked")).to_have_text("balanced r=0.10")
    expect(page.locator("#forecast tbody tr").first).to_contain_text(re.compile(r"\d/s".replace("/", "\u202f/")))
    page.get_by_role("button", name="Pin the plan at this ratio").click()
    confirm(page, "Pin")
    expect(page.locator("#fact-plan")).to_have_text(re.compile(r"v\d+ balanced r=0\.10"))
    plan = operator.get("plan").json()
    assert (plan["pattern"], plan["knobs"]["offload_ratio"], sorted(plan["roles"].values())) == (
        "balanced",
        0.1,
        ["decode", "prefill"],
    )
