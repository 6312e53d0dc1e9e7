"""The chat in a browser: it answers, survives a reload, goes on, fails and recovers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bequest.engine.errors import InternalError, QueueFull
from bequest.engine.text.chat import ChatTemplate
from tests.console.browser import DESKTOP, PHONE
from tests.console.conftest import Opener
from tests.server.conftest import LEASES, Starter
from tests.server.fake_whisper import WhisperTokenizer, Window, sound, whisper_engine
from tests.server.fakes import PIECES, FakeEngine, FakeText, failing_script, seeing_engine
from tests.server.test_reasoning import OPENED
from tests.server.test_tools import saying
from tests.tiny_seeing import encoded, picture

ANSWER = "".join(PIECES).strip()


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
async def test_a_chat_survives_a_reload(start: Starter, visit: Opener, expect: Any, size: Any) -> None:
    front = await start()
    tab = await visit(front, size)
    await expect(tab.page.locator(".welcome h2")).to_be_visible()
    await tab.say("Hello there")
    await tab.say("And then?")
    await tab.page.fill("#text", "a draft")
    await tab.page.reload()
    await expect(tab.page.locator(".answer > .text")).to_have_count(2)
    assert await tab.texts(".question .said") == ["Hello there", "And then?"]
    assert (await tab.texts(".answer > .text"))[1].split() == ANSWER.split()
    await expect(tab.page.locator("#title")).to_have_text("Hello there")
    await expect(tab.page.locator("#text")).to_have_value("a draft")
    # The second question continued the first answer, and brought the conversation for the case that it is gone.
    second = front.engine.submitted[1]
    assert second.terms.lineage is not None and second.terms.lineage.parent == front.engine.submitted[0].id
    assert "inherited" in (await tab.texts(".answer .cost"))[1]


async def test_a_conversation_outlives_the_server(start: Starter, visit: Opener, expect: Any) -> None:
    front = await start()
    tab = await visit(front)
    await tab.say("Hello there")
    front.engine.found.clear()  # as after a restart
    await tab.say("And then?")
    prompt = bytes(i for i in front.engine.submitted[1].prompt_token_ids if i < 256).decode()
    assert prompt == f"user: Hello there\nassistant: {''.join(PIECES)}\nuser: And then?\nassistant: "
    await expect(tab.page.locator(".answer .inherited").last).to_have_text("0 inherited")


async def test_conversations_are_listed_renamed_deleted_and_found(start: Starter, visit: Opener, expect: Any) -> None:
    tab = await visit(await start())
    for text in ("First question", "Second question"):
        await tab.page.click("#new-chat")
        await tab.say(text)
    entries = tab.page.locator("#conversations .open")
    assert await entries.all_inner_texts() == ["Second question", "First question"]
    await tab.page.fill("#search", "first")
    await expect(entries).to_have_count(1)
    await entries.click()
    await expect(tab.page.locator("#title")).to_have_text("First question")
    await tab.button("More about First question").click()
    await tab.page.get_by_role("menuitem", name="Rename").click()
    await tab.page.get_by_label("Name of the conversation").fill("First of all")
    await tab.page.keyboard.press("Enter")
    await expect(tab.page.locator("#title")).to_have_text("First of all")
    await tab.button("More about First of all").click()
    await tab.page.get_by_role("menuitem", name="Delete").click()
    await expect(tab.page.locator(".welcome h2")).to_be_visible()
    await tab.page.fill("#search", "")
    await expect(entries).to_have_count(1)
    await tab.button("Undo").click()
    await expect(entries).to_have_count(2)


async def test_export_and_import(start: Starter, visit: Opener, expect: Any, tmp_path: Path) -> None:
    front = await start()
    tab = await visit(front)
    await tab.say("Hello there")
    await tab.button("Ask again").click()
    await tab.idle()
    async with tab.page.expect_download() as download:
        await tab.page.click("#export-all")
    path = tmp_path / "conversations.json"
    await (await download.value).save_as(path)
    other = await visit(front)
    await other.page.set_input_files("#import-file", path)
    await expect(other.page.locator(".versions")).to_contain_text("2 of 2")
    assert await other.texts(".question .said") == ["Hello there"]
    # What was imported goes on as if it had been said here.
    await other.say("And then?")
    assert front.engine.submitted[-1].terms.lineage.parent == front.engine.submitted[-2].id


HOSTILE: dict[str, Any] = {
    "not JSON": "{",
    "another file": json.dumps({"conversations": []}),
    "a later version": json.dumps({"format": "bequest.conversations", "version": 99, "conversations": []}),
    "a circle": json.dumps(
        {
            "format": "bequest.conversations",
            "version": 1,
            "conversations": [{"turns": [{"id": "a", "parent": "b"}, {"id": "b", "parent": "a"}]}],
        }
    ),
    "no objects": json.dumps({"format": "bequest.conversations", "version": 1, "conversations": [7]}),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_file_that_is_wrong_changes_nothing(start: Starter, visit: Opener, expect: Any, name: str) -> None:
    tab = await visit(await start())
    file = {"name": "x.json", "mimeType": "application/json", "buffer": HOSTILE[name].encode()}
    await tab.page.set_input_files("#import-file", files=[file])
    await expect(tab.page.locator(".toast")).to_contain_text("Nothing was imported.")
    await expect(tab.page.locator("#conversations .open")).to_have_count(0)


async def test_a_file_with_markup_is_text(start: Starter, visit: Opener, expect: Any) -> None:
    tab = await visit(await start())
    evil = "<img src=x onerror=alert(1)><script>alert(1)</script>"
    turn = {"id": "a", "parent": None, "given": [{"role": "user", "content": evil}], "pieces": [{"text": evil}]}
    body = {"format": "bequest.conversations", "version": 1, "conversations": [{"title": evil, "turns": [turn]}]}
    file = {"name": "x.json", "mimeType": "application/json", "buffer": json.dumps(body).encode()}
    await tab.page.set_input_files("#import-file", files=[file])
    await expect(tab.page.locator(".question .said")).to_have_text(evil)
    await expect(tab.page.locator("main img, main script, nav img, nav script")).to_have_count(0)


async def test_a_browser_that_keeps_nothing_says_so(start: Starter, visit: Opener, expect: Any) -> None:
    tab = await visit(await start())
    await tab.page.evaluate("""() => {
      IDBObjectStore.prototype.put = () => { throw new DOMException("The disk is full.", "QuotaExceededError"); };
    }""")
    await tab.say("Hello there")
    await expect(tab.page.locator(".toast").first).to_contain_text("The disk is full.")
    assert (await tab.texts(".answer > .text"))[0].split() == ANSWER.split()


async def test_an_answer_that_was_cut_goes_on(start: Starter, visit: Opener, expect: Any) -> None:
    front = await start()
    tab = await visit(front)
    await settings(tab, {"Longest answer": "3"})
    await tab.say("Hello there")
    await tab.button("Continue").click()
    await tab.idle()
    first, second = front.engine.submitted
    assert second.terms.lineage.at == len(first.prompt_token_ids) + 3
    assert len(second.prompt_token_ids) == second.terms.lineage.at, "nothing stands between the two"
    await expect(tab.page.locator(".answer")).to_have_count(1)
    assert (await tab.texts(".answer > .text"))[0] == "".join(PIECES[:3]) * 2


async def test_an_error_is_told_in_its_place_and_can_be_tried_again(start: Starter, visit: Opener, expect: Any) -> None:
    front = await start()
    tab = await visit(front)
    front.engine.refusal = QueueFull("The queue is full: 9 requests wait.")
    await tab.say("Hello there")
    fault = tab.page.locator(".answer .fault")
    await expect(fault).to_contain_text("The server is busy")
    await expect(fault).to_contain_text("wait")
    assert await tab.texts(".question .said") == ["Hello there"]
    await tab.page.reload()
    await expect(fault).to_be_visible()
    front.engine.refusal = None
    await tab.button("Try again").click()
    await tab.idle()
    await expect(fault).to_be_hidden()
    assert (await tab.texts(".answer > .text"))[0].split() == ANSWER.split()
    await expect(tab.page.locator(".question")).to_have_count(1)


async def test_an_answer_that_breaks_off_keeps_what_came(start: Starter, visit: Opener, expect: Any) -> None:
    front = await start()
    tab = await visit(front)
    front.engine.script = failing_script(InternalError("The device is gone."), after=2)
    await tab.say("Hello there")
    await expect(tab.page.locator(".answer .fault")).to_be_visible()
    await expect(tab.page.locator(".answer > .text")).to_have_text("Hello")
    await expect(tab.button("Continue")).to_be_visible()


async def test_an_answer_can_be_stopped(start: Starter, visit: Opener, expect: Any) -> None:
    front = await start()
    tab = await visit(front)
    front.engine.held = True
    await tab.page.fill("#text", "Hello there")
    await tab.page.press("#text", "Enter")
    await front.until(lambda: len(front.engine.runs) == 1)
    front.engine.advance()
    await expect(tab.page.locator(".answer > .text")).to_have_text("Hel")
    await tab.page.keyboard.press("Escape")
    await tab.idle()
    await front.until(lambda: len(front.engine.aborted) == 1)
    front.engine.held = False
    await tab.button("Continue").click()
    await tab.idle()
    assert front.engine.submitted[1].terms.lineage.at == len(front.engine.submitted[0].prompt_token_ids) + 1


async def test_the_key_is_asked_for(start: Starter, visit: Opener, expect: Any) -> None:
    front = await start(api_key=["k"])
    tab = await visit(front, ready=False)
    await expect(tab.page.locator("#state")).to_contain_text("needs an API key")
    await tab.say("Hello there")
    await expect(tab.page.locator(".fault")).to_contain_text("A key is needed")
    await tab.button("Key, theme and shortcuts").click()
    await tab.page.get_by_role("menuitem", name="API key").click()
    await tab.page.get_by_label("Key", exact=True).fill("k")
    await tab.button("Use this key").click()
    await expect(tab.page.locator("#state")).to_have_text("ready")
    await tab.button("Try again").click()
    await tab.idle()
    await expect(tab.page.locator(".fault")).to_be_hidden()


async def settings(tab: Any, values: dict[str, str]) -> None:
    await tab.page.click("#open-settings")
    await tab.page.locator("dialog details").evaluate_all("folds => folds.forEach((fold) => { fold.open = true; })")
    for label, value in values.items():
        found = tab.page.get_by_label(label, exact=True)
        if await found.evaluate("field => field.tagName") == "SELECT":
            await found.select_option(label=value)
        else:
            await found.fill(value)
    await tab.button("Use these").click()


async def test_settings_go_into_the_request(start: Starter, visit: Opener, expect: Any) -> None:
    front = await start()
    tab = await visit(front)
    wanted = {"System prompt": "Be brief.", "Temperature": "0.5", "Top k": "7", "Seed": "3", "Stop at": "end"}
    await settings(tab, wanted)
    await tab.say("Hello there")
    request = front.engine.submitted[0]
    assert (request.params.temperature, request.params.top_k, request.params.seed) == (0.5, 7, 3)
    assert request.params.stop == ("end",)
    prompt = bytes(i for i in request.prompt_token_ids if i < 256).decode()
    assert prompt.startswith("system: Be brief.\nuser: Hello there")
    # Another system prompt stands at the beginning: the conversation is read anew, from there.
    await settings(tab, {"System prompt": "Be long."})
    await tab.say("And then?")
    request = front.engine.submitted[1]
    assert request.terms.lineage is None
    assert bytes(i for i in request.prompt_token_ids if i < 256).decode().startswith("system: Be long.\nuser: Hello")
    await tab.say("And then?")
    assert front.engine.submitted[2].terms.lineage is not None


async def test_a_wrong_setting_is_told(start: Starter, visit: Opener, expect: Any) -> None:
    front = await start()
    tab = await visit(front)
    await settings(tab, {"The answer is": "JSON that fits a schema", "Rule": "{"})
    await expect(tab.page.locator("dialog .fault")).to_contain_text("The JSON schema is not JSON")
    await tab.page.get_by_label("Rule", exact=True).fill('{"type": "object"}')
    await tab.button("Use these").click()
    async with tab.page.expect_request("**/v1/chat/completions") as asked:
        await tab.say("Hello there")
    body = (await asked.value).post_data_json
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}


async def test_a_tool_is_called_and_answered(start: Starter, visit: Opener, expect: Any) -> None:
    front = await start(FakeEngine(saying('<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>', 4)))
    tab = await visit(front)
    await settings(tab, {"Tools": '[{"name": "look", "parameters": {"type": "object"}}]'})
    await tab.say("Where?")
    await expect(tab.page.locator(".call strong")).to_have_text("look")
    await expect(tab.page.locator(".call code")).to_contain_text('"at": 1')
    front.engine.script = saying("At the sea.", 4)
    await tab.page.get_by_label("Result of look").fill("the sea")
    await tab.button("Send the result").click()
    await tab.idle()
    assert (await tab.texts(".answer > .text"))[-1] == "At the sea."
    prompt = bytes(i for i in front.engine.submitted[1].prompt_token_ids if i < 256).decode()
    assert "tool: the sea" in prompt


async def test_thoughts_are_folded(start: Starter, visit: Opener, expect: Any) -> None:
    front = await start(FakeEngine(), FakeText(chat_template=ChatTemplate(OPENED)))  # type: ignore[arg-type]
    front.engine.script = saying("I weigh it.\n</think>\n\nYes.", 3, by_byte=True)
    tab = await visit(front)
    await tab.say("Well?")
    assert (await tab.texts(".answer > .text"))[0] == "Yes."
    thoughts = tab.page.locator(".thoughts")
    await expect(thoughts.locator("summary")).to_contain_text("Thought for")
    assert not await thoughts.evaluate("fold => fold.open")
    await thoughts.locator("summary").click()
    await expect(thoughts.locator(".text")).to_have_text("I weigh it.")


async def test_a_model_without_a_template_completes(start: Starter, visit: Opener, expect: Any) -> None:
    """It says so, goes on with the text, and inherits what it wrote; what only a chat has is not offered."""
    front = await start(FakeEngine(), FakeText(chat_template=None))
    tab = await visit(front)
    await expect(tab.page.locator(".welcome p")).to_contain_text("no chat template")
    await tab.page.click("#open-settings")
    await expect(tab.page.get_by_label("Longest answer", exact=True)).to_be_visible()
    await expect(tab.page.get_by_label("System prompt", exact=True)).to_have_count(0)
    await tab.page.keyboard.press("Escape")
    await tab.say("Once upon")
    await expect(tab.page.locator(".answer > .text")).to_contain_text("Hello")
    await tab.say(" and so")
    written = "".join(PIECES)
    first, second = (bytes(i for i in one.prompt_token_ids if i < 256) for one in front.engine.submitted)
    assert first == b"Once upon" and second.endswith(b" and so")
    assert front.engine.submitted[1].terms.lineage is not None
    front.engine.found.clear()  # as after a restart
    await tab.say("!")
    last = bytes(i for i in front.engine.submitted[-1].prompt_token_ids if i < 256).decode()
    assert last == f"Once upon{written} and so{written}!"
    await tab.button("Ask again").last.click()
    await tab.idle()
    again = front.engine.submitted[-1]
    assert again.prompt_token_ids == front.engine.submitted[-2].prompt_token_ids


async def test_leases_that_last(start: Starter, visit: Opener, expect: Any) -> None:
    """Offered where the server has a place for them."""
    for can_last in (False, True):
        front = await start(leases=replace(LEASES, can_last=can_last))
        tab = await visit(front)
        await tab.page.click("#open-settings")
        await tab.page.locator("dialog details").evaluate_all("folds => folds.forEach((fold) => { fold.open = true; })")
        await tab.page.get_by_label("Lease the cache of every answer").check()
        lasting = tab.page.get_by_label("Leases outlive the server")
        await expect(lasting).to_have_count(int(can_last))
        if can_last:
            await lasting.check()
        await tab.button("Use these").click()
        await tab.say("Hello there")
        retain = front.engine.submitted[0].terms.retain
        assert retain is not None and (retain.ttl, retain.durable) == (600.0, can_last)


async def test_a_recording_is_heard(start: Starter, visit: Opener, expect: Any) -> None:
    front = await start(whisper_engine(Window(" Well said.", 1.0)), FakeText(WhisperTokenizer()))
    tab = await visit(front)
    await expect(tab.page.locator(".welcome h2")).to_have_text("What was said?")
    file = {"name": "clip.wav", "mimeType": "audio/wav", "buffer": sound(2.0)}
    await tab.page.set_input_files("#attach-file", files=[file])
    await tab.page.click("#send")
    await tab.idle()
    await expect(tab.page.locator(".answer > .text")).to_have_text("Well said.")
    await tab.page.reload()
    await expect(tab.page.locator(".recording")).to_contain_text("clip.wav")
    await expect(tab.page.locator(".recording audio")).to_have_attribute("src", re.compile("^blob:"))


async def test_pictures_are_sent_and_stay(start: Starter, visit: Opener, expect: Any) -> None:
    front = await start(engine=seeing_engine())
    tab = await visit(front)
    await expect(tab.page.locator("#attach")).to_be_visible()
    pictures = [
        {"name": f"{name}.png", "mimeType": "image/png", "buffer": encoded(picture(9, 7, seed))}
        for seed, name in enumerate(("cat", "dog"))
    ]
    await tab.page.set_input_files("#attach-file", pictures)
    await expect(tab.page.locator("#files .chip")).to_have_count(2)
    await tab.page.click('button[aria-label="Remove dog.png"]')
    await expect(tab.page.locator("#files .chip")).to_have_count(1)
    await tab.say("What is it?")
    await expect(tab.page.locator(".question img.picture")).to_have_count(1)
    [image] = front.engine.submitted[0].images
    assert image.first_id in front.engine.submitted[0].prompt_token_ids
    await tab.page.reload()
    await expect(tab.page.locator(".question img.picture")).to_have_count(1)
    await tab.say("And its colour?")
    second = front.engine.submitted[1]
    assert second.images == (image,) and second.terms.lineage is not None, "the parent brings it"
