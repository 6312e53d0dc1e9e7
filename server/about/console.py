"""The console's page: GET / and its files. They are static and hold nothing of ours, so that they need no key; the page
asks for one and sends it along (server/about/console_state.py has what it asks for)."""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

_FOLDER = Path(__file__).parents[1] / "console"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_FILES = {
    path.relative_to(_FOLDER).as_posix(): (path.read_bytes(), _TYPES[path.suffix])
    for path in sorted(_FOLDER.rglob("*"))
    if path.suffix in _TYPES
}
STATIC_PATHS = frozenset({"/", *(f"/console/{name}" for name in _FILES if name != "index.html")})

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; media-src blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


async def page(http: web.Request) -> web.Response:
    return _file("index.html")


async def script(http: web.Request) -> web.Response:
    return _file(http.path.removeprefix("/console/"))


def _file(name: str) -> web.Response:
    body, kind = _FILES[name]
    return web.Response(body=body, content_type=kind, charset="utf-8", headers=_HEADERS)
