"""Prompts: history keeps its roles through the model's template, and thinking is what the user set, in every arm."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import pytest

import dflash_mlx.chat
from dflash_mlx import Segments, make_prompt_cache, make_sampler, stream_generate
from dflash_mlx.app import plain
from dflash_mlx.app.backend import Backend, Pair
from dflash_mlx.app.commands import Change, Hint, parse
from dflash_mlx.app.jobs import LoadModel
from dflash_mlx.app.settings import Settings
from dflash_mlx.cli import chat_ids, generate_main
from dflash_mlx.templates import render
from tests.families import tiny
from tests.folders import draft_folder, target_folder
from tests.generating import DRAFT
from tests.thinking import MARKERS, raw_tokenizer, thinking_tokenizer

ROLES = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
FLAG = ROLES + "{% if add_generation_prompt %}<|im_start|>assistant\nthinking={{ enable_thinking }}\n{% endif %}"
SWITCHES = [(True, "thinking=True\n"), (False, "thinking=False\n"), (None, "thinking=True\n")]
HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "User: what is 2 + 2?"},
    {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\n4"},
    {"role": "user", "content": "And 3 + 3?"},
]


def text_of(tokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids))


@pytest.mark.parametrize(("thinking", "printed"), SWITCHES)
def test_the_switch_reaches_the_template(thinking: bool | None, printed: str) -> None:
    """None is mlx_lm's default: on for a model that can think, off for one that cannot."""
    tokenizer = thinking_tokenizer(MARKERS, FLAG)
    assert text_of(tokenizer, render(tokenizer, HISTORY, thinking)).endswith(printed)
    cannot = thinking_tokenizer((), FLAG)
    wanted = "thinking=False\n" if thinking is None else printed
    assert text_of(cannot, render(cannot, HISTORY, thinking)).endswith(wanted)


def test_history_keeps_its_roles() -> None:
    """All of it, as the model was trained to see it."""
    tokenizer = thinking_tokenizer()
    ids = render(tokenizer, HISTORY)
    assert ids == tokenizer.apply_chat_template(HISTORY, add_generation_prompt=True)
    assert text_of(tokenizer, ids).count("<|im_start|>") == len(HISTORY) + 1
    assert chat_ids(tokenizer, "And 3 + 3?", "Be brief.", raw=False) == render(tokenizer, [HISTORY[0], HISTORY[3]])


def test_the_splitter_knows_what_the_switch_did_to_the_prompt() -> None:
    tokenizer = thinking_tokenizer()
    for thinking, opened in ((True, "reasoning"), (False, None), (None, "reasoning")):
        assert Segments.for_prompt(tokenizer, render(tokenizer, HISTORY, thinking)).unfinished == opened


@pytest.mark.parametrize("thinking", [True, False])
def test_a_template_without_the_switch_refuses_it(thinking: bool) -> None:
    """Rather than answer as if nothing had been asked."""
    tokenizer = thinking_tokenizer(MARKERS, ROLES)
    with pytest.raises(ValueError, match=rf"`thinking` cannot be switched {'on' if thinking else 'off'}"):
        render(tokenizer, HISTORY, thinking)
    assert render(tokenizer, HISTORY) == render(tokenizer, HISTORY, None)


# The command line. -------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Prompt ids that reached `stream_generate` from the command line."""
    seen: list[list[int]] = []

    def recording(model, tokenizer, prompt, *args, **kwargs):
        seen.append(prompt)
        return stream_generate(model, tokenizer, prompt, *args, **kwargs)

    monkeypatch.setattr("dflash_mlx.generate_command.stream_generate", recording)
    monkeypatch.setattr("dflash_mlx.stream_generate", recording)
    return seen


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("models")
    target, draft = target_folder(root / "tiny"), draft_folder(root / "tiny-draft")
    raw_tokenizer(MARKERS, FLAG).save_pretrained(target)
    return ["--model", str(target), "--draft", str(draft), "--blas", "off", "--prompt", "hi", "--max-tokens", "2"]


@pytest.mark.parametrize(("options", "printed"), [(["--think"], True), (["--no-think"], False), ([], True)])
def test_the_flag_is_the_same_for_every_mode(options: list[str], printed: bool, models, asked, capsys) -> None:
    for mode in ("plain", "dflash", "auto"):
        assert generate_main([*models, "--mode", mode, *options]) == 0
    assert asked[0] == asked[1] == asked[2]
    tokenizer = thinking_tokenizer(MARKERS, FLAG)
    assert (
        text_of(tokenizer, asked[0]) == f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nthinking={printed}\n"
    )


def test_the_flag_needs_the_template(models, capsys) -> None:
    assert generate_main([*models, "--raw", "--no-think"]) == 1
    assert "`--think or --no-think` needs a chat template" in capsys.readouterr().err


def test_the_flag_is_refused_where_the_template_has_no_switch(models, tmp_path: Path, capsys) -> None:
    folder = target_folder(tmp_path / "tiny")
    assert generate_main([*models, "--model", str(folder), "--no-think"]) == 1
    assert "`thinking` cannot be switched off" in capsys.readouterr().err


# The chat. ---------------------------------------------------------------------------------------------------------


def chat(template: str, settings: Settings, *questions: str) -> tuple[int, list[list[int]], list[str], str]:
    """The plain chat over the tiny pair.

    Returns:
        Exit code; the whole prompt of each turn, what the cache held of it included; each answer; stderr.
    """
    prompts, answers = list[list[int]](), list[str]()

    def stream(model, tokenizer, ids, *args, prompt_cache, **kwargs):
        prompts.append(prompt_cache.tokens[: prompt_cache.cache.length] + ids)
        answers.append("")
        for response in stream_generate(model, tokenizer, ids, *args, prompt_cache=prompt_cache, **kwargs):
            answers[-1] += response.text
            yield response

    backend = Backend(
        lambda path, options, progress: Pair(tiny("llama"), thinking_tokenizer(MARKERS, template), DRAFT, 16),
        stream,
        make_sampler,
        make_prompt_cache,
        compare=lambda *args: None,
        clear_streams=lambda: None,
    )
    out, err = io.StringIO(), io.StringIO()
    code = plain.run(LoadModel(), settings, iter(questions), backend=lambda: backend, out=out, err=err)
    return code, prompts, answers, err.getvalue()


@pytest.mark.parametrize(("thinking", "printed"), SWITCHES)
def test_a_chat_is_rendered_with_roles_and_the_switch_in_every_turn(thinking: bool | None, printed: str) -> None:
    settings = Settings(max_tokens=12, system="Be brief.", thinking=thinking)
    code, prompts, answers, err = chat(FLAG, settings, "one", "two", "three")
    assert code == 0, err
    tokenizer = thinking_tokenizer(MARKERS, FLAG)
    history = [{"role": "system", "content": "Be brief."}]
    for question, answer, prompt in zip(("one", "two", "three"), answers, prompts, strict=True):
        history.append({"role": "user", "content": question})
        switch = {} if thinking is None else {"enable_thinking": thinking}
        assert prompt == tokenizer.apply_chat_template(history, add_generation_prompt=True, **switch)
        assert text_of(tokenizer, prompt).endswith(printed)
        history.append({"role": "assistant", "content": answer})


def test_the_chat_says_that_a_template_has_no_switch() -> None:
    code, prompts, _, err = chat(ROLES, Settings(thinking=False), "one")
    assert (code, prompts) == (1, []) and "`thinking` cannot be switched off" in err


@pytest.mark.parametrize(("options", "thinking"), [(["--think"], True), (["--no-think"], False), ([], None)])
def test_the_chats_flag_is_its_first_setting(options: list[str], thinking: bool | None, monkeypatch) -> None:
    seen: list[Settings] = []
    monkeypatch.setattr(plain, "run", lambda load, settings, questions, **options: seen.append(settings) or 0)
    assert dflash_mlx.chat.main(["-p", "hi", *options]) == 0
    assert [settings.thinking for settings in seen] == [thinking]


def test_thinking_is_switched_between_two_messages() -> None:
    settings = Settings()
    for value, thinking in (("off", False), ("on", True), ("auto", None)):
        command = parse(f"/think {value}", settings)
        assert isinstance(command, Change) and command.said == f"thinking {value}"
        settings = command.settings
        assert settings.thinking is thinking
    for wrong in ("/think", "/think maybe"):
        assert parse(wrong, settings) == Hint("Use /think on, /think off or /think auto.")
