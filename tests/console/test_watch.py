"""The server's panel in a browser: the map of blocks, whose they are, the figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.console.conftest import Opener
from tests.server.conftest import Starter
from tests.server.test_console import TwoTenants, key_file


async def use_key(tab: Any, key: str) -> None:
    await tab.page.evaluate(f"sessionStorage.setItem('bequest.key', '{key}')")
    await tab.page.reload()
    await tab.page.click("#open-watch")


async def test_the_map_says_what_a_block_is_and_whose(
    start: Starter, visit: Opener, expect: Any, tmp_path: Path
) -> None:
    tab = await visit(await start(engine=TwoTenants(), api_key_file=key_file(tmp_path)), ready=False)
    await use_key(tab, "b")
    canvas = tab.page.locator("canvas.blocks").first
    await expect(canvas).to_have_attribute("aria-label", "Blocks: 1 free, 2 warm, 1 running, 1 shared, 1 leased")
    told = tab.page.locator(".map .told").first
    for cell, words in enumerate(("leased", "running", "warm", "shared", "warm", "free")):
        await canvas.hover(position={"x": 44 + 14 * cell + 5, "y": 5})
        await expect(told).to_contain_text(f"Block {cell + 1}: {words}")
        await expect(told).to_contain_text({0: "Of boss.", 1: "Of guest.", 3: "Of guest."}.get(cell, "."))
    await canvas.hover(position={"x": 49, "y": 5})
    await expect(told).to_contain_text("Of layers that see the last 8 tokens.")
    groups = tab.page.get_by_role("region", name="What layers keep").locator("tbody tr")
    await expect(groups).to_have_text(
        [
            "all tokens100111.0 KB3.0 KBguest 3",
            "the last 8 tokens011011.0 KB3.0 KBboss 2, guest 1",
            "one state for all before3021070 KB420 KB",
        ]
    )
    # Pointing at a tenant leaves its blocks alone in full colour.
    whole = await canvas.screenshot()
    await tab.button("guest").hover()
    assert await canvas.screenshot() != whole
    await expect(tab.page.locator("#watch")).to_contain_text("r-boss")
    await expect(tab.page.locator(".plot").first).to_be_visible()


async def test_a_tenant_sees_its_own_alone(start: Starter, visit: Opener, expect: Any, tmp_path: Path) -> None:
    tab = await visit(await start(engine=TwoTenants(), api_key_file=key_file(tmp_path)), ready=False)
    await use_key(tab, "g")
    await expect(tab.page.locator(".scope")).to_contain_text("Your key shows your own blocks")
    canvas = tab.page.locator("canvas.blocks").first
    await expect(canvas).to_have_attribute("aria-label", "Blocks: 3 free, 1 warm, 1 running, 1 shared")
    await expect(tab.page.locator("#watch")).to_contain_text("r-guest")
    await expect(tab.page.locator("#watch")).not_to_contain_text("boss")
    await expect(tab.page.locator(".plot").first).to_be_hidden()


async def test_errors_and_requests_are_listed(start: Starter, visit: Opener, expect: Any) -> None:
    front = await start()
    await front.post("/v1/completions", {"prompt": "a", "max_tokens": -1})
    tab = await visit(front)
    await tab.page.click("#open-watch")
    row = tab.page.locator(".listing").last.locator("tbody tr")
    await expect(row).to_contain_text("invalid_value")
    await expect(row.locator("td").first).to_have_text("just now")
    await expect(tab.page.locator("#watch")).to_contain_text("Nothing runs or waits.")


async def test_a_server_that_went_away_is_told(start: Starter, visit: Opener, expect: Any) -> None:
    front = await start()
    tab = await visit(front)
    await tab.page.context.set_offline(True)
    await tab.page.click("#open-watch")
    await expect(tab.page.locator("#state")).to_contain_text("does not answer")
    await tab.say("Hello there")
    await expect(tab.page.locator(".fault")).to_contain_text("No connection")
    await tab.page.context.set_offline(False)
    await tab.button("Try again").click()
    await tab.idle()
    await expect(tab.page.locator(".fault")).to_be_hidden()


async def test_replicas_are_listed_with_their_sum(start: Starter, visit: Opener, expect: Any) -> None:
    """Where the page is of one of several; whoever knows all of them answers at the same address."""
    figures = {"running": 2, "waiting": 1, "leases": 3, "leased_share": 0.25, "generated_tokens": 1234}
    state = {
        "replicas": {"r1": {"state": "ready", **figures}, "r2": {"state": "down", **figures}},
        "sum": {**figures, "running": 4},
    }
    tab = await visit(await start(replica_tag="r1"))
    await tab.page.route("**/cluster/state", lambda route: route.fulfill(json=state))
    await tab.page.click("#open-watch")
    table = tab.page.get_by_role("region", name="Replicas")
    await expect(table.locator("tbody tr")).to_have_text(
        ["r1ready21325 %1,234", "r2down21325 %1,234", "all41325 %1,234"]
    )
    await expect(tab.page.get_by_role("link", name="r2")).to_have_attribute("href", "/?bequest-replica=r2")
