"""A model of whichever kind, as runners have it."""

from __future__ import annotations

from bequest.engine.models.decoder import Decoder
from bequest.engine.models.encoder_decoder import EncoderDecoder
from bequest.engine.models.transformers_impl.model import TransformersDecoder

Model = Decoder | EncoderDecoder | TransformersDecoder


def adapting(model: Model) -> Decoder | EncoderDecoder:
    """One of our own families: only those take adapters."""
    assert not isinstance(model, TransformersDecoder)
    return model
