"""What clients read when the engine refuses or fails: the engine gives a reason and numbers, and the sentence is here.

A message is complete in itself: it tells what is wrong, the limit and the way out, with the routes, fields and flags
that a client or its operator knows. Names in braces are the error's details and facts, and `param`, the client's field.
"""

from __future__ import annotations

import dataclasses
import re

from bequest.engine.config import EngineConfig, ServerConfig
from bequest.engine.errors import EngineError, ModelError

# Fields of the engine's requests under the names that clients have for them; others have the same.
_PARAMS = {
    "adapter": "model",
    "audio": "file",
    "beams.width": "beam_width",
    "deadline": "timeout",
    "encoder": "prompt",
    "images": "messages",
    "name": "request_id",
    "template": "chat_template",
}
_LAYERS = (
    "`layers` are from 0 (the embedding's output) to {num_layers} (after the final norm), or from -1 to {first} "
    "counted from the last: "
)
_LEASES_FULL = (
    "taken; release a lease, set a smaller max_tokens, or try again when one has expired."  # behind whose they are
)
SENTENCES = {
    # a prompt
    "context_length": "This model's maximum context length is {max_model_len} tokens; the prompt is too long: "
    "{prompt_tokens} tokens, with {max_tokens} for the completion makes {total}.",
    "context_not_counted": "This model's maximum context length is {max_model_len} tokens; the prompt is too long: "
    "{prompt_tokens} tokens, with {max_tokens} for the completion makes {total}. It has at least as many: a text that "
    "must be too long is not counted to its end.",
    "completion_too_long": "This model's maximum context length is {max_model_len} tokens; the prompt is too long: "
    "{prompt_tokens} tokens, with {max_tokens} for the completion makes {total}. Behind it there is room for {room}: "
    "ask for no more, or leave their number out.",
    "token_unknown": "The prompt has the token {token}, which its tokenizer knows and this model does not: its tokens "
    "are 0 to {last}. Leave out what it stands for.",
    "image_empty": "`{param}` is an image without a byte.",
    "image_format": "`{param}` is no image that this server reads: send one of {formats}.",
    "image_broken": "`{param}` is an image that is broken or cut short ({why}).",
    "image_in_parts": "`{param}` is an image of more than {most} {kind}: save it anew.",
    "image_too_large": "`{param}` is an image of {width} × {height} pixels, at most {max_pixels} are taken "
    "(--max-image-megapixels): send a smaller one.",
    "image_too_long": "`{param}` is an image of {width} × {height} pixels: one side may be {most} times the other at "
    "most.",
    "no_pillow": "`{param}` is an image, and this server was installed without what reads images: pip install "
    "'bequest[vision]'.",
    "no_vision": "This model reads text alone: send parts of type 'text'.",
    "no_embeds": "`prompt_embeds` is not taken here: its operator allows it with --allow-prompt-embeds.",
    "embeds_unreadable": "`{param}` is no tensor that this server takes: {why}.",
    "image_unknown": "The prompt has the token {token}, which stands for an image that the request does not have.",
    "image_cut": "Tokens {begin} to {end} of the prompt are a part of an image, and this model computes an image at "
    "once: continue or cut a prompt before or behind its images.",
    "images_without_logprobs": "`{param}` cannot be used with images or `prompt_embeds`, which have no "
    "log-probabilities: leave it out.",
    "encoder_input_too_long": "This model's maximum context length is {max_encoder_len} {unit} in the encoder; the "
    "prompt is too long: {encoder_tokens} {unit} in `{param}`.",
    "no_encoder": "This model has no encoder: send the whole prompt as `prompt`.",
    "encoder_needs_tokens": "This model reads its input with an encoder: send it to /v1/completions.",
    "encoder_needs_audio": "This model reads its input with an encoder: send it to /v1/audio/transcriptions.",
    "wrong_encoder_input": "This model's encoder reads {takes}.",
    "template_invalid": "chat_template is not valid Jinja: line {line}: {why}",
    "audio_too_long": "The audio is {length}; at most {limit:.0f} s are transcribed in one request "
    "(--max-audio-minutes). Split it and send the parts.",
    "audio_container": "The file is {container}, which this server does not read. It reads {formats}: convert it, for "
    "example with `ffmpeg -i FILE -ac 1 -ar 16000 out.flac`, or install `bequest[audio]` on the server.",
    "audio_unreadable": "The file is not audio that this server reads ({formats}), or it is damaged: {why}",
    # beams, grammars
    "too_many_ends": "{width} beams with {ends} tokens that end them are too many: width × (1 + end tokens) may be "
    "{limit} at most; send fewer stop_token_ids or take fewer beams.",
    "beams_too_large": "{width} beams of {max_tokens} tokens after {prompt_tokens} may take {needed_blocks} cache "
    "blocks, but there are {blocks}; take fewer beams or a smaller max_tokens, or start the server with a larger "
    "--num-blocks.",
    "suffixes_too_large": "The prompt and its longest suffix may take {needed_blocks} cache blocks, but there are "
    "{blocks}; send shorter ones, or start the server with a larger --num-blocks.",
    "no_beam": "No beam could be completed: nothing is allowed to follow.",
    "grammar_endless": "The grammar in `{param}` cannot be followed to its end: {why}.",
    "grammar_grew": "The grammar in `{param}` became too large while it was followed: {why}.",
    "nothing_allowed": "Nothing is allowed to follow: what a grammar, `catalogue` or `allowed_token_ids` allow, one of "
    "the others, `min_tokens` or `bad_words` exclude.",
    # hidden states
    "no_layers": _LAYERS + "the list is empty.",
    "layer_out_of_range": _LAYERS + "{layer} is not one of them.",
    "layer_missing": "Layer {layer} is not there: this {stack} has the layers 0 to {num_layers}.",
    "position_out_of_range": "Position {position} is not there: there are {num_tokens} tokens, 0 to {last}, or -1 to "
    "{first} counted from the end.",
    "no_positions": "`positions` selects none of the {num_tokens} tokens.",
    "one_choice": "Without tokens to generate there is one choice: send n 1.",
    "states_too_large": "The hidden states of this request may take {needed} bytes ({rows} positions of {layers} "
    "layers), but this server holds at most {budget} for one request: ask for fewer positions or layers, or set a "
    "smaller `max_tokens`.",
    "states_full": "The memory for hidden states is full ({budget} bytes); try again later.",
    # parents, leases, names
    "parent_unknown": "There is no request '{reference}' to continue from: it was never here, was deleted, or was lost "
    "in a restart. Send the whole prompt.",
    "parent_of_adapter": "'{reference}' is a lease in files of the adapter '{adapter}', which is not loaded, or in "
    "another version. Load it (--lora, POST /v1/load_lora_adapter), or send the whole prompt.",
    "parent_expired": "The request '{reference}' was retained here, but its time is up, it made room for others, "
    "or its adapter was unloaded; send the whole prompt, and lease it longer next time with `retain`.",
    "parent_elsewhere": "'{reference}' belongs to the replica '{replica}': send the request there.",
    "parent_failed": "The request '{reference}' ended before anything was computed; send the whole prompt.",
    "parent_lost": "The lease '{id}' was kept in files, which are lost or broken: it cannot be continued. Send the "
    "whole prompt, or send it along as `continuation_fallback`.",
    "no_files": "`retain.durable` needs a server that keeps leases in files: start it with --estate-dir "
    "or --estate-store.",
    "images_not_for_files": "The images of the prompt have {needed} MiB of pixels; {most} MiB may be kept in files or "
    "leave the server. Send fewer or smaller ones, or leave `retain.durable` out.",
    "lease_too_large_for_files": "`retain.durable` would keep up to {needed} blocks in files, which may hold {budget} "
    "at most (--estate-gb); set a smaller max_tokens.",
    "files_full": "`retain.durable` needs up to {needed_blocks} blocks in files, more than are free of {budget_blocks} "
    "(--estate-gb); release a lease, or try again when one has expired.",
    "nothing_to_lease": "The request '{id}' ended before anything was computed: there is nothing to lease.",
    "blocks_reused": "The request '{id}' cannot be leased any more: its blocks have been reused. Continue from it with "
    "`retain` to lease its tokens anew.",
    "too_many_leases": "`retain`: this key already has {leases} leases, and no more than {most} are allowed; release "
    "one (DELETE /v1/continuations/{{id}}) or wait for one to expire.",
    "lease_too_large": "`retain` would lease up to {needed} blocks, but leases may hold {budget} at most; set a "
    "smaller max_tokens, or start the server with a larger --retain-fraction or --host-cache-gb.",
    "beams_of_states_too_many": "{width} beams have more recurrent states than this server has room for; send a "
    "`beam_width` of {limit} at most.",
    "estate_mismatch": "The estate was made by a server with another {names}; it can be continued there alone. Models, "
    "dtypes, the layout of caches (--block-size, --kv-cache-dtype) and the tenant must be the same.",
    "estate_incomplete": "The request '{reference}' still runs: its estate is complete when it has ended.",
    "estate_lost": "The blocks of the estate are lost.",
    "no_room_for_estate": "The estate needs {needed_blocks} blocks of the cache at once, which running requests have; "
    "try again soon.",
    "lease_of_states_too_large": "`retain` would lease up to {needed} recurrent states, but leases may hold {budget} "
    "at most; set a smaller max_tokens or n, or start the server with a larger --state-interval.",
    "leases_of_states_full": "`retain` needs up to {needed_states} recurrent states, but {taken} of {limit} are taken; "
    "try again when a lease has expired.",
    "leases_full": "`retain` needs up to {needed_blocks} blocks, more than are free of the {limit} blocks of the "
    "retention budget, which all keys share; set a smaller max_tokens, or try again when a lease has expired.",
    "share_of_leases_full": "`retain` needs up to {needed_blocks} blocks, but {taken} of the {limit} blocks of this "
    "key's share of the retention budget are " + _LEASES_FULL,
    "name_of_running": "`request_id` '{name}' is the name of a request that is still running ({id}); wait for it, or "
    "choose another name.",
    "name_of_retained": "`request_id` '{name}' is the name of a request that is retained ({id}); delete it (DELETE "
    "/v1/continuations/{id}), or choose another name.",
    # adapters
    "adapter_unknown": "The model '{name}' does not exist here: no adapter of this name is loaded, or not any more.",
    "adapter_name": "`lora_name` must be 1 to 128 ASCII characters without spaces and equals signs.",
    "adapter_loaded": "An adapter '{name}' is loaded already: unload it (POST /v1/unload_lora_adapter), or choose "
    "another `lora_name`.",
    "too_many_adapters": "This server holds {most} adapters at most (--max-loras): unload one "
    "first (POST /v1/unload_lora_adapter).",
    "rank_too_large": "The adapter's rank is {rank}, but this server takes {most} at most (--max-lora-rank).",
    "adapter_in_use": "The adapter '{name}' is needed by {users}: {ids}. Wait for requests to end, release leases "
    "(DELETE /v1/continuations/{{id}}), and unload it then.",
    "other_adapter": "`model` must be the parent's own: '{parent}' was computed with another adapter, or without one.",
    # time and room
    "queue_full": "The server's queue is full ({max_queued} waiting {kind}); try again in {retry_after} s.",
    "late_in_queue": "The request's timeout passed while it was still in the queue; nothing was generated.",
    "late_in_prompt": "The request's timeout passed while it was still in the prompt; nothing was generated.",
    "late_parent": "The request's timeout passed while it waited for its parent '{reference}' to end.",
    # the engine itself
    "grammar_left": "A token was sampled that the grammar excludes, which is a fault of this server; the request was "
    "stopped: {why}.",
    "not_a_number": "The model produced NaN for this request; it was stopped.",
    "closed": "The server is shutting down and takes no new requests.",
    "stopped": "The server is shutting down; the request was not finished.",
    "asleep": "The server sleeps until its operator wakes it (POST /wake_up).",
    "cannot_wake": "The server sleeps and cannot wake now: its memory is in use elsewhere. Try again later.",
    "requests_open": "Requests are open; the server can sleep when they have ended.",
    "no_room_to_sleep": "The server stays awake: the host has no room for what leases hold. Release leases, or try "
    "again when some have expired.",
    "cannot_sleep": "This server cannot sleep: its model sees images, its GPU holds adapters, or it was started with "
    "--allow-prompt-embeds or --record.",
    "dead": "The engine has failed and this server is restarting.",
    "died": "The engine has failed and this server is restarting; send the request again.",
}

_SETTINGS = [
    field.name
    for config in (EngineConfig, ServerConfig)
    for field in dataclasses.fields(config)
    if field.name != "model"  # which has no flag
]
_SETTING = re.compile(rf"\b({'|'.join(_SETTINGS)})=(?=([^\s,.;)]|\.\S)?)")


def param_of(error: EngineError) -> str | None:
    """The client's name for the field at fault, where the engine knows it."""
    return None if error.field is None else _PARAMS.get(error.field, error.field)


def sentence(error: EngineError, param: str | None) -> str:
    """What a client reads of the error, whose field it calls `param`. An error without a reason says all itself."""
    if not error.reason:
        return error.message
    return SENTENCES[error.reason].format_map({**error.details, **error.facts, "param": param})


def with_flags(error: ModelError) -> str:
    """Why the server does not start, with settings as its command line has them. The engine writes `name=value`, or
    `name=` of one that has no value yet."""
    return _SETTING.sub(lambda match: f"--{match[1].replace('_', '-')}{' ' * bool(match[2])}", str(error))
