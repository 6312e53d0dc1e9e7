"""HAProxy's configuration: where each request goes. Text alone; cluster/router.py runs it.

Who gets a request, the first of these that says something:

1. a replica that the request names itself: header, query or cookie;
2. the table of names: what a replica has said that it holds, by tenant and name;
3. the tag in the parent's id, or in the id of the path;
4. a name that nobody knows: one replica after the other, until one does not answer 404;
5. a consistent hash of the tenant and of how the prompt begins (of a chat, its first two messages), unless that
   replica has much more to do than others. A replica's share of the hashes shrinks as its leases fill their budget:
   cluster/controller.py sets its weight.

The parent is in the path, in a header, or in the body as far as it fits into the buffer. A 421 names the replica that
should have been asked: the client is sent there by a 307, which repeats method and body. If that one does not run,
another replica takes the parent over, falls back, or says that it is gone, as if the id had said whose it is.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bequest.cluster.own_answers import ask_once_more, own_errors, refuse_metrics, refuse_unknown
from bequest.server.wire.replicas import (
    HOLDS_HEADER,
    NAME_HEADER,
    OVER_RATE_HEADER,
    OWNER_HEADER,
    PARENT_HEADER,
    REPLICA_HEADER,
    TAGGED_ID,
)

_BUFFER = 65536  # bytes of a body that are looked at
_NAMES = 1_000_000  # in the table
_KEYS = 100_000  # with a rate
_TICK = 20  # microseconds: 31 bits of them are twelve hours
_WRAP = 2**31 - 1
_MINUTE, _HOUR = 60_000_000 // _TICK, 3_600_000_000 // _TICK
_PREFIX = 256  # bytes of a prompt that are hashed
FULL_WEIGHT = 10  # of a replica without leases, on the ring of hashes
_OURS = "bequest-"  # how all names begin that a query has for the router alone
QUERY = f"{_OURS}replica"  # names a replica, as a cookie too
_SENT = f"{_OURS}owner"  # who has the parent: of a request that the router has sent on, because a replica said so
_AGAIN = f"{_OURS}again"  # it was sent on twice
# Fields of bodies that name something that one replica has, in the order in which they count.
_REFERENCES = ("continuation_of", "previous_response_id", "input_file_id")
_PROMPTS = ("prompt", "input")
_TALKS = ("/chat/completions", "/v1/messages", "/api/chat")  # ends of paths whose bodies have messages
_LIST = r'"(prompt|input)"\s*:\s*\['
_TOKENS = r'"{0}"\s*:\s*\[[\s\[]*[0-9]'
_LIST_OF = r'req.body,regsub(^[\s\S]*?"{0}"[^[]*,),field(1,])'  # up to where the first one ends
_UNDECIDED = "METH_POST !{ var(txn.parent) -m found } !{ var(txn.asked) -m found }"
_OBJECTS = "continuations|responses|files|batches"


@dataclass(frozen=True, slots=True)
class Backend:
    """A replica as the router sees it."""

    tag: str
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    host: str  # to listen on
    port: int
    backends: Sequence[Backend]
    admin_socket: str
    tenants: str  # a file of `tenants_map`: what is known of keys
    name: str = "router1"  # among the routers that share the table of names
    peers: Mapping[str, str]  # name → host:port of all of them, its own too
    load_factor: int = 150  # percent of the mean that a replica may have before prompts go elsewhere
    open_host: bool = False  # clients call by any name; else replicas refuse what is no loopback name
    overview: str | None = None  # host:port of what knows all replicas (cluster/overview.py)
    certificate: str | None = None  # PEM file of a certificate and its key: serve HTTPS


@dataclass(frozen=True, slots=True)
class Holder:
    """Whom a key stands for, and how many requests a minute it may send."""

    tenant: str
    rate: float | None = None


def tenants_map(holders: Mapping[str, Holder]) -> str:
    """By the SHA-256 of each key: the router learns no key. Behind the tenant stands the time from one request of a
    limited key to the next."""
    return "".join(f"{digest.upper()} {_entry(holder)}\n" for digest, holder in sorted(holders.items()))


def _entry(holder: Holder) -> str:
    if holder.rate is None:
        return holder.tenant
    return f"{holder.tenant} {min(max(math.ceil(_MINUTE / holder.rate), 1), _HOUR)}"


def configuration(routing: Routing) -> str:
    sections = (_global, _peers, _resolvers, _defaults, _frontend, _replicas, _asked, _rates, _overview)
    return "\n".join(filter(None, (section(routing) for section in sections)))


def _global(routing: Routing) -> str:
    # More headers than a server takes: it refuses them in JSON.
    return f"""\
# Written by `bequest cluster`; it is written anew when replicas come and go.
global
    log stderr format raw local0 warning
    stats socket {routing.admin_socket} mode 600 level admin expose-fd listeners
    tune.bufsize {_BUFFER}
    tune.maxrewrite 4096
    tune.http.maxhdr 1000
"""


def _peers(routing: Routing) -> str:
    """Routers tell each other what they learn; so does a router that is reloaded to the one that takes its place."""
    lines = [f"    peer {name} {address}" for name, address in routing.peers.items()]
    return "\n".join(["peers routers", *lines, ""])


def _defaults(routing: Routing) -> str:
    # A stream is silent while a long prompt is computed. What has not reached a replica is sent to another one. A check
    # of a server that has ended is refused at once; one of a busy machine may take its time.
    lines = """\
defaults
    mode http
    log global
    option dontlognull
    option http-no-delay
    option redispatch 1
    retries 3
    retry-on conn-failure
    timeout connect 3s
    timeout check 3s
    timeout http-request 60s
    timeout http-keep-alive 75s
    timeout client 1h
    timeout server 1h
    timeout queue 60s
"""
    return "\n".join([lines.rstrip(), *own_errors(), ""])


def _frontend(routing: Routing) -> str:
    tls = "" if routing.certificate is None else f" ssl crt {routing.certificate} alpn h2,http/1.1"
    lines = [
        "frontend api",
        f"    bind {routing.host}:{routing.port}{tls}",
        "    option http-buffer-request",
        f"    http-request del-header {OWNER_HEADER}",
        *_who(routing),
        *_count(),
        *_parent(),
        *_replica_named(routing),
        *_owner(routing),
        *_prefix(),
        *_metrics(routing),
        "    use_backend asked if { var(txn.parent) -m found } !{ var(txn.to) -m found } !learned",
        "    default_backend replicas",
    ]
    return "\n".join([*lines, ""])


def _who(routing: Routing) -> list[str]:
    """The tenant, from the digest of the key, which is where replicas look for it (server/access/auth.py)."""
    lines = [
        "    http-request set-var(txn.digest) req.fhdr(x-api-key,1),sha2(256),hex",
        "    http-request set-var(txn.digest) req.fhdr(authorization,1),word(2,' '),sha2(256),hex "
        "if { req.fhdr(authorization,1) -m reg -i '^bearer +[^ ]' }",
        f"    http-request set-var(txn.holder) var(txn.digest),map_str({routing.tenants},-)",
        "    http-request set-var(txn.tenant) str(-)",
        "    http-request set-var(txn.tenant) var(txn.holder),word(1,' ') if { var(txn.holder) -m found }",
    ]
    return [*lines, "    http-request set-header Host localhost"] if routing.open_host else lines


def _count() -> list[str]:
    """The rate of a key over all replicas, as one server counts it: a bucket of a minute's requests, which fills while
    nobody sends. The table has the time at which it will be full again. A replica refuses what is too much, in the
    words of the endpoint that was asked."""
    limited, over = "{ var(txn.every) -m found }", "{ var(txn.over) -m int gt 0 }"
    return [
        f"    http-request del-header {OVER_RATE_HEADER}",
        "    http-request set-var(txn.every) var(txn.holder),word(2,' ') "
        "if METH_POST !{ path_end /cancel } { var(txn.holder),word(2,' ') -m int gt 0 }",
        f"    http-request track-sc0 var(txn.digest) table rates if {limited}",
        f"    http-request set-var(txn.now) date(0,us),div({_TICK}),and({_WRAP}) if {limited}",
        f"    http-request set-var(txn.missing) sc0_get_gpt0(rates),sub(txn.now) if {limited}",
        # Full long ago, or the clock began anew.
        f"    http-request set-var(txn.missing) int(0) if {limited} !{{ var(txn.missing) -m int 0:{2 * _HOUR} }}",
        f"    http-request set-var(txn.over) var(txn.missing),add(txn.every),sub({_MINUTE}) if {limited}",
        # Fewer than one a minute: the bucket holds one.
        f"    http-request set-var(txn.over) var(txn.missing) if {limited} {{ var(txn.every) -m int gt {_MINUTE} }}",
        f"    http-request sc-set-gpt0(0) var(txn.now),add(txn.missing),add(txn.every) if {limited} !{over}",
        f"    http-request set-header {OVER_RATE_HEADER} %[var(txn.over),div({1000 // _TICK}),add(1)] "
        f"if {limited} {over}",
    ]


def _rates(routing: Routing) -> str:
    return f"backend rates\n    stick-table type string len 64 size {_KEYS} expire 3h store gpt0 peers routers\n"


def _parent() -> list[str]:
    """Most bodies name none: one look for the words saves reading 64 KiB as JSON three times."""
    known = "!{ var(txn.parent) -m found }"
    lines = [
        f"    http-request set-var(txn.parent) req.hdr({PARENT_HEADER}) if {{ req.hdr({PARENT_HEADER}) -m found }}",
        f"    http-request set-var(txn.parent) path,field(4,/),url_dec if {known} "
        f"{{ path_reg ^/v1/({_OBJECTS})/[^/]+ }} !{{ path /v1/responses/input_tokens }}",
    ]
    lines += [
        f"    http-request set-var(txn.refers) bool(true) if METH_POST {known} "
        f"{{ req.body -m reg {'|'.join(_REFERENCES)} }}",
    ]
    lines += [
        f"    http-request set-var(txn.parent) req.body,json_query('$.{name}') if {{ var(txn.refers) -m bool }} {known}"
        for name in _REFERENCES
    ]
    return [*lines, "    http-request set-var(txn.key) var(txn.parent),concat(/,txn.tenant)"]


def _replica_named(routing: Routing) -> list[str]:
    """What the request says itself. The query is the router's own: it does not reach a replica, and does not come
    twice where the client is sent on. A cookie may be older than the replicas; a name in the request itself must be one
    of them."""
    named = (f"url_param({QUERY})", f"req.hdr({REPLICA_HEADER})")
    return [
        *(f"    http-request set-var(txn.named) {one} if {{ {one} -m found }}" for one in named),
        refuse_unknown("txn.named", [backend.tag for backend in routing.backends]),
        f"    http-request set-var(txn.asked) req.cook({QUERY}) if {{ req.cook({QUERY}) -m found }}",
        "    http-request set-var(txn.asked) var(txn.named) if { var(txn.named) -m found }",
        f"    http-request set-var(txn.chosen) url_param({QUERY}) if {{ path / }} {{ url_param({QUERY}) -m found }}",
        f"    http-request set-var(txn.sent) url_param({_SENT}) if {{ url_param({_SENT}) -m found }}",
        f"    http-request set-var(txn.again) url_param({_AGAIN}) if {{ url_param({_AGAIN}) -m found }}",
        f"    http-request set-query %[query,regsub(&?{_OURS}[a-z]*=[a-z0-9]*,,g)] if {{ query -m reg (^|&){_OURS} }}",
        "    http-request set-var(txn.uri) pathq",
    ]


def _owner(routing: Routing) -> list[str]:
    """The replica that has the parent, if anything says so; and whether it runs. A replica that was asked knows better
    than an id, and has read the whole body."""
    tags = " ".join(backend.tag for backend in routing.backends) or "-- -"
    tagged = f"{{ var(txn.parent) -m reg ^{TAGGED_ID}$ }}"
    lines = [
        f"    http-request set-var(txn.to) var(txn.parent),regsub(_,-),field(2,-) if {tagged}",
        "    http-request set-var(txn.to) var(txn.sent) if { var(txn.sent) -m found }",
        "    acl learned var(txn.key),in_table(replicas)",
        f"    http-request set-header {OWNER_HEADER} gone if {{ var(txn.to) -m found }} "
        f"!{{ var(txn.to) -m str {tags} }}",
    ]
    lines += [
        f"    http-request set-header {OWNER_HEADER} gone if {{ var(txn.to) -m str {backend.tag} }} "
        f"!{{ srv_is_up(replicas/{backend.tag}) }}"
        for backend in routing.backends
    ]
    return lines


def _prefix() -> list[str]:
    """How the prompt begins: conversations that begin alike meet where their cache is. The second message belongs to
    it: a system prompt that everybody sends is in every cache, and would send everybody to one replica. Nobody looks
    where something else decides, nor for what the endpoint does not take: a look that finds nothing reads all."""
    lines = [
        f"    acl talks path_end {' '.join(_TALKS)}",
        f"    http-request set-var(txn.listed) bool(true) if {_UNDECIDED} !talks {{ req.body -m reg '{_LIST}' }}",
    ]
    listed = "!talks { var(txn.listed) -m bool }"
    # One token alone says nothing: a list of them is taken as it is written.
    lines += [
        f"    http-request set-var(txn.prompt) '{_LIST_OF.format(name)},bytes(0,{_PREFIX})' "
        f"if {_UNDECIDED} {listed} !{{ var(txn.prompt) -m found }} {{ req.body -m reg '{_TOKENS.format(name)}' }}"
        for name in _PROMPTS
    ]
    lines += ["    http-request unset-var(txn.listed) if { var(txn.prompt) -m found }"]
    lines += _begins("prompt", "", "!talks !{ var(txn.listed) -m found }", _PROMPTS)
    for variable, number, behind in (("prompt", 0, ""), ("second", 1, "{ var(txn.prompt) -m found }")):
        message = (f"messages[{number}].content", f"messages[{number}].content[0].text")
        item = (f"input[{number}].content", f"input[{number}].content[0].text")
        text = () if number else ("prompt[0]", "input[0]")
        lines += _begins(variable, behind, "talks", message) + _begins(variable, behind, listed, (*text, *item))
    return [
        *lines,
        "    http-request set-var(txn.prefix) var(txn.tenant),concat(/,txn.prompt),concat(/,txn.second) "
        "if { var(txn.prompt) -m found }",
    ]


def _begins(variable: str, behind: str, where: str, fields: Sequence[str]) -> list[str]:
    """The first of the fields that is a text."""
    return [
        f"    http-request set-var(txn.{variable}) req.body,json_query('$.{field}'),bytes(0,{_PREFIX}) "
        f"if {_UNDECIDED} {where} {behind}{' ' if behind else ''}!{{ var(txn.{variable}) -m found }}"
        for field in fields
    ]


def _metrics(routing: Routing) -> list[str]:
    """Those of one replica or another would look like those of all."""
    if routing.overview is not None:
        return [
            "    use_backend overview if { path /metrics } !{ var(txn.asked) -m found }",
            "    use_backend overview if { path /cluster/state }",
        ]
    return [refuse_metrics(QUERY)]


def _servers(routing: Routing, track: str = "") -> list[str]:
    """One that is known by a name is looked up again when its address changes."""
    return [
        f"    server {backend.tag} {_address(backend)} {f'track {track}/{backend.tag}' if track else 'check'}"
        f"{' resolvers system init-addr last,libc,none' if _is_name(backend.host) else ''}"
        for backend in routing.backends
    ]


def _is_name(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


def _resolvers(routing: Routing) -> str:
    if not any(_is_name(backend.host) for backend in routing.backends):
        return ""
    return "resolvers system\n    parse-resolv-conf\n    hold valid 2s\n"


def _address(backend: Backend) -> str:
    host = f"[{backend.host}]" if ":" in backend.host else backend.host
    return f"{host}:{backend.port}"


def _learn() -> list[str]:
    """Names that clients gave, and parents that are not where their ids say. This comes before any `http-response`."""
    return [
        f"    stick store-response res.hdr({header}),concat(/,txn.tenant) table replicas "
        f"if {{ res.hdr({header}) -m found }}"
        for header in (NAME_HEADER, HOLDS_HEADER)
    ]


def _redirect() -> list[str]:
    """To the owner, and once more if that one knows of another: what it had was taken over while it was away. Whom the
    request named itself is not named again. If the owner has just ended, another one gets the request and sends it to
    the owner, in vain."""
    asked, sent, again = (f"{{ var(txn.{name}) -m found }}" for name in ("asked", "sent", "again"))
    to = f"{_SENT}=%[res.hdr({REPLICA_HEADER})]"
    redirects = [
        f'    http-response redirect code 307 location "%[var(txn.uri)]{sign}{to}{more}" '
        f"if {{ status 421 }} !{asked} {condition} {query}{{ var(txn.uri) -m sub ? }}"
        for more, condition in (("", f"!{sent}"), (f"&{_AGAIN}=1", f"{sent} !{again}"))
        for sign, query in (("&", ""), ("?", "!"))
    ]
    another = [
        ask_once_more(f"{{ status 421 }} {{ var(txn.{name}) -m found }} !{{ srv_name,strcmp(txn.{name}) eq 0 }}")
        for name in ("asked", "sent")
    ]
    return [*another, *redirects]


def _replicas(routing: Routing) -> str:
    lines = [
        "backend replicas",
        "    balance hash var(txn.prefix)",
        "    hash-type consistent sdbm avalanche",
        f"    hash-balance-factor {routing.load_factor}",
        "    option httpchk GET /health",
        "    http-check expect status 200",
        f"    default-server weight {FULL_WEIGHT} inter 500ms fastinter 200ms downinter 500ms fall 2 rise 1 "
        "on-error fastinter",
        f"    stick-table type string len 300 size {_NAMES} expire 24h srvkey name peers routers",
        "    use-server %[var(txn.asked)] if { var(txn.asked) -m found }",
        "    use-server %[var(txn.sent)] if { var(txn.sent) -m found }",
        "    use-server %[var(txn.to)] if { var(txn.to) -m found } !{ var(txn.key),in_table(replicas) }",
        "    stick match var(txn.key) table replicas if { var(txn.parent) -m found }",
        *_learn(),
        *_redirect(),
        f'    http-response add-header Set-Cookie "{QUERY}=%[var(txn.chosen)]; Path=/; SameSite=Strict" '
        "if { var(txn.chosen) -m found }",
        *_servers(routing),
    ]
    return "\n".join([*lines, ""])


def _overview(routing: Routing) -> str:
    return "" if routing.overview is None else f"backend overview\n    server overview {routing.overview}\n"


def _asked(routing: Routing) -> str:
    """Names that no answer has taught: those of a router that lost its table."""
    lines = [
        "backend asked",
        "    balance roundrobin",
        f"    retries {3 * max(len(routing.backends), 1)}",
        "    retry-on conn-failure 404",
        "    use-server %[var(txn.asked)] if { var(txn.asked) -m found }",
        *_learn(),
        *_redirect(),
        *_servers(routing, track="replicas"),
    ]
    return "\n".join([*lines, ""])
