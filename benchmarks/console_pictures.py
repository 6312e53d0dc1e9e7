"""Pictures of the console for the documentation. Needs playwright and chromium (`make test-console` installs them).

python -m benchmarks.console_pictures [docs] [--seconds 60]
"""

from __future__ import annotations

import argparse
import asyncio
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import aiohttp

TENANTS = ("harbour", "orchard", "library")
TOPICS = ["the sea", "a lighthouse", "winter", "an old clock", "the harbour at night", "a garden"]
SETTINGS = '{"numbers": {"max_tokens": 80, "temperature": 0.4, "seed": 11}}'
KEYS = '[[keys]]\nname = "operator"\nkey = "operator"\noperator = true\n' + "".join(
    f'[[keys]]\nname = "{name}"\nkey = "{name}"\n' for name in TENANTS
)


async def load(url: str, number: int) -> None:
    """Asks, leases, continues, for ever; now and then wrongly."""
    headers = {"Authorization": f"Bearer {TENANTS[number % len(TENANTS)]}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        turn = 0
        while True:
            turn += 1
            parent = f"poet-{number}-{turn}"
            body: dict[str, Any] = {
                "messages": [{"role": "user", "content": f"Write verse {turn} of a poem about {TOPICS[number]}."}],
                "max_tokens": 90 if turn % 7 else -1,
                "request_id": parent,
            }
            if number % 3 == 0:
                body["retain"] = {"ttl": 40}
            if await _send(session, url, body) != 200:
                continue
            children = [
                {"continuation_of": parent, "messages": [{"role": "user", "content": text}], "max_tokens": 60}
                for text in ("Now shorter.", "Now in prose.")
            ]
            await asyncio.gather(*(_send(session, url, child) for child in children))


async def _send(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> int:
    async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
        await answer.read()
        return answer.status


async def _idle(page: Any) -> None:
    await page.wait_for_selector("#send:visible", timeout=180_000)


async def _say(page: Any, text: str) -> None:
    await page.fill("#text", text)
    await page.press("#text", "Enter")
    await _idle(page)


async def _converse(page: Any) -> None:
    """A chat with branches."""
    await _say(page, "Why does bread rise?")
    await _say(page, "Explain it to a child.")
    await page.get_by_role("button", name="Ask again").last.click()
    await _idle(page)
    await page.get_by_role("button", name="Branch at a token").first.click()
    await page.locator(".token").nth(14).click()
    await page.wait_for_selector(".other", timeout=60_000)
    await page.locator(".other:not(.same)").first.click()
    await _idle(page)
    await _say(page, "Write a Python function that doubles a number.")
    await page.get_by_role("button", name="Branch at a token").first.click()
    await page.locator(".token").nth(9).click()
    await page.wait_for_selector(".other", timeout=60_000)


async def pictures(url: str, folder: Path, seconds: float) -> None:
    from playwright.async_api import async_playwright

    async with async_playwright() as driver:
        flags = ["--no-sandbox", "--disable-gpu"]
        browser = await driver.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        context = await browser.new_context(viewport={"width": 1440, "height": 900}, reduced_motion="reduce")
        page = await context.new_page()
        await page.add_init_script(
            f"sessionStorage.setItem('bequest.key', 'operator'); localStorage.setItem('bequest.settings', '{SETTINGS}')"
        )
        await page.goto(url)
        await page.click("#open-branches")
        await _converse(page)
        await page.screenshot(path=folder / "console.png")
        poets = [asyncio.ensure_future(load(url, number)) for number in range(len(TOPICS))]
        await page.emulate_media(color_scheme="dark")
        await page.click("#open-watch")
        await page.click("#widen")
        await asyncio.sleep(seconds)
        await page.screenshot(path=folder / "console-dark.png")
        for poet in poets:
            poet.cancel()
        await page.emulate_media(color_scheme="light")
        await page.click("#widen")
        await page.set_viewport_size({"width": 390, "height": 844})
        await page.click("#close-panel")
        await page.get_by_role("button", name="Done").click()
        await asyncio.sleep(1)
        await page.screenshot(path=folder / "console-phone.png")
        await browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("docs"))
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as keys:
        keys.write(KEYS)
        keys.flush()
        flags = ["--port", "0", "--num-blocks", "500", "--host-cache-gb", "0.05", "--max-num-seqs", "8"]
        flags += ["--max-model-len", "2048", "--api-key-file", keys.name]
        command = [sys.executable, "-m", "bequest", "serve", *flags]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            ready = next(line for line in process.stderr if "ready on" in line)
            reader = asyncio.to_thread(process.stderr.read)

            async def both() -> None:
                reading = asyncio.ensure_future(reader)
                try:
                    await pictures(re.findall(r"http://[^\s;]+", ready)[0], options.folder, options.seconds)
                finally:
                    process.terminate()
                    await reading

            asyncio.run(both())


if __name__ == "__main__":
    main()
