"""Prompts from conversations: real roles through the model's own chat template, and its switch for thinking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def render(tokenizer: Any, messages: list[dict[str, str]], thinking: bool | None = None) -> list[int]:
    """Prompt ids of a conversation whose next answer is the assistant's.

    Args:
        tokenizer: mlx_lm's TokenizerWrapper, with a chat template.
        messages: {"role": ..., "content": ...}, oldest first.
        thinking: the template's `enable_thinking`. None leaves it to mlx_lm, which asks models that can think to.
    Raises:
        ValueError: `thinking` was given, and the template has no such switch.
    """

    def ids(**switch: bool) -> list[int]:
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, **switch))

    if thinking is None:
        return ids()
    on, off = ids(enable_thinking=True), ids(enable_thinking=False)
    if on == off:
        raise ValueError(
            f"`thinking` cannot be switched {'on' if thinking else 'off'}: this model's chat template gives the same "
            "prompt either way, so the setting would do nothing. Leave it at the model's default."
        )
    return on if thinking else off


def stable_length(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    ids: Sequence[int],
    thinking: bool | None = None,
    **template: Any,
) -> int:
    """How many of a prompt's ids the next turn will begin with, whatever the answer is.

    Templates open the answer in ways that the next turn does not repeat (an empty block of reasoning, say), so this is
    usually the end of the user's message. `PromptCache.reuse` takes it as `stable`.

    Args:
        messages: the conversation that was rendered to `ids`, the user's message last.
        thinking, template: what the template was given besides: `enable_thinking`, `tools=...`.
    Returns:
        0..len(ids); 0 if the template cannot render a further turn.
    """
    later = [*messages, {"role": "assistant", "content": "."}, {"role": "user", "content": "."}]
    switch = {} if thinking is None else {"enable_thinking": thinking}
    try:
        rendered = tokenizer.apply_chat_template(later, add_generation_prompt=True, **switch, **template)
    except Exception:  # a template may raise anything, and then nothing is known
        return 0
    return common_prefix(ids, rendered)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
