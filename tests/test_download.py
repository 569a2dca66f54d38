"""Downloads: their progress, and what is left when they are cancelled."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dflash_mlx.hub.cache import TARGET
from dflash_mlx.hub.download import download
from dflash_mlx.hub.repository import find
from tests.fake_hub import FakeHub
from tests.folders import target_folder
from tests.served_hub import ServedHub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    made = FakeHub(tmp_path / "hub")
    made.install(monkeypatch)
    made.add("org/target", target_folder(tmp_path / "target"))
    return made


class Cancelled(Exception):
    pass


def test_progress_is_told_in_bytes_in_the_thread_that_asked(hub: FakeHub) -> None:
    """The chat's callback belongs to one thread; the hub's bars are updated in eight."""
    told = threading.Semaphore(0)
    hub.each_file = lambda: [told.acquire(timeout=5) for _ in range(2)]  # a report between any two files
    said: list[tuple[str, float | None]] = []
    threads = set()

    def tell(text: str, share: float | None) -> None:
        said.append((text, share))
        threads.add(threading.get_ident())
        told.release()

    find("org/target", TARGET).fetch(tell)
    shares = [share for _, share in said]
    assert shares == sorted(shares) and shares[0] == 0 and 0 < shares[-1] <= 1 and len(set(shares)) > 2
    assert said[0][0].startswith("Fetching org/target (0.0 of ") and said[0][0].endswith(" MB)")
    assert threads == {threading.get_ident()}


def test_an_error_raised_in_the_progress_cancels_and_the_next_try_completes(hub: FakeHub) -> None:
    """Nothing goes on in the background, and what had arrived stays."""
    gate, files = threading.Event(), []
    hub.each_file = lambda: files.append(1) or (len(files) > 1 and gate.wait(5))

    def tell(text: str, share: float | None) -> None:
        if share:
            raise Cancelled

    with pytest.raises(Cancelled):
        find("org/target", TARGET).fetch(tell)
    gate.set()
    for thread in threading.enumerate():
        if thread.name.startswith("fetch"):
            thread.join(5)
            assert not thread.is_alive()
    assert len(files) == 2 and len(list(hub.place("org/target").iterdir())) == 1
    hub.each_file = lambda: None
    assert (find("org/target", TARGET).fetch(lambda text, share: None) / "model.safetensors").exists()


def test_the_end_is_reported_also_where_it_comes_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar that stays where it was last seen looks like a download that hangs."""
    monkeypatch.setattr("dflash_mlx.hub.download.hub.snapshot_download", lambda *args, **options: "/somewhere")
    seen: list[float | None] = []
    assert download("org/model", None, ["*"], 5_000_000, lambda text, share: seen.append(share)) == Path("/somewhere")
    assert seen == [0.0, 1.0]


_FETCH = """
import sys
from dflash_mlx.hub.cache import TARGET
from dflash_mlx.hub.repository import find

class Cancelled(Exception): pass

def tell(text, share):
    print(f"{share:.3f}", flush=True)
    if sys.argv[1] == "cancel" and share > 0.2:
        raise Cancelled

try:
    print(find("org/model", TARGET).fetch(tell))
except Cancelled:
    print("cancelled")
"""


def test_the_real_hub_client_is_cancelled_and_fetches_only_the_rest_afterwards(tmp_path: Path) -> None:
    """huggingface_hub itself against a hub on this machine: the bars are its own affair, and may change with it."""
    folder = target_folder(tmp_path / "model")
    with (folder / "model.safetensors").open("ab") as file:
        file.write(bytes(30_000_000))
    with ServedHub("org/model", folder, pause_after=15_000_000, pause_s=1.5) as served:

        def fetch(how: str) -> list[str]:
            command = [sys.executable, "-c", _FETCH, how]
            environment = served.environment(tmp_path / "home")
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr
            assert "Error" not in done.stderr and "Traceback" not in done.stderr
            return done.stdout.split()

        cancelled = fetch("cancel")
        blobs = tmp_path / "home" / "hub" / "models--org--model" / "blobs"
        kept = {path.name for path in blobs.iterdir()}
        assert cancelled[-1] == "cancelled" and 0.2 < float(cancelled[-2]) < 1
        assert kept and not [name for name in kept if name.endswith(".incomplete")]

        served.release()
        served.fetched.clear()
        *shares, place = fetch("through")
        assert (Path(place) / "model.safetensors").stat().st_size == (folder / "model.safetensors").stat().st_size
        assert shares == sorted(shares) and float(shares[-1]) == 1  # also where it was over between two looks
        assert "model.safetensors" in served.fetched and "tokenizer.json" not in served.fetched
