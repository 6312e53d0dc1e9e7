"""Text in, text out: tokenizer, incremental detokeniser, stop strings, chat template. No torch, no asyncio."""

from bequest.engine.text.chat import ChatTemplate
from bequest.engine.text.detokenizer import IncrementalDetokenizer
from bequest.engine.text.load import TextBundle, load_text, template_from_file, text_from_gguf
from bequest.engine.text.stops import StopMatcher
from bequest.engine.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "IncrementalDetokenizer",
    "StopMatcher",
    "TextBundle",
    "Tokenizer",
    "load_text",
    "template_from_file",
    "text_from_gguf",
]
