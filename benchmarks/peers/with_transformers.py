"""Hugging Face transformers: `generate` on a batch of equal lengths, float32, on the export of the GGUF file."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM


def load(model: str, threads: int) -> Callable[[list[list[int]], int], int]:
    torch.set_num_threads(threads)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    @torch.inference_mode()
    def generate(prompts: list[list[int]], output_len: int) -> int:
        input_ids = torch.tensor(prompts)  # [R, P]
        output = network.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            min_new_tokens=output_len,
            max_new_tokens=output_len,
            pad_token_id=0,
        )
        return int(output[:, input_ids.shape[1] :].numel())

    return generate


def load_beams(model: str, threads: int) -> tuple[Callable[[list[int]], None], Callable[[list[int], int, int], int]]:
    torch.set_num_threads(threads)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    @torch.inference_mode()
    def search(prompt: list[int], width: int, output_len: int) -> int:
        input_ids = torch.tensor([prompt])  # [1, P]
        output = network.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            min_new_tokens=output_len,
            max_new_tokens=output_len,
            pad_token_id=0,
        )
        return int(output.shape[0])

    return lambda prompt: None, search  # it keeps nothing from call to call
