"""Where tokens go that are nothing but their own text: into events that are made and written in one call for a step.

In the middle of a stream nearly every token spells whole characters, and nothing is to be told but them. A sink that
has an outlet lets those pass it: what stands around the text is constant, and the text of a token as well.
"""

from __future__ import annotations

import orjson

from bequest.engine._C import Outlet, TokenTexts, pass_on
from bequest.engine.text.tokenizer import Tokenizer
from bequest.engine.types import Sink

__all__ = ["Outlet", "outlet_of", "pass_on", "quoted_texts"]


def outlet_of(sink: Sink) -> Outlet | None:
    """While the `outlet` of a sink is open, tokens of the request's one choice may go there instead of in Deltas."""
    outlet = getattr(sink, "outlet", None)
    return outlet if isinstance(outlet, Outlet) else None


def quoted_texts(tokenizer: Tokenizer | None) -> TokenTexts | None:
    """The texts of single tokens as strings of JSON. None: what a token stands for depends on those before it."""
    if tokenizer is None or not tokenizer.spelling.exact:
        return None

    def spell(token_id: int) -> bytes:
        """Nothing for special tokens, which may be hidden, and for parts of characters."""
        if token_id in tokenizer.special_ids:
            return b""
        try:
            text = tokenizer.bytes_by_id[token_id].decode()
        except UnicodeDecodeError:
            return b""
        return orjson.dumps(text) if text else b""

    return TokenTexts(spell)
