"""Results of other programs in this package's definitions: the same word means four things among them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dflash_mlx import bench
from dflash_mlx.bench.form import BenchError
from dflash_mlx.bench.imports import KIND, MEANINGS, import_main, read_peers
from dflash_mlx.bench.measure import measure
from dflash_mlx.bench.peers import Peer, of_share, peer_table
from dflash_mlx.bench.record import save
from tests.bench.fake_server import LLAMA, MLX_VLM
from tests.bench.scripted import FakeClock, Scripted, dflash, prompt, record

RUN = {
    "run": 1,
    "baseline": {"ttft_ms": 250.0, "generation_tps": 50.0, "peak_memory_gb": 8.5},
    "dflash": {
        "ttft_ms": 200.0,
        "generation_tps": 200.0,
        "tokens_per_cycle": 1024 / 107,
        "cycles": 107,
        "acceptance_ratio": 917 / 1024,
        "peak_memory_gb": 9.75,
    },
    "speedup": 4.0,
}
DFLASH_MLX = {
    "hardware": {"chip": "Apple M5 Max", "memory_gb": "64", "mlx_version": "0.31.1"},
    "config": {"target_model": "Qwen/Qwen3.5-9B", "max_new_tokens": 1024, "block_tokens": 16, "prompt_tokens": 102},
    "runs": [RUN, RUN, RUN | {"dflash": RUN["dflash"] | {"generation_tps": 230.0}}],  # type: ignore[operator]
    "summary": {},
}
ZLAB = """Baseline throughput: 45.10 tok/s
DFlash throughput:  1,120.50 tok/s
Decoding speedup: 4.66
Average Acceptance length: 6.50
Acceptance length histogram: ['0.0%', '10.0%']
"""


def peers(tmp_path: Path, value: Any, name: str = "x.json") -> dict[str, Peer]:
    path = tmp_path / name
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return {peer.arm: peer for peer in read_peers(path)}


def values(peer: Peer) -> dict[str, float]:
    return {name: found.value for name, found in peer.numbers.items()}


def test_an_acceptance_of_ninety_percent_of_the_answer_is_57_percent_of_the_drafts(tmp_path: Path) -> None:
    """The published 9B run: 917 of 1024 tokens in 107 cycles of 15 drafts are 9.57 tokens per cycle, 57% of drafts."""
    found = values(peers(tmp_path, DFLASH_MLX)["dflash"])
    assert found["accepted_share"] == pytest.approx(0.8955, abs=1e-4)
    assert found["mean_acceptance_length"] == pytest.approx(1024 / 107)
    assert found["draft_acceptance_rate"] == pytest.approx(8.57 / 15, abs=1e-3)
    assert found["mlx_lm_tps"] == 200.0 and found["ttft_s"] == 0.2  # medians of its runs


def test_without_the_size_of_a_block_no_rate_of_drafts_is_made_up(tmp_path: Path) -> None:
    """A/P follows from the length only if it is known how many were drafted."""
    config = {k: v for k, v in DFLASH_MLX["config"].items() if k != "block_tokens"}  # type: ignore[attr-defined]
    found = values(peers(tmp_path, DFLASH_MLX | {"config": config})["dflash"])
    assert "draft_acceptance_rate" not in found and "mean_acceptance_length" in found


def test_z_labs_rates_are_shown_as_what_they_are(tmp_path: Path) -> None:
    """1 over the mean time per token is none of our rates; its length is a mean of requests, which is said."""
    found = peers(tmp_path, ZLAB, "zlab.txt")
    assert found["dflash"].other == {"1/mean time per token (tokens/s)": 1120.5} and not found["baseline"].numbers
    length = found["dflash"].numbers["mean_acceptance_length"]
    assert (length.value, length.how) == (6.5, "mean of requests")
    assert values(found["dflash"])["accepted_share"] == pytest.approx(5.5 / 6.5)


@pytest.mark.parametrize("lines", [False, True], ids=["one", "lines"])
def test_timings_of_servers_are_summed_over_responses(tmp_path: Path, lines: bool) -> None:
    """llama.cpp's response, or several a line each: nine tokens, of which five were drafts, so that there were three
    cycles."""
    rows = [{"timings": LLAMA}] * (3 if lines else 1)
    found = values(peers(tmp_path, "\n".join(map(json.dumps, rows)))["server"])
    assert found["mean_acceptance_length"] == pytest.approx(8 / 3)
    assert found["draft_acceptance_rate"] == pytest.approx(5 / 9)
    assert found["mlx_lm_tps"] == pytest.approx(9 / 0.08) and found["request_tps"] == pytest.approx(9 / 0.1)


def test_drafts_counted_behind_the_end_are_taken_off(tmp_path: Path) -> None:
    """mlx-vlm says eight accepted in three rounds, and the answer has nine tokens."""
    found = peers(tmp_path, {"timings": MLX_VLM})["server"]
    assert values(found)["mean_acceptance_length"] == pytest.approx(8 / 3)
    assert "its draft_n_accepted, 8," in found.numbers["mean_acceptance_length"].how


def neutral(**numbers: Any) -> dict[str, Any]:
    arms = [{"name": "spec", "drafts_per_cycle": 4, "numbers": numbers}]
    return {"kind": "dflash-peer", "schema": 1, "source": "them", "conditions": {"chip": "M3"}, "arms": arms}


def test_the_neutral_form_names_definitions_and_what_has_none_here_stays_as_it_was(tmp_path: Path) -> None:
    """Numbers are converted by what they are, and not by what they are called."""
    given = neutral(
        acceptance={"value": 0.8, "definition": "accepted/generated"},
        speed={"value": 40.0, "definition": "generated/(last-request)"},
        feel={"value": 9.0, "definition": "votes"},
    )
    found = peers(tmp_path, given)["spec"]
    assert values(found) == {
        "accepted_share": 0.8,
        "request_tps": 40.0,
        "mean_acceptance_length": pytest.approx(5.0),
        "draft_acceptance_rate": pytest.approx(1.0),
    }
    assert found.other == {"feel (votes)": 9.0} and found.conditions == {"chip": "M3"}
    assert found.numbers["mean_acceptance_length"].theirs == "acceptance 0.8"


def test_a_number_that_was_given_is_not_replaced_by_one_that_follows(tmp_path: Path) -> None:
    """Whoever measured it knows better: drafts of a cycle may differ."""
    given = neutral(
        tau={"value": 3.0, "definition": "1+accepted/cycles"}, rate={"value": 0.7, "definition": "accepted/drafted"}
    )
    assert values(peers(tmp_path, given)["spec"])["draft_acceptance_rate"] == 0.7


def test_a_share_of_the_answer_cannot_be_all_of_it() -> None:
    """Every cycle gives one token of the target's own."""
    with pytest.raises(BenchError, match="acceptance 1 cannot be a share"):
        of_share(1.0, "acceptance 1")


@pytest.mark.parametrize(
    "value, message",
    [
        ("hello", "no format that is known here"),
        ({"tps": 5}, "no format that is known here"),
        ({"kind": "dflash-peer", "schema": 2}, "schema 2"),
        ({"kind": "dflash-peer", "schema": 1, "source": "x"}, "has not the form"),
        (neutral(x={"value": 1}), "has not the form"),
        (DFLASH_MLX | {"runs": []}, "no runs with numbers"),
    ],
    ids=["text", "unknown", "newer", "arms", "definition", "empty"],
)
def test_what_has_no_known_meaning_is_refused(tmp_path: Path, value: Any, message: str) -> None:
    """A number that is guessed at looks like one that was measured."""
    with pytest.raises(BenchError, match=message):
        peers(tmp_path, value)


def test_ours_stand_beside_theirs_with_every_conversion_below(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One table in one set of definitions, and what each number was before."""
    clock = FakeClock()
    save(measure(record("stock", "dflash"), [Scripted(clock), dflash(clock)], [prompt("a")]), tmp_path / "own.json")
    (tmp_path / "theirs.json").write_text(json.dumps(DFLASH_MLX))
    files = [str(tmp_path / name) for name in ("theirs.json", "own.json")]
    assert import_main([*files, "--markdown"]) == 0
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if line.startswith("| ")]
    theirs, own = (next(row for row in rows if name in row and "| dflash |" in row) for name in ("theirs", "own"))
    assert "| 9.57 | 57% | 90% |" in theirs and "| 2.67 | 56% | 62% |" in own
    assert "accepted share of the answer from acceptance_ratio 0.8955, accepted/generated" in out
    assert "only what does not depend on the machine can be compared" in out and "chip Apple M5 Max" in out


def test_json_keeps_originals_and_conversions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For scripts, and for a file that is kept."""
    (tmp_path / "x.json").write_text(json.dumps(DFLASH_MLX))
    out = tmp_path / "out.json"
    assert import_main([str(tmp_path / "x.json"), "--json", "--out", str(out)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(out.read_text())
    assert printed[1]["numbers"]["mean_acceptance_length"]["how"] == "1/(1 - share)"


def test_every_definition_that_may_be_named_has_a_column(tmp_path: Path) -> None:
    """One that is read and then not shown would be lost."""
    given = neutral(**{f"n{i}": {"value": 0.5, "definition": name} for i, name in enumerate(MEANINGS)})
    table = peer_table(list(peers(tmp_path, given).values()))
    assert "-" not in table.rows[0]


def test_the_page_names_every_definition() -> None:
    """README.md of the folder is where somebody with another program looks."""
    text = (Path(bench.__file__).parent / "README.md").read_text()
    assert all(f"| `{name}` |" in text for name in MEANINGS)
    shown = re.search(r"```json\n(.*?)```", text, re.S)
    assert shown is not None
    given = json.loads(shown[1])
    assert given["kind"] == KIND and given["arms"][0]["numbers"]["acceptance"]["definition"] in MEANINGS
