"""The console in a headless Chromium. Runs where playwright and chromium are installed."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Starter
from tests.server.fakes import PIECES

playwright = pytest.importorskip("playwright.async_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not here"),
    pytest.mark.filterwarnings("default"),  # playwright's own are not ours to mend
]


@pytest.fixture
async def tab() -> AsyncIterator[Any]:
    """A page, which must not have complained by the end of the test: of a script, or of the content policy."""
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = await browser.new_page(viewport={"width": 1400, "height": 900})
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        yield page
        await browser.close()
        assert not [text for text in complaints if "status of 401" not in text]


async def test_chat_branch_and_watch(start: Starter, tab: Any, tmp_path: Path) -> None:
    front = await start()
    await tab.goto(front.url)
    await playwright.expect(tab.locator("#state")).to_have_text("ready")
    await playwright.expect(tab.locator("#model")).to_have_text("fake/model")
    await tab.fill("#text", "Hello there")
    await tab.click("#send")
    answer = tab.locator(".turn.assistant .token")
    await playwright.expect(answer).to_have_count(len(PIECES))
    assert await answer.all_text_contents() == list(PIECES)
    # Continue from the third token of the answer.
    await answer.nth(2).click()
    await playwright.expect(tab.locator("#branching")).to_be_visible()
    await tab.click("#send")
    await playwright.expect(tab.locator("#tree circle")).to_have_count(2)
    child = front.engine.submitted[1]
    prompt_len = len(front.engine.submitted[0].prompt_token_ids)
    assert child.terms.lineage is not None and child.terms.lineage.at == prompt_len + 3
    await playwright.expect(tab.locator("#tree text").filter(has_text=f"@{prompt_len + 3}")).to_have_count(1)
    await playwright.expect(tab.locator(".turn.assistant")).to_have_count(1)
    await playwright.expect(tab.locator(".turn.assistant .token")).to_have_count(3 + len(PIECES))
    # Another turn, from the end of the branch.
    await tab.fill("#text", "And then?")
    await tab.press("#text", "Enter")
    await playwright.expect(tab.locator("#tree circle")).to_have_count(3)
    await playwright.expect(tab.locator(".turn.user")).to_have_count(2)
    # The first answer is whole when it is chosen again.
    await tab.locator("#tree circle").last.click()
    await playwright.expect(tab.locator(".turn.assistant .token")).to_have_count(len(PIECES))
    await tab.screenshot(path=tmp_path / "console.png")
    assert (tmp_path / "console.png").stat().st_size > 10_000


async def test_errors_are_told(start: Starter, tab: Any) -> None:
    front = await start(api_key=["k"])
    await tab.goto(front.url)
    await playwright.expect(tab.locator("#state")).to_contain_text("needs an API key")
    await tab.fill("#text", "hello")
    await tab.click("#send")
    await playwright.expect(tab.locator("#note")).to_contain_text("needs an API key")
    await tab.fill("#key", "k")
    await tab.press("#key", "Tab")
    await playwright.expect(tab.locator("#state")).to_have_text("ready")
    await playwright.expect(tab.locator("#errors tbody tr").first).to_contain_text("invalid_api_key")
