"""What drafts bring: tokens per second with them by those without, by turns, of prompts that have something to copy and
of one that has nothing.

    python -m benchmarks.speculation [--model DIR] [--tokens 160] [--rounds 3] [--json FILE]

The answers of both are compared: a draft must not change a token. Beside the ratio of times stands what was counted,
which a busy machine does not change: tokens by the steps that they took, each drafted token at its part of a step.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time
from dataclasses import dataclass
from pathlib import Path

from bequest.engine.build import Built, build_engine
from bequest.engine.config import EngineConfig
from bequest.engine.types import Request, SamplingParams
from bequest.engine.types.speculation import ON_CPU, DraftMethod, Speculation
from bequest.engine.watching.observation import StepStats

_TEXT = """\
The lighthouse stands on a rock at the end of the bay. It was built in 1871, after three ships were lost in one \
winter. For ninety years a keeper lived in the house beside the tower with his family. Every evening he climbed the \
stairs, lit the lamp and wound the clockwork that turned the lens. In fog he rang a bell by hand, once every thirty \
seconds, sometimes for two days without a break.

In 1961 the lamp was changed to an electric one, and the last keeper, Thomas Reed, moved to the village. The house was \
empty for twenty years. Then a group of neighbours bought it, mended the roof and opened a small museum. Today about \
four thousand people visit it each year. They can see the old lens, the log books and the bell, and on clear days they \
can climb the tower and look at the islands in the west.

The museum is open from April to October, every day but Monday. A boat leaves the harbour at ten in the morning and \
comes back at four in the afternoon. When the sea is rough the boat does not sail, and visitors have to wait for the \
next day."""
_MISTAKES = {"lighthouse": "lighthous", "evening": "evning", "neighbours": "neigbours", "visitors": "visiters"}


def _misspelt(text: str) -> str:
    for right, wrong in _MISTAKES.items():
        text = text.replace(right, wrong)
    return text


PROMPTS = {
    "repeat": "Repeat this text word for word:\n\n" + _TEXT,
    "sum up": "Sum this text up in one paragraph:\n\n" + _TEXT,
    "edit: a name": "Write this text again, but call the keeper John Miller:\n\n" + _TEXT,
    "edit: spelling": "Correct the spelling mistakes in this text:\n\n" + _misspelt(_TEXT),
    "edit: tense": "Rewrite this text in the present tense:\n\n" + _TEXT,
    "edit: a word": "Write this text again, with the word 'gallery' for the word 'museum':\n\n" + _TEXT,
    "story": "Tell a story about a fox and a river.",
}
_numbers = itertools.count()


@dataclass
class Counts:
    """An Observer: what the steps of an answer cost, by their number."""

    steps: int = 0
    drafted: int = 0

    def on_step(self, stats: StepStats) -> None:
        self.steps += bool(stats.generated_tokens)
        self.drafted += stats.drafted_tokens

    def on_finish(self, stats: object) -> None:
        pass

    def cost(self) -> float:
        return self.steps + ON_CPU.row * self.drafted


async def rate(built: Built, text: str, method: DraftMethod, num_tokens: int) -> tuple[list[int], float]:
    """The answer, and its tokens per second behind the first."""
    template = built.text.chat_template
    shown = text if template is None else template.render([{"role": "user", "content": text}])
    request = Request(
        f"speculation-{next(_numbers)}",
        "benchmark",
        tuple(built.text.tokenizer.encode(shown, add_special_tokens=template is None)),
        SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True),
        speculation=Speculation(method=method),
    )
    tokens: list[int] = []
    began, at_first = 0.0, 0
    async for delta in built.engine.generate(request):
        tokens += [token for choice in delta.choices for token in choice.token_ids]
        if not began:
            began, at_first = time.perf_counter(), len(tokens)
    return tokens, (len(tokens) - at_first) / (time.perf_counter() - began)


async def measure(model: str | None, num_tokens: int, rounds: int) -> dict[str, float]:
    counts = Counts()
    built = await build_engine(EngineConfig(model=model, kv_cache_gb=1.0), counts)  # type: ignore[arg-type]
    ratios = {}
    for name, text in PROMPTS.items():
        best: dict[DraftMethod, float] = {"off": 0.0, "ngram": 0.0}
        said: dict[DraftMethod, list[int]] = {}
        for _ in range(rounds):
            for method in best:
                counts.steps = counts.drafted = 0
                said[method], reached = await rate(built, text, method, num_tokens)
                best[method] = max(best[method], reached)
        assert said["off"] == said["ngram"], "a draft changed the answer"
        ratios[name] = best["ngram"] / best["off"]
        counted = len(said["ngram"]) / counts.cost()
        print(f"{name:>14}  {best['off']:8.1f}  {best['ngram']:8.1f}  {ratios[name]:6.2f}   {counted:6.2f}", flush=True)
    await built.engine.stop()
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print("        prompt   without      with   ratio  counted   (tokens per second)")
    ratios = asyncio.run(measure(options.model, options.tokens, options.rounds))
    if options.json is not None:
        options.json.write_text(json.dumps(ratios, indent=1) + "\n")


if __name__ == "__main__":
    main()
