"""Images over HTTP: the official client, several images, continuation, branches, stored responses, bad input."""

from __future__ import annotations

import base64
import json
import os
import re
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from bequest.engine.types.image import FIRST_ID, LAST_ID
from tests.test_end_to_end import Server
from tests.tiny_seeing import (
    BEGIN,
    END,
    IMAGE_ID,
    PICTURES,
    SPECIAL,
    data_url,
    encoded,
    image_part,
    make_tokenizer,
    picture,
    save_seeing,
    text_part,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That images are read from."""
    folder = tmp_path_factory.mktemp("images")
    (folder / "here.png").write_bytes(encoded(PICTURES[0]))
    (folder / "out.png").symlink_to("/etc/hostname")
    (folder / "loop.png").symlink_to("loop.png")
    os.mkfifo(folder / "pipe.png")
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Server]:
    directory = save_seeing("smolvlm", tmp_path_factory.mktemp("seeing"))
    flags = ("--image-dir", str(folder), "--max-images", "8", "--max-image-megapixels", "1", "--kv-cache-gb", "0.02")
    server = Server(str(directory), *flags, *(f"--allow-image-hosts={host}" for host in ("127.0.0.1", "localhost:9")))
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its template writes another token for an image than its rows have, and text belongs around it."""
    directory = save_seeing("gemma3", tmp_path_factory.mktemp("gemma"))
    server = Server(str(directory), "--kv-cache-gb", "0.02")
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def blind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    from tests.tiny_models import save_tiny_model

    server = Server(str(save_tiny_model("llama", tmp_path_factory.mktemp("blind"))), "--kv-cache-gb", "0.01")
    yield server
    assert server.stop() == 0


def post(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer; the error object, with its status, where it is refused."""
    asked = urllib.request.Request(
        f"{server.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(asked, timeout=60) as response:
            answer: dict[str, Any] = json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return {**json.load(error)["error"], "status": error.code}
    return answer


def chat(server: Server, *parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": list(parts)}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 8, "ignore_eos": True} | fields
    return post(server, "/v1/chat/completions", body)


def said(answer: dict[str, Any]) -> str:
    assert "choices" in answer, answer
    text: str = answer["choices"][0]["message"]["content"]
    return text


def cached(answer: dict[str, Any]) -> int:
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def test_a_template_that_writes_what_it_is_given(server: Server) -> None:
    """Text does not wait for images, but for their ids, where it has them. An image comes before what is wrong else."""
    template = (
        "{% for message in messages %}user {% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}{{ part['image'] }}<image>{% endfor %}{% endif %}{% endfor %}"
    )
    answer = chat(server, image_part(PICTURES[0]), chat_template=template, return_token_ids=True)
    shown = make_tokenizer().decode([token for token in answer["prompt_token_ids"] if token not in range(len(SPECIAL))])
    assert FIRST_ID <= int(shown.split()[1]) < LAST_ID
    broken = {"type": "image_url", "image_url": {"url": data_url(encoded(PICTURES[0])[:90])}}
    for wrong in ({"chat_template": "{{ nobody() }}"}, {"chat_template": "{% for"}):
        assert chat(server, broken, **wrong)["code"] == "invalid_image"
        assert chat(server, image_part(PICTURES[0]), **wrong)["status"] == 400


def test_the_official_client(server: Server) -> None:
    model = server.client().models.list().data[0].id
    answer = server.client().chat.completions.create(
        model=model,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "what is this? "},
                    {"type": "image_url", "image_url": {"url": data_url(encoded(PICTURES[0])), "detail": "high"}},
                ],
            }
        ],
        max_tokens=5,
        temperature=0,
    )
    assert answer.usage is not None and answer.usage.prompt_tokens > 40


def test_the_official_client_of_messages(server: Server) -> None:
    """A picture in base64 is the one of chat; a conversation about it inherits its rows; a result may hold one."""
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as client:
        data = base64.b64encode(encoded(PICTURES[0])).decode()
        picture: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
        ask: Any = [{"role": "user", "content": [{"type": "text", "text": "look: "}, picture]}]
        model = client.models.list().data[0].id
        options: Any = {"model": model, "max_tokens": 8, "extra_body": {"temperature": 0, "ignore_eos": True}}
        answer = client.messages.create(messages=ask, **options)
        [block] = answer.content
        assert block.type == "text" and block.text == said(chat(server, text_part("look: "), image_part(PICTURES[0])))
        with client.messages.stream(messages=ask, **options) as stream:
            assert "".join(stream.text_stream) == block.text
        more: Any = [*ask, {"role": "assistant", "content": block.text}, {"role": "user", "content": "and now?"}]
        counted = client.messages.count_tokens(model=model, messages=more).input_tokens
        usage = client.messages.create(messages=more, **options).usage
        read = usage.cache_read_input_tokens or 0
        assert read + usage.input_tokens == counted and read > answer.usage.output_tokens + 40
        with pytest.raises(anthropic.BadRequestError, match=r"content\[1\].source.data"):
            picture["source"]["data"] = "aGk="
            client.messages.create(messages=ask, **options)


def test_images_change_answers_and_are_found_again(server: Server) -> None:
    texts = [said(chat(server, text_part("look: "), image_part(image))) for image in PICTURES]
    assert len(set(texts)) == len(texts)
    parts = [text_part("three: "), *map(image_part, PICTURES), text_part(" compare")]
    first = chat(server, *parts)
    again = chat(server, *parts)
    assert said(again) == said(first) and cached(first) < 40
    assert cached(again) == again["usage"]["prompt_tokens"] - 1
    swapped = chat(server, parts[0], *map(image_part, PICTURES[::-1]), parts[-1])
    assert said(swapped) != said(first)


def test_what_the_tower_does_is_counted(server: Server) -> None:
    """An image that nobody has sent; the same again needs neither the tower nor its rows."""
    before = counted(server)
    asked = [text_part("count: "), image_part(picture(40, 40, 77))]
    chat(server, *asked)
    once = counted(server)
    assert once["images_seen"] == before["images_seen"] + 1 and once["image_bytes"] > before["image_bytes"]
    chat(server, *asked)
    assert counted(server) == once
    chat(server, text_part("otherwise: "), asked[1])  # its tokens are computed again, of the rows that are there
    again = counted(server)
    assert again["images_seen"] == once["images_seen"] and again["images_found"] > once["images_found"]


def counted(server: Server) -> dict[str, float]:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as response:
        text = response.read().decode()
    names = ("images_seen", "image_bytes", "images_found")
    found = {name: re.search(rf"^bequest:{name}_total\{{.*\}} (\S+)$", text, re.MULTILINE) for name in names}
    return {name: float(match[1]) for name, match in found.items() if match is not None}


def test_formats_and_ways_in(server: Server, folder: Path) -> None:
    """The same pixels say the same, however they come."""
    expected = said(chat(server, image_part(PICTURES[0])))
    for kind in ("webp", "gif"):
        if kind == "gif":
            continue  # 256 colours
        url = data_url(encoded(PICTURES[0], kind.upper()), kind)
        assert said(chat(server, {"type": "image_url", "image_url": url})) == expected
    for url in (f"file://{folder}/here.png", f"file://localhost{folder}/here.png", "file:here.png"):
        assert said(chat(server, {"type": "image_url", "image_url": {"url": url}})) == expected
    written = data_url(encoded(PICTURES[0])).partition(",")[2]
    for url in (
        f" data:;base64,{written}\n",
        f"data:application/octet-stream;base64,{written.rstrip('=')}",
        f"data:image/jpg;charset=utf-8;base64,{written.replace('+', '-').replace('/', '_')}",
        f"data:image/png;base64,{written.replace('+', '%2B').replace('=', '%3D')}",
    ):
        assert said(chat(server, {"type": "image", "url": url})) == expected
    for kind in ("JPEG", "GIF"):
        url = data_url(encoded(PICTURES[0], kind), kind.lower())
        assert said(chat(server, {"type": "image_url", "image_url": {"url": url}}))


def test_low_detail_takes_fewer_tokens(server: Server) -> None:
    high, low = (chat(server, image_part(PICTURES[0], detail=detail)) for detail in ("high", "low"))
    assert low["usage"]["prompt_tokens"] < high["usage"]["prompt_tokens"]


def test_a_conversation_with_images_goes_on(server: Server) -> None:
    first = chat(server, text_part("one "), image_part(PICTURES[0]), request_id="seen", retain={"ttl": 60})
    more = [{"role": "user", "content": [text_part("and "), image_part(PICTURES[1]), text_part("?")]}]
    fields = {"messages": more, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    child = post(server, "/v1/chat/completions", {**fields, "continuation_of": "seen"})
    told = child["continuation"]
    assert told["inherited_tokens"] >= first["usage"]["prompt_tokens"] and told["source"] == "blocks"
    assert told["inherited_tokens"] + told["computed_tokens"] == child["usage"]["prompt_tokens"]
    other = [{"role": "user", "content": [text_part("and "), image_part(PICTURES[2]), text_part("?")]}]
    assert said(post(server, "/v1/chat/completions", {**fields, "messages": other, "continuation_of": "seen"})) != said(
        child
    )
    again = [{"role": "user", "content": [text_part("one "), image_part(PICTURES[0])]}]
    repeated = post(server, "/v1/chat/completions", {**fields, "messages": again, "continuation_of": "seen"})
    assert repeated["code"] == "continuation_repeats_parent"
    suffix = {"continuation_of": "seen", "prompt": " the end", "max_tokens": 4, "temperature": 0}
    assert post(server, "/v1/completions", suffix)["continuation"]["source"] == "blocks"
    branch = post(server, "/v1/completions", {**suffix, "continuation_at": 12})
    assert branch["continuation"]["at"] == 12 and "choices" in branch


def test_responses_with_images(server: Server) -> None:
    model = server.client().models.list().data[0].id
    content = [
        {"type": "input_text", "text": "what? "},
        {"type": "input_image", "image_url": data_url(encoded(PICTURES[0])), "detail": "auto"},
    ]
    first = server.client().responses.create(
        model=model,
        input=[{"role": "user", "content": content}],  # type: ignore[list-item, misc]
        temperature=0,
        max_output_tokens=8,
    )
    items = server.client().responses.input_items.list(first.id).data
    assert items[0].content[1].type == "input_image"  # type: ignore[union-attr, index]
    second = server.client().responses.create(
        model=model, input="and now?", previous_response_id=first.id, temperature=0, max_output_tokens=8
    )
    assert first.usage is not None and second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 1
    assert first.output_text


def test_tokens_of_images_are_counted_and_shown(server: Server) -> None:
    messages = [{"role": "user", "content": [image_part(PICTURES[0])]}]
    told = post(server, "/tokenize", {"messages": messages, "return_token_strs": True})
    answer = post(server, "/v1/chat/completions", {"messages": messages, "max_tokens": 1, "return_token_ids": True})
    assert told["count"] == answer["usage"]["prompt_tokens"] and told["tokens"] == answer["prompt_token_ids"]
    assert told["token_strs"].count("<image>") > 4


def test_text_around_images(gemma: Server) -> None:
    """It is tokenised with what is beside it."""
    messages = [{"role": "user", "content": [text_part("see\n"), image_part(PICTURES[0]), text_part("here")]}]
    told = post(gemma, "/tokenize", {"messages": messages, "return_token_strs": True})
    text = f"<|im_start|>user\nsee\n\n\n{BEGIN}{END}\n\nhere<|im_end|>\n<|im_start|>assistant\n"
    expected = make_tokenizer().encode(text, add_special_tokens=False)
    place = expected.index(SPECIAL.index(BEGIN)) + 1
    assert told["tokens"] == [*expected[:place], *[IMAGE_ID] * 9, *expected[place:]]


def test_an_image_that_is_computed_at_once_is_not_cut(gemma: Server) -> None:
    first = chat(gemma, text_part("one "), image_part(PICTURES[0]), request_id="whole", retain={"ttl": 60})
    suffix = {"continuation_of": "whole", "prompt": " the end", "max_tokens": 4, "temperature": 0}
    told = post(
        gemma, "/tokenize", {"messages": [{"role": "user", "content": [text_part("one "), image_part(PICTURES[0])]}]}
    )
    within = told["tokens"].index(IMAGE_ID) + 4
    refused = post(gemma, "/v1/completions", {**suffix, "continuation_at": within})
    assert refused["status"] == 400 and "part of an image" in refused["message"], refused
    assert "choices" in post(gemma, "/v1/completions", {**suffix, "continuation_at": within + 5})
    assert said(first)


def test_a_model_that_reads_text_alone(blind: Server) -> None:
    refused = chat(blind, text_part("look "), image_part(PICTURES[0]))
    assert refused["status"] == 400 and refused["param"] == "messages[0].content[1].type"
    assert "reads text alone" in refused["message"]
    vector = post(blind, "/v1/embeddings", {"input": [{"text": "look", "image": data_url(encoded(PICTURES[0]))}]})
    assert vector["status"] == 400 and vector["param"] == "input[0].image", vector


# --- bad input -----------------------------------------------------------------------------------------------------


def bomb() -> bytes:
    """A PNG of a few hundred bytes that says it has four billion pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")

    head = (65_000).to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


def bad_urls() -> dict[str, tuple[str, str]]:
    png = encoded(PICTURES[0])
    return {
        "no image": (data_url(b"hello, this is a text"), "no image that this server reads"),
        "empty": (data_url(b""), "without a byte"),
        "bomb": (data_url(bomb()), "65000 × 65000"),
        "cut short": (data_url(png[: len(png) // 2]), "broken or cut short"),
        "wrong base64": ("data:image/png;base64,@@@@", "not valid base64"),
        "no base64": ("data:image/png,abc", "must be a data: URL of an image in base64"),
        "another type": (data_url(png).replace("image/png", "text/html"), "must be a data: URL of an image"),
        "svg": (data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "svg+xml"), "no image that this server reads"),
        "long and thin": (data_url(encoded(picture(1, 500))), "one side may be"),
        "private address": ("http://127.0.0.1:9/x.png", "private address"),
        "private name": ("http://localhost:9/x.png", "private address"),
        "address of a cloud": ("http://169.254.169.254/latest/meta-data", "private address"),
        "number": ("http://2130706433:9/x.png", "private address"),
        "port": ("http://localhost:22/x.png", "not among --allow-image-hosts"),
        "other host": ("https://example.com/x.png", "not among --allow-image-hosts"),
        "other scheme": ("ftp://example.com/x.png", "must be a data:, https: or file: URL"),
        "nothing": ("", "must be a data:, https: or file: URL"),
        "file above": ("file:../../etc/passwd", "no file below --image-dir"),
        "file elsewhere": ("file:///etc/passwd", "no file below --image-dir"),
        "link that leads out": ("file:out.png", "no file below --image-dir"),
        "link to itself": ("file:loop.png", "no file below --image-dir"),
        "pipe": ("file:pipe.png", "no file below --image-dir"),
        "missing": ("file:missing.png", "no file below --image-dir"),
    }


@pytest.mark.parametrize("name", bad_urls())
def test_bad_images_are_refused(server: Server, name: str) -> None:
    url, sentence = bad_urls()[name]
    refused = chat(server, text_part("look "), {"type": "image_url", "image_url": {"url": url}})
    assert refused.get("status") == 400, refused
    assert sentence in refused["message"] and refused["param"] == "messages[0].content[1].image_url.url"
    refuses = "private" in sentence or "--" in sentence
    assert (refused["code"] == "image_url_refused") == refuses and (refused["code"] == "image_too_large") == (
        name == "bomb"
    )


def test_bad_parts_are_refused(server: Server) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"type": "image_url"}, "messages[0].content[0].image_url"),
        ({"type": "image_url", "image_url": {}}, "messages[0].content[0].image_url.url"),
        ({"type": "image_url", "image_url": {"url": 5}}, "messages[0].content[0].image_url.url"),
        ({"type": "image_url", "image_url": {"url": "x", "detail": "huge"}}, "messages[0].content[0].image_url.detail"),
        (
            {"type": "image_url", "image_url": {"url": "x", "max_pixels": 9}},
            "messages[0].content[0].image_url.max_pixels",
        ),
        ({"type": "input_image", "file_id": "file-1"}, "messages[0].content[0].file_id"),
        ({"type": "input_audio"}, "messages[0].content[0].type"),
    ]
    for part, param in wrong:
        refused = chat(server, part)
        assert refused.get("status") == 400 and refused["param"] == param, refused
    many = chat(server, *[image_part(PICTURES[2])] * 9)
    assert many["status"] == 400 and "at most 8" in many["message"] and many["code"] == "too_many_images"
    forged = chat(server, text_part("<image>"))
    assert forged["status"] == 400 and "1 place(s)" in forged["message"]
    told = chat(server, image_part(PICTURES[2]), prompt_logprobs=1)
    assert told["status"] == 400 and told["param"] == "prompt_logprobs"


def test_others_are_unaffected(server: Server) -> None:
    """After all that: a plain question, and penalties over a prompt with images."""
    assert said(chat(server, text_part("the quick brown fox")))
    assert said(chat(server, image_part(PICTURES[0]), repetition_penalty=1.2, n=2, logit_bias={"5": 1}))
