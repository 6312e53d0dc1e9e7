"""The embedding of an encoder-decoder model, which both stacks and the output share, or have one each of."""

from __future__ import annotations

from bequest.engine.layers.weight import Weight
from bequest.engine.models.encoder_decoder_config import EncoderDecoderConfig
from bequest.engine.models.reader import Reader

STACKS = ("encoder", "decoder")


def embeddings(config: EncoderDecoderConfig, read: Reader, prefix: str = "") -> tuple[Weight, Weight, Weight]:
    """The encoder's, the decoder's and the output matrix; those that are one are read once. `prefix`: of the names of
    all but the output matrix."""
    shared = f"{prefix}shared"
    names = [f"{prefix}{stack}.embed_tokens" if stack in config.own_tables else shared for stack in STACKS]
    names.append(shared if config.tie_word_embeddings else "lm_head")
    found = {name: read.weight(name, config.vocab_size, config.hidden_size) for name in dict.fromkeys(names)}
    encoder, decoder, output = (found[name] for name in names)
    return encoder, decoder, output
