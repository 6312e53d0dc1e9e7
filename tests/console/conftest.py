"""Fixtures of the browser's tests. They are skipped, with the reason, where no browser is installed.

All of them share a browser, which takes longer to start than a test to run, and so the loop that it is spoken to in.
Each page has a context of its own: storage, permissions and caches are nobody else's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio

from tests.console.browser import DESKTOP, Tab, browser, missing, open_tab
from tests.server.conftest import Starter, starting
from tests.server.front import Front

Opener = Callable[..., Awaitable[Tab]]
LOOP = "package"  # whose loop it is


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing()
    for item in items:
        if "tests/console" not in str(item.path):
            continue
        item.add_marker(pytest.mark.asyncio(loop_scope=LOOP), append=False)  # before the one of every async test
        item.add_marker(pytest.mark.filterwarnings("default"))  # playwright's own are not ours to mend
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest_asyncio.fixture(loop_scope=LOOP)
async def start() -> AsyncIterator[Starter]:
    async with starting() as starter:
        yield starter


@pytest_asyncio.fixture(scope="package", loop_scope=LOOP)
async def opened() -> AsyncIterator[Any]:
    async with browser() as one:
        yield one


@pytest_asyncio.fixture(loop_scope=LOOP)
async def visit(opened: Any) -> AsyncIterator[Opener]:
    """Opens the console: `await visit(front, size=PHONE, color_scheme="dark")`. Every page is checked at the end."""
    tabs: list[Tab] = []

    async def opener(front: Front, size: Any = None, ready: bool = True, **options: Any) -> Tab:
        context = await opened.new_context(viewport=size or DESKTOP, **options)
        await context.grant_permissions(["clipboard-read", "clipboard-write"])
        tabs.append(await open_tab(context, front, ready=ready))
        return tabs[-1]

    yield opener
    for tab in tabs:
        await tab.page.context.close()
    for tab in tabs:
        tab.check()


@pytest.fixture
def expect() -> Any:
    from playwright.async_api import expect

    return expect
