"""A server measured as a client sees it: clocks, what it says of its drafts, and every way in which it can fail."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_mlx.bench.acceptance import Acceptance
from dflash_mlx.bench.checks import check
from dflash_mlx.bench.openai import openai_main
from dflash_mlx.bench.record import Limits, Measured, from_json, load
from dflash_mlx.bench.served_arm import Served, text_prompt
from dflash_mlx.bench.server import Answer, Server, ServerError
from tests.bench.fake_server import LLAMA, MLX_VLM, OLD_SGLANG, SGLANG, VLLM, Fake, serving

PROMPT = text_prompt("one", "code", "Count.")


def ask(fake: Fake, limits: Limits = Limits(max_tokens=9), **more: Any) -> Measured:  # noqa: B008
    with serving(fake):
        return Served.of(Server(fake.url, timeout=10), None, "server", **more).run(PROMPT, limits)


ENGINES: dict[str, tuple[Fake, tuple[int, int, int | None, int | None], str]] = {
    "vllm": (Fake("vllm", {"metrics": {"speculative_decoding": VLLM}}, exact=True), (3, 5, 9, 4), "vLLM's metrics"),
    "vllm, only counters": (Fake("vllm", exact=True, scraped=True), (3, 5, 9, 4), "vLLM's counters in /metrics"),
    "sglang": (Fake("sglang", {"sglext": {"spec_tokens_details": SGLANG}}, exact=True), (3, 5, 9, 4), "SGLang's"),
    "sglang, meta_info": (Fake("sglang", {"meta_info": OLD_SGLANG}), (3, 5, None, None), "accepted = tokens - 1 -"),
    "llama.cpp": (Fake("llamacpp", {"timings": LLAMA}), (3, 5, 9, None), "llama.cpp's draft_n"),
    "mlx-vlm": (Fake("mlx", {"timings": MLX_VLM}), (3, 5, 9, 4), r"its draft_n_accepted, 8, counts"),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engines_numbers_become_the_same_counts(engine: str) -> None:
    """Nine tokens in three cycles with five accepted of nine drafts, whatever an engine calls them: SGLang's own length
    is 3.00 here and ours 2.67, since the first token belongs to no cycle; mlx-vlm counts drafts behind the end."""
    fake, counts, definition = ENGINES[engine]
    seen = ask(fake)
    said = seen.reported
    assert (said.cycles, said.accepted, said.drafted, seen.block_size) == counts
    assert seen.generated == said.generated == 9
    assert any(note.startswith("acceptance: ") and definition.replace("\\", "") in note for note in seen.notes)
    assert check(seen) == []
    if counts[2] is not None:
        found = Acceptance.of(seen)
        assert found is not None and found.mean_acceptance_length == pytest.approx(8 / 3)
        assert found.draft_acceptance_rate == pytest.approx(5 / 9) and found.accepted_share == pytest.approx(5 / 8)


@pytest.mark.parametrize("engine", ["vllm", "vllm, only counters", "sglang"])
def test_histograms_are_of_accepted_drafts(engine: str) -> None:
    """From a dense list, or from how often every position was accepted."""
    assert ask(ENGINES[engine][0]).reported.histogram == {0: 1, 2: 1, 3: 1}


def test_a_server_without_drafts_has_no_acceptance() -> None:
    """mlx_lm's server says nothing of them: unknown, and not zero."""
    seen = ask(Fake("mlx-lm"))
    assert Acceptance.of(seen) is None and seen.reported.cycles is None
    assert (seen.prompt_tokens, seen.cached_tokens, seen.generated, seen.finish_reason) == (7, 2, 9, "length")


def test_clocks_run_from_the_request_to_the_last_visible_token() -> None:
    """By the harness's own clock: four bursts, the first of one token, so that eight tokens are generation only."""
    seen = ask(replace(ENGINES["vllm"][0], pause_s=0.05))
    assert seen.cycles is not None and seen.cycles.emitted == (4, 1, 3)
    assert 0.04 < seen.first_s < seen.cycles.at_s[0] < seen.end_s == seen.cycles.at_s[-1]
    assert len(seen.cycle_s) == 3 and min(seen.cycle_s) > 0.04
    assert seen.decode_tokens == 8 and seen.decode_s == pytest.approx(seen.end_s - seen.first_s)


def test_tokens_that_come_with_the_first_are_not_generation_only() -> None:
    """An engine whose first burst has five tokens would otherwise get four of them for nothing."""
    bursts = ((0, 1, 2, 3, 4), (5, 6), (7, 8))
    seen = ask(Fake("vllm", exact=True, bursts=bursts))
    assert seen.first_burst[0] == 5 and seen.decode_tokens == 4
    assert len(seen.cycle_s) == 2


def test_tokens_that_follow_at_once_are_one_burst() -> None:
    """Some servers send a cycle's tokens one by one: the gaps of a microsecond between them are no cycles."""
    answer = Answer()
    for now in (1.0, 1.0005, 1.001, 1.5, 1.5005, 2.0):
        answer.see({"choices": [{"delta": {"content": "x"}}]}, now)
    assert answer.at_s == [1.001, 1.5005, 2.0] and answer.first_s == 1.0 and answer.chunks == 6


def test_chunks_are_counted_only_where_no_usage_is_given_and_that_is_said() -> None:
    """A chunk is not a token. Where it is all there is, that is said; an unknown prompt is not one of 0 tokens."""
    seen = ask(Fake(counts=False))
    assert seen.generated == 4 and seen.prompt_tps is None
    assert "tokens are the 4 chunks with text" in seen.notes[0]
    assert not any("chunks" in note for note in ask(Fake()).notes)


def test_reasoning_is_visible_and_named() -> None:
    """The time to the first token depends on whether it is one of the reasoning."""
    seen = ask(Fake(reasons=True))
    assert "the first token is one of the reasoning" in seen.notes and seen.text.startswith("one two")


def test_a_server_that_counts_before_the_cut_is_doubted_and_not_refused() -> None:
    """Its accepted drafts are more than its answer has tokens."""
    said = VLLM | {"num_accepted_draft_tokens": 7}
    seen = ask(Fake("vllm", {"metrics": {"speculative_decoding": said}}, exact=True))
    assert any("accepted + cycles + 1 is 11 and the answer has 9" in note for note in seen.notes)
    assert check(seen) == []


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llamacpp", "mlx"])
def test_prompts_are_asked_for_without_a_cache_where_an_engine_can(engine: str) -> None:
    """Trials and warm-up ask the same prompt: read from a cache, its prefill would be measured as nothing."""
    fake = Fake(engine)
    with serving(fake):
        arm = Served.of(Server(fake.url), None, "server")
        arm.run(PROMPT, Limits(max_tokens=9))
        arm.run(PROMPT, Limits(max_tokens=9))
    first, again = ({name: body.get(name) for name in ("cache_salt", "cache_prompt")} for body in fake.asked)
    if engine in ("vllm", "sglang"):
        assert first["cache_salt"] and first["cache_salt"] != again["cache_salt"]
    else:
        assert first == {"cache_salt": None, "cache_prompt": False if engine == "llamacpp" else None}


def test_a_length_without_drafts_is_kept_in_words() -> None:
    """Where an engine does not say how many it drafted there is no rate, and its length is not lost."""
    seen = ask(ENGINES["sglang, meta_info"][0])
    assert "mean acceptance length 2.67; it does not say its drafts" in seen.notes and Acceptance.of(seen) is None


def test_bursts_that_the_network_joined_are_no_contradiction() -> None:
    """Three cycles that arrive together are three by the server's word: the run goes on."""
    bursts = ((0,), (1,), (2, 3, 4, 5, 6, 7, 8))
    seen = ask(Fake("vllm", {"metrics": {"speculative_decoding": VLLM}}, exact=True, bursts=bursts, pause_s=0.06))
    assert seen.reported.cycles == 3 and len(seen.cycle_s) == 2 and check(seen) == []


def test_what_is_sent_is_what_the_limits_say() -> None:
    """Temperature, seed, ends and what else the user wants; engines that can are asked for counts per burst."""
    fake = Fake("sglang")
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    seen = ask(fake, Limits(max_tokens=20, ignore_eos=True, temperature=0.5, top_k=20, seed=3), extra=extra)
    body = fake.asked[0]
    assert body["messages"] == [{"role": "user", "content": "Count."}] and body["model"] == "tiny"
    assert (body["temperature"], body["seed"], body["top_k"], body["max_tokens"]) == (0.5, 3, 20, 20)
    assert body["ignore_eos"] and body["return_spec_tokens_details"] and body["stream"]
    assert body["chat_template_kwargs"] == {"enable_thinking": False} and "top_p" not in body
    assert "the server does not honour ignore_eos: 9 of 20 tokens" in seen.notes


FAILURES = {
    "cut": r"cut an answer after 3 chunks, without a reason to finish \(the connection was closed\)",
    "error": "ended an answer with an error: .*out of memory",
    "garbage": "streamed 'not json', which is no JSON object",
    "whole": "answered with application/json and not as a stream",
    "busy": "answered with status 429: too many requests. It is busy",
    "redirect": "answered with status 302",
}


@pytest.mark.parametrize("how", FAILURES)
def test_a_failure_is_one_clear_error_and_nothing_is_tried_again(how: str) -> None:
    """Half an answer, or a second try, would be measured as if it were a request."""
    fake = Fake(breaks=how)
    with pytest.raises(ServerError, match=FAILURES[how]):
        ask(fake)
    assert len(fake.asked) == 1


def test_an_answer_that_ends_with_a_reason_needs_no_marker() -> None:
    """Some servers close the connection instead of sending [DONE]."""
    assert ask(Fake(breaks="no end")).generated == 9


def test_a_server_that_cannot_list_its_models_is_measured_if_one_is_named() -> None:
    """mlx_lm's cannot where there is no cache of the hub; it answers all the same."""
    with serving(Fake(lists=False)) as fake:
        arm = Served.of(Server(fake.url), "tiny", "server")
        assert arm.run(PROMPT, Limits(max_tokens=9)).generated == 9 and arm.engine is None
        with pytest.raises(ServerError, match="answered with status 404"):
            Served.of(Server(fake.url), None, "server")


def test_a_server_that_is_not_there_is_named() -> None:
    """The first thing that goes wrong for anybody."""
    with pytest.raises(ServerError, match=r"http://127\.0\.0\.1:9/v1 cannot be reached .*Start the server"):
        Served.of(Server("http://127.0.0.1:9/v1"), None, "x")


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://me:secret@host", "http://host?key=1"])
def test_an_address_that_would_not_work_or_would_leak_is_refused(url: str) -> None:
    """A record keeps the address, so that it must hold no password."""
    with pytest.raises(ValueError, match="`base_url`"):
        Server(url)


# The command.


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    rows = [
        {"name": "a", "category": "code", "prompt": "Count."},
        {"name": "b", "category": "chat", "prompt": "Count to nine, slowly.", "task": "text", "answer": "no"},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def run(prompts: str, tmp_path: Path, fakes: list[Fake], *more: str) -> tuple[int, Any]:
    out = tmp_path / "out.json"
    urls = [word for fake in fakes for word in ("--base-url", f"{fake.url}/v1")]
    status = openai_main([*urls, "--prompts", prompts, "--max-tokens", "9", "--out", str(out), *more])
    return status, load(out) if out.exists() else None


def test_two_servers_are_asked_a_b_b_a_and_compared(
    prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With and without speculation: the same prompts in turn and in reverse turn, speed-ups with their interval."""
    slow = Fake("vllm", exact=True, pause_s=0.02, bursts=tuple((i,) for i in range(9)))
    with serving(slow), serving(replace(ENGINES["vllm"][0], asked=[], pause_s=0.02)) as fast:
        status, record = run(prompts, tmp_path, [slow, fast])
    assert status == 0 and record.complete
    order = [(each.prompt, each.arm) for each in record.order if each.kind == "measured"]
    assert order == [(name, arm) for name in "ab" for arm in ("plain", "spec", "spec", "plain")]
    assert record.summary.arms["spec"].same_tokens == 2
    found = record.summary.arms["spec"].speedup
    assert 1.5 < found["request"].ratio < 3.5 and found["request"].basis == "total time"
    assert record.run.arms["spec"] == f"tiny of {fast.url}/v1 (vllm)"
    assert [asked.tokens for asked in record.prompts] == [7, 7]
    assert record.run.machine["role"] == "client"
    shown = capsys.readouterr().out
    assert "mean acceptance length (tokens/cycle)" in shown and "2.67" in shown
    assert "acceptance: vLLM's metrics.speculative_decoding" in shown
    assert "plain: 29% of its prompts' tokens came from the server's cache" in " ".join(shown.split())


def test_requests_at_the_same_time_are_a_load_with_a_throughput(
    prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokens over the time of a pass; counters around the pass, since around a request they would be of others too."""
    with serving(Fake("vllm", exact=True, scraped=True, pause_s=0.05)) as fake:
        status, record = run(prompts, tmp_path, [fake], "--concurrency", "2")
    assert status == 0 and fake.most_at_once == 2
    assert len(record.passes) == 2
    for each in record.passes:
        assert (each.concurrency, each.requests, each.generated) == (2, 2, 18)
        assert (each.cycles, each.drafted, each.accepted) == (6, 18, 10)
        assert 0.19 < each.wall_s < 0.39  # two requests of 0.2 s side by side, not one after the other
    assert all(each.reported.cycles is None for each in record.measured)
    assert "throughput (tokens/s)" in capsys.readouterr().out


def test_a_load_on_two_servers_goes_there_and_back_too(prompts: str, tmp_path: Path) -> None:
    """A client or a network that gets slower treats both alike."""
    with serving(Fake()) as one, serving(Fake()) as other:
        status, record = run(prompts, tmp_path, [one, other], "--concurrency", "2", "--trials", "2")
    assert status == 0 and [each.arm for each in record.passes] == ["plain", "spec", "spec", "plain"] * 2
    warm = [(each.arm, each.prompt) for each in record.order if each.kind == "warm-up"]
    assert warm == [("plain", "a"), ("plain", "b"), ("spec", "a"), ("spec", "b")]
    assert record.complete and record.summary.arms["spec"].requests == 8


def test_rounds_of_all_requests_are_not_taken_for_one() -> None:
    """mlx-vlm's counters are a request's own only while it is alone."""
    seen = ask(ENGINES["mlx-vlm"][0], alone=False)
    assert seen.reported.cycles is None


def test_a_run_that_fails_keeps_its_record_and_says_one_thing(
    prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was measured before a server died is worth keeping, as long as it does not pass for all."""
    with serving(Fake()) as fake:
        asked = fake.asked

        class Dying(list):  # type: ignore[type-arg]
            def append(self, body: Any) -> None:
                asked.insert(len(asked), body)
                super().append(body)
                fake.breaks = "cut" if len(self) > 5 else None

        fake.asked = Dying()
        status, record = run(prompts, tmp_path, [fake])
    said = capsys.readouterr()
    assert status == 1 and not record.complete and len(record.measured) > 0
    assert said.err.splitlines()[-1].startswith("Error: http://127.0.0.1") and "cut an answer" in record.ended
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    "fake, more, message",
    [
        (Fake(key="right"), (), "/v1/models answered with status 401: .*--api-key-env"),
        (Fake(), ("--model", "large"), "status 404: .*no model 'large'"),
        (Fake(key="right"), ("--model", "tiny"), "status 401: .*--api-key-env"),
        (Fake(models=("a", "b")), (), "has 2 models: a, b.*name it with --model"),
        (Fake(), ("--name", "x", "--name", "y"), "`base_url` is given 1 times, `name` 2"),
        (Fake(), ("--limit", "1", "--temperature", "1"), "`seed` has to be given"),
    ],
    ids=["key", "model", "key of a model", "models", "names", "seed"],
)
def test_what_is_wrong_is_said_before_or_at_the_first_request(
    prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], fake: Fake, more: tuple[str, ...], message: str
) -> None:
    """One line that says what to change."""
    with serving(fake):
        status, _ = run(prompts, tmp_path, [fake], *more)
    error = capsys.readouterr().err.splitlines()[-1]
    assert status == 1
    assert re.search(message, error), error


@pytest.mark.parametrize("option", ["--concurrency", "--limit", "--trials", "--max-tokens"])
def test_a_number_below_one_is_wrong_usage(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before a server is asked."""
    with pytest.raises(SystemExit) as end:
        openai_main(["--base-url", "http://127.0.0.1:9", option, "0"])
    assert end.value.code == 2 and f"{option}: has to be an integer of 1 or more" in capsys.readouterr().err


def test_the_key_is_sent_and_kept_nowhere(
    prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records are published."""
    monkeypatch.setenv("MY_KEY", "sk-secret")
    with serving(Fake(key="sk-secret")) as fake:
        status, _ = run(prompts, tmp_path, [fake], "--api-key-env", "MY_KEY")
    assert status == 0 and set(fake.keys) == {"Bearer sk-secret"}
    assert "sk-secret" not in (tmp_path / "out.json").read_text() + "".join(capsys.readouterr())
    assert "sk-secret" not in repr(Server(fake.url, "sk-secret"))


def test_without_a_name_for_it_a_record_is_kept_all_the_same(
    prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a server took an hour for must not end as lines on a screen; nor where there is nothing is a file made."""
    monkeypatch.chdir(tmp_path)
    with serving(Fake()) as fake:
        words = ["--base-url", f"{fake.url}/v1", "--prompts", prompts, "--limit", "1", "--max-tokens", "9"]
        assert openai_main(words) == 0
    (file,) = tmp_path.glob("bench-*.json")
    assert load(file).complete
    file.unlink()
    assert openai_main(words) == 1  # nobody answers now
    assert not list(tmp_path.glob("bench-*.json"))


def test_the_record_is_one_line_of_json_if_asked_for(
    prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For scripts: nothing else on stdout."""
    with serving(Fake()) as fake:
        run(prompts, tmp_path, [fake], "--json", "--limit", "1")
    (line,) = capsys.readouterr().out.splitlines()
    found = from_json(json.loads(line))
    assert found == load(tmp_path / "out.json") and found.summary is not None
    assert found.summary.arms["server"].generated == 36
