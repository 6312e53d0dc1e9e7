"""A model of whichever kind, as runners have it."""

from __future__ import annotations

from bequest.engine.models.decoder import Decoder
from bequest.engine.models.encoder_decoder import EncoderDecoder
from bequest.engine.models.transformers_impl.model import TransformersDecoder

Model = Decoder | EncoderDecoder | TransformersDecoder
