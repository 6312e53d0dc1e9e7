"""What Whisper wrote about one window, cut at its timestamps, and where the next window begins.

    <|0.00|> It was… <|7.86|><|8.20|> the worst… <|12.00|><|12.00|> cut o        window of 30 s
    └──── segment ────────┘ └──── segment ─────┘ ▲
                                                 the next window begins here: what follows the last pair may be cut off

A single timestamp at the end says that nothing follows in this window; without any pair it is one segment. Timestamps
that go backwards or stand alone are not trusted, whatever the model writes: a window always moves on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bequest.engine.text.whisper_tokens import WhisperTokens


@dataclass(frozen=True, slots=True)
class TimedTokens:
    """A segment: seconds from the beginning of the window, and its tokens, timestamps included."""

    start: float
    end: float
    token_ids: tuple[int, ...]
    first: int = 0  # its first token among those of the window


@dataclass(frozen=True, slots=True)
class WindowSegments:
    segments: tuple[TimedTokens, ...]
    advance: float  # seconds from this window's beginning to the next one's


def split_window(tokens: WhisperTokens, token_ids: Sequence[int], seconds: float) -> WindowSegments:
    """`token_ids`: what was sampled, without the end token; `seconds`: how much audio the window has."""
    timed = [tokens.seconds(token_id) for token_id in token_ids]
    cuts = [i for i in range(1, len(timed)) if timed[i - 1] is not None and timed[i] is not None]
    ends_here = len(timed) >= 2 and timed[-1] is not None and timed[-2] is None
    if not cuts:
        last = next((time for time in reversed(timed) if time), seconds)
        return WindowSegments(_nonempty([TimedTokens(0.0, min(last, seconds), tuple(token_ids))], tokens), seconds)
    segments: list[TimedTokens] = []
    begin = 0
    for cut in [*cuts, len(timed)] if ends_here else cuts:
        before = segments[-1].end if segments else 0.0
        first, last_time = timed[begin], timed[cut - 1]
        start = min(max(before, before if first is None else first), seconds)
        end = min(max(start, seconds if last_time is None else last_time), seconds)
        segments.append(TimedTokens(start, end, tuple(token_ids[begin:cut]), begin))
        begin = cut
    advance = seconds if ends_here else segments[-1].end
    return WindowSegments(_nonempty(segments, tokens), advance if advance > 0 else seconds)


def _nonempty(segments: Sequence[TimedTokens], tokens: WhisperTokens) -> tuple[TimedTokens, ...]:
    """Those with anything but control tokens."""
    return tuple(s for s in segments if any(token_id < tokens.end for token_id in s.token_ids))
