"""The pages in a real Chromium without a window: what they show, where they keep the key, and that all can read them."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
from http_server import AUTH, CHAT, SECRET, running

pytestmark = pytest.mark.http
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; it drives the browser")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as driver:
        path = CHROMIUM or driver.chromium.executable_path
        if not Path(path).exists():
            pytest.skip("no Chromium here; apt-get install chromium, or playwright install chromium, brings one")
        found = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


@pytest.fixture
def tab(browser, server):
    """tab(path, ...): a page of the server in a tab of its own; what goes wrong in it, or leaves the host, fails the test."""
    wrong, contexts = [], []

    def opened(path, *, key=SECRET, width=1280, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if said.type == "error" and "401" not in said.text else None)
        page.on("request", lambda sent: None if sent.url.startswith(server.url) else wrong.append(sent.url))
        if key is not None:
            page.add_init_script(f"sessionStorage.setItem('trivium-key', '{key}')")
        page.goto(server.url + path)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []


def until(page, script):
    page.wait_for_function(script)


def test_the_dashboard_asks_for_the_key_and_keeps_it_in_the_tab(tab, http):
    http.post("/v1/chat/completions", json=CHAT)
    page = tab("/dashboard", key=None)
    page.get_by_label("API key").fill("wrong")
    page.get_by_role("button", name="Use it").click()
    page.get_by_text("the API key is not known here").wait_for()
    assert page.locator("#flows tr").count() == 0
    page.get_by_label("API key").fill(SECRET)
    page.get_by_role("button", name="Use it").click()
    page.locator("#flows tr").first.wait_for()
    assert "serving" in page.locator("#state").inner_text() and not page.locator("#key-panel").is_visible()
    assert page.evaluate("[Object.values(sessionStorage), localStorage.length, document.cookie]") == [[SECRET], 0, ""]
    page.get_by_role("button", name="Key").click()
    page.get_by_role("button", name="Forget it").click()
    page.get_by_text("a key is needed").wait_for()
    assert page.evaluate("sessionStorage.length") == 0


def test_the_figures_are_those_of_the_data(tab, http):
    http.post("/v1/chat/completions", json={**CHAT, "max_completion_tokens": 7})
    page = tab("/dashboard")
    page.locator("#flows tr").first.wait_for()
    assert "→ 7" in page.locator("#flows tr").first.inner_text()
    assert page.locator("#flows tr").count() == len(http.get("/dashboard/data/5").json()["requests"])
    assert page.locator(".model h3").all_inner_texts() == ["tiny"] and "reference:0" in page.locator(".model").inner_text()
    until(page, "document.querySelectorAll('#first-chart svg .dot, #first-chart svg .line').length >= 3")
    assert page.locator("#all-times tr").count() == 7
    page.get_by_label("15 min").check()
    page.get_by_text("15 min ago").first.wait_for()


def test_a_chat_streams_the_servers_answer_and_its_times(tab, http, server):
    page = tab("/dashboard")
    page.locator(".model").first.wait_for()
    go_on = threading.Event()
    server.llm.async_engine._commands.put(go_on.wait)  # the engine holds still, so there is something to stop
    try:
        page.get_by_label("Message").fill("never answered")
        page.get_by_role("button", name="Send").click()
        page.get_by_role("button", name="Stop").click()
        page.get_by_text("stopped").wait_for()
    finally:
        go_on.set()
    page.get_by_label("Message").fill("hello")
    page.keyboard.press("Enter")
    page.get_by_text("first after").wait_for()
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    want = http.post("/v1/chat/completions", json=asked).json()
    assert page.locator(".said.mine").last.inner_text() == "hello"
    assert page.locator(".said.theirs").text_content() == want["choices"][0]["message"]["content"]
    assert f"{want['usage']['completion_tokens']} tokens" in page.locator(".figures").last.inner_text()
    page.get_by_role("button", name="Clear").click()
    assert page.locator(".said").count() == 0


def test_charts_are_read_with_the_keys(tab, http):
    page = tab("/dashboard")
    page.locator(".model").first.wait_for()
    page.locator("#requests-chart").focus()
    tip = page.locator("#requests-chart .tip")
    page.keyboard.press("ArrowLeft")
    assert "ago" in tip.inner_text() and "running" in tip.inner_text()
    page.keyboard.press("Escape")
    assert not tip.is_visible()


CONTRAST = """(grounds) => {
  const light = (text) => {
    const parts = text.match(/[\\d.]+/g).map((part) => part / 255);
    const [r, g, b] = parts.map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const probe = document.body.appendChild(document.createElement("i"));
  const of = (name) => { probe.style.color = `var(--${name})`; return light(getComputedStyle(probe).color); };
  const found = {};
  for (const ground of grounds)
    for (const ink of ["ink", "muted", "queue", "prefill", "decode", "bad"]) {
      const [a, b] = [of(ground), of(ink)].sort((x, y) => y - x);
      found[`${ink} on ${ground}`] = (a + 0.05) / (b + 0.05);
    }
  return found;
}"""
NAMELESS = """() => {
  const wanted = "button, input, select, textarea, [role=img], [tabindex='0']";
  const named = (one) => one.labels?.length || one.ariaLabel || one.getAttribute("aria-labelledby") || one.innerText?.trim();
  return [...document.querySelectorAll(wanted)].filter((one) => !named(one)).map((one) => one.outerHTML);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", ["/dashboard", "/docs"])
def test_all_can_read_it(tab, http, path, scheme):
    http.post("/v1/chat/completions", json=CHAT)
    page = tab(path, scheme=scheme, width=390)
    page.locator(".model, .op").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert {name: ratio for name, ratio in page.evaluate(CONTRAST, ["card", "well"]).items() if ratio < 4.5} == {}
    assert page.evaluate(NAMELESS) == []
    assert page.evaluate("document.documentElement.lang") == "en" and page.locator("h1").count() == 1


def test_the_docs_show_every_operation_and_its_fields(tab, http):
    document = http.get("/openapi.json").json()
    page = tab("/docs")
    page.locator(".op").first.wait_for()
    want = sorted(f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods)
    verbs, paths = (page.locator(f".op > summary > {part}").all_inner_texts() for part in (".verb", "code"))
    assert sorted(f"{verb} {path}" for verb, path in zip(verbs, paths)) == want
    page.locator("#post_v1_chat_completions > summary").click()
    table = page.locator("#post_v1_chat_completions .inside table").first
    table.wait_for()  # it is made once it is opened
    fields = table.locator("tbody > tr > td:first-child > code").all_inner_texts()
    schema = document["components"]["schemas"]["ChatRequest"]
    assert set(fields) == set(schema["properties"])
    needed = table.locator("tr:has(.must) > td:first-child > code").all_inner_texts()
    assert needed == schema["required"]
    page.get_by_label("Find").fill("xtc_probability")
    shown = page.locator(".op:visible > summary > code").all_inner_texts()
    assert "/v1/chat/completions" in shown and "/health" not in shown


def test_a_server_that_goes_away_is_said_and_figures_stay(browser, folder):
    with running(folder) as server:
        context = browser.new_context()
        page = context.new_page()
        page.add_init_script(f"sessionStorage.setItem('trivium-key', '{AUTH['authorization'].split()[1]}')")
        page.goto(server.url + "/dashboard")
        page.locator(".model").first.wait_for()
    page.get_by_text("no connection, trying again").wait_for(timeout=30_000)
    assert page.locator(".model").count() == 1
    context.close()
