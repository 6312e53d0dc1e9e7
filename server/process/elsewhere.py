"""Flags of other servers, and what does the same here. docs/from_vllm.md and docs/from_llama_cpp.md have them, too."""

from __future__ import annotations

from collections.abc import Mapping

_MODEL = "name the model without a flag: bequest serve MODEL"
_DEVICE = "all layers run on one device, see --device"
_BUDGET = "the flag is --max-num-batched-tokens"
_CACHE = "the flag is --kv-cache-dtype"
_DRAFTS = "the flag is --speculative draft:N"
_ALWAYS = "leave it out, it is always so"
_THERE = "leave it out, the endpoint is always there"
_LOG = "every request leaves a line, without its text; --log-level bounds them"

FLAGS: Mapping[str, str] = {
    # vLLM's
    "--model": _MODEL,
    "--tokenizer": "the tokenizer is read from the model's directory or file",
    "--revision": "it stands in the model's name: ORG/NAME@REVISION",
    "--hf-token": "the token is the variable HF_TOKEN",
    "--download-dir": "the variable HF_HOME says where models are kept",
    "--task": "leave it out, one server generates and embeds",
    "--runner": "leave it out, one server generates and embeds",
    "--num-gpu-blocks-override": "the flag is --num-blocks",
    "--swap-space": "the flag is --host-cache-gb",
    "-tp": "the flag is --tensor-parallel-size",
    "-pp": "--tensor-parallel-size divides every layer; none is left out",
    "--pipeline-parallel-size": "--tensor-parallel-size divides every layer; none is left out",
    "-dp": "`bequest cluster up --replicas N` runs several servers",
    "--data-parallel-size": "`bequest cluster up --replicas N` runs several servers",
    "--api-server-count": "there is one process; `bequest cluster up --replicas N` runs several",
    "--enable-chunked-prefill": _ALWAYS,
    "--enable-lora": "leave it out, --lora NAME=PATH is enough",
    "--lora-modules": "the flag is --lora NAME=PATH, repeated",
    "--max-cpu-loras": "the flag is --max-loras",
    "--enable-auto-tool-choice": _ALWAYS,
    "--enable-prompt-embeds": "the flag is --allow-prompt-embeds",
    "--enable-sleep-mode": _THERE,
    "--guided-decoding-backend": "leave it out, there is one",
    "--structured-outputs-config": "leave it out, there is one way",
    "--chat-template-content-format": "leave it out, the template shows it",
    "--override-generation-config": "requests have fields for it; --generation-config none leaves the model's out",
    "--speculative-config": "the flags are --speculative and --draft-model",
    "--limit-mm-per-prompt": "the flag is --max-images",
    "--allowed-local-media-path": "the flag is --image-dir",
    "--allowed-media-domains": "the flag is --allow-image-hosts",
    "--enable-log-requests": _LOG,
    "--no-enable-log-requests": _LOG,
    "--disable-log-requests": _LOG,
    "--root-path": "the paths are fixed; let a proxy rewrite them",
    "--uds": "`bequest install-service --socket` writes a unit that can hold a Unix socket",
    # llama.cpp's
    "-m": _MODEL,
    "-hf": "name the model without a flag: bequest serve ORG/NAME:Q4_K_M",
    "--hf-repo": "name the model without a flag: bequest serve ORG/NAME:Q4_K_M",
    "--ctx-size": "the flag is --max-model-len",
    "-c": "the flag is --max-model-len",
    "--parallel": "the flag is --max-num-seqs",
    "-np": "the flag is --max-num-seqs",
    "-b": _BUDGET,
    "--batch-size": _BUDGET,
    "-ub": _BUDGET,
    "--ubatch-size": _BUDGET,
    "-t": "the flag is --threads",
    "--n-gpu-layers": _DEVICE,
    "-ngl": _DEVICE,
    "-ctk": _CACHE,
    "-ctv": _CACHE,
    "--cache-type-k": _CACHE,
    "--cache-type-v": _CACHE,
    "-fa": _ALWAYS,
    "--flash-attn": _ALWAYS,
    "-cb": _ALWAYS,
    "--cont-batching": _ALWAYS,
    "--cache-prompt": _ALWAYS,
    "--jinja": _ALWAYS,
    "--alias": "the flag is --served-model-name",
    "--chat-template-file": "the flag is --chat-template",
    "--ssl-cert-file": "the flag is --ssl-certfile",
    "--ssl-key-file": "the flag is --ssl-keyfile",
    "--embedding": _THERE,
    "--embeddings": _THERE,
    "--rerank": _THERE,
    "--reranking": _THERE,
    "--metrics": _THERE,
    "-md": "the flag is --draft-model",
    "--model-draft": "the flag is --draft-model",
    "--draft-max": _DRAFTS,
    "--draft": _DRAFTS,
    "--mmproj": "images need the model's safetensors, see docs/images.md",
    "-v": "the flag is --log-level debug",
    "--verbose": "the flag is --log-level debug",
}
