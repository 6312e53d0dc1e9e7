"""What an answer that is held to a grammar may begin with: the model's thoughts, which no grammar holds."""

from __future__ import annotations

from bequest.engine.dialects.events import Stage
from bequest.engine.dialects.harmony import CHANNEL, END, MESSAGE, START
from bequest.engine.dialects.reader import Dialect
from bequest.engine.dialects.recognise import thinking_format
from bequest.server.asks.tool_grammars import Specials, spelled


def lead_of(dialect: Dialect, stage: Stage, specials: Specials, head: str = "") -> str:
    """Lark with a rule `lead`: thoughts, as far as the prompt leaves room for them, and `head` behind; "": none."""
    if dialect.reasoning is None or stage == "said":
        return ""
    if dialect.is_harmony:
        begin, end = f"{CHANNEL}analysis{MESSAGE}", END
        behind = spelled(f"{START}assistant", specials)
    else:
        thinking = thinking_format(dialect.reasoning)
        assert thinking is not None
        begin, end, behind = thinking.begin, thinking.end, "LEAD_BLANK?"
    lazy = "" if end in specials else "[lazy]"
    whole = f"lead_thought {behind}"
    rest = whole if stage == "inside" else f"(LEAD_BLANK? {spelled(begin, specials)} {whole})?"
    # Few blanks, so that no answer can go on in them.
    blank = "" if dialect.is_harmony and stage == "inside" else "LEAD_BLANK: /[ \\n]{1,4}/\n"
    return f"lead: {rest} {head}\nlead_thought{lazy}: /(.|\\n)*/ {spelled(end, specials)}\n{blank}"


def content_head(dialect: Dialect, stage: Stage, specials: Specials) -> str:
    """What the model writes between its thoughts and content, as Lark."""
    return spelled(f"{CHANNEL}final{MESSAGE}", specials) if dialect.is_harmony and stage != "said" else ""
