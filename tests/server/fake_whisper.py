"""A model that hears, in name: a vocabulary with Whisper's control tokens, and an engine that says what it is told."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import soundfile

from bequest.engine.types import ChoiceDelta, Delta, FinishReason, OutputMode, Request, TokenLogprob, Usage
from bequest.engine.types.encoder import EncoderInfo
from bequest.engine.types.listening import Alignment
from tests.server.fakes import ByteTokenizer, FakeEngine

NAMES = [
    *("endoftext", "startoftranscript", "en", "de", "translate", "transcribe"),
    *("startoflm", "startofprev", "nospeech", "notimestamps"),
]
END, START, EN, DE, TRANSLATE, TRANSCRIBE, _, PREVIOUS, NO_SPEECH, NO_TIMES = range(256, 266)
TIMES = 266
ENGLISH, MULTILINGUAL = 51_864, 51_865
RATE = 16_000


class WhisperTokenizer(ByteTokenizer):
    special_ids = frozenset(range(256, 266))

    def id_of(self, token: str) -> int | None:
        return 256 + NAMES.index(token[2:-2]) if token[2:-2] in NAMES else None

    def token_string(self, token_id: int | None) -> str | None:
        return f"<|{NAMES[token_id - 256]}|>" if token_id is not None and 256 <= token_id < 266 else None

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else f"<|{token_id}|>".encode()


class Window:
    """What the model says of one window: text, and seconds for timestamps. `at` gives it by temperature. `cut`: the
    deadline comes before it has said all."""

    def __init__(self, *said: str | float, no_speech: float = 0.0, logprob: float = -0.1, cut: bool = False) -> None:
        self.token_ids = [
            token_id
            for part in said
            for token_id in (part.encode() if isinstance(part, str) else [TIMES + round(part / 0.02)])
        ]
        self.no_speech = no_speech
        self.logprob = logprob
        self.cut = cut


def whisper_engine(*windows: Window, multilingual: bool = False, script: Callable[..., Iterator[Delta]] | None = None):
    """An engine that answers with `windows`, one for each request that is not about the language."""
    left = list(windows)

    def play(request: Request) -> Iterator[Delta]:
        if request.params.allowed_token_ids is not None:
            yield from _deltas(request, [DE], -0.1, None)
            return
        if request.extracts:
            yield from _deltas(request, [], 0.0, None)
            return
        window = left.pop(0)
        ids = request.prompt_token_ids
        silence = ((NO_SPEECH, float(np.log(max(window.no_speech, 1e-9)))), (7, -9.0))
        said = window.token_ids if window.cut else [*window.token_ids, END]
        if request.params.rules.timestamps is not None and said[0] < TIMES:
            said.insert(0, TIMES)
        if ids[-1] == START:
            assert request.params.logprobs == 20 and request.params.prompt_logprobs is None
            yield from _deltas(request, said, window.logprob, None, silence, cut=window.cut)
            return
        assert request.params.prompt_logprobs == 20
        behind = ids.index(START) + 1
        prompt = [TokenLogprob(i, -1.0, 1, silence if place == behind else ()) for place, i in enumerate(ids)]
        yield from _deltas(request, said, window.logprob, (None, *prompt[1:]), cut=window.cut)

    engine = FakeEngine(script or play)
    encoder = EncoderInfo(
        "audio",
        max_len=1500,
        decoder_start_token_id=START,
        default_decoder_prompt=(START, NO_TIMES),
        suppress_tokens=(40,),
        begin_suppress_tokens=(32, END),
        num_mels=80,
        num_frames=3000,
        frames_per_position=2,
        num_layers=2,
        alignment=Alignment(((0, 1), (2, 0), (2, 3))),
    )
    vocab_size = MULTILINGUAL if multilingual else ENGLISH
    engine.info = replace(engine.info, max_model_len=448, vocab_size=vocab_size, eos_token_ids=(END,), encoder=encoder)
    return engine


def _deltas(
    request: Request,
    token_ids: Sequence[int],
    logprob: float,
    prompt: tuple[TokenLogprob | None, ...] | None,
    first_top: tuple[tuple[int, float], ...] = (),
    cut: bool = False,
) -> Iterator[Delta]:
    usage = Usage(len(request.prompt_token_ids), len(token_ids), 0)
    groups = [list(token_ids)] if request.output is OutputMode.FINAL else [[token_id] for token_id in token_ids]
    for step, group in enumerate(groups):
        last = step == len(groups) - 1
        logprobs = None
        if request.params.logprobs is not None:
            tops = [first_top if step == place == 0 else () for place in range(len(group))]
            logprobs = tuple(TokenLogprob(i, logprob, 1, top) for i, top in zip(group, tops, strict=True))
        reason: FinishReason | None = ("length" if cut else "stop") if last else None
        stop = "deadline" if last and cut else None
        choice = ChoiceDelta(0, "", tuple(group), logprobs, finish_reason=reason, stop_reason=stop)
        yield Delta(
            request.id,
            (choice,),
            first=step == 0,
            prompt_logprobs=prompt if step == 0 else None,
            usage=usage if last else None,
        )


def sound(seconds: float, kind: str = "WAV", rate: int = RATE) -> bytes:
    file = io.BytesIO()
    tone = 0.1 * np.sin(np.arange(round(seconds * rate)) / 20)
    soundfile.write(file, tone, rate, format=kind, subtype="PCM_16")
    return file.getvalue()
