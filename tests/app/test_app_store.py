"""Saved chats: what is read again is what was said, whatever happened to the process, the disk or the file."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mlx.app import chat_file
from dflash_mlx.app.chat_file import INTERRUPTED, Unsent
from dflash_mlx.app.messages import Numbers, Part
from dflash_mlx.app.store import Chat, ChatStore, StoreError

TEXT = st.text(st.characters(exclude_categories=()), max_size=8)  # lone surrogates too
PARTS = st.lists(
    st.builds(
        Part,
        st.sampled_from(["reasoning", "answer", "tool_call", "marker"]),
        st.sampled_from(["draft", "target"]),
        TEXT,
    ),
    max_size=4,
)
NUMBERS = st.builds(
    Numbers,
    mode=st.sampled_from(["dflash", "plain"]),
    generation_tokens=st.integers(0, 99),
    decode_tps=st.none() | st.floats(0, 1e6),
    recent=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=3).map(tuple),
    notes=st.lists(TEXT, max_size=2).map(tuple),
)
EVENTS = st.one_of(
    st.tuples(st.just("ask"), TEXT),
    st.tuples(st.just("append"), PARTS),
    st.tuples(st.just("finish"), st.tuples(st.sampled_from(["stop", "length", "cancelled", "failed"]), TEXT, NUMBERS)),
    st.tuples(st.sampled_from(["undo", "regenerate", "reopen"]), st.none()),
    st.tuples(st.just("rename"), TEXT),
    st.tuples(st.just("system"), TEXT),
    st.tuples(st.just("unsent"), st.builds(Unsent, st.lists(TEXT, max_size=2).map(tuple), TEXT)),
)


class Ticking:
    """A clock that is far enough on whenever it is read, so that every `grew` is written."""

    def __init__(self) -> None:
        self.seconds = 0

    def __call__(self) -> float:
        self.seconds += 10
        return self.seconds

    def date(self) -> datetime:
        return datetime(2026, 3, 1, 9, tzinfo=UTC) + timedelta(seconds=self())


def make_store(folder: Path) -> ChatStore:
    clock = Ticking()
    return ChatStore(folder, now=clock.date, clock=clock)


class Talk:
    """Does to a conversation and its chat what the app does."""

    def __init__(self, folder: Path) -> None:
        self.store = make_store(folder)
        self.chat = self.store.create("demo", "be brief")
        self.number = 0
        self.states = [(0, seen(self.chat))]
        """Size of the file and what the user saw, after each event."""

    @property
    def size(self) -> int:
        return self.chat.path.stat().st_size if self.chat.path.exists() else 0

    def do(self, what: str, value: Any = None) -> None:
        if what == "regenerate":
            asked_again = self.chat.conversation.turns[-1].user if self.chat.conversation.turns else None
            self.do("undo")
            what, value = ("ask", asked_again) if asked_again is not None else ("undo", None)
        try:
            self._do(what, value)
        finally:
            self.states.append((self.size, seen(self.chat)))

    def _do(self, what: str, value: Any) -> None:
        chat, talk = self.chat, self.chat.conversation
        turn = talk.open_turn
        if what == "ask" and turn is None:
            self.number += 1
            chat.asked(talk.ask(value, self.number))
        elif what == "append" and turn is not None:
            talk.append(turn.number, value)
            chat.grew(turn)
        elif what == "finish" and turn is not None:
            talk.finish(turn.number, *value)
            chat.finished(turn)
        elif what == "undo" and (dropped := talk.undo()) is not None:
            chat.dropped(dropped.number)
        elif what == "rename":
            chat.retitled(value)
        elif what == "system":
            chat.system(value)
        elif what == "unsent":
            chat.left_unsent(value)
        elif what == "reopen" and chat.path.exists():
            chat.close()
            self.chat = self.store.open(chat.id)
            self.number = 0  # a new process counts from the start


def seen(chat: Chat) -> tuple[str, str, tuple[object, ...], Unsent]:
    """Everything that a reopened chat has to have, as it is read: an answer that did not end was interrupted."""
    turns = []
    for turn in chat.conversation.turns:
        end = ("cancelled", INTERRUPTED, None) if turn.state == "open" else (turn.state, turn.closing, turn.numbers)
        turns.append((turn.user, tuple(turn.parts), *end))
    return chat.title, chat.settings_system, tuple(turns), chat.unsent


def read(path: Path) -> tuple[str, str, tuple[object, ...], Unsent]:
    chat = make_store(path.parent).open(path.stem)
    assert not chat.read_only, chat.read_only
    chat.close()
    return seen(chat)


@given(st.lists(EVENTS, max_size=25))
@settings(max_examples=100, deadline=None)
def test_a_chat_that_is_read_again_is_the_chat_that_was_left(events: list[tuple[str, Any]]) -> None:
    """A wrong turn in the history, and the next answer goes on from something that was never said."""
    with tempfile.TemporaryDirectory() as folder:
        talk = Talk(Path(folder))
        for event in [*events, ("ask", "last")]:
            talk.do(*event)
        talk.chat.close()
        assert read(talk.chat.path) == seen(talk.chat)
        (summary,) = talk.store.list()
        assert (summary.title, summary.turns) == (talk.chat.title, len(talk.chat.conversation.turns))


@given(st.lists(EVENTS, max_size=15), st.integers(0, 10_000), st.booleans())
@settings(max_examples=150, deadline=None)
def test_a_file_cut_anywhere_is_the_chat_as_it_was_before_the_line_that_was_cut(
    events: list[tuple[str, Any]], at: int, garbage: bool
) -> None:
    """A crash or an empty battery takes the sentence that was being written, not the chat."""
    with tempfile.TemporaryDirectory() as folder:
        talk = Talk(Path(folder))
        for event in [*events, ("ask", "last"), ("append", [Part("answer", "draft", "kept\n\U0001f40d")])]:
            talk.do(*event)
        talk.chat.forget()
        whole = talk.chat.path.read_bytes()
        cut = at % (len(whole) + 1)
        talk.chat.path.write_bytes(whole[:cut] + (b"\0" * 9 if garbage else b""))
        if b"\n" not in whole[:cut]:
            with pytest.raises(StoreError, match="is not a saved chat"):
                talk.store.open(talk.chat.id)
            return
        got = read(talk.chat.path)
        if any(0 < size <= cut for size, _ in talk.states):
            assert got == [state for size, state in talk.states if size <= cut][-1]
        else:  # what came before the first question is written with it
            assert got in [state for size, state in talk.states if size == 0]
        talk.chat, talk.number = talk.store.open(talk.chat.id), 0
        talk.do("ask", "after the crash")
        talk.chat.close()
        assert read(talk.chat.path) == seen(talk.chat)
        assert [turn.user for turn in talk.chat.conversation.turns][-1] == "after the crash"
        assert seen(talk.chat)[2][:-1] == got[2]


def test_every_single_byte_is_a_place_where_a_file_may_be_cut(tmp_path: Path) -> None:
    """Also the one before the end of a line: that line would be read once, and cut off when the next is written."""
    talk = Talk(tmp_path)
    for event in [
        ("ask", "how?"),
        ("append", [Part("answer", "draft", "so ")]),
        ("finish", ("stop", "2 tokens", Numbers(generation_tokens=2))),
        ("regenerate", None),
        ("append", [Part("answer", "target", "not ")]),
        ("rename", "How"),
        ("unsent", Unsent(("and then?", "why?"), "Wha")),
        ("unsent", Unsent(("why?",))),
    ]:
        talk.do(*event)
    talk.chat.forget()
    whole = talk.chat.path.read_bytes()
    for cut in range(whole.index(b"\n") + 1, len(whole) + 1):
        talk.chat.path.write_bytes(whole[:cut])
        expected = [state for size, state in talk.states if size <= cut][-1]
        chat = talk.store.open(talk.chat.id)
        assert (seen(chat), chat.note) == (expected, ""), cut
        chat.retitled("again")
        chat.close()
        assert read(chat.path) == ("again", *expected[1:]), cut


def test_a_text_that_is_not_unicode_is_kept_and_the_others_can_be_searched_for(tmp_path: Path) -> None:
    """A paste can hold half a surrogate pair. A search through the files has to find words in every language."""
    talk = Talk(tmp_path)
    talk.do("ask", "half \ud800")
    talk.do("finish", ("stop", "", None))
    talk.do("ask", "Příliš žluťoučký \u2028 kůň")
    talk.chat.close()
    assert "Příliš žluťoučký" in talk.chat.path.read_text(encoding="utf-8")
    assert [turn.user for turn in talk.store.open(talk.chat.id).conversation.turns] == [
        "half \ud800",
        "Příliš žluťoučký \u2028 kůň",
    ]


class Disk:
    """A disk that takes `room` more bytes, then part of a write and an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room: int | None = None
        self._write = os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, descriptor: int, data: Any) -> int:
        if self.room is None:
            return self._write(descriptor, data)
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = self._write(descriptor, memoryview(data)[: self.room])
        self.room -= done
        return done


@given(st.lists(EVENTS, min_size=1, max_size=12), st.lists(EVENTS, max_size=12), st.integers(0, 200))
@settings(max_examples=60, deadline=None)
def test_a_full_disk_costs_no_line_that_was_written_and_is_made_up_for_when_there_is_room(
    before: list[tuple[str, Any]], during: list[tuple[str, Any]], room: int
) -> None:
    """Half a line in the middle of a file would take what is written after it along."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
        talk, disk, errors = Talk(Path(folder)), Disk(monkeypatch), []
        for event in before:
            talk.do(*event)
        lines = talk.chat.path.read_bytes() if talk.size else b""
        disk.room = room
        for event in during:
            if event[0] == "reopen":
                continue
            try:
                talk.do(*event)
            except StoreError as error:
                errors.append(str(error))
        assert len(errors) <= 1, "said once"
        assert all("the disk is full" in error and "not saved" in error for error in errors)
        kept = talk.chat.path.read_bytes() if talk.chat.path.exists() else b""
        assert kept.startswith(lines) and kept[-1:] in (b"", b"\n")
        disk.room = None
        talk.do("ask", "there is room again")
        talk.do("finish", ("stop", "", None))
        talk.chat.close()
        assert read(talk.chat.path) == seen(talk.chat)


def test_a_disk_that_is_full_from_the_start_leaves_no_empty_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk, disk = Talk(tmp_path), Disk(monkeypatch)
    disk.room = 0
    with pytest.raises(StoreError, match="the disk is full"):
        talk.do("ask", "hello")
    talk.do("append", [Part("answer", "target", "hi")])
    talk.chat.close()
    assert list(tmp_path.iterdir()) == []


def test_the_end_of_a_turn_is_on_the_disk_and_not_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that took minutes must not depend on the battery."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    talk = Talk(tmp_path)
    talk.do("ask", "hello")
    talk.do("append", [Part("answer", "target", "hi")])
    assert not synced
    talk.do("finish", ("stop", "", None))
    assert synced == [talk.size]


def test_a_growing_answer_is_written_once_a_second_and_each_word_once(tmp_path: Path) -> None:
    """Twenty chunks a second, each with all of the answer, would fill the disk with copies."""
    seconds = 0.0
    store = ChatStore(tmp_path, clock=lambda: seconds)
    chat = store.create("demo")
    turn = chat.conversation.ask("hello", 1)
    chat.asked(turn)
    for i in range(100):
        seconds += 0.0625
        chat.conversation.append(1, [Part("answer", "draft" if i % 3 else "target", f"word{i} ")])
        chat.grew(turn)
    chat.conversation.finish(1, "stop")
    chat.finished(turn)
    lines = chat.path.read_text().splitlines()
    assert sum('"grow"' in line for line in lines) == 6
    assert all(chat.path.read_text().count(f"word{i} ") == 1 for i in range(100))


def test_closing_the_app_in_the_middle_of_an_answer_keeps_all_of_it(tmp_path: Path) -> None:
    """Also what came since the last second was written: it is on the screen when the window is closed."""
    chat = ChatStore(tmp_path, clock=lambda: 0.0).create("demo")
    turn = chat.conversation.ask("hello", 1)
    chat.asked(turn)
    chat.conversation.append(1, [Part("answer", "draft", "half an ans")])
    chat.grew(turn)
    assert "half" not in chat.path.read_text()
    chat.close()
    chat.close()
    back = make_store(tmp_path).open(chat.id)
    assert [(turn.answer, turn.state) for turn in back.conversation.turns] == [("half an ans", "cancelled")]


HOLDER = """
import sys
from pathlib import Path
from dflash_mlx.app.messages import Part
from dflash_mlx.app.store import ChatStore
chat = ChatStore(Path(sys.argv[1]), clock=iter(range(0, 99, 10)).__next__).open(sys.argv[2])
turn = chat.conversation.ask("from elsewhere", 1)
chat.asked(turn)
chat.conversation.append(1, [Part("answer", "draft", "half an ans")])
chat.grew(turn)
print("open", chat.read_only, flush=True)
sys.stdin.read()
"""


def test_a_chat_that_is_open_elsewhere_is_only_read_and_comes_back_when_that_window_dies(tmp_path: Path) -> None:
    """Two windows that write to one file would mix two conversations into one."""
    talk = Talk(tmp_path)
    talk.do("ask", "hello")
    talk.do("finish", ("stop", "", None))
    talk.chat.close()
    arguments = [sys.executable, "-c", HOLDER, str(tmp_path), talk.chat.id]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline().strip() == "open"
        content = talk.chat.path.read_bytes()
        here = talk.store.open(talk.chat.id)
        assert "open in another window" in here.read_only and "not saved" in here.read_only
        assert [turn.user for turn in here.conversation.turns] == ["hello", "from elsewhere"]
        here.asked(here.conversation.ask("lost", 9))
        here.retitled("lost")
        here.close()
        for change in (talk.store.delete, lambda id: talk.store.rename(id, "lost")):
            with pytest.raises(StoreError, match="open in another window"):
                change(talk.chat.id)
        assert talk.chat.path.read_bytes() == content
        other.send_signal(signal.SIGKILL)
        other.wait(10)
    back = talk.store.open(talk.chat.id)
    assert not back.read_only
    last = back.conversation.turns[-1]
    assert (last.answer, last.state, last.closing) == ("half an ans", "cancelled", INTERRUPTED)
    assert back.conversation.messages()[-1] == ("assistant", "half an ans")
    back.close()


def test_turns_that_were_read_have_no_numbers_that_a_job_could_have(tmp_path: Path) -> None:
    """Stopping turn 2 would stop, or a late chunk would reach, one that was answered yesterday."""
    talk = Talk(tmp_path)
    for _ in range(3):
        talk.do("ask", "hello")
        talk.do("finish", ("stop", "", None))
    talk.do("undo")
    talk.do("reopen")
    assert [turn.number for turn in talk.chat.conversation.turns] == [-3, -2]
    talk.do("ask", "again")
    assert [turn.number for turn in talk.chat.conversation.turns] == [-3, -2, 1]
    talk.chat.close()


def test_chats_are_private(tmp_path: Path) -> None:
    """Other users of the machine would read along."""
    before = os.umask(0)
    try:
        talk = Talk(tmp_path / "data" / "chats")
        talk.do("ask", "a secret")
    finally:
        os.umask(before)
    assert stat.S_IMODE(talk.chat.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(talk.chat.path.parent.stat().st_mode) == 0o700


def test_a_chat_without_a_question_leaves_nothing_behind(tmp_path: Path) -> None:
    """Every start of the app would add an empty chat to the list."""
    talk = Talk(tmp_path / "chats")
    talk.do("system", "be kind")
    talk.chat.close()
    assert talk.store.list() == [] and not (tmp_path / "chats").exists()


def test_a_question_that_only_waited_makes_the_file_when_the_chat_is_left(tmp_path: Path) -> None:
    """It was sent, as far as the user knows; a scribble in the box of a chat that never began was not."""
    store = make_store(tmp_path)
    scribbled = store.create("demo")
    scribbled.left_unsent(Unsent((), "/qui"))
    dropped = store.create("demo")
    dropped.left_unsent(Unsent(("never mind",)))
    dropped.left_unsent(Unsent())
    asked = store.create("demo")
    asked.left_unsent(Unsent(("Who\nare you?",), "and"))
    for chat in (scribbled, dropped, asked):
        assert not chat.path.exists()
        chat.close()
    [summary] = store.list()
    assert (summary.id, summary.title, summary.turns) == (asked.id, "Who", 0)
    assert store.open(asked.id).unsent == Unsent(("Who\nare you?",), "and")


def test_what_was_not_sent_is_on_the_disk_at_once_and_not_written_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message in the queue is nowhere else."""
    talk, synced = Talk(tmp_path), list[int]()
    talk.do("ask", "how?")
    monkeypatch.setattr(os, "fsync", synced.append)
    talk.do("unsent", Unsent(("why?",)))
    size = talk.size
    talk.do("unsent", Unsent(("why?",)))
    assert len(synced) == 1 and talk.size == size
    talk.chat.forget()
    assert read(talk.chat.path)[3] == Unsent(("why?",))


def test_a_reader_that_knows_no_unsent_messages_reads_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat of today has to open in the version of last month, which skips and counts what it does not know."""
    talk = Talk(tmp_path)
    for event in [("ask", "how?"), ("unsent", Unsent(("why?",), "W")), ("finish", ("stop", "", None))]:
        talk.do(*event)
    talk.chat.close()
    apply = chat_file._apply
    monkeypatch.setattr(chat_file, "_apply", lambda saved, record: record["op"] != "unsent" and apply(saved, record))
    chat = talk.store.open(talk.chat.id)
    assert [(turn.user, turn.state) for turn in chat.conversation.turns] == [("how?", "stop")]
    assert chat.note.startswith("1 damaged line was left out")


def test_the_list_has_the_newest_chat_first_and_follows_changes(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    chats = []
    for number, question in enumerate(("  \n\tFirst   question\nmore", "second"), 1):
        chat = store.create("demo")
        chat.asked(chat.conversation.ask(question, number))
        chats.append(chat)
    assert [(chat.title, chat.turns, chat.model) for chat in store.list()] == [
        ("second", 1, "demo"),
        ("First question", 1, "demo"),
    ]
    chats[0].conversation.finish(1, "stop")
    chats[0].finished(chats[0].conversation.turns[0])
    assert [chat.title for chat in store.list()] == ["First question", "second"], "an answer came"
    chats[0].asked(chats[0].conversation.ask("again", 3), "another/model")
    store.rename(chats[1].id, "Renamed")
    assert [(chat.title, chat.turns, chat.model) for chat in store.list()] == [
        ("First question", 2, "another/model"),
        ("Renamed", 1, "demo"),
    ]
    assert store.open(chats[1].id) is chats[1] and chats[1].title == "Renamed"
    store.rename(chats[1].id, " ")
    assert chats[1].title == "second"


@pytest.mark.parametrize("here", [True, False])
def test_a_deleted_chat_is_gone_and_does_not_come_back(tmp_path: Path, here: bool) -> None:
    talk = Talk(tmp_path)
    talk.do("ask", "hello")
    if not here:
        talk.chat.close()
    talk.store.delete(talk.chat.id)
    talk.do("append", [Part("answer", "target", "hi")])
    talk.do("finish", ("stop", "", None))
    talk.chat.close()
    assert list(tmp_path.iterdir()) == [] and talk.store.list() == []
    with pytest.raises(StoreError, match="cannot be read"):
        talk.store.open(talk.chat.id)


def test_a_file_that_was_deleted_under_the_app_is_said(tmp_path: Path) -> None:
    """It would go on as if everything were saved."""
    talk = Talk(tmp_path)
    talk.do("ask", "hello")
    talk.chat.path.unlink()
    with pytest.raises(StoreError, match="it was deleted"):
        talk.do("append", [Part("answer", "target", "hi")])
    talk.do("finish", ("stop", "", None))


def newer(path: Path) -> None:
    head = {"format": "dflash-metal chat", "version": 2, "created": "2026-03-01T09:00:00+00:00", "model": "x"}
    path.write_text(json.dumps(head) + "\n")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.write_bytes(b""), "is not a saved chat"),
        (lambda path: path.write_bytes(b"\0" * 5000), "is not a saved chat"),
        (lambda path: path.write_bytes(b"[" * 100_000 + b"\n"), "is not a saved chat"),
        (lambda path: path.write_text('{"role": "user", "content": "not ours"}\n'), "is not a saved chat"),
        (lambda path: path.write_text('{"format": "dflash-metal chat", "version": 1}\n'), "damaged first line"),
        (newer, "newer dflash-metal (format 2, this one reads up to 1)"),
        (lambda path: path.mkdir(), "is no file"),
        (lambda path: os.mkfifo(path), "is no file"),
        (lambda path: path.symlink_to("nowhere"), "cannot be read"),
    ],
)
def test_a_foreign_file_is_left_out_with_a_note_and_left_as_it_is(
    tmp_path: Path, make: Callable[[Path], None], said: str
) -> None:
    talk = Talk(tmp_path)
    talk.do("ask", "hello")
    path = tmp_path / "foreign.jsonl"
    make(path)
    content = path.read_bytes() if path.is_file() else None
    assert [chat.title for chat in talk.store.list()] == ["hello"]
    (note,) = talk.store.notes
    assert said in note and str(path) in note
    with pytest.raises(StoreError):
        talk.store.open("foreign")
    assert (path.read_bytes() if path.is_file() else None) == content


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "\0\0\0",
        '"text"',
        '{"op":"sing"}',
        '{"op":"ask","turn":1,"at":"2026-03-01T09:00:00+00:00","user":"a number that was used"}',
        '{"op":"ask","turn":9,"at":"2026-03-01T09:00:00","user":"a time without a zone"}',
        '{"op":"ask","turn":9,"at":"2026-03-01T09:00:00+00:00","user":7}',
        '{"op":"ask","turn":true,"at":"2026-03-01T09:00:00+00:00","user":"x"}',
        '{"op":"grow","turn":1,"parts":[["answer","nobody","x"]]}',
        '{"op":"grow","turn":1,"parts":7}',
        '{"op":"end","turn":1,"at":"2026-03-01T09:00:00+00:00","parts":[],"state":"bored"}',
        '{"op":"end","turn":1,"at":"2026-03-01T09:00:00+00:00","parts":[],"state":"stop","numbers":7}',
        '{"op":"title","text":null}',
        '{"op":"unsent","waiting":"one","box":""}',
        '{"op":"unsent","waiting":[7],"box":""}',
        '{"op":"unsent","waiting":["one"]}',
    ],
)
def test_a_line_that_makes_no_sense_is_left_out_and_counted(tmp_path: Path, line: str) -> None:
    talk = Talk(tmp_path)
    talk.do("ask", "hello")
    with talk.chat.path.open("a") as file:
        file.write(line + "\n")
    talk.do("append", [Part("answer", "target", "hi")])
    talk.do("finish", ("stop", "done", None))
    expected = seen(talk.chat)
    talk.chat.close()
    back = talk.store.open(talk.chat.id)
    assert seen(back) == expected
    assert "1 damaged line was left out" in back.note
    back.close()


def test_numbers_of_another_version_are_read_as_far_as_they_are_known(tmp_path: Path) -> None:
    talk = Talk(tmp_path)
    talk.do("ask", "hello")
    talk.do("finish", ("stop", "", Numbers(generation_tokens=7, recent=((1, 3),))))
    talk.chat.close()
    text = talk.chat.path.read_text().replace('"generation_tokens":7', '"generation_tokens":7,"joules":9')
    talk.chat.path.write_text(text.replace('"mode":"",', ""))
    assert talk.store.open(talk.chat.id).conversation.turns[0].numbers == Numbers(generation_tokens=7, recent=((1, 3),))


@pytest.mark.parametrize("id", ["../outside", "a/b", "..", ".hidden", ""])
def test_an_id_cannot_lead_out_of_the_folder(tmp_path: Path, id: str) -> None:
    with pytest.raises(StoreError, match="is no chat's id"):
        make_store(tmp_path).delete(id)


def test_a_folder_that_cannot_be_made_is_said_once_and_the_chat_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    talk = Talk(tmp_path / "file" / "chats")
    with pytest.raises(StoreError, match="not saved"):
        talk.do("ask", "hello")
    talk.do("finish", ("stop", "", None))
    talk.chat.close()
    assert talk.chat.conversation.turns[0].state == "stop"


@pytest.mark.parametrize(
    ("question", "title"),
    [
        ("How do I sort?\nIn Python.", "How do I sort?"),
        ("x" * 61, "x" * 59 + "…"),
        ("語" * 31, "語" * 29 + "…"),
        ("\x1b[31mred\x07", "␛[31mred␇"),
        ("\n \n", "New chat"),
    ],
)
def test_the_title_is_the_first_line_of_the_question_and_fits_a_list(tmp_path: Path, question: str, title: str) -> None:
    talk = Talk(tmp_path)
    talk.do("ask", question)
    assert talk.chat.title == title
