"""Text in, text out: tokenizer, incremental detokeniser, stop strings, chat template. No torch, no asyncio."""

from engine.text.chat import ChatTemplate, no_template_error
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.load import TextBundle, load_text, text_from_gguf
from engine.text.stops import StopMatcher
from engine.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "IncrementalDetokenizer",
    "StopMatcher",
    "TextBundle",
    "Tokenizer",
    "load_text",
    "no_template_error",
    "text_from_gguf",
]
