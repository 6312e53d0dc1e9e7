"""What an answer that is held to a grammar may begin with: the model's thoughts, which no grammar holds."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bequest.engine.dialects.events import Stage
from bequest.engine.dialects.harmony import CHANNEL, END, MESSAGE, START
from bequest.engine.dialects.reader import Dialect
from bequest.engine.dialects.recognise import thinking_format
from bequest.server.asks.tool_grammars import Specials, spelled


@dataclass(frozen=True, slots=True)
class ThoughtLimit:
    """`num_tokens` are the most that thoughts may have; then comes their end, the token `end_id`."""

    num_tokens: int
    end_id: int


def lead_of(
    dialect: Dialect, stage: Stage, specials: Specials, head: str = "", limit: ThoughtLimit | None = None
) -> str:
    """Lark with a rule `lead`: thoughts, as far as the prompt leaves room for them, and `head` behind; "": none."""
    if dialect.reasoning is None or stage == "said":
        return ""
    begin, end = thought_marks(dialect)
    behind = spelled(f"{START}assistant", specials) if dialect.is_harmony else "LEAD_BLANK?"
    whole = f"lead_thought {behind}"
    rest = whole if stage == "inside" else f"(LEAD_BLANK? {spelled(begin, specials)} {whole})?"
    # Few blanks, so that no answer can go on in them.
    blank = "" if dialect.is_harmony and stage == "inside" else "LEAD_BLANK: /[ \\n]{1,4}/\n"
    return f"lead: {rest} {head}\n{_thought(end, specials, limit)}{blank}"


def _thought(end: str, specials: Specials, limit: ThoughtLimit | None) -> str:
    if limit is not None:
        text = f"/(.|\\n)*/ & ~/(.|\\n)*{_escaped(end)}(.|\\n)*/"
        return (
            f"lead_thought: lead_limited <[{limit.end_id}]>\nlead_limited[max_tokens={limit.num_tokens}]: LEAD_TEXT\n"
            f"LEAD_TEXT: {text}\n"
        )
    lazy = "" if end in specials else "[lazy]"
    return f"lead_thought{lazy}: /(.|\\n)*/ {spelled(end, specials)}\n"


def thought_marks(dialect: Dialect) -> tuple[str, str]:
    """What begins thoughts, and what ends them.

    REQUIRES: the dialect has thoughts.
    """
    if dialect.is_harmony:
        return f"{CHANNEL}analysis{MESSAGE}", END
    thinking = thinking_format(dialect.reasoning)
    assert thinking is not None
    return thinking.begin, thinking.end


def free_answer(dialect: Dialect, stage: Stage, specials: Specials) -> str:
    """Any answer behind thoughts, as Lark. Where thoughts may come first, it does not begin as they do."""
    begin, end = thought_marks(dialect)
    marks = " | ".join(f"<[{token}]>" for mark, token in specials.items() if mark not in (begin, end))
    unlike = f" & ~/[ \\n]*{_escaped(begin)}(.|\\n)*/" if stage == "before" else ""
    more = f" (mark TEXT?)*\nmark: {marks}\nTEXT: /(.|\\n)+/" if marks else ""
    return f"start: FIRST?{more}\nFIRST: /(.|\\n)+/{unlike}\n"


def _escaped(text: str) -> str:
    """For a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/")


def content_head(dialect: Dialect, stage: Stage, specials: Specials) -> str:
    """What the model writes between its thoughts and content, as Lark."""
    return spelled(f"{CHANNEL}final{MESSAGE}", specials) if dialect.is_harmony and stage != "said" else ""
