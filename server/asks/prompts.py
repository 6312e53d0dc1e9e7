"""Prompts of text or tokens → tokens. Long texts are tokenised in the worker pool: nothing holds the event loop up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from bequest.engine.errors import EngineError, context_exceeded
from bequest.engine.text.fill_in import fill_in_tokens
from bequest.engine.types.encoder import EncoderInfo
from bequest.server.asks.embeds import Embeds, given_prompts
from bequest.server.asks.encoder_prompts import check_forms, decoder_ids, encoder_input
from bequest.server.asks.prompt import Prompt, Truncation, check_not_empty
from bequest.server.asks.prompt_forms import Form, Piece, read_forms
from bequest.server.asks.ranges import check_ids
from bequest.server.context import Context
from bequest.server.transport.work import apart, tokenised
from bequest.server.wire.bodies import InputField, PromptField
from bequest.server.wire.errors import at_field, from_engine, invalid, unsupported


class TextSource(msgspec.Struct, frozen=True, kw_only=True):
    """What a body says of its prompts, which are text or tokens."""

    given: PromptField | InputField | Sequence[int] | None
    field: str = "prompt"  # where they are given
    special: bool | None = None  # whether the tokenizer adds its special tokens; None: yes
    truncation: Truncation = Truncation()
    after: str = ""  # the text behind the gap that the answer fills
    echo: bool = False  # the answer begins with the prompt's text
    hint: str = ""  # follows the complaint about a foreign token id
    embeds: Embeds | None = None  # `prompt_embeds`: prompts of rows, before those of text


async def encode(context: Context, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
    tokenizer = context.text.tokenizer
    chars = sum(map(len, texts))
    return await tokenised(context, chars, lambda: [tokenizer.encode(text, add_special_tokens) for text in texts])


async def encode_behind(context: Context, texts: Sequence[str], last: int | None = None) -> list[list[int]]:
    """Of texts that each go on behind a token."""
    tokenizer = context.text.tokenizer
    chars = sum(map(len, texts))
    return await tokenised(context, chars, lambda: [tokenizer.encode_behind(text, last) for text in texts])


def check_length(context: Context, text: str, param: str, encoder: EncoderInfo | None = None) -> None:
    """Refuses a text that must be too long, for the encoder if it is given, before minutes are spent on its tokens."""
    longest = context.text.tokenizer.max_chars_per_token
    limit = context.engine.info.max_model_len if encoder is None else encoder.max_len
    if longest is None or len(text) <= limit * longest:
        return
    least = -(-len(text) // longest)
    if encoder is None:
        raise from_engine(context_exceeded(least, 1, limit, counted=False), param)
    try:
        encoder.check_length(least)
    except EngineError as error:
        raise at_field(error, param) from error


async def plain_prompts(context: Context, source: TextSource) -> list[Prompt]:
    """Those of rows come first."""
    given = [] if source.embeds is None else await _given_prompts(context, source, source.embeds)
    return given if given and not source.given else given + await _written_prompts(context, source)


async def _given_prompts(context: Context, source: TextSource, embeds: Embeds) -> list[Prompt]:
    for name, used in (("echo", source.echo), ("suffix", bool(source.after))):
        if used:
            raise invalid(f"`{name}` cannot be used with `prompt_embeds`, which have no text. Leave it out.", name)
    most = context.engine.info.max_model_len
    images = await given_prompts(context, embeds)
    return [
        Prompt(source.truncation.of_prompt(image.token_ids, most), images=(image,), param="prompt_embeds")
        for image in images
    ]


async def _written_prompts(context: Context, source: TextSource) -> list[Prompt]:
    forms = await apart(context, lambda: _checked_forms(context, source))
    encoder = context.engine.info.encoder
    pieces = [form.prompt for form in forms]
    gap = await _gap(context, source)
    tokens = await _tokens(context, pieces, source.special is not False and gap is None)
    if encoder is not None:
        return await _encoder_prompts(context, encoder, source.truncation, forms, tokens)

    def work() -> list[Prompt]:
        prompts = []
        for piece, ids in zip(pieces, tokens, strict=True):
            prompt = _completion_prompt(context, source, piece.given, ids if gap is None else gap(ids))
            prompts.append(check_not_empty(prompt, piece.param))
        return prompts

    return await apart(context, work)


def _checked_forms(context: Context, source: TextSource) -> list[Form]:
    """The prompts that a body names, as far as they can be judged before they are tokenised."""
    forms = read_forms(source.given, source.field)
    encoder = context.engine.info.encoder
    check_forms(encoder, forms, fills_in=bool(source.after), echo=source.echo)
    for piece in (form.prompt for form in forms):
        if not isinstance(piece.given, str):
            check_ids(piece.given, context.engine.info.vocab_size, piece.param, source.hint)
        elif source.truncation.keep is None:
            check_length(context, piece.given, piece.param, encoder)
    return forms


async def _gap(context: Context, source: TextSource) -> Callable[[list[int]], list[int]] | None:
    """With `suffix`: from the tokens of a prompt to those of a prompt whose answer stands between the two."""
    if not source.after:
        return None
    tokenizer = context.text.tokenizer
    marks = fill_in_tokens(tokenizer.id_of)
    if marks is None:
        message = "`suffix` cannot be used here: this model has no tokens for filling in the middle. Leave it out."
        raise unsupported("suffix", message)
    if source.echo:
        raise invalid("`echo` cannot be used with `suffix`: the prompt does not end where the answer begins.", "echo")
    check_length(context, source.after, "suffix")
    [after] = await encode(context, [source.after], add_special_tokens=False)
    begin = [] if source.special is False else tokenizer.encode("", add_special_tokens=True)
    return lambda before: marks.prompt(begin, before, after)


async def _encoder_prompts(
    context: Context,
    info: EncoderInfo,
    truncation: Truncation,
    forms: Sequence[Form],
    tokens: Sequence[Sequence[int]],
) -> list[Prompt]:
    """`tokens`: those of the encoder prompts. A decoder's text is the beginning of its answer, tokenised as such."""
    decoders = [form.decoder for form in forms if form.decoder is not None]
    for piece in decoders:
        if isinstance(piece.given, str):
            check_length(context, piece.given, piece.param)
    begun = iter(await _tokens(context, decoders, add_special_tokens=False))
    prompts = []
    for form, ids in zip(forms, tokens, strict=True):
        decoder = decoder_ids(context, info, None if form.decoder is None else next(begun), form.decoder)
        param = None if form.decoder is None else form.decoder.param
        prompts.append(Prompt(decoder, encoder=encoder_input(info, truncation, ids, form.prompt), param=param))
    return prompts


async def _tokens(context: Context, pieces: Sequence[Piece], add_special_tokens: bool) -> list[list[int]]:
    encoded = iter(await encode(context, [p.given for p in pieces if isinstance(p.given, str)], add_special_tokens))
    return [next(encoded) if isinstance(piece.given, str) else piece.given for piece in pieces]


def _completion_prompt(context: Context, source: TextSource, given: str | list[int], ids: list[int]) -> Prompt:
    kept = source.truncation.of_prompt(ids, context.engine.info.max_model_len)
    if not source.echo:
        return Prompt(kept)
    if isinstance(given, str) and len(kept) == len(ids):
        return Prompt(kept, given)
    return Prompt(kept, context.text.tokenizer.decode(list(kept), skip_special_tokens=False))
