"""The console in a headless Chromium: pages that must not complain and must not ask anybody else for anything."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.server.front import Front

DESKTOP = {"width": 1440, "height": 900}
PHONE = {"width": 390, "height": 844}
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def missing() -> str | None:
    """Why the tests cannot run here; None: they can."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed: `make test-console` installs it"
    if chromium() is None and not any(_fetched().glob("chromium*")):
        return "no chromium is on the path: install one, or run `make test-console`"
    return None


def _fetched() -> Path:
    """Where playwright keeps the browsers that it fetched."""
    return Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache" / "ms-playwright")


def chromium() -> str | None:
    """None: the one that playwright brought."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


@dataclass
class Tab:
    """A page and what it said."""

    page: Any
    front: Front
    complaints: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)  # every URL

    async def idle(self) -> None:
        """Until no answer is on its way."""
        await self.page.wait_for_selector("#send:visible", timeout=20_000)

    async def say(self, text: str) -> None:
        await self.page.fill("#text", text)
        await self.page.press("#text", "Enter")
        await self.idle()

    def button(self, name: str) -> Any:
        return self.page.get_by_role("button", name=name, exact=True)

    async def texts(self, selector: str) -> list[str]:
        return [text.strip() for text in await self.page.locator(selector).all_inner_texts()]

    def check(self) -> None:
        """That nothing went wrong on the page that it did not show, and that all requests stayed at home."""
        assert not [text for text in self.complaints if "Failed to load resource" not in text], self.complaints
        home = urlsplit(self.front.url).netloc
        fetched = [url for url in self.asked if urlsplit(url).scheme not in ("data", "blob")]
        away = [url for url in fetched if urlsplit(url).netloc != home]
        assert not away, f"asked elsewhere: {away}"


@asynccontextmanager
async def browser() -> AsyncIterator[Any]:
    from playwright.async_api import async_playwright

    async with async_playwright() as driver:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        opened = await driver.chromium.launch(executable_path=chromium(), args=flags)
        try:
            yield opened
        finally:
            await opened.close()


async def open_tab(context: Any, front: Front, *, ready: bool = True) -> Tab:
    from playwright.async_api import expect

    page = await context.new_page()
    tab = Tab(page, front)
    page.on("console", lambda message: tab.complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: tab.complaints.append(str(error)))
    page.on("request", lambda request: tab.asked.append(request.url))
    await page.goto(front.url)
    if ready:
        await expect(page.locator("#state")).to_have_text("ready")
    return tab
