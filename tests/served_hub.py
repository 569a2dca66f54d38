"""A hub on this machine: the few answers of the Hugging Face hub that a download needs, over HTTP.

with ServedHub("org/model", folder, pause_after=15_000_000, pause_s=1.5) as hub:
    subprocess.run(..., env=hub.environment(home)); hub.release(); hub.fetched
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "d" * 40


class ServedHub:
    """Serves one repository. A file pauses once after `pause_after` bytes, unless it is released.

    fetched: names of the files whose content was asked for.
    """

    def __init__(self, name: str, folder: Path, pause_after: int, pause_s: float) -> None:
        self.name, self.folder, self.pause_after, self.pause_s = name, folder, pause_after, pause_s
        self.fetched: list[str] = []
        self._released = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True

    def __enter__(self) -> ServedHub:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        self._server.shutdown()
        self._server.server_close()

    def release(self) -> None:
        self._released.set()

    def environment(self, home: Path) -> dict[str, str]:
        kept = {
            key: value for key, value in os.environ.items() if not key.startswith("HF_") and "proxy" not in key.lower()
        }
        address = f"http://127.0.0.1:{self._server.server_port}"
        return kept | {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*"}

    def _files(self) -> dict[str, Path]:
        return {path.name: path for path in self.folder.iterdir()}

    def _handler(hub) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_HEAD(self) -> None:
                self._file(content=False)

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path.startswith(f"/api/models/{hub.name}/tree/"):
                    files = [
                        {"type": "file", "path": name, "size": each.stat().st_size, "oid": _etag(each)}
                        for name, each in hub._files().items()
                    ]
                    self._json(files)
                elif path.startswith(f"/api/models/{hub.name}"):
                    files = [{"rfilename": name, "size": each.stat().st_size} for name, each in hub._files().items()]
                    self._json({"id": hub.name, "sha": COMMIT, "siblings": files, "tags": []})
                else:
                    self._file(content=True)

            def _json(self, answer: Any) -> None:
                body = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def _file(self, content: bool) -> None:
                path = hub._files().get(self.path.rpartition("/")[2])
                if path is None:
                    self.send_error(404)
                    return
                data = path.read_bytes()
                self.send_response(200)
                self.send_header("ETag", f'"{_etag(path)}"')
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if not content:
                    return
                hub.fetched.append(path.name)
                try:
                    self.wfile.write(data[: hub.pause_after])
                    if len(data) > hub.pause_after:
                        hub._released.wait(hub.pause_s)
                    self.wfile.write(data[hub.pause_after :])
                except OSError:  # the client has gone
                    self.close_connection = True

        return Handler


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
