"""Bequest, through the class for scripts: the embedded GGUF file, its values in float32."""

from __future__ import annotations

from collections.abc import Callable

from engine.llm import LLM, EngineConfig, SamplingParams


def load(model: str, threads: int) -> Callable[[list[list[int]], int], int]:
    llm = LLM(EngineConfig(model=model, threads=threads, dtype="float32", enable_prefix_caching=False))

    def generate(prompts: list[list[int]], output_len: int) -> int:
        params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
        completions = llm.generate(prompts, params, progress=False)
        return sum(completion.usage.completion_tokens for completion in completions)

    return generate
