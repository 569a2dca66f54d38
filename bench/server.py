"""A server with OpenAI's HTTP API, as a client sees it: what it is, streamed answers with their clocks, its counters.

Nothing is repeated: a request that fails, or a stream that is cut, ends in a `ServerError` that says what to do. No
redirect is followed, since the key would go with it, and there is no proxy on the way to this machine.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse
from typing import Any

from .form import BenchError

BURST_S = 0.002
"""Chunks that follow each other faster belong to one burst: some servers send a cycle's tokens one by one."""
_LOCAL = ("localhost", "127.0.0.1", "::1")
_SHOWN = 300  # characters of a server's own words


class ServerError(BenchError):
    """A server that cannot be reached, refuses, or does not end its answer."""


@dataclass(frozen=True)
class Server:
    """base_url: with or without the ending `/v1`. key: sent as a bearer token, and written nowhere.

    timeout: seconds without a byte.
    """

    base_url: str
    key: str | None = field(default=None, repr=False)
    timeout: float = 600.0

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"`base_url` has to be http(s)://HOST[:PORT][/PATH], got {self.base_url!r}.")
        if parts.username or parts.password:
            raise ValueError(
                "`base_url` holds a user or password, which a record would keep. Give the key by --api-key-env."
            )

    @property
    def root(self) -> str:
        return self.base_url.rstrip("/").removesuffix("/v1")

    def models(self) -> list[dict[str, Any]]:
        """What it lists: `id`, and in `owned_by` most engines name themselves."""
        with self._open("/v1/models") as response:
            try:
                listed = json.loads(response.read())["data"]
                return [each for each in listed if isinstance(each, dict) and isinstance(each.get("id"), str)]
            except (ValueError, KeyError, TypeError) as error:
                raise ServerError(
                    f"{self.base_url} does not list its models as OpenAI's API does ({type(error).__name__}: {error}). "
                    "No model can be chosen. Give the address of a server with that API."
                ) from error

    def counters(self) -> dict[tuple[str, str], float] | None:
        """Samples of `/metrics` in Prometheus' text: (name, labels) -> value; None where there are none."""
        try:
            with self._open("/metrics") as response:
                text = response.read().decode("utf-8", "replace")
        except ServerError:
            return None
        return {(name, labels or ""): float(value) for name, labels, value in _SAMPLE.findall(text)} or None

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The objects of a streamed chat completion, as they arrive, until its end.

        Raises:
            ServerError: refused, not streamed, an error on the way, or cut before its end.
        """
        with self._open("/v1/chat/completions", body) as response:
            kind = response.headers.get_content_type()
            if kind != "text/event-stream":
                raise ServerError(
                    f"{self.base_url} answered with {kind} and not as a stream of events, so that no token has a time "
                    "of its own. Give a server that streams chat completions."
                )
            ended, count = False, 0
            try:
                for line in response:
                    if not line.startswith(b"data:"):  # comments that keep a connection alive, and blank lines
                        continue
                    data = line.removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        return
                    chunk = self._chunk(data)
                    count += 1
                    ended = ended or any(choice.get("finish_reason") for choice in chunk.get("choices") or ())
                    yield chunk
            except (OSError, HTTPException) as error:
                raise self._cut(count, f"{type(error).__name__}: {error}") from error
            if not ended:
                raise self._cut(count, "the connection was closed")

    def _chunk(self, data: bytes) -> dict[str, Any]:
        try:
            chunk = json.loads(data)
        except ValueError:
            chunk = None
        if not isinstance(chunk, dict):
            raise ServerError(
                f"{self.base_url} streamed {_short(data)!r}, which is no JSON object. What it says cannot be read: "
                "ask the server's maker."
            )
        if chunk.get("error"):
            raise ServerError(
                f"{self.base_url} ended an answer with an error: {_short(json.dumps(chunk['error']))}. Half an answer "
                "is no measurement: look into the server's log."
            )
        return chunk

    def _cut(self, count: int, why: str) -> ServerError:
        return ServerError(
            f"{self.base_url} cut an answer after {count} chunks, without a reason to finish ({why}). Half an answer "
            "is no measurement: look into the server's log, or give it more time with --timeout."
        )

    def _open(self, path: str, body: dict[str, Any] | None = None) -> HTTPResponse:
        request = urllib.request.Request(self.root + path)
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        if self.key:
            request.add_unredirected_header("Authorization", f"Bearer {self.key}")
        handlers: list[Any] = [_NoRedirect()]
        if urllib.parse.urlsplit(self.base_url).hostname in _LOCAL:
            handlers.append(urllib.request.ProxyHandler({}))
        try:
            opened: HTTPResponse = urllib.request.build_opener(*handlers).open(request, timeout=self.timeout)
            return opened
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(path, body, error.code, _short(error.read(4096))) from error
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise ServerError(
                f"{self.base_url} cannot be reached ({reason}). Nothing can be measured. Start the server, or correct "
                "--base-url."
            ) from error

    def _refused(self, path: str, body: dict[str, Any] | None, status: int, said: str) -> ServerError:
        advice = {
            401: "It wants a key, or another one: put it into the environment variable that --api-key-env names.",
            403: "It wants a key, or another one: put it into the environment variable that --api-key-env names.",
            404: f"It has no such path, or no model {body['model']!r}: look at --base-url and --model." if body else "",
            429: "It is busy or limits how often it is asked, and a request that waits or is repeated measures that.",
        }.get(status) or "See what it says, and its log; --extra-body '{...}' changes what is sent."
        return ServerError(f"{self.base_url}{path} answered with status {status}: {said}. {advice}")


_SAMPLE = re.compile(
    r"^([A-Za-z_:][\w:]*)(?:\{([^}\n]*)\})?[ \t]+([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)[ \t]*\d*$", re.M
)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def _short(text: bytes | str) -> str:
    said = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    return " ".join(said.split())[:_SHOWN]


@dataclass
class Answer:
    """A streamed answer. Seconds count from the request.

    at_s: of the last chunk with text of every burst; first_s: of the first one. chunks: those with text.
    counted: tokens so far by the server's own running count, with every burst; None where it sends none.
    usage, parts: the last usage; every chunk that holds more than text.
    """

    first_s: float | None = None
    end_s: float = 0.0
    text: str = ""
    reasoned: bool = False
    chunks: int = 0
    at_s: list[float] = field(default_factory=list)
    counted: list[int | None] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    parts: list[dict[str, Any]] = field(default_factory=list)

    def see(self, chunk: dict[str, Any], now: float) -> None:
        usage = chunk.get("usage")
        self.usage = usage if isinstance(usage, dict) else self.usage
        self.parts.append(chunk)
        for choice in chunk.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            delta = choice.get("delta") or {}
            thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
            text = thought + (delta.get("content") or "")
            if not text:
                continue
            self.reasoned = self.reasoned or bool(thought)
            self.text += text
            self.chunks += 1
            tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
            self._burst(now, tokens)
        self.end_s = self.at_s[-1] if self.at_s else now

    def _burst(self, now: float, tokens: int | None) -> None:
        if self.first_s is None:
            self.first_s = now
        if self.at_s and now - self.at_s[-1] < BURST_S:
            self.at_s[-1], self.counted[-1] = now, tokens
        else:
            self.at_s.append(now)
            self.counted.append(tokens)


def ask(server: Server, body: dict[str, Any], clock: Callable[[], float]) -> Answer:
    """One request from its beginning to its end, on `clock`."""
    answer, start = Answer(), clock()
    for chunk in server.stream(body):
        answer.see(chunk, clock() - start)
    return answer
