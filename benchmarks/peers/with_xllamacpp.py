"""llama.cpp's server in the process, through xllamacpp: the GGUF file as it is, its weights in 4 bits."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import xllamacpp

MOST_REQUESTS = 16
CONTEXT_LEN = 640


def load(model: str, threads: int) -> Callable[[list[list[int]], int], int]:
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_parallel = MOST_REQUESTS
    params.n_ctx = MOST_REQUESTS * CONTEXT_LEN  # shared out evenly
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.port = 0
    params.verbosity = -1
    params.warmup = False
    server = xllamacpp.Server(params)
    pool = ThreadPoolExecutor(MOST_REQUESTS)

    def generate(prompts: list[list[int]], output_len: int) -> int:
        options = {"n_predict": output_len, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        tasks = [pool.submit(server.handle_completions, {"prompt": prompt, **options}) for prompt in prompts]
        return sum(task.result()["usage"]["completion_tokens"] for task in tasks)

    return generate
