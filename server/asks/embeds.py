"""`prompt_embeds`: prompts whose rows of the embedding come with the request, as tensors in base64."""

from __future__ import annotations

import hashlib

from bequest.engine.errors import EngineError
from bequest.engine.formats.given_rows import read_rows
from bequest.engine.state.contents import ContentKey
from bequest.engine.text.base64 import from_base64
from bequest.engine.types.image import Detail, GivenRows, Image
from bequest.server.asks.prompt_forms import MAX_PROMPTS
from bequest.server.context import Context
from bequest.server.transport.work import current_tenant, in_pool
from bequest.server.wire.errors import ApiError, at_field, invalid, unsupported

Embeds = str | list[str]
FIELD = "prompt_embeds"


async def given_prompts(context: Context, given: Embeds) -> list[Image]:
    """Each is a prompt, or the end of one."""
    if not context.engine.takes_embeds:
        raise unsupported(FIELD, f"`{FIELD}` is not taken here: its operator allows it with --allow-prompt-embeds.")
    if isinstance(given, str):
        return [await _given(context, given, FIELD)]
    if not 0 < len(given) <= MAX_PROMPTS:
        raise invalid(f"`{FIELD}` must hold 1 to {MAX_PROMPTS} tensors, not {len(given)}.", FIELD)
    return [await _given(context, one, f"{FIELD}[{index}]") for index, one in enumerate(given)]


async def _given(context: Context, text: str, param: str) -> Image:
    info, tenant = context.engine.info, current_tenant()

    def work() -> tuple[ContentKey, GivenRows]:
        rows = read_rows(_decoded(text, param), info.hidden_size)
        # Of a kind of their own: no file of an image has this digest.
        digest = hashlib.blake2b(rows.tobytes(), digest_size=32, person=b"prompt_embeds").digest()
        return ContentKey(tenant, digest, Detail()), rows

    try:
        key, rows = await in_pool(context, work)
    except EngineError as error:
        raise at_field(error, param) from error
    return context.recent.take_rows(key, rows)


def _decoded(text: str, param: str) -> bytes:
    try:
        return from_base64(text)
    except ValueError:
        raise ApiError(400, "invalid_value", f"`{param}` is not valid base64.", param=param) from None
