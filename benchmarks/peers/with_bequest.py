"""Bequest, through the class for scripts: the embedded GGUF file, its values in float32."""

from __future__ import annotations

from collections.abc import Callable

from bequest import LLM, SamplingParams


def load(model: str, threads: int, matmul: str = "auto") -> Callable[[list[list[int]], int], int]:
    llm = LLM(model, threads=threads, dtype="float32", enable_prefix_caching=False, cpu_matmul=matmul)

    def generate(prompts: list[list[int]], output_len: int) -> int:
        params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
        completions = llm.generate(prompts, params, progress=False)
        return sum(completion.usage.completion_tokens for completion in completions)

    return generate


def load_beams(model: str, threads: int) -> tuple[Callable[[list[int]], None], Callable[[list[int], int, int], int]]:
    llm = LLM(model, threads=threads, dtype="float32")

    def remember(prompt: list[int]) -> None:
        llm.generate(prompt, SamplingParams(max_tokens=0))

    def search(prompt: list[int], width: int, output_len: int) -> int:
        params = SamplingParams(max_tokens=output_len, ignore_eos=True)
        [found] = llm.beam_search([prompt], width, params, progress=False)
        return len(found.choices)

    return remember, search
