"""Servers with OpenAI's API on this machine, each with the ways of one engine. Their answers are scripts."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORDS = ("one", " two", " three", " four", " five", " six", " seven", " eight", " nine")
BURSTS = ((0,), (1, 2, 3, 4), (5,), (6, 7, 8))
"""Nine tokens: the one of prefill, then cycles of 3, 0 and 2 accepted drafts of 3."""
VLLM = {
    "mean_acceptance_length": 8 / 3,
    "draft_acceptance_rate": 5 / 9,
    "acceptance_histogram": [1, 0, 1, 1],
    "num_spec_steps": 3,
    "num_accepted_draft_tokens": 5,
    "num_draft_tokens": 9,
    "num_spec_tokens": 3,
}
SGLANG = {
    "spec_accept_length": 3.0,  # of nine tokens, the first included
    "spec_verify_ct": 3,
    "spec_num_correct_drafts": 5,
    "spec_num_proposed_drafts": 9,
    "spec_correct_drafts_histogram": [1, 0, 1, 1],
}
OLD_SGLANG = {"completion_tokens": 9, "spec_accept_length": 3.0, "spec_verify_ct": 3}
LLAMA = {"prompt_n": 7, "prompt_ms": 20.0, "predicted_n": 9, "predicted_ms": 80.0, "draft_n": 9, "draft_n_accepted": 5}
MLX_VLM = {"predicted_n": 9, "draft_rounds": 3, "draft_n": 9, "draft_n_accepted": 8}  # three of them behind the end


@dataclass
class Fake:
    """What a server does.

    owner: `owned_by` of its model. last: goes into its last chunk. counts: whether it gives usage; with every chunk if
    that is asked for and it is `exact`. breaks: how it fails. pause_s: between bursts.
    """

    owner: str = "someone"
    last: dict[str, Any] = field(default_factory=dict)
    counts: bool = True
    exact: bool = False
    breaks: str | None = None
    key: str | None = None
    pause_s: float = 0.01
    reasons: bool = False
    bursts: tuple[tuple[int, ...], ...] = BURSTS
    scraped: bool = False
    lists: bool = True
    models: tuple[str, ...] = ("tiny",)
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def metrics(self) -> str:
        done = len(self.asked)
        rows = {"drafts": 3, "draft_tokens": 9, "accepted_tokens": 5}
        lines = [f'vllm:spec_decode_num_{name}_total{{model_name="tiny"}} {n * done}.0' for name, n in rows.items()]
        accepted = (2, 2, 1)
        lines += [
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{model_name="tiny",position="{i}"}} {n * done}.0'
            for i, n in enumerate(accepted)
        ]
        return "# HELP of it\n# TYPE counter\n" + "\n".join(lines) + "\nother_metric 1e+3\n"

    def chunks(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Of one answer, a burst with a pause before it."""
        every = body.get("stream_options", {}).get("continuous_usage_stats") and self.exact
        given, limit = 0, body["max_tokens"]
        yield {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
        for number, burst in enumerate(self.bursts):
            if given + len(burst) > limit:
                burst = burst[: limit - given]
            if not burst:
                break
            time.sleep(self.pause_s)
            given += len(burst)
            name = "reasoning_content" if self.reasons and number == 0 else "content"
            chunk = {
                "choices": [{"index": 0, "delta": {name: "".join(WORDS[i] for i in burst)}, "finish_reason": None}]
            }
            yield chunk | ({"usage": self.usage(given)} if every else {})
        yield {"choices": [{"index": 0, "delta": {}, "finish_reason": "length" if given == limit else "stop"}]}
        if self.counts or self.last:
            yield {"choices": []} | ({"usage": self.usage(given)} if self.counts else {}) | self.last

    def usage(self, tokens: int) -> dict[str, Any]:
        return {"prompt_tokens": 7, "completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 2}}


class _Handler(BaseHTTPRequestHandler):
    fake: Fake

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/metrics" and self.fake.scraped:
            return self.say(200, self.fake.metrics().encode(), "text/plain")
        if self.path != "/v1/models" or not self.fake.lists:
            return self.say(404, b"nothing here", "text/plain")
        if not self.allowed():
            return
        listed = [{"id": name, "owned_by": self.fake.owner} for name in self.fake.models]
        self.say(200, json.dumps({"data": listed}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.allowed():
            return
        if body["model"] not in self.fake.models:
            return self.say(404, b'{"error": {"message": "model not found"}}')
        with self.fake.lock:
            self.fake.asked.append(body)
            self.fake.at_once += 1
            self.fake.most_at_once = max(self.fake.most_at_once, self.fake.at_once)
        try:
            self.answer(body)
        finally:
            with self.fake.lock:
                self.fake.at_once -= 1

    def answer(self, body: dict[str, Any]) -> None:
        breaks = self.fake.breaks
        if breaks == "busy":
            return self.say(429, b"too many requests", "text/plain")
        if breaks == "redirect":
            self.send_response(302)
            self.send_header("Location", "http://127.0.0.1:9/elsewhere")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        if breaks == "whole":
            return self.say(200, b'{"choices": [{"message": {"content": "all at once"}}]}')
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.end_headers()
        self.wfile.write(b": keep-alive\n\n")
        for number, chunk in enumerate(self.fake.chunks(body)):
            if breaks == "cut" and number == 3:
                return
            if breaks == "error" and number == 3:
                chunk = {"error": {"message": "out of memory"}}
            data = b"not json" if breaks == "garbage" and number == 3 else json.dumps(chunk).encode()
            self.wfile.write(b"data: " + data + b"\n\n")
            self.wfile.flush()
        if breaks != "no end":
            self.wfile.write(b"data: [DONE]\n\n")

    def allowed(self) -> bool:
        self.fake.keys.append(self.headers.get("Authorization"))
        if self.fake.key is None or self.headers.get("Authorization") == f"Bearer {self.fake.key}":
            return True
        self.say(401, b'{"error": "bad key"}')
        return False

    def say(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _Quiet(ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None:
        """A client that has seen enough closes its end."""


@contextmanager
def serving(fake: Fake) -> Iterator[Fake]:
    """The fake with its `url`, until the block ends."""
    server = _Quiet(("127.0.0.1", 0), type("Handler", (_Handler,), {"fake": fake}))
    fake.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
