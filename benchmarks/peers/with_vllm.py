"""vLLM's CPU build, in one process, float32, on the export of the GGUF file."""

from __future__ import annotations

import os
from collections.abc import Callable

# Read when vllm is imported.
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="2", VLLM_NO_USAGE_STATS="1")

from vllm import LLM, SamplingParams
from vllm.sampling_params import BeamSearchParams


def load(model: str, threads: int) -> Callable[[list[list[int]], int], int]:
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    llm = LLM(model, dtype="float32", max_model_len=1024, skip_tokenizer_init=True, enable_prefix_caching=False)

    def generate(prompts: list[list[int]], output_len: int) -> int:
        params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate


def load_beams(model: str, threads: int) -> tuple[Callable[[list[int]], None], Callable[[list[int], int, int], int]]:
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    llm = LLM(model, dtype="float32", max_model_len=1024, enable_prefix_caching=True, max_logprobs=64)

    def remember(prompt: list[int]) -> None:
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)

    def search(prompt: list[int], width: int, output_len: int) -> int:
        params = BeamSearchParams(beam_width=width, max_tokens=output_len, ignore_eos=True)
        outputs = llm.beam_search([{"prompt_token_ids": prompt}], params)
        return len(outputs[0].sequences)

    return remember, search
