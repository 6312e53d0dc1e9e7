"""Who can use the console: by the keyboard alone, with a screen reader, in the light and in the dark, on a phone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.console.browser import DESKTOP, PHONE, Tab
from tests.console.conftest import Opener
from tests.server.conftest import Starter
from tests.server.fakes import PIECES, FakeEngine
from tests.server.test_tools import saying

AXE = Path(__file__).parents[2] / "build" / "console" / "node_modules" / "axe-core" / "axe.min.js"
RICH = (
    "# Title\n\nSome *words*, `code` and a [link](https://a.example).\n\n"
    "```py\nx = 1  # one\n```\n\n| a | b |\n|-|-|\n| 1 | 2 |"
)


async def faults(tab: Tab) -> list[str]:
    """What axe finds, but for what it calls minor."""
    await tab.page.evaluate(AXE.read_text())
    found = await tab.page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    return [
        f"{fault['impact']} {fault['id']}: {node['html'][:160]} {node['any'][0]['message'] if node['any'] else ''}"
        for fault in found["violations"]
        if fault["impact"] in ("moderate", "serious", "critical")
        for node in fault["nodes"]
    ]


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not installed: `make test-console` installs it")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
async def test_axe_finds_nothing(start: Starter, visit: Opener, expect: Any, size: Any, scheme: str) -> None:
    front = await start(FakeEngine(saying(RICH, 6)))
    tab = await visit(front, size, color_scheme=scheme, reduced_motion="reduce")
    assert await faults(tab) == []
    await tab.say("Hello there")
    await tab.button("Ask again").click()
    await tab.idle()
    assert await faults(tab) == []
    await tab.button("Branch at a token").click()
    await tab.page.locator(".tokens .token").nth(2).click()
    assert await faults(tab) == []
    for name in ("branches", "watch"):
        await tab.page.click(f"#open-{name}")
        await expect(tab.page.locator(f"#{name}")).to_be_visible()
        assert await faults(tab) == []
        await tab.page.click("#close-panel")
    await tab.page.click("#open-settings")
    await tab.page.locator("dialog details").evaluate_all("folds => folds.forEach((fold) => { fold.open = true; })")
    assert await faults(tab) == []


async def test_the_keyboard_is_enough(start: Starter, visit: Opener, expect: Any) -> None:
    """No pointer is used: every step is a key."""
    front = await start()
    tab = await visit(front)
    keys, page = tab.page.keyboard, tab.page
    await expect(page.locator("#text")).to_be_focused()
    await keys.type("Hello there")
    await keys.press("Enter")
    await tab.idle()
    await expect(page.locator("#says")).to_have_text("The answer is complete")
    # To a token of the answer, and on from there.
    await walk_to(page, "Branch at a token", "Shift+Tab")
    await keys.press("Enter")
    await expect(page.locator(".tokens .token").first).to_be_focused()
    await keys.press("ArrowRight")
    await keys.press("ArrowRight")
    await keys.press("Enter")
    await expect(page.get_by_role("button", name="Go on after")).to_be_focused()
    await keys.press("Enter")
    await tab.idle()
    assert front.engine.submitted[-1].terms.lineage.at == len(front.engine.submitted[0].prompt_token_ids) + 3
    # Branches, by a shortcut and arrows.
    await keys.press("Alt+b")
    await expect(page.get_by_role("treeitem")).to_have_count(2)
    await page.get_by_role("treeitem").nth(1).focus()
    await keys.press("ArrowUp")
    await keys.press("Enter")
    await expect(page.get_by_role("treeitem").first).to_have_attribute("aria-selected", "true")
    # Settings open and close, and a new chat begins.
    await keys.press("Alt+s")
    await expect(page.get_by_role("dialog")).to_be_visible()
    await keys.press("Escape")
    await expect(page.get_by_role("dialog")).to_have_count(0)
    await keys.press("Alt+n")
    await expect(page.locator(".welcome")).to_be_visible()
    await expect(page.locator("#text")).to_be_focused()
    # A menu walks by arrows and gives the focus back.
    await walk_to(page, "Key, theme and shortcuts", "Shift+Tab")
    await keys.press("Enter")
    await keys.press("ArrowDown")
    await expect(page.get_by_role("menuitem", name="Keys of the keyboard")).to_be_focused()
    await keys.press("Escape")
    await expect(page.locator("#open-more")).to_be_focused()


async def walk_to(page: Any, name: str, key: str) -> None:
    for _ in range(60):
        await page.keyboard.press(key)
        focused = await page.evaluate("document.activeElement.getAttribute('aria-label')")
        if focused == name:
            return
    raise AssertionError(f"the keyboard does not reach '{name}'")


async def test_light_and_dark(start: Starter, visit: Opener, expect: Any) -> None:
    tab = await visit(await start(), color_scheme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = await tab.page.evaluate(ground)
    await tab.page.emulate_media(color_scheme="dark")
    dark = await tab.page.evaluate(ground)
    assert light != dark, "the system's wish is followed"
    await tab.page.click("#open-more")
    await tab.page.get_by_role("menuitemradio", name="Light", exact=True).click()
    assert await tab.page.evaluate(ground) == light, "and the reader's own wins"
    await tab.page.reload()
    assert await tab.page.evaluate(ground) == light
    await tab.page.click("#open-more")
    await tab.page.get_by_role("menuitemradio", name="as the system").click()
    assert await tab.page.evaluate(ground) == dark


async def test_a_phone(start: Starter, visit: Opener, expect: Any) -> None:
    tab = await visit(await start(), PHONE, has_touch=True, is_mobile=True)
    await tab.say("Hello there")
    await tab.say("A long word: " + "x" * 400)
    wide = "document.documentElement.scrollWidth - innerWidth"
    assert await tab.page.evaluate(wide) <= 0, "nothing sticks out"
    await expect(tab.page.locator("#sidebar")).to_be_hidden()
    await tab.button("Conversations").tap()
    await expect(tab.page.locator("#sidebar")).to_be_visible()
    await tab.page.locator("#new-chat").tap()
    await expect(tab.page.locator("#sidebar")).to_be_hidden()
    await expect(tab.page.locator(".welcome")).to_be_visible()
    await tab.button("Branches").tap()
    await expect(tab.page.locator("#panel")).to_be_visible()
    assert await tab.page.evaluate("document.getElementById('panel').getBoundingClientRect().width") == PHONE["width"]
    await tab.button("Close the panel").tap()
    await expect(tab.page.locator("#panel")).to_be_hidden()
    assert (await tab.page.locator("#send").bounding_box())["height"] >= 36


async def test_what_a_screen_reader_is_told(start: Starter, visit: Opener, expect: Any) -> None:
    front = await start()
    tab = await visit(front)
    front.engine.held = True
    await tab.page.fill("#text", "Hello there")
    await tab.page.press("#text", "Enter")
    await front.until(lambda: len(front.engine.runs) == 1)
    await expect(tab.page.locator("#says")).to_have_text("The model is answering")
    front.engine.advance()
    answer = tab.page.get_by_role("article", name="Answer")
    await expect(answer).to_have_attribute("aria-busy", "true")
    for _ in PIECES[1:]:
        front.engine.advance()
    await tab.idle()
    await expect(answer).to_have_attribute("aria-busy", "false")
    await expect(tab.page.locator("#says")).to_have_text("The answer is complete")
