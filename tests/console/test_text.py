"""Markdown in a browser: what it makes of text, of hostile text, and how long that takes."""

from __future__ import annotations

from typing import Any

import pytest_asyncio

from tests.console.conftest import LOOP, Opener
from tests.server.conftest import Starter
from tests.server.fakes import FakeEngine
from tests.server.test_tools import saying

RENDER = """async (source) => {
  const { renderMarkdown } = await import("/console/text/render.js");
  const box = document.createElement("div");
  renderMarkdown(box, source);
  return box.innerHTML;
}"""
# Renders every beginning of the text into one element, as a stream does, and once at the end into another.
GROW = """async (source) => {
  const { renderMarkdown } = await import("/console/text/render.js");
  const grown = document.createElement("div"), whole = document.createElement("div");
  for (let end = 0; end <= source.length; end++) renderMarkdown(grown, source.slice(0, end));
  renderMarkdown(whole, source);
  return grown.isEqualNode(whole);
}"""
TIME = """async (source) => {
  const { renderMarkdown } = await import("/console/text/render.js");
  const began = performance.now();
  renderMarkdown(document.createElement("div"), source);
  return performance.now() - began;
}"""
FOUND = """async (source) => {
  const { renderMarkdown } = await import("/console/text/render.js");
  const box = document.createElement("div");
  document.body.append(box);
  renderMarkdown(box, source);
  const links = [...box.querySelectorAll("[href], [src], [srcdoc], [action], [formaction], [style]")];
  const names = [...box.querySelectorAll("*")].flatMap((each) => each.getAttributeNames());
  const tags = [...box.querySelectorAll("*")].map((each) => each.localName);
  return { links: links.map((each) => each.getAttribute("href")), names, tags, text: box.textContent };
}"""

PLAIN = [
    ("a *b* **c** ~~d~~ `e*f`", "<p>a <em>b</em> <strong>c</strong> <del>d</del> <code>e*f</code></p>"),
    ("# One\n\n###### Six", "<h2>One</h2><h6>Six</h6>"),
    ("- a\n- b\n  - c", "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul>"),
    ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
    ("> a\n> b", "<blockquote><p>a\nb</p></blockquote>"),
    ("snake_case_word and 2 * 3 * 4", "<p>snake_case_word and 2 * 3 * 4</p>"),
    ("**open and `too", "<p>**open and `too</p>"),
    ("a\\*b\\*", "<p>a*b*</p>"),
    ("x < y && y > z &amp; <b>", "<p>x &lt; y &amp;&amp; y &gt; z &amp;amp; &lt;b&gt;</p>"),
]

HOSTILE = [
    "<script>document.title = 'owned'</script>",
    "<img src=x onerror=\"document.title = 'owned'\">",
    "[x](javascript:alert(1)) [y](JaVaScRiPt:alert(1)) [z](data:text/html,<script>1</script>)",
    "[x](&#106;avascript:alert(1)) [y](java\nscript:alert(1)) [z](\x01javascript:alert(1))",
    "![x](https://evil.example/pixel.png) ![y](javascript:1)",
    '<javascript:alert(1)> <vbscript:x> <https://a.example/" onmouseover="alert(1)>',
    "```<img src=x onerror=alert(1)>\n</code></pre><script>1</script>\n```",
    "```html\n<iframe srcdoc='<script>1</script>'></iframe>\n```",
    "| <script>1</script> | b |\n|-|-|\n| [x](javascript:1) | <svg onload=alert(1)> |",
    "# <a href=javascript:1>x</a>\n\n> <style>*{display:none}</style>",
    'https://a.example/<script>1</script> http://b.example"onclick=1',
    '[a](https://ok.example/"><script>1</script>)',
    "[<img src=x>](https://ok.example)",
]

SLOW = [
    "[",
    "](",
    "*",
    "**",
    "_a ",
    "`",
    "`` ` ",
    "<",
    "~~",
    "![",
    "[a](",
    "> ",
    "- ",
    "| ",
    "*a _b ~~c ",
    "[[](",
    "1. ",
]


@pytest_asyncio.fixture(loop_scope=LOOP)
async def page(start: Starter, visit: Opener) -> Any:
    return (await visit(await start())).page


async def test_what_becomes_of_markdown(page: Any) -> None:
    for source, wanted in PLAIN:
        assert await page.evaluate(RENDER, source) == wanted, source


async def test_hostile_text_stays_text(page: Any) -> None:
    allowed = {
        "href",
        "target",
        "rel",
        "class",
        "type",
        "title",
        "aria-label",
        "tabindex",
        "role",
        "viewBox",
        "aria-hidden",
        "d",
    }
    for source in HOSTILE:
        found = await page.evaluate(FOUND, source)
        assert not {"script", "img", "iframe", "style", "object", "embed", "form"} & set(found["tags"]), source
        assert set(found["names"]) <= allowed, (source, found["names"])
        assert all(link.startswith(("https://", "http://", "mailto:")) for link in found["links"]), source
    assert await page.title() != "owned"


async def test_an_answer_that_grows_is_drawn_as_the_whole(page: Any) -> None:
    code, table = "```py\nx = 1  # one\n```", "| a | b |\n|-|-|\n| 1 | 2 |"
    text = f"# Title\n\nSome *words* and `code`:\n\n{code}\n\n- a\n- b\n\n{table}\n\nEnd."
    assert await page.evaluate(GROW, text)


async def test_no_text_takes_long(page: Any) -> None:
    for piece in SLOW:
        for source in (piece * 20_000, (piece + "\n") * 5_000):
            assert await page.evaluate(TIME, source) < 5_000, piece


async def test_code_is_copied_as_it_is(start: Starter, visit: Opener) -> None:
    code = 'def f(x):\n    return "<b>" + x  # *not* markdown'
    front = await start(FakeEngine(saying(f"See:\n\n```python\n{code}\n```\n\nDone.", 5)))
    tab = await visit(front)
    await tab.say("Show me code")
    await tab.button("Copy the code").click()
    assert await tab.page.evaluate("navigator.clipboard.readText()") == code
    await tab.button("Copy the answer").click()
    assert (await tab.page.evaluate("navigator.clipboard.readText()")).startswith("See:\n\n```python")


async def test_an_answer_makes_no_request(start: Starter, visit: Opener) -> None:
    text = "![x](https://evil.example/pixel.png) <img src=https://evil.example/y.png> https://evil.example/z"
    tab = await visit(await start(FakeEngine(saying(text, 7))))
    await tab.say("Show me a picture")
    assert not [url for url in tab.asked if "evil" in url]
