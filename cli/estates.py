"""`bequest estate inspect FILE`: what is in the file of an estate, once its checksums are found to be right."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bequest.cli.parser import Parser
from bequest.engine.errors import InvalidEstate
from bequest.engine.formats.estate_file import from_bytes
from bequest.engine.types.estate import Estate


def main(arguments: Sequence[str]) -> int:
    parser = Parser("bequest estate", description="Looks into the file of an estate.", spare="one file at a time")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    inspect = commands.add_parser("inspect", help="check a file, and show what is in it")
    inspect.add_argument("file", metavar="FILE", type=Path)
    inspect.add_argument("--json", action="store_true", help="as JSON, with the token ids")
    given = parser.read(arguments)
    try:
        estate = from_bytes(given.file.read_bytes())
    except OSError as error:
        print(f"bequest estate: {given.file}: {error.strerror}", file=sys.stderr)
        return 1
    except InvalidEstate as error:
        print(f"bequest estate: {given.file}: {error.message}", file=sys.stderr)
        return 1
    print(json.dumps(facts(estate, tokens=True)) if given.json else shown(estate))
    return 0


def facts(estate: Estate, *, tokens: bool = False) -> dict[str, object]:
    deed = estate.deed
    identity = deed.identity
    return {
        "id": deed.id,
        "request_id": deed.name,
        "tenant": identity.tenant,
        "created_at": int(deed.created_at),
        "parent": deed.parent,
        "weights": identity.weights,
        "dtype": identity.dtype,
        "cache": {"dtype": identity.cache.dtype, "shape": list(identity.cache.shape)},
        "blocks": len(estate.content),
        "bytes": estate.content.nbytes,
        "encoder_len": None if deed.encoder is None else deed.encoder.length,
        "choices": [
            {
                "index": choice.index,
                "tokens": len(choice.token_ids),
                "prompt_tokens": choice.num_prompt,
                "computed_tokens": choice.computed,
                "blocks": len(choice.rows),
                **({"token_ids": list(choice.token_ids)} if tokens else {}),
            }
            for choice in deed.choices
        ],
    }


def shown(estate: Estate) -> str:
    deed, identity = estate.deed, estate.deed.identity
    created = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(deed.created_at))
    lines = {
        "id": deed.id if deed.name is None else f"{deed.id} ({deed.name})",
        "tenant": identity.tenant,
        "created": created,
        "continues": None if deed.parent is None else f"{deed.parent} at token {deed.at}",
        "weights": identity.weights,
        "dtype": identity.dtype,
        "blocks": f"{len(estate.content)} of {identity.cache.dtype} {list(identity.cache.shape)}, "
        f"{estate.content.nbytes / 1e6:.1f} MB",
        "encoder": None if deed.encoder is None else f"{deed.encoder.length} positions",
    }
    text = [f"{name:<10}{value}" for name, value in lines.items() if value is not None]
    text += [
        f"{f'choice {choice.index}':<10}{len(choice.token_ids)} tokens, {choice.num_prompt} of them the prompt's, "
        f"{choice.computed} computed"
        for choice in deed.choices
    ]
    return "\n".join([*text, "checksums are right"])
