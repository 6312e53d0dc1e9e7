"""What each open request has cost: tokens and times, for its line of the log. Lives on the event-loop thread."""

from __future__ import annotations

from bequest.engine.watching.observation import RequestStats


class Account:
    """Of one answer, which may be made of several requests of the engine."""

    __slots__ = ("cached_tokens", "decode_seconds", "first_seconds", "num_choices", "output_tokens", "prompt_tokens")

    def __init__(self) -> None:
        self.prompt_tokens = self.cached_tokens = self.output_tokens = self.num_choices = 0
        self.first_seconds = 0.0  # from arrival to the first token, the latest
        self.decode_seconds = 0.0  # from there to the last one, the longest

    def add(self, stats: RequestStats) -> None:
        self.prompt_tokens += stats.prompt_tokens
        self.cached_tokens += stats.cached_tokens
        self.output_tokens += stats.completion_tokens
        self.num_choices += stats.n
        self.first_seconds = max(self.first_seconds, stats.queue_seconds + stats.prefill_seconds)
        self.decode_seconds = max(self.decode_seconds, stats.decode_seconds)

    @property
    def tokens_per_second(self) -> float | None:
        """Of all choices together, after their first tokens; None where there is nothing to divide."""
        later = self.output_tokens - self.num_choices
        return later / self.decode_seconds if later > 0 and self.decode_seconds > 0 else None

    def fields(self) -> dict[str, int | float]:
        """For a line of JSON."""
        found: dict[str, int | float] = {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "first_token_seconds": round(self.first_seconds, 6),
        }
        if (rate := self.tokens_per_second) is not None:
            found["tokens_per_second"] = round(rate, 1)
        return found

    def __str__(self) -> str:
        cached = f" ({self.cached_tokens} cached)" if self.cached_tokens else ""
        told = f"{self.prompt_tokens} prompt tokens{cached}, {self.output_tokens} output tokens"
        if not self.output_tokens:
            return told
        rate = self.tokens_per_second
        return f"{told}, first after {self.first_seconds:.3f} s" + (f", then {rate:.1f} tokens/s" if rate else "")


class Spending:
    """The accounts of answers that are under way, by their ids."""

    def __init__(self) -> None:
        self._open: dict[str, Account] = {}

    def open(self, answer_id: str) -> None:
        self._open[answer_id] = Account()

    def on_finish(self, stats: RequestStats) -> None:
        """Requests are named after their answer; the second and later ones of an answer have a number behind it."""
        account = self._open.get(stats.id) or self._open.get(stats.id.rpartition("-")[0])
        if account is not None:
            account.add(stats)

    def of(self, answer_id: str) -> Account | None:
        """As it stands."""
        return self._open.get(answer_id)

    def close(self, answer_id: str | None) -> Account | None:
        """None for a request that computed nothing."""
        account = None if answer_id is None else self._open.pop(answer_id, None)
        return account if account is not None and account.num_choices else None
