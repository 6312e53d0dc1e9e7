"""From sampled tokens to what a client is shown: text, stop strings, log-probabilities. Owned by the event-loop thread.

Decoding text is put off until somebody needs it: at once where stop strings must be found, else at delivery, after the
next step has been launched.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from bequest.engine.text.detokenizer import IncrementalDetokenizer
from bequest.engine.text.outlets import Outlet
from bequest.engine.text.stops import StopMatcher
from bequest.engine.text.tokenizer import Tokenizer
from bequest.engine.types import ChoiceDelta, FinishReason, OutputMode, Request, StopReason, TokenLogprob


class ChoiceOutput:
    """One choice of a request on its way to the client."""

    def __init__(self, request: Request, index: int, tokenizer: Tokenizer | None, outlet: Outlet | None = None) -> None:
        """`outlet`: where the sink takes tokens that are nothing but their own text."""
        params = request.params
        self.index = index
        self._request = request
        self._tokenizer = tokenizer
        self.finish_reason: FinishReason | None = None
        self.stop_reason: StopReason = None
        self._mode = request.output
        self._params = params
        self._decoder = (
            IncrementalDetokenizer(tokenizer, request.said_token_ids, params.skip_special_tokens)
            if tokenizer is not None
            else None
        )
        self._stops = StopMatcher(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._plain = request.output is OutputMode.DELTA and not params.stop and params.logprobs is None
        self._offered = outlet if self._plain and params.n == 1 and self._decoder is not None else None
        self.outlet: Outlet | None = None  # the same while the text of a token is that of the token alone
        self._num_tokens = 0
        self._undecoded: list[int] = []
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self._cumulative = 0.0
        self._announced = False
        self._beam_score: float | None = None
        self._stop_found = False
        self._num_shown = 0  # pushed tokens that have text
        # With stop strings: the characters of the text up to the last one that each token has a part in, the text's
        # length, and how much of it was let through.
        self._reached: list[int] = []
        self._length = 0
        self._let_through = 0

    def sibling(self, index: int) -> ChoiceOutput:
        """The output of another choice of the same request."""
        return ChoiceOutput(self._request, index, self._tokenizer)

    def whole_sibling(
        self, index: int, token_ids: list[int], num_shown: int, logprobs: list[TokenLogprob] | None
    ) -> ChoiceOutput:
        """The same with all its tokens, of which the first `num_shown` have text.

        REQUIRES: there are no stop strings, and this one has no tokens.
        """
        assert self._stops is None
        sibling = ChoiceOutput(self._request, index, None)
        sibling._num_tokens = len(token_ids)
        sibling._tokens = token_ids
        sibling._num_shown = num_shown
        sibling._text += self.texts_of([token_ids[:num_shown]])
        if sibling._logprobs is not None and logprobs is not None:
            sibling._logprobs = logprobs
        return sibling

    def texts_of(self, answers: Sequence[Sequence[int]]) -> list[str]:
        """Of whole answers to the request; all empty without a tokenizer. REQUIRES: as `whole_sibling`"""
        return [""] * len(answers) if self._decoder is None else self._decoder.wholes(answers)

    def shows_end(self, token_id: int) -> bool:
        """As stop strings are, unless it is a special token, whose text is left out."""
        if not self._params.include_stop_str_in_output:
            return False
        special = self._tokenizer is not None and token_id in self._tokenizer.special_ids
        return not (special and self._params.skip_special_tokens)

    def push(self, token_id: int, logprob: TokenLogprob | None, shown: bool) -> str | None:
        """Takes one sampled token; `shown` is false for an end token that has no text.

        Returns the stop string it completed, if any.
        """
        self._num_tokens += 1
        self._tokens.append(token_id)
        if self._logprobs is not None and logprob is not None:
            self._logprobs.append(logprob)
            self._cumulative += logprob.logprob
        if shown:
            self._num_shown += 1
            self._undecoded.append(token_id)
        if self._stops is None:
            return None
        return self._decode()

    def set_beam(self, cumulative_logprob: float, beam_score: float) -> None:
        self._cumulative, self._beam_score = cumulative_logprob, beam_score

    @property
    def shown_len(self) -> int:
        """Sampled tokens that are part of the text shown: no end token, none that reaches into a hidden stop string."""
        if not self._stop_found:
            return self._num_shown + (0 if self._offered is None else self._offered.num_written)
        return bisect_right(self._reached, self._let_through)

    def finish(self, reason: FinishReason, stop_reason: StopReason) -> None:
        """The choice is complete: what was held back for a possible stop string is text after all."""
        if self._stops is None:
            self._decode()
        if self._decoder is not None and not self._stop_found:
            rest = self._decoder.flush()
            if self._stops is None:
                self._text.append(rest)
            else:
                safe, _ = self._stops.feed(rest)
                self._text.append(safe + self._stops.flush())
        self.finish_reason = reason
        self.stop_reason = stop_reason

    def take(self, always: bool) -> ChoiceDelta | None:
        """What to deliver now, or None when there is nothing new and not `always`."""
        if self._plain and self.finish_reason is None and not always:
            return self._take_plain()
        if self._stops is None:
            self._decode()
        ended = self.finish_reason is not None and not self._announced
        if not (self._tokens or ended or always):
            return None
        text = "".join(self._text)
        tells_score = self._logprobs is not None or self._beam_score is not None
        delta = ChoiceDelta(
            index=self.index,
            text=text,
            token_ids=tuple(self._tokens),
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            finish_reason=self.finish_reason if ended or self._mode is not OutputMode.DELTA else None,
            stop_reason=self.stop_reason,
            cumulative_logprob=self._cumulative if ended and tells_score else None,
            beam_score=self._beam_score if ended else None,
        )
        self._announced = self._announced or ended
        if self._mode is OutputMode.DELTA:
            self._text.clear()
            self._tokens.clear()
            if self._logprobs is not None:
                self._logprobs.clear()
        else:
            self._text = [text]
        return delta

    def _take_plain(self) -> ChoiceDelta | None:
        """The same in the middle of a stream of which nothing but its tokens and their text is wanted."""
        if not self._tokens:
            return None
        token_ids = tuple(self._tokens)
        self._tokens.clear()
        text = "" if self._decoder is None else self._decoder.steps(self._undecoded)
        self._undecoded.clear()
        if self._offered is not None:
            assert self._decoder is not None
            self.outlet = self._offered if self._decoder.settled else None
        return ChoiceDelta(self.index, text, token_ids)

    def _decode(self) -> str | None:
        """Decodes what is waiting; returns the stop string that it completed, if any."""
        pending, self._undecoded = self._undecoded, []
        if self._decoder is None:
            return None
        if self._stops is None:
            if pending:
                self._text.append(self._decoder.steps(pending))
            return None
        for token_id in pending:
            piece = self._decoder.step(token_id)
            safe, stop = self._stops.feed(piece, armed=self._num_tokens >= self._params.min_tokens)
            self._text.append(safe)
            self._length += len(piece)
            self._reached.append(self._length + self._decoder.inside_character)
            self._let_through += len(safe)
            if stop is not None:
                self._stop_found = True
                return stop
        return None
