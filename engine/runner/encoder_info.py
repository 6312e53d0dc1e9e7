"""What a loaded encoder-decoder model says of its encoder."""

from __future__ import annotations

from bequest.engine.config import EngineConfig
from bequest.engine.errors import ModelError
from bequest.engine.models.encoder_decoder import EncoderDecoder
from bequest.engine.models.encoder_decoder_config import EncoderDecoderConfig
from bequest.engine.models.loaded import LoadedModel
from bequest.engine.types.encoder import EncoderInfo
from bequest.engine.types.listening import Alignment


def max_encoder_len(config: EngineConfig, loaded: LoadedModel) -> int:
    if not isinstance(loaded.config, EncoderDecoderConfig):
        return 0
    most = loaded.config.encoder.max_len
    if config.max_encoder_len is not None and config.max_encoder_len > most:
        raise ModelError(f"max_encoder_len={config.max_encoder_len} is more than the model's own {most} positions")
    return config.max_encoder_len or most


def encoder_info(config: EngineConfig, loaded: LoadedModel) -> EncoderInfo | None:
    decoding = loaded.generation.decoding
    if not isinstance(loaded.config, EncoderDecoderConfig):
        return None
    if decoding is None:
        raise ModelError(f"{loaded.config.architecture}: nothing says how its decoder begins")
    encoder = loaded.config.encoder
    return EncoderInfo(
        takes=encoder.takes,
        max_len=max_encoder_len(config, loaded),
        decoder_start_token_id=decoding.start_token_id,
        default_decoder_prompt=decoding.prompt,
        forced_bos_token_id=decoding.forced_bos_token_id,
        forced_eos_token_id=decoding.forced_eos_token_id,
        suppress_tokens=decoding.suppress_tokens,
        begin_suppress_tokens=decoding.begin_suppress_tokens,
        num_mels=encoder.num_mels,
        num_frames=encoder.max_len * encoder.frames_per_state if encoder.takes == "audio" else 0,
        frames_per_position=encoder.frames_per_state,
        num_layers=encoder.num_layers,
        alignment=_alignment(config, loaded, loaded.config) if encoder.takes == "audio" else None,
    )


def _alignment(config: EngineConfig, loaded: LoadedModel, shape: EncoderDecoderConfig) -> Alignment | None:
    """A rank has some of the heads alone, and the others are not asked."""
    if not isinstance(loaded.model, EncoderDecoder) or config.tensor_parallel_size > 1:
        return None
    decoding = loaded.generation.decoding
    return (None if decoding is None else decoding.alignment) or _upper_heads(shape)


def _upper_heads(config: EncoderDecoderConfig) -> Alignment:
    """All heads of the upper half of the decoder, as OpenAI's program has it where nobody has chosen some."""
    layers = range(config.num_layers // 2, config.num_layers)
    return Alignment(tuple((layer, head) for layer in layers for head in range(config.num_heads)))
