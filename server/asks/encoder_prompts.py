"""Prompts of encoder-decoder models: what the encoder reads, and how the decoder begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bequest.engine.errors import EngineError, context_exceeded
from bequest.engine.types.encoder import EncoderInfo, EncoderInput, TokenRules
from bequest.server.asks.prompt import Prompt, Truncation
from bequest.server.asks.prompt_forms import Form, Piece
from bequest.server.asks.ranges import check_ids
from bequest.server.context import Context
from bequest.server.wire.errors import at_field, from_engine, invalid, unsupported


def check_forms(info: EncoderInfo | None, forms: Sequence[Form], *, fills_in: bool, echo: bool) -> None:
    """Refuses what the model cannot read, before anything is tokenised."""
    if info is None:
        for form in forms:
            if form.is_pair:
                param = form.prompt.param.partition(".encoder_prompt")[0] + ".encoder_prompt"
                raise invalid(f"`{param}`: this model has no encoder; send the whole prompt as `prompt`.", param)
        return
    if info.takes == "audio":
        param = forms[0].prompt.param
        raise invalid(
            f"`{param}`: this model reads audio, and this endpoint takes none; send it to /v1/audio/transcriptions or "
            "/v1/audio/translations.",
            param,
        )
    if fills_in:
        raise unsupported(
            "suffix",
            "`suffix` cannot be used with an encoder-decoder model, which does not fill in the middle. Leave it out.",
        )
    if echo:
        raise unsupported(
            "echo",
            "`echo` cannot be used with an encoder-decoder model, whose answer does not begin with the prompt. "
            "`return_token_ids` gives both prompts back.",
        )
    for piece in (form.prompt for form in forms):
        if not piece.given:
            raise invalid(f"`{piece.param}` is empty: there is nothing for the encoder to read.", piece.param)


def encoder_input(info: EncoderInfo, truncation: Truncation, ids: Sequence[int], piece: Piece) -> EncoderInput:
    """The encoder prompt, cut to what is to be kept of it."""
    ids = truncation.of_encoder(ids, info.max_len)
    try:
        info.check_length(len(ids))
    except EngineError as error:
        raise at_field(error, piece.param) from error
    return EncoderInput.of_tokens(ids)


def decoder_ids(context: Context, info: EncoderInfo, ids: Sequence[int] | None, piece: Piece | None) -> tuple[int, ...]:
    """With the start token, or the model's default; it must leave room for one token."""
    prompt = info.decoder_prompt(ids)
    limit = context.engine.info.max_model_len
    if piece is not None and not isinstance(piece.given, str):
        check_ids(piece.given, context.engine.info.vocab_size, piece.param)
    if piece is not None and len(prompt) > limit:
        raise from_engine(context_exceeded(len(prompt), 1, limit), piece.param)
    return prompt


def rules_of(info: EncoderInfo | None, prompt: Prompt, *, ends: bool) -> TokenRules | None:
    """What the model's generation_config forces and forbids behind a prompt. Whoever continues an answer is not at its
    beginning. `ends`: the answer ends at an end token."""
    if info is None:
        return None
    rules = info.rules(len(prompt.token_ids), ends=ends)
    continues = prompt.lineage is not None and prompt.lineage.at > 0
    return replace(rules, not_first=()) if rules is not None and continues else rules
