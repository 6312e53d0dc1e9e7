"""What a checkpoint says about generation: the tokens that end it and the sampling it likes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from bequest.engine.errors import ModelError
from bequest.engine.models.fields import Fields
from bequest.engine.types.listening import Alignment

if TYPE_CHECKING:
    from bequest.engine.formats.gguf_file import GGUFFile

# Our sampling parameters, which are also generation_config.json's names, and their ranges.
SAMPLING_FIELDS = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1.0, float("inf")),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-6, 10.0),
}
# What transformers does beside, and this engine does not; with the value that changes nothing.
_NOT_FOLLOWED: dict[str, object] = {
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "bad_words_ids": [],
    "sequence_bias": {},
    "stop_strings": [],
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "penalty_alpha": 0.0,
    "guidance_scale": 1.0,
    "exponential_decay_length_penalty": [],
    "watermarking_config": {},
}
_FOLLOWED_BY_DECODING = ("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id")
GGUF_SAMPLING_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
GGUF_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    eos_token_ids: tuple[int, ...]  # any of them ends a generation; ascending
    sampling: dict[str, float | int] = field(default_factory=dict)
    decoding: DecodingDefaults | None = None  # of an encoder-decoder model
    not_followed: tuple[str, ...] = ()  # fields that would change what is sampled, and do not here


@dataclass(frozen=True, slots=True)
class DecodingDefaults:
    """How the decoder of an encoder-decoder model begins and what `generate` forces or forbids."""

    start_token_id: int
    prompt: tuple[int, ...]  # where the request has none
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    alignment: Alignment | None = None  # of a model that hears, where its files name heads


def read_json(path: Path) -> dict[str, object]:
    try:
        values = orjson.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return values


def hf_generation_defaults(directory: Path, config: Fields) -> GenerationDefaults:
    """The ends named by generation_config.json, config.json and the tokenizer: chat models often add one in only one
    of these places."""
    path = directory / "generation_config.json"
    generation = Fields(read_json(path), path.name) if path.exists() else None
    return generation_defaults(generation, config, _tokenizer_end(directory))


def generation_defaults(
    generation: Fields | None, config: Fields, tokenizer_end: Collection[int] = ()
) -> GenerationDefaults:
    """`generation` is generation_config.json, which older checkpoints do not have."""
    told = Fields({}, config.source) if generation is None else generation
    text = config.section("text_config")  # of a decoder beside an encoder of images
    ends = {*(end for one in (told, config, text) for end in one.integers("eos_token_id")), *tokenizer_end}
    sampling = {name: told.number(name) for name in SAMPLING_FIELDS if told.has(name)}
    decodes = _architecture(config).endswith("ForConditionalGeneration") and not config.has("text_config")
    decoding = decoding_defaults(config if generation is None else generation, config) if decodes else None
    return GenerationDefaults(tuple(sorted(ends)), _whole_top_k(sampling), decoding, _not_followed(told, decodes))


def _not_followed(told: Fields, decodes: bool) -> tuple[str, ...]:
    """Fields that make `generate` of transformers choose other tokens than this engine does."""
    neutral = _NOT_FOLLOWED | ({} if decodes else {name: [] for name in _FOLLOWED_BY_DECODING})
    return tuple(name for name, nothing in neutral.items() if told.raw(name) not in (None, nothing))


def decoding_defaults(generation: Fields, config: Fields) -> DecodingDefaults:
    """What `generation` says, which older checkpoints do in config.json; there is always a start token in one of them,
    or a pad token, which is T5's."""
    starts = [
        ids[0]
        for name in ("decoder_start_token_id", "pad_token_id")
        for fields in (generation, config)
        if (ids := fields.integers(name))
    ]
    if not starts:
        raise ModelError(f"{config.source} has no decoder_start_token_id, so that nobody knows how its decoder begins")
    vocab_size = config.integer("vocab_size") if config.has("vocab_size") else None
    forced_bos = next(iter(generation.integers("forced_bos_token_id")), None)
    forced_eos = next(iter(generation.integers("forced_eos_token_id")), None)
    prompt = (starts[0], *_after_start(generation, config, forced_bos))
    for token in (*prompt, forced_eos):
        if vocab_size is not None and token is not None and not 0 <= token < vocab_size:
            raise ModelError(
                f"{generation.source} begins or ends answers with the token {token}, but {config.source} has a "
                f"vocabulary of {vocab_size}"
            )
    suppressed, suppressed_first = (
        # A token that the model does not have cannot come anyway.
        tuple(token for token in generation.integers(name) if vocab_size is None or 0 <= token < vocab_size)
        for name in ("suppress_tokens", "begin_suppress_tokens")
    )
    heads = _alignment(generation, config)
    return DecodingDefaults(starts[0], prompt, forced_bos, forced_eos, suppressed, suppressed_first, heads)


def _alignment(generation: Fields, config: Fields) -> Alignment | None:
    """`alignment_heads`: pairs of a layer of the decoder and a head of it."""
    if not generation.has("alignment_heads"):
        return None
    num_layers, num_heads = (config.integer(name) for name in ("decoder_layers", "decoder_attention_heads"))
    heads = []
    for pair in generation.list_of("alignment_heads"):
        match pair:
            case [int(layer), int(head)] if 0 <= layer < num_layers and 0 <= head < num_heads:
                heads.append((layer, head))
            case _:
                raise ModelError(
                    f"{generation.source}: alignment_heads has {pair}, but must hold pairs of a layer below "
                    f"{num_layers} and a head below {num_heads}"
                )
    width = config.integer("median_filter_width", 7)
    if width < 1 or width % 2 == 0:
        raise ModelError(f"{config.source}: median_filter_width must be an odd number, not {width}")
    return Alignment(tuple(heads), width) if heads else None


def _after_start(generation: Fields, config: Fields, forced_bos: int | None) -> tuple[int, ...]:
    """The control tokens of an answer: BART's BOS, a language of mBART's, Whisper's language, task and timestamps."""
    if _architecture(config).startswith("Whisper"):
        english = generation.section("lang_to_id").raw("<|en|>")
        transcribe = generation.section("task_to_id").raw("transcribe")
        control = [english, transcribe, generation.raw("no_timestamps_token_id")]
        return tuple(token for token in control if isinstance(token, int))
    if forced_bos is not None:
        return (forced_bos,)
    return config.integers("bos_token_id") if _architecture(config).startswith("Bart") else ()


def _architecture(config: Fields) -> str:
    names = config.raw("architectures", [])
    return str(names[0]) if isinstance(names, list) and names else ""


def gguf_generation_defaults(file: GGUFFile) -> GenerationDefaults:
    metadata = Fields(file.metadata, str(file.path))
    ends = {metadata.integer(key) for key in GGUF_END_KEYS if metadata.has(key)}
    sampling = {name: metadata.number(key) for key, name in GGUF_SAMPLING_KEYS.items() if metadata.has(key)}
    return GenerationDefaults(tuple(sorted(ends)), _whole_top_k(sampling))


def check_sampling(sampling: Mapping[str, float | int]) -> None:
    """Raises ModelError for a default that no request could ask for: every request without one would fail."""
    for name, value in sampling.items():
        least, most = SAMPLING_FIELDS[name]
        if not least <= value <= most:
            raise ModelError(
                f"the model's generation config has {name} {value:g}, which must be from {least:g} to {most:g}; "
                "correct it, or leave it alone with generation_config=none"
            )


def _whole_top_k(sampling: dict[str, float]) -> dict[str, float | int]:
    return {name: int(value) if name == "top_k" else value for name, value in sampling.items()}


def _tokenizer_end(directory: Path) -> set[int]:
    """The id of the tokenizer's eos_token, or nothing where the files do not say."""
    paths = directory / "tokenizer_config.json", directory / "tokenizer.json"
    if not all(path.exists() for path in paths):
        return set()
    settings, tokenizer = (read_json(path) for path in paths)
    end = settings.get("eos_token")
    text = end.get("content") if isinstance(end, dict) else end  # older files hold the whole token
    fields = Fields(tokenizer, str(paths[1]))
    for token in fields.list_of("added_tokens"):
        if isinstance(token, dict) and token.get("content") == text:
            return {token["id"]}
    vocab = fields.section("model").raw("vocab")
    return {vocab[text]} if isinstance(vocab, dict) and text in vocab else set()
