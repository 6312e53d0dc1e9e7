"""Fixtures of the browser's tests. They are skipped, with the reason, where no browser is installed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tests.console.browser import DESKTOP, Tab, browser, missing, open_tab
from tests.server.conftest import start  # noqa: F401  a fixture
from tests.server.front import Front

Opener = Callable[..., Awaitable[Tab]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing()
    for item in items:
        if "tests/console" not in str(item.path):
            continue
        item.add_marker(pytest.mark.filterwarnings("default"))  # playwright's own are not ours to mend
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
async def visit() -> AsyncIterator[Opener]:
    """Opens the console: `await visit(front, size=PHONE, color_scheme="dark")`. Every page is checked at the end."""
    tabs: list[Tab] = []
    async with browser() as opened:

        async def opener(front: Front, size: Any = None, ready: bool = True, **options: Any) -> Tab:
            context = await opened.new_context(viewport=size or DESKTOP, **options)
            await context.grant_permissions(["clipboard-read", "clipboard-write"])
            tabs.append(await open_tab(context, front, ready=ready))
            return tabs[-1]

        yield opener
        for tab in tabs:
            tab.check()
