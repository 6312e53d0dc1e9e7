"""A model of whichever kind, as runners have it."""

from __future__ import annotations

from torch import Tensor

from bequest.engine.layers.step_adapters import StepAdapters
from bequest.engine.models.decoder import Decoder
from bequest.engine.models.encoder_decoder import EncoderDecoder
from bequest.engine.models.transformers_impl.model import TransformersDecoder

Model = Decoder | EncoderDecoder | TransformersDecoder


def logits_of(model: Model, hidden: Tensor, adapters: StepAdapters | None) -> Tensor:
    """[R, H] → [R, V]. `adapters`: of these rows"""
    if isinstance(model, TransformersDecoder):
        assert adapters is None, "only our own families take adapters"
        return model.logits(hidden)
    return model.logits(hidden, adapters)
