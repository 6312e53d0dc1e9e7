"""Branches in a browser: at a token, with another token, beside a question; and the tree that shows them."""

from __future__ import annotations

from typing import Any

from tests.console.conftest import Opener
from tests.server.conftest import Starter
from tests.server.fakes import PIECES


async def test_a_branch_at_a_token(start: Starter, visit: Opener, expect: Any) -> None:
    front = await start()
    tab = await visit(front)
    await tab.say("Hello there")
    prompt_len = len(front.engine.submitted[0].prompt_token_ids)
    await tab.button("Branch at a token").click()
    tokens = tab.page.locator(".tokens .token")
    assert [text.strip("\n") for text in await tokens.all_text_contents()] == [piece.strip("\n") for piece in PIECES]
    await tokens.nth(2).hover()
    await expect(tab.page.locator(".token-bar .help")).to_contain_text(f"Keeps {prompt_len + 3} tokens in the cache")
    await tokens.nth(2).click()
    await tab.page.get_by_role("button", name="Go on after").click()
    await tab.idle()
    child = front.engine.submitted[-1]
    assert child.terms.lineage.at == prompt_len + 3 == len(child.prompt_token_ids)
    await expect(tab.page.locator(".answer")).to_have_count(1)
    text = "".join(PIECES[:3]) + "".join(PIECES)
    assert (await tab.texts(".answer > .text"))[0].split() == text.split()
    # The first answer is whole when it is chosen again.
    await tab.button("Previous version").click()
    assert (await tab.texts(".answer > .text"))[0].split() == "".join(PIECES).split()


async def test_another_token_in_its_place(start: Starter, visit: Opener, expect: Any) -> None:
    front = await start()
    tab = await visit(front)
    await tab.say("Hello there")
    prompt_len = len(front.engine.submitted[0].prompt_token_ids)
    await tab.button("Branch at a token").click()
    await tab.page.locator(".tokens .token").nth(3).click()
    other = tab.page.locator(".other:not(.same)")
    await expect(other.last).to_contain_text("A")
    looked = front.engine.submitted[-1]
    assert looked.terms.lineage.at == prompt_len + 3 and looked.params.max_tokens == 1, "one token is computed"
    assert not looked.terms.keep_record, "and none is kept"
    await other.last.click()
    await tab.idle()
    child = front.engine.submitted[-1]
    assert child.terms.lineage.at == prompt_len + 3 and child.prompt_token_ids[prompt_len + 3 :] == (ord("A"),)
    assert "".join(PIECES[:3]) + "A" + PIECES[0] in (await tab.texts(".answer > .text"))[0]
    # What was put there is a part of the conversation, for the server too.
    front.engine.found.clear()
    await tab.say("And then?")
    prompt = bytes(i for i in front.engine.submitted[-1].prompt_token_ids if i < 256).decode()
    assert f"assistant: {''.join(PIECES[:3])}A{PIECES[0]}" in prompt


async def test_a_reply_in_the_middle_of_an_answer(start: Starter, visit: Opener, expect: Any) -> None:
    front = await start()
    tab = await visit(front)
    await tab.say("Hello there")
    prompt_len = len(front.engine.submitted[0].prompt_token_ids)
    await tab.button("Branch at a token").click()
    await tab.page.locator(".tokens .token").nth(1).click()
    await tab.button("Reply at this point").click()
    await expect(tab.page.locator("#place")).to_contain_text(f"{prompt_len + 2} tokens are kept")
    await tab.say("Stop there.")
    child = front.engine.submitted[-1]
    assert child.terms.lineage.at == prompt_len + 2
    prompt = bytes(i for i in child.prompt_token_ids if i < 256).decode()
    kept = "".join(piece[0] for piece in PIECES[:2])  # the fake's tokens are first bytes
    assert prompt.endswith(f"assistant: {kept}\nuser: Stop there.\nassistant: ")
    assert (await tab.texts(".answer > .text"))[0] == "".join(PIECES[:2])


async def test_asking_again_computes_one_token(start: Starter, visit: Opener, expect: Any) -> None:
    front = await start()
    tab = await visit(front)
    await tab.say("Hello there")
    await tab.button("Ask again").click()
    await tab.idle()
    first, second = front.engine.submitted
    assert second.prompt_token_ids == first.prompt_token_ids
    assert second.terms.lineage.at == len(first.prompt_token_ids)
    await expect(tab.page.locator(".versions")).to_contain_text("2 of 2")
    await expect(tab.page.locator(".question")).to_have_count(1)
    # The next question follows the answer that is shown.
    await tab.button("Previous version").click()
    await tab.say("And then?")
    assert front.engine.submitted[2].terms.lineage.parent == first.id


async def test_an_edited_question_stands_beside_the_old_one(start: Starter, visit: Opener, expect: Any) -> None:
    front = await start()
    tab = await visit(front)
    await tab.say("Hello there")
    await tab.say("And then?")
    await tab.page.press("#text", "ArrowUp")  # in an empty field: edits the last
    field = tab.page.get_by_label("Edited message")
    await expect(field).to_have_value("And then?")
    await field.fill("And now?")
    await tab.button("Ask this instead").click()
    await tab.idle()
    assert await tab.texts(".question .said") == ["Hello there", "And now?"]
    assert front.engine.submitted[2].terms.lineage.parent == front.engine.submitted[0].id
    await tab.button("Previous version").click()
    assert await tab.texts(".question .said") == ["Hello there", "And then?"]


async def test_the_tree_shows_what_each_turn_inherited(start: Starter, visit: Opener, expect: Any) -> None:
    front = await start()
    tab = await visit(front)
    await tab.page.click("#open-branches")
    await expect(tab.page.locator("#branches h2")).to_have_text("No branches yet")
    await tab.say("Hello there")
    await tab.say("And then?")
    await tab.button("Ask again").last.click()
    await tab.idle()
    nodes = tab.page.get_by_role("treeitem")
    await expect(nodes).to_have_count(3)
    lengths = [len(request.prompt_token_ids) for request in front.engine.submitted]
    inherited = [request.terms.lineage.at for request in front.engine.submitted[1:]]
    # The root says what the prefix cache gave it.
    await expect(nodes.nth(0)).to_contain_text(f"1 inherited from prefix cache · {lengths[0] - 1} computed")
    await expect(nodes.nth(1)).to_contain_text(f"{inherited[0]} inherited from blocks")
    await expect(nodes.nth(2)).to_contain_text("Asked again")
    await expect(nodes.nth(2)).to_contain_text(f"{lengths[2] - 1} inherited from blocks · 1 computed")
    assert [await node.get_attribute("aria-level") for node in await nodes.all()] == ["1", "2", "2"]
    await nodes.nth(0).click()
    assert await tab.texts(".question .said") == ["Hello there"]
    await tab.say("Or else?")
    assert front.engine.submitted[3].terms.lineage.parent == front.engine.submitted[0].id
    await expect(nodes).to_have_count(4)
