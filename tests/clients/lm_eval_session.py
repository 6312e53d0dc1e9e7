"""lm-evaluation-harness, against the server and with its own Hugging Face backend on the same model. Run by
test_lm_eval.py in the environment that has it; prints what both came to as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate  # type: ignore[import-not-found]

QUESTIONS = [
    ("The capital of France is", [" Paris", " London", " Rome"], 0),
    ("The capital of Italy is", [" Paris", " Rome", " Berlin"], 1),
    ("Two and two make", [" five", " four", " a horse"], 1),
    ("Question: What do bees make?\nAnswer:", [" honey", " iron", " letters"], 0),
    ("The opposite of hot is", [" cold", " tall", " green"], 0),
    ("Water freezes to", [" ice", " bread"], 0),
]
TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "In 1969 two men walked on the moon. 👋 Éclairs!\n\nThey came back.",
]


def tasks(folder: Path) -> list[dict[str, Any]]:
    """Of local files: nothing is fetched."""
    choices, texts = folder / "choices.jsonl", folder / "texts.jsonl"
    rows = [{"question": text, "choices": options, "answer": answer} for text, options, answer in QUESTIONS]
    choices.write_text("\n".join(map(json.dumps, rows)))
    texts.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    return [
        {
            "task": "choices",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(choices)}},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}",
            "target_delimiter": "",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        {
            "task": "texts",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(texts)}},
            "test_split": "test",
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}],
        },
    ]


def told(model: str, arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
    found = simple_evaluate(
        model=model, model_args=arguments, tasks=tasks(folder), log_samples=True, bootstrap_iters=0, verbosity="ERROR"
    )
    metrics = {name: {key: value for key, value in row.items() if "," in key} for name, row in found["results"].items()}
    samples = {
        name: [sample["filtered_resps"] for sample in sorted(rows, key=lambda row: row["doc_id"])]
        for name, rows in found["samples"].items()
    }
    return {"metrics": metrics, "samples": samples}


def main() -> None:
    url, model, exported, folder = sys.argv[1:]
    remote = {
        "model": model,
        "base_url": f"{url}/v1/completions",
        "tokenizer": exported,
        "tokenized_requests": True,
        "num_concurrent": 1,
        "max_retries": 1,
    }
    local = {"pretrained": exported, "dtype": "float32", "device": "cpu", "batch_size": 1}
    server = told("local-completions", remote, Path(folder))
    strings = told("local-completions", {**remote, "tokenized_requests": False}, Path(folder))
    print("RESULT" + json.dumps({"server": server, "strings": strings, "hf": told("hf", local, Path(folder))}))


if __name__ == "__main__":
    main()
