"""A record as tables, Markdown, and one HTML file: every number with its unit, the worst row among them."""

from __future__ import annotations

import builtins
import html.parser
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dflash_mlx.bench.charts import over_context, speed_rows
from dflash_mlx.bench.facts import facts
from dflash_mlx.bench.measure import measure
from dflash_mlx.bench.profile import Cycle, Profile, Profiled, to_json
from dflash_mlx.bench.published import Beside
from dflash_mlx.bench.record import Limits, Pair, Pass, Record, load, save
from dflash_mlx.bench.report_command import profile_table, report_main
from dflash_mlx.bench.summary import Spread
from dflash_mlx.bench.tables import Table, rich_group, tables
from tests.bench.scripted import FakeClock, Scripted, dflash, prompt, record


def made(**changes: Any) -> Record:
    """Two categories, of which chat is slower, and a prompt that is the longest. Stock takes 6 s of every prompt: 2 of
    prefill and 8 tokens of 0.5 s; dflash 2.5 + 3 cycles of 0.5 s = 4.0 s for code."""
    clock = FakeClock()
    arms = [Scripted(clock), dflash(clock, **changes)]
    pace = arms[1].run

    def slower_for_chat(asked: Any, limits: Limits) -> Any:
        arms[1].cycle_s = 1.5 if asked.category == "chat" else 0.5
        return pace(asked, limits)

    arms[1].run = slower_for_chat  # type: ignore[method-assign]
    given = [prompt("a"), prompt("b", "chat", length=200), prompt("c", "chat", length=50)]
    return measure(record("stock", "dflash"), arms, given)


@pytest.fixture(scope="module")
def shown() -> Record:
    return made()


def named(found: list[Table], title: str) -> Table:
    return next(table for table in found if title in table.title)


def test_speed_ups_stand_with_their_interval_and_the_worst_category_is_marked(shown: Record) -> None:
    """Times by hand: 6/4 = 1.50 for code, 6/7 = 0.86 for chat, 18/18 in all; a loss is shown as a loss."""
    rows = {row[0]: row for row in named(tables(shown), "Speed-up").rows}
    assert list(rows) == ["code", "chat (worst)", "all prompts", "longest: b, 200 tokens"]
    assert rows["code"][2:4] == ("1 of 1", "1.50")
    assert rows["chat (worst)"][3] == "0.86 [0.86, 0.86]"
    assert rows["all prompts"][3] == "1.00 [0.86, 1.50]" and rows["all prompts"][5:] == ("0.86", "1.50")
    assert rows["code"][4] == "2.00"  # 4 s over 1.5 s and 0.5 s of the draft's work on the prompt


def test_every_column_of_numbers_has_a_unit_and_every_table_says_what_it_means(shown: Record) -> None:
    """A bare number is read as whatever one expects."""
    for table in tables(shown):
        assert table.notes and all(len(row) == len(table.columns) for row in table.rows)
    columns = {column for table in tables(shown) for column in table.columns}
    assert {
        "generation only (tokens/s)",
        "with prefill (tokens/s)",
        "cycle p50, p95 (ms)",
        "peak memory (GB)",
    } <= columns
    assert "mean acceptance length (tokens/cycle)" in columns


def test_rates_and_acceptance_are_those_of_the_summary(shown: Record) -> None:
    """Three cycles, five of nine drafts: 2.67, 56%, 62%, 67%, each under its name; below 20 no percentile."""
    rate = {row[0]: row for row in named(tables(shown), "Rates").rows}
    assert rate["stock"][1:4] == ("6", "2.0", "1.5") and rate["stock"][5] == "- (n 6)"
    assert rate["stock"][7] == "500, 500 (n 48)"
    (row,) = named(tables(shown), "Acceptance").rows
    assert row[1:6] == ("2.67", "2.67", "56%", "62%", "67%") and row[6:8] == ("18 (0)", "0: 6, 2: 6, 3: 6")


def test_text_that_differs_is_compared_per_token_and_said_so() -> None:
    """No text is the same, so that total times would compare different work."""
    found = made(first=500)
    table = named(tables(found), "Speed-up")
    assert table.rows[0][2] == "0 of 1" and table.rows[0][3].endswith(" per token")
    assert any("compared per token" in line for line in facts(found))


def test_facts_name_pair_settings_machine_command_and_what_differs(shown: Record) -> None:
    """A number without its conditions is worth nothing."""
    run = replace(shown.run, machine={"chip": "M9", "memory_gb": 64}, conditions_differ=("n is 3 and not 128",))
    run = replace(run, pair=Pair("tiny", draft="tiny-DFlash"))
    lines = facts(replace(shown, run=run))
    assert "pair: tiny, draft tiny-DFlash" in lines and "machine: chip M9, memory_gb 64" in lines
    assert (
        "settings: greedy, at most 9 tokens, answers end where the model ends them, 2 trials of every prompt" in lines
    )
    assert "differs from the run that it is held against: n is 3 and not 128" in lines
    assert "command: python -m bench.x" in lines


def test_passes_become_a_throughput(shown: Record) -> None:
    """Tokens of both passes over their times, and the counters of the server."""
    passes = [Pass("stock", 4, 10, 100, 2.0), Pass("stock", 4, 10, 100, 3.0, 30, 90, 60)]
    (row,) = named(tables(replace(shown, passes=passes)), "same time").rows
    assert row == ("stock", "4", "20", "40.0", "3.00", "67%")


def test_a_pipe_in_a_name_does_not_break_a_markdown_table() -> None:
    """Names of categories and arms are the user's."""
    table = Table("t", ("a", "b"), (("x|y", "1"),), ("what",))
    assert table.markdown().splitlines()[2:5] == ["| a | b |", "|---|---|", "| x\\|y | 1 |"]


def test_a_table_that_does_not_fit_a_terminal_stands_upright(shown: Record) -> None:
    """Nine columns folded into 80 letters cannot be read; two arms side by side can."""
    table = named(tables(shown), "Rates")
    upright = table.upright()
    assert table.width > 120 and upright.width < 80
    assert upright.columns == ("arm", "stock", "dflash") and upright.rows[1] == (table.columns[2], "2.0", "2.0")
    console = Console(width=80, file=io.StringIO())
    console.print(rich_group([table], [], 80))
    assert "generation only (tokens/s) " in console.file.getvalue()  # type: ignore[attr-defined]


# The command.


@pytest.fixture
def files(tmp_path: Path, shown: Record) -> dict[str, Path]:
    paths = {name: tmp_path / f"{name}.json" for name in ("record", "profile", "peer")}
    save(shown, paths["record"])
    cycles = (Cycle(30, 3, 2, 0.002, 0.006, 0.001, 0.001),)
    profile = Profile("profile it", Pair("tiny"), Limits(), 4, {}, (Profiled("a", 30, (1,), cycles),))
    paths["profile"].write_text(json.dumps(to_json(profile)))
    numbers = {"tau": {"value": 5.0, "definition": "1+accepted/cycles"}}
    arms = [{"name": "spec", "numbers": numbers, "drafts_per_cycle": 15}]
    paths["peer"].write_text(json.dumps({"kind": "dflash-peer", "schema": 1, "source": "them", "arms": arms}))
    return paths


def test_the_terminal_shows_all_tables(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """A record, the profile beside it, and a peer, whose conversion is written below."""
    assert report_main([str(path) for path in files.values()]) == 0
    out = capsys.readouterr().out
    for text in (
        "Speed-up over `stock`",
        "chat (worst)",
        "A cycle by phase",
        "verify",
        "60%",
        "them: peer.json",
        "27%",
    ):
        assert text in out, text
    assert "(length - 1)/15, if every cycle drafts 15" in out


def test_published_numbers_of_a_preset_come_with_what_differs(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """They are in the record's file; a report that dropped them would show ours alone."""
    row = Beside("paper, table 1", "code", "mean_acceptance_length", 6.54, "dflash", 2.67, ("n: 128, 1",))
    save(load(files["record"]), files["record"], published=[row])
    assert report_main([str(files["record"])]) == 0
    out = capsys.readouterr().out
    assert "Published numbers beside these" in out and "6.54" in out and "n: 128, 1" in out


def test_markdown_goes_to_stdout_or_a_file(
    files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For a README: the same tables."""
    assert report_main([str(files["record"]), "--markdown"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("## Benchmark of tiny") and "| chat (worst) | dflash | 2 of 2 |" in out
    assert report_main([str(files["record"]), "--markdown", str(tmp_path / "r.md")]) == 0
    assert (tmp_path / "r.md").read_text() == out


class _Links(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        links = [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        self.fetched += [value for value in links if not value.startswith("#")]


def test_the_page_holds_everything_and_fetches_nothing(files: dict[str, Path], tmp_path: Path) -> None:
    """It is mailed around and opened without a network; each chart is an SVG in it, whose text can be searched."""
    out = tmp_path / "r.html"
    assert report_main([*map(str, files.values()), "--html", str(out)]) == 0
    text, links = out.read_text(), _Links()
    links.feed(text)
    assert links.fetched == [] and "script" not in links.tags and links.tags.count("svg") == 4
    for name in ("speedup", "acceptance", "context", "cycle"):
        assert f'<figure id="{name}">' in text
    for words in ("dflash: chat (worst)", "0.86x", "share of cycles that drafted", "tokens/s", "verify, 6.0 ms"):
        assert words in text, words
    report_main([*map(str, files.values()), "--html", str(tmp_path / "again.html")])
    assert (tmp_path / "again.html").read_text() == text


def test_what_models_and_servers_say_is_only_text_on_the_page(files: dict[str, Path], tmp_path: Path) -> None:
    """A category or a server's name with markup in it must not run."""
    found = load(files["record"])
    found.run = replace(found.run, arms={"stock": "stock", "dflash": "<script>alert(1)</script>"})
    save(found, files["record"])
    files["record"].write_text(files["record"].read_text().replace('"chat"', '"<img src=x>"'))
    out = tmp_path / "r.html"
    assert report_main([str(files["record"]), "--html", str(out)]) == 0
    text = out.read_text()
    assert "<script" not in text and "&lt;script&gt;" in text
    assert "<img" not in text and text.count("&lt;img src=x&gt;") == 2  # in a table and a chart


def test_charts_are_files_too(files: dict[str, Path], tmp_path: Path) -> None:
    """For a README or a post."""
    assert report_main([str(files["record"]), "--png", str(tmp_path / "charts")]) == 0
    made = sorted((tmp_path / "charts").iterdir())
    assert [path.name for path in made] == ["acceptance.png", "context.png", "speedup.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in made)


def test_without_matplotlib_the_page_says_what_to_install(
    files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the tables still come."""
    real = builtins.__import__

    def no_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError("not here")
        return real(name, *args, **kwargs)

    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    assert report_main([str(files["record"]), "--html", str(tmp_path / "r.html")]) == 1
    assert "pip install 'dflash-metal[report]'" in capsys.readouterr().err
    assert report_main([str(files["record"])]) == 0


def test_speed_over_context_is_tokens_over_time_within_ranges_of_positions(shown: Record) -> None:
    """Stock: one token in 0.5 s wherever; the lines end where the longest prompt's answer does."""
    lines = over_context(shown)
    known = {name: [(place, rate) for place, rate in line if rate is not None] for name, line in lines.items()}
    assert {round(rate, 6) for _, rate in known["stock"]} == {2.0}
    assert len(known["stock"]) < len(lines["stock"])  # a gap is a gap, and not a line between its ends
    assert 50 < known["stock"][0][0] < 100 and 195 < known["stock"][-1][0] < 210
    assert max(rate for _, rate in known["dflash"]) == 8.0  # of code: four tokens in 0.5 s


def test_rows_of_the_chart_mark_the_worst(shown: Record) -> None:
    """The same numbers as in the table."""
    assert [row[0] for row in speed_rows(shown)] == ["dflash: all", "dflash: code", "dflash: chat (worst)"]
    assert [round(row[1], 2) for row in speed_rows(shown)] == [1.0, 1.5, 0.86]


def test_a_profile_stands_apart_and_beside_the_cycle_that_did_not_wait(shown: Record) -> None:
    """Its sum is no cycle time: the record's stands below, and a note says why they differ."""
    cycles = (Cycle(30, 3, 2, 0.002, 0.006, 0.001, 0.001),)
    assert shown.summary is not None
    arms = shown.summary.arms | {"dflash": replace(shown.summary.arms["dflash"], cycle_s=Spread(20, 1.5, 2.0))}
    beside = replace(shown, summary=replace(shown.summary, arms=arms))
    table = profile_table(Profile("p", Pair("tiny"), Limits(), 4, {}, (Profiled("a", 30, (), cycles),)), beside)
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["draft"] == ("2.00", "20%") and rows["all phases"] == ("10.00", "100%")
    assert rows["a cycle without waits, of the record's `dflash`"][0] == "1500.00"
    assert "none of its numbers is a throughput" in table.notes[0]


@pytest.mark.parametrize(
    "text, message",
    [("not json at all", "is of no format that is known"), ('{"kind": "dflash-bench", "schema": 9}', "schema 9")],
)
def test_a_file_that_cannot_be_shown_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    """One line, no traceback."""
    (tmp_path / "x.json").write_text(text)
    assert report_main([str(tmp_path / "x.json")]) == 1
    assert message in capsys.readouterr().err


def test_a_record_without_a_whole_prompt_has_nothing_to_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An interrupted run: said, rather than an empty table."""
    found = record("stock")
    found.ended, found.prompts = "interrupted", []
    save(found, tmp_path / "x.json")
    assert report_main([str(tmp_path / "x.json")]) == 1
    assert "no prompt that every arm finished (interrupted)" in capsys.readouterr().err
