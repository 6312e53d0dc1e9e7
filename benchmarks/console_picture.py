"""A picture of the console under load, for the documentation. Needs playwright and chromium.

python -m benchmarks.console_picture [docs/console.png] [--seconds 60]
"""

from __future__ import annotations

import argparse
import asyncio
import re
import shutil
import subprocess
import sys
from typing import Any

import aiohttp

CLIENTS = 5
TOPICS = ["the sea", "a lighthouse", "winter", "an old clock", "the harbour at night"]


async def load(url: str, number: int) -> None:
    """Asks, leases, continues, for ever; now and then wrongly."""
    async with aiohttp.ClientSession() as session:
        turn = 0
        while True:
            turn += 1
            parent = f"poet-{number}-{turn}"
            body: dict[str, Any] = {
                "messages": [{"role": "user", "content": f"Write verse {turn} of a poem about {TOPICS[number]}."}],
                "max_tokens": 60 if turn % 7 else -1,
                "request_id": parent,
                "retain": {"ttl": 45},
            }
            async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
                await answer.read()
                if answer.status != 200:
                    continue
            children = [
                {"continuation_of": parent, "messages": [{"role": "user", "content": text}], "max_tokens": 40}
                for text in ("Now shorter.", "Now in prose.")
            ]
            await asyncio.gather(*(_send(session, f"{url}/v1/chat/completions", child) for child in children))


async def _send(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
    async with session.post(url, json=body) as answer:
        await answer.read()


async def picture(url: str, path: str, seconds: float) -> None:
    from playwright.async_api import async_playwright

    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": 1400, "height": 980})
        await page.goto(url)
        poets = [asyncio.ensure_future(load(url, number)) for number in range(CLIENTS)]
        await asyncio.sleep(seconds / 2)
        await page.fill("#max-tokens", "60")
        await page.check("#lease")
        for text in ("Why does bread rise?", "Explain it to a child."):
            await page.fill("#text", text)
            await page.click("#send")
            await page.wait_for_selector("#send:visible", timeout=120_000)
        for token in (12, 25):
            await page.locator("#tree circle").first.click()
            await page.locator(".turn.assistant .token").nth(token).click()
            await page.click("#send")
            await page.wait_for_selector("#send:visible", timeout=120_000)
        await asyncio.sleep(seconds / 2)
        await page.screenshot(path=path)
        for poet in poets:
            poet.cancel()
        await browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", default="docs/console.png")
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    flags = ["--port", "0", "--num-blocks", "600", "--host-cache-gb", "0.05", "--max-num-seqs", "8"]
    command = [sys.executable, "-m", "bequest", "serve", "--max-model-len", "2048", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        ready = next(line for line in process.stderr if "ready on" in line)
        reader = asyncio.to_thread(process.stderr.read)

        async def both() -> None:
            reading = asyncio.ensure_future(reader)
            try:
                await picture(re.findall(r"http://\S+", ready)[0], options.path, options.seconds)
            finally:
                process.terminate()
                await reading

        asyncio.run(both())


if __name__ == "__main__":
    main()
