"""The two configurations. Command-line flags and TOML keys are made from these fields (server/process/options.py):
the flag of `max_model_len` is `--max-model-len`, its help is the field's `help`, its default the field's."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from bequest.engine.types.speculation import parse_speculative
from bequest.engine.types.store_url import parse_store_url

# What --reasoning-parser and --tool-call-parser take (engine/dialects).
ReasoningParser = Literal[
    "auto",
    "none",
    "qwen3",
    "deepseek_r1",
    "deepseek_v3",
    "glm45",
    "olmo3",
    "minimax_m2",
    "smollm3",
    "nemotron_v3",
    "kimi_k2",
    "ernie45",
    "step3",
    "granite",
    "mistral",
    "cohere_command3",
    "cohere_command4",
    "gemma4",
    "seed_oss",
    "openai_gptoss",
]
ToolCallParser = Literal[
    "auto",
    "hermes",
    "llama3_json",
    "mistral",
    "mistral_args",
    "granite",
    "phi4_mini_json",
    "cohere_command3",
    "glm4",
    "deepseek_v3",
    "deepseek_v31",
    "qwen3_coder",
    "glm45",
    "minimax_m2",
    "kimi_k2",
    "seed_oss",
    "pythonic",
    "lfm2",
    "olmo3",
    "gemma3",
    "gemma4",
    "openai",
    "llama3",
    "llama4_json",
    "llama4_pythonic",
    "granite4",
    "qwen3_xml",
    "glm47",
]


_MOST_NUMBER = 10**9  # of anything; as GiB it is a number of bytes in 64 bits
_MOST = {"threads": 4096}  # more than a process may start
_ORIGIN = r"\*|null|file://|[a-z][a-z0-9+.-]*://[^/\sA-Z]+"  # file://: of apps in a web view, such as Cordova's
_HOST = r"[^\s,/@?#]+"  # neither a list nor a URL
REPLICA_TAG = r"[a-z0-9]{1,16}"
ADAPTER_NAME = r"[\x21-\x3c\x3e-\x7e]{1,128}"  # printable ASCII but for "="


def option(default: Any, help: str, value: str | None = None) -> Any:
    """A field with a line of help. `value` says in a usage what it takes, where the last word of its name does not."""
    metadata = {"help": help, "value": value}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def check_numbers(config: EngineConfig | ServerConfig) -> None:
    """A command line can say `nan` and `inf`, of which no comparison below would complain, and a number with more zeros
    than was meant, which no counter and no sum of bytes could hold."""
    for name in (entry.name for entry in fields(config)):
        value = getattr(config, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, not {value:g}")
        most = _MOST.get(name, _MOST_NUMBER)
        if isinstance(value, int | float) and value > most and name != "seed":
            raise ValueError(f"{name} must be at most {most}, not {value:g}")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The model and the engine."""

    model: str | None = option(
        None,
        "Hugging Face directory, .gguf file, Whisper .pt file, or a name that is fetched: ORG/NAME on the Hugging "
        "Face hub, with @REVISION and :QUANTISATION of a GGUF, whisper, or t5; default: the embedded "
        "SmolLM2-135M-Instruct",
    )
    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "where the model runs; auto: a GPU if there is one and CUDA was built"
    )
    tensor_parallel_size: int = option(
        1, "processes of this machine that compute the model together, each with a part of it; on GPUs one for each"
    )
    load_format: Literal["auto", "dummy"] = option(
        "auto", "dummy: random weights of config.json's shape, for measuring"
    )
    model_impl: Literal["auto", "bequest", "transformers"] = option(
        "auto",
        "who computes the model's layers; auto: Bequest's own families, and the transformers library for other "
        "architectures, two to three times slower; bequest, transformers: these alone",
    )
    trust_remote_code: bool = option(
        False, "run Python files that a checkpoint brings for transformers, with all rights of this process"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto",
        "storage of weights and cache; auto: as the checkpoint, where this chip is fast in it. A CPU with matrix units "
        "(AMX) also multiplies bfloat16",
    )
    kv_cache_dtype: Literal["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"] = option(
        "auto",
        "storage of the cache; auto: as --dtype; float16, bfloat16: half of float32's memory, on a CPU; fp8 (the same "
        "as fp8_e4m3): half of bfloat16's, with the checkpoint's scales or 1",
    )
    quantization: Literal["auto", "fp8"] = option(
        "auto",
        "codes of the layers' weights; auto: as the checkpoint; fp8: made of a checkpoint in numbers when it is "
        "loaded, half of bfloat16's memory, on a GPU",
    )
    cpu_matmul: Literal["auto", "exact", "fast"] = option(
        "auto",
        "how a CPU multiplies weights that stay in the codes of a quantised checkpoint; exact: as the float32 values "
        "that they stand for; fast: as integers, with activations rounded to 16 bits; auto: fast where the chip has an "
        "instruction for it (VNNI, dotprod)",
    )
    max_model_len: int | None = option(None, "longest prompt plus completion, in tokens; default: the model's own")
    max_num_seqs: int = option(256, "most sequences that run at once")
    max_num_batched_tokens: int | None = option(
        None,
        "most tokens in one step, longer prompts are cut into chunks; "
        "default: 2048 on a GPU; on a CPU 128, or 512 while nothing but prompts is computed",
    )
    max_encoder_len: int | None = option(
        None, "longest input of an encoder-decoder model's encoder, in positions; default: the model's own"
    )
    image_cache_mb: float = option(
        512, "memory in MiB on the device for what the vision tower made of images; they are looked at again later"
    )
    allow_prompt_embeds: bool = option(
        False, "requests may bring rows of the embedding instead of tokens (`prompt_embeds` of /v1/completions)"
    )
    max_num_encoder_tokens: int | None = option(
        None,
        "most positions of encoder inputs in one step, a longer input has a step to itself; "
        "default: 16384 on a GPU, 2048 on a CPU",
    )
    block_size: int = option(16, "tokens per cache block")
    num_blocks: int | None = option(
        None, "blocks in the cache pool, each with tokens of all layers; default: from the memory that is free"
    )
    kv_cache_gb: float | None = option(None, "memory of the cache pool in GiB, where --num-blocks is not given")
    retain_fraction: float | None = option(
        None, "share of the cache that leases may hold; default: 0.5, or less where a longest request needs the rest"
    )
    host_cache_gb: float = option(4.0, "host memory in GiB that leases and preempted requests may move to")
    state_interval: int | None = option(
        None,
        "tokens between two positions that sliding windows and states of recurrent layers are kept of, for those who "
        "continue from the middle; default: 4096, of recurrent layers as many as have keys and values of that size",
    )
    estate_dir: str | None = option(None, "directory for leases that outlive the process")
    estate_peers: bool = option(
        False,
        "the directory stands beside those of other servers, each named by its --replica-tag: leases of one that has "
        "ended are taken over when they are asked for",
    )
    estate_store: str | None = option(
        None, "a store for leases that servers share, instead: mooncake://MASTER:PORT, see docs/estates.md", "URL"
    )
    estate_gb: float = option(10.0, "how much they may take there, in GiB")
    warm_estates: bool = option(
        False, "what requests without a lease leave goes there, too, where leases leave room: a cache of prefixes"
    )
    durable_by_default: bool = option(False, "every lease is to outlive the process, unless it says otherwise")
    durable_wait: float = option(5.0, "seconds that the end of an answer waits for its lease to be on the disk")
    idle_sleep: float = option(
        0.0,
        "seconds without a request after which weights and cache give their memory back, until the next one; 0: never",
    )
    default_ttl: float = option(300.0, "seconds that `retain: true` leases for")
    max_ttl: float = option(86400.0, "longest lease in seconds")
    max_leases: int | None = option(None, "most leases of one tenant; default: what the budget holds")
    max_lease_fraction: float = option(1.0, "share of the retention budget that one tenant may hold")
    retained_tokens_records: int = option(1024, "finished requests whose tokens are kept without a lease")
    gpu_memory_utilization: float = option(0.9, "share of the GPU's memory to use, cache included")
    enforce_eager: bool = option(False, "run without CUDA graphs")
    enable_prefix_caching: bool = option(True, "share cached blocks between requests with equal beginnings")
    max_queued: int = option(4096, "most waiting requests; beyond it a request is answered 429")
    step_timeout: float = option(
        120.0, "seconds after which a step of the device is taken for hung, and the engine for dead; 0: never"
    )
    extraction_share: float = option(
        0.1, "share of the computed tokens, and of the time, that extractions of hidden states get beside generations"
    )
    max_queued_extractions: int = option(1024, "most waiting extractions; beyond it one is answered 429")
    max_extraction_mb: float = option(1024, "largest hidden states of one request in MiB")
    extraction_mb: float = option(4096, "memory in MiB for hidden states that are collected or being sent")
    threads: int | None = option(None, "threads of the CPU kernels; default: one per core")
    seed: int = option(0, "seeds the random numbers of requests that bring none, with the request's id")
    pipelined: bool = option(True, "plan a step while the one before it runs")
    speculative: str = option(
        "auto",
        "drafts that steps check, which change no token: off, ngram (what followed the same tokens before in the "
        "request), suffix (there, or in the tenant's records), draft or eagle3 (what --draft-model says), mtp (what "
        "the head of the model's own checkpoint says); NAME:K with K tokens at most; auto: by the draft model where "
        "there is one, else ngram on a CPU",
        "NAME[:K]",
    )
    draft_model: str | None = option(
        None,
        "a smaller model with the same tokens, or a head of EAGLE-3, which drafts for this one; named as --model is",
    )
    lora: list[str] = option(
        [],
        "a LoRA adapter as NAME=PATH, a directory that PEFT has saved; requests name it as `model`; may be repeated",
        "NAME=PATH",
    )
    max_loras: int = option(64, "most adapters that are loaded at once")
    max_lora_rank: int = option(64, "largest rank of an adapter")
    lora_experts: bool = option(
        False, "on a GPU: slots have memory for adapters of experts, too; true where one of --lora is of experts"
    )
    lora_vocabulary: bool = option(False, "on a GPU: the same of adapters of the embedding and of the output matrix")
    lora_slots: int | None = option(
        None, "on a GPU: adapters that a step can have, each with memory for the largest rank; default: those of --lora"
    )
    record: str | None = option(
        None,
        "file for everything that passes the device, to be run again by `python -m bequest.engine.replay`: for "
        "reports of bugs; if it is there, the next is FILE.1. It holds the prompts and answers of all users",
        "FILE",
    )
    chat_template: str | None = option(None, "file with a Jinja chat template, in place of the model's own", "FILE")
    generation_config: Literal["auto", "none"] = option(
        "auto", "what a request leaves open; auto: as the model's generation_config.json samples; none: as OpenAI does"
    )

    def __post_init__(self) -> None:
        check_numbers(self)
        parse_speculative(self.speculative)
        check_loras(self.lora, self.max_loras)
        _check_ranks(self)
        for name, least in (
            ("max_num_seqs", 1),
            ("max_lora_rank", 1),
            ("max_loras", 0),
            ("block_size", 1),
            ("max_queued", 0),
            ("max_queued_extractions", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        for name in ("retain_fraction", "max_lease_fraction"):
            share = getattr(self, name)
            if share is not None and not 0 <= share <= 1:
                raise ValueError(f"{name} must be from 0 to 1, not {share}")
        if not 0 <= self.extraction_share < 1:
            raise ValueError(f"extraction_share must be from 0 to less than 1, not {self.extraction_share:g}")
        if self.kv_cache_gb is not None and self.kv_cache_gb <= 0:
            raise ValueError(f"kv_cache_gb must be over 0, not {self.kv_cache_gb:g}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be over 0, at most 1, not {self.gpu_memory_utilization:g}")
        if self.step_timeout < 0:
            raise ValueError(f"step_timeout must not be negative, not {self.step_timeout:g}")
        for name in (
            "host_cache_gb",
            "retained_tokens_records",
            "max_leases",
            "max_extraction_mb",
            "extraction_mb",
            "lora_slots",
        ):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must not be negative, not {value}")
        for name in ("image_cache_mb", "estate_gb"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be over 0, not {getattr(self, name):g}")
        self._check_store()
        if self.estate_peers and self.estate_dir is None:
            raise ValueError("estate_peers needs estate_dir, the directory that stands beside others")
        if self.warm_estates and self.estate_dir is None:
            raise ValueError("warm_estates needs estate_dir, the directory that they go to")
        for name in ("durable_wait", "idle_sleep"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name):g}")
        if self.durable_by_default and not self.keeps_estates:
            raise ValueError("durable_by_default needs estate_dir or estate_store: a place for the leases")
        if not 0 < self.default_ttl <= self.max_ttl:
            raise ValueError(
                f"default_ttl must be over 0, at most max_ttl ({self.max_ttl:g}), not {self.default_ttl:g}"
            )
        lengths = ("max_model_len", "max_num_batched_tokens", "max_encoder_len", "max_num_encoder_tokens")
        for name in (*lengths, "num_blocks", "threads", "state_interval"):
            value, least = getattr(self, name), 2 if name == "num_blocks" else 1
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")

    @property
    def keeps_estates(self) -> bool:
        """Whether leases can outlive the process."""
        return self.estate_dir is not None or self.estate_store is not None

    def _check_store(self) -> None:
        if self.estate_store is None:
            return
        if self.estate_dir is not None:
            raise ValueError("estate_store and estate_dir are two places for the same leases: set one of them")
        try:
            parse_store_url(self.estate_store)
        except ValueError as error:
            raise ValueError(f"estate_store {error}") from None


def _check_ranks(config: EngineConfig) -> None:
    if config.tensor_parallel_size < 1:
        raise ValueError(f"tensor_parallel_size must be at least 1, not {config.tensor_parallel_size}")
    for name in ("record", "idle_sleep"):
        if config.tensor_parallel_size > 1 and getattr(config, name):
            raise ValueError(f"{name} needs tensor_parallel_size=1: it is for one process")


def check_loras(given: Sequence[str], most: int) -> None:
    """Raises ValueError for what is no NAME=PATH, twice there, or too many."""
    names = [entry.partition("=")[0] for entry in given]
    for entry, name in zip(given, names, strict=True):
        if not re.fullmatch(ADAPTER_NAME, name) or not entry.partition("=")[2]:
            raise ValueError(
                f"lora must be NAME=PATH, the name of 1 to 128 ASCII characters without spaces, not {entry}"
            )
        if names.count(name) > 1:
            raise ValueError(f"lora names {name} twice")
    if len(names) > most:
        raise ValueError(f"max_loras is {most}, but {len(names)} are given with lora")


_OVER_ZERO = (
    "max_body_mb",
    "max_body_values",
    "max_body_parts",
    "max_tokenize_chars",
    "max_in_flight_mb",
    "max_audio_mb",
    "max_audio_minutes",
    "max_images",
    "max_image_mb",
    "max_image_megapixels",
    "max_catalogue_mb",
    "max_estate_mb",
    "grammars_mb",
    "grammar_seconds",
    "client_timeout",
    "files_mb",
    "max_file_mb",
    "max_batch_lines",
    "batch_concurrency",
)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP front."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 takes a free one and prints it")
    served_model_name: list[str] = option(
        [], "names the API answers to, one or several, the first in its answers; default: the model's own"
    )
    ssl_certfile: str | None = option(
        None,
        "PEM file with a certificate and its chain: serve HTTPS. Read again when it changes, and on SIGHUP",
        "FILE",
    )
    ssl_keyfile: str | None = option(None, "PEM file with its private key; default: in the certificate's file", "FILE")
    api_key: list[str] = option([], "a key that clients must send; may be repeated")
    api_key_file: str | None = option(None, "TOML file of keys, their tenants and limits; SIGHUP reads it again")
    allow_lora_loading: str | None = option(
        None,
        "folder from below which operators may load adapters while the server runs (POST /v1/load_lora_adapter)",
        "DIR",
    )
    allowed_origins: list[str] = option([], "origin that browsers may call from (CORS); may be repeated", "ORIGIN")
    max_body_mb: float = option(32, "largest request body in MiB")
    max_body_values: int = option(1_500_000, "most values in a JSON body, of which token ids are most")
    max_body_parts: int = option(100_000, "most strings, names, lists and objects among them")
    max_tokenize_chars: int = option(1_000_000, "longest text that is only tokenised or counted")
    max_in_flight_mb: float = option(2048, "memory in MiB of bodies and answers on their way, all together")
    max_audio_mb: float = option(256, "largest upload of audio in MiB")
    max_audio_minutes: float = option(120, "longest audio that is transcribed in one request")
    max_images: int = option(32, "most images in one request")
    max_image_mb: float = option(20, "largest image that is fetched or read, in MiB")
    max_image_megapixels: float = option(50, "largest image in millions of pixels; no larger one is decoded")
    images_mb: float = option(256, "memory in MiB for images that may come again")
    image_dir: str | None = option(None, "directory whose files requests may name as file: URLs; default: none")
    allow_image_hosts: list[str] = option(
        [],
        "host that images are fetched from, *.name for all below one, * for any; may be repeated; default: none",
        "HOST",
    )
    max_catalogue_mb: float = option(1024, "largest upload of a catalogue in MiB")
    max_estate_mb: float = option(4096, "largest estate that is taken in, in MiB")
    catalogues_mb: float = option(2048, "memory in MiB for all catalogues")
    grammars_mb: float = option(256, "memory in MiB for compiled grammars; one may take an eighth of it")
    grammar_seconds: float = option(10.0, "seconds that a grammar of a request may take to compile")
    chat_template_seconds: float = option(
        5.0, "seconds that a chat template of a request may take to render; 0: requests bring none"
    )
    client_timeout: float = option(30.0, "seconds that a client may let pass while it sends a request")
    drain_timeout: float = option(30.0, "seconds that running requests get to finish after SIGTERM")
    stored_responses: int = option(10_000, "finished responses that can be fetched and continued")
    stored_mb: float = option(256, "memory in MiB for them; the least recently used leave first")
    files_dir: str | None = option(
        None, "directory for the files of clients and the answers of batches; default: there are no files, no batches"
    )
    files_mb: float = option(8192, "room in MiB for all of them")
    max_file_mb: float = option(200, "largest upload of a file in MiB")
    max_batch_lines: int = option(50_000, "most lines of a batch")
    batch_concurrency: int = option(
        64, "most lines of batches that run at once; an eighth of them while other requests are open"
    )
    sse_keep_alive_interval: float = option(
        0.0, "seconds of silence in a stream, also before its first event, that a keep-alive comment ends; 0: none"
    )
    tool_call_parser: ToolCallParser = option(
        "auto", "how the model writes tool calls; auto: as its chat template does"
    )
    reasoning_parser: ReasoningParser = option(
        "auto", "how the model marks its thoughts; auto: as its chat template does; none: thoughts are content"
    )
    replica_tag: str | None = option(
        None,
        "a name of this server, of a-z and 0-9, where it is one of several behind a router: its ids carry it, and what "
        "another one has made is answered 421 with that one's tag",
    )
    guard_metrics: bool = option(False, "ask for a key on /metrics too")
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "what is logged")
    log_format: Literal["text", "json"] = option("text", "json: one object per line")

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("ssl_keyfile needs ssl_certfile, the certificate that the key belongs to")
        if not 0 <= self.port < 2**16:
            raise ValueError(f"port must be from 0 to {2**16 - 1}, not {self.port}")
        if self.allow_lora_loading is not None and not Path(self.allow_lora_loading).expanduser().is_dir():
            raise ValueError(f"allow_lora_loading must be a folder that exists, not {self.allow_lora_loading!r}")
        if self.image_dir is not None and not Path(self.image_dir).is_dir():
            raise ValueError(f"image_dir must be a directory that exists, not {self.image_dir!r}")
        if "" in self.served_model_name:
            raise ValueError("served_model_name must not be empty")
        for origin in self.allowed_origins:
            if not re.fullmatch(_ORIGIN, origin):
                raise ValueError(
                    f"allowed_origins has {origin!r}: each is * or an origin as browsers send it, in small letters and "
                    "without a path, such as https://app.example or http://localhost:3000"
                )
        if self.replica_tag is not None and not re.fullmatch(REPLICA_TAG, self.replica_tag):
            raise ValueError(f"replica_tag must be 1 to 16 characters out of a-z and 0-9, not {self.replica_tag!r}")
        for host in self.allow_image_hosts:
            if not re.fullmatch(_HOST, host):
                raise ValueError(f"allow_image_hosts has {host!r}: each is a name, *.name or *, and may have a :port")
        for name in _OVER_ZERO:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be over 0, not {getattr(self, name):g}")
        from_zero = ("catalogues_mb", "drain_timeout", "stored_responses", "stored_mb", "sse_keep_alive_interval")
        for name in (*from_zero, "chat_template_seconds", "images_mb"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name):g}")
