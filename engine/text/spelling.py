"""How the strings of a vocabulary stand for bytes of text.

Two spellings cover nearly every generating model, and for both the text of a token sequence is the UTF-8 of its tokens'
bytes put together, which is what makes streaming exact:

- byte level (GPT-2 and its kin): each character of a token is one byte, shifted out of the unprintable ranges;
- byte fallback (SentencePiece BPE): "▁" is a space, "<0xE2>" is a byte, everything else is itself. The first space of
  the text is an artefact of the encoding and is dropped.

Anything else (Unigram with a Metaspace decoder, WordPiece) is decoded by the tokenizers library and has no exact bytes.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

import tokenizers

SPACE_MARK = "▁"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Character → byte. Printable bytes stand for themselves, the others are numbered from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


BYTE_LEVEL_ALPHABET = _byte_level_alphabet()


@dataclass(frozen=True, slots=True)
class Spelling:
    kind: Literal["byte_level", "byte_fallback", "other"]
    strips_first_space: bool = False

    @property
    def exact(self) -> bool:
        """Whether decoding is the UTF-8 of the tokens' bytes put together."""
        return self.kind != "other"

    def to_bytes(self, token: str) -> bytes:
        if self.kind == "byte_level":
            try:
                return bytes([BYTE_LEVEL_ALPHABET[char] for char in token])
            except KeyError:  # a placeholder that stands for no text
                return token.encode()
        if self.kind == "byte_fallback" and (match := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.replace(SPACE_MARK, " ").encode()


def spelling_of(backend: tokenizers.Tokenizer) -> Spelling:
    """Recognises the spelling by the decoder, which is what turns the strings back into text."""
    steps = component_steps(backend.decoder)
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return Spelling("byte_level")
    strips = bool(steps) and steps[-1] == {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if strips:
        steps = steps[:-1]
    if [step["type"] for step in steps] == ["Replace", "ByteFallback", "Fuse"] and _replaces_space_mark(steps[0]):
        return Spelling("byte_fallback", strips_first_space=strips)
    return Spelling("other")


def _replaces_space_mark(step: dict[str, Any]) -> bool:
    return bool(step["pattern"] == {"String": SPACE_MARK} and step["content"] == " ")


def component_steps(component: Any) -> list[dict[str, Any]]:
    """A normaliser, pre-tokeniser or decoder as the list of its steps, each as in tokenizer.json; [] for None."""
    if component is None:
        return []
    description: dict[str, Any] = json.loads(component.__getstate__())
    if description["type"] != "Sequence":
        return [description]
    # The name of the list depends on the kind of component; nothing else in a Sequence is a list.
    return next(value for value in description.values() if isinstance(value, list))
