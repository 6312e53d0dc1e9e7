"""Bodies of Ollama's API."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from bequest.server.asks.image_parts import GivenImage
from bequest.server.asks.messages import wrong_type
from bequest.server.asks.ranges import agreed
from bequest.server.wire.errors import ApiError, invalid, unsupported
from bequest.server.wire.fields import Rules
from bequest.server.wire.reading import shorten


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What a request says beside its prompt; server/doors/ollama/options.py says what it means."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    num_predict: int | None = None
    num_ctx: int | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    # Refused, unless they ask for nothing.
    mirostat: int | None = None
    tfs_z: float | None = None
    typical_p: float | None = None
    penalize_newline: bool | None = None

    # Advisory: how the model is loaded, which it is already; and what goes with a mirostat that is refused.
    numa: bool | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    vocab_only: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    embedding_only: bool | None = None
    num_thread: int | None = None
    num_keep: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None


_OPTIONS = dict.fromkeys(Options.__struct_fields__)
_IN_OPTIONS = {
    name: ((), f"it belongs into `options`, as `options.{there}`")
    for name, there in {
        "temperature": "temperature",
        "top_p": "top_p",
        "top_k": "top_k",
        "seed": "seed",
        "stop": "stop",
        "max_tokens": "num_predict",
        "num_predict": "num_predict",
        "num_ctx": "num_ctx",
    }.items()
}
_RULES = Rules({**_IN_OPTIONS, "response_format": ((), "use `format`")}, {"options": _OPTIONS})


class OllamaBody(msgspec.Struct, frozen=True, kw_only=True):
    """What all have."""

    rules: ClassVar[Rules] = _RULES

    model: str | None = None
    options: Options = Options()
    keep_alive: str | float | None = None  # advisory: the model stays


class GeneratingBody(OllamaBody, frozen=True, kw_only=True):
    stream: bool = True
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    logprobs: bool = False
    top_logprobs: int | None = None


class OllamaChatBody(GeneratingBody, frozen=True, kw_only=True):
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None


class OllamaGenerateBody(GeneratingBody, frozen=True, kw_only=True):
    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: list[int] | None = None
    raw: bool = False
    images: list[str] | None = None


class OllamaEmbedBody(OllamaBody, frozen=True, kw_only=True):
    input: str | list[str] | None = None
    truncate: bool = True
    dimensions: int | None = None


class OllamaEmbeddingsBody(OllamaBody, frozen=True, kw_only=True):
    """The older form of it."""

    prompt: str | None = None


class OllamaModelBody(msgspec.Struct, frozen=True, kw_only=True):
    """What asks for a model by its name, of which `name` is the older form."""

    rules: ClassVar[Rules] = Rules()

    model: str | None = None
    name: str | None = None
    stream: bool = True
    verbose: bool = False  # advisory: everything is told
    insecure: bool = False  # advisory: nothing is fetched


def chat_messages(body: OllamaChatBody, sees: bool) -> list[dict[str, Any]]:
    """As templates know them: a tool has a name, and a call an id if the client gave it one."""
    return [_message(message, f"messages[{index}]", sees) for index, message in enumerate(body.messages or [])]


def _message(message: dict[str, Any], path: str, sees: bool) -> dict[str, Any]:
    _, tool = agreed(f"{path}.tool_name", message.get("tool_name"), f"{path}.name", message.get("name"))
    plain = {name: value for name, value in message.items() if name not in ("images", "tool_name")}
    if message.get("images"):
        plain["content"] = with_images(message.get("content"), message["images"], f"{path}.images", sees)
    return plain if tool is None else {**plain, "name": tool}


def with_images(text: Any, images: Any, param: str, sees: bool) -> list[dict[str, Any]]:
    """Parts of a message: its images, then its text. Images come as base64, without a type."""
    if not sees:
        raise no_images(param)
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise wrong_type(param, "a list of strings, each an image in base64")
    urls = [image if image.startswith("data:") else f"data:image/png;base64,{image}" for image in images]
    given = [GivenImage(url, f"{param}[{index}]") for index, url in enumerate(urls)]
    parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in given]
    return [*parts, {"type": "text", "text": text}] if text else parts


def check_generate(body: OllamaGenerateBody) -> None:
    beside = next((name for name in ("raw", "suffix", "context") if getattr(body, name)), None)
    if body.images and beside is not None:
        raise invalid(f"`images` cannot be used with `{beside}`: send them with a `prompt` alone.", "images")
    if body.template:
        message = "`template` is in Go's language, which this server does not read; start it with --chat-template FILE."
        raise unsupported("template", message)
    for name in ("system", "context"):
        if getattr(body, name) and (body.raw or body.suffix):
            other = "raw" if body.raw else "suffix"
            raise invalid(f"`{name}` cannot be used with `{other}`: the prompt is taken as it is.", name)


def no_images(param: str) -> ApiError:
    return unsupported(param, f"`{param}` cannot be used here: this model reads text alone. Leave it out.")


def effort_of(think: bool | str | None, shows_thoughts: bool, model: str) -> str | None:
    """`think` as an effort, which templates are told; None: nothing is said of it."""
    if think is None or (think is False and not shows_thoughts):
        return None
    if not shows_thoughts:
        raise invalid(f"`think` cannot be used here: the model '{shorten(model)}' does not support thinking.", "think")
    if isinstance(think, bool):
        return "medium" if think else "none"
    if think not in ("low", "medium", "high"):
        raise invalid(f"`think` must be true, false, 'low', 'medium' or 'high', not {shorten(repr(think))}.", "think")
    return think
