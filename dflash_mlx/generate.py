"""Text generation with mlx_lm's arguments and one response per token: stops, detokenising, statistics.

`stream_generate` and `generate` take what mlx_lm's take and refuse by name what they do not honour. The loop is
`dflash_mlx.decode`; this file turns its tokens into text. Tokens after a stop never reach the caller, and a reused
cache holds exactly what was returned, however the caller leaves the generator.

`python -m dflash_mlx.generate` is the command line (`dflash_mlx.cli`).
"""

from __future__ import annotations

if __name__ == "__main__":  # before MLX is imported, so that --help answers at once
    import sys

    from dflash_mlx.cli import generate_main

    sys.exit(generate_main())

from collections.abc import Generator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import GenerationResponse as MlxLmResponse
from mlx_lm.generate import wired_limit
from mlx_lm.tokenizer_utils import StreamingDetokenizer, TokenizerWrapper

from dflash_mlx import threads
from dflash_mlx.cache import KVQuantization
from dflash_mlx.decode import Commit, Progress, Session, decode
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.health import Watch
from dflash_mlx.kernels.choice import Kernels
from dflash_mlx.options import Options
from dflash_mlx.prompt_cache import PromptCache
from dflash_mlx.report import summary_lines
from dflash_mlx.request import Request, plan
from dflash_mlx.sampling import LogitsProcessor, Sampler, SamplingPolicy, as_policy
from dflash_mlx.stats import Stats, Timings
from dflash_mlx.stops import StopStrings


@dataclass
class GenerationResponse(MlxLmResponse):
    """mlx_lm's response with what speculation did.

    `generation_tps` is generation only (`Timings.decode_tps`), and `prompt_tps` the rate of prompt tokens really
    processed; both 0.0 while unknown, because mlx_lm's fields are floats. `timings` and `stats` are
    running totals of the request, where unknown is None.

    mode:          what ran: "dflash" or "plain"; it turns from one to the other where a draft proves not to work.
    notes:         fallbacks and facts for the user.
    cycle:         0 = the token that prefill gave; tokens of one cycle share the number.
    accepted, drafted: of that cycle.
    block_size:    anchor + drafts per cycle; 1 for plain decoding.
    pipelined:     whether the next draft is submitted before the verdict is read.
    draft_vocabulary: tokens that the draft proposes from, if not all.
    cached_tokens: positions that were already in the cache.
    recomputed_tokens: positions that a `PromptCache` held too, and that were read again because the target cannot go
        back to where the conversation changed.
    """

    mode: str = "plain"
    notes: tuple[str, ...] = ()
    cycle: int = 0
    accepted: int = 0
    drafted: int = 0
    block_size: int = 1
    pipelined: bool = False
    draft_vocabulary: int | None = None
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    stats: Stats = field(default_factory=Stats)
    timings: Timings = field(default_factory=Timings)


def stream_generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompt: str | mx.array | Sequence[int],
    max_tokens: int = 256,
    draft_model: DraftModel | None = None,
    stream: mx.Stream | None = None,
    *,
    sampler: Sampler | SamplingPolicy | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    max_kv_size: int | None = None,
    prompt_cache: PromptCache | list | None = None,
    prefill_step_size: int = 2048,
    prompt_progress_callback: Progress | None = None,
    num_draft_tokens: int | None = None,
    block_size: int | None = None,
    stop: str | Sequence[str] | None = None,
    mode: str = "auto",
    rule: str = "rejection",
    exact: bool | float = False,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 5000,
    strict: bool = False,
    pipelined: bool = False,
    kernels: str | Kernels = "auto",
    input_embeddings: mx.array | None = None,
    requested_at: float | None = None,
) -> Generator[GenerationResponse]:
    """Generate text, one response per token. mlx_lm's arguments mean what they mean there.

    Args:
        model, tokenizer, draft_model: as `dflash_mlx.load` returns them.
        prompt: text or ids, at least one token.
        max_tokens: 1 or more, or -1 for no limit.
        sampler: None is greedy. `dflash_mlx.make_sampler(...)` is verified by rejection sampling with one host
            read per cycle; any other mlx_lm sampler is applied position by position, equally exact.
        logits_processors: called left to right with the history each position really has: all of a `PromptCache`, or
            what this call was given over an mlx_lm cache list, as in mlx_lm.
        prompt_cache: a `PromptCache`, or an mlx_lm cache list (which holds every returned token afterwards).
        block_size: anchor + drafts per cycle, 2..the draft's; 1 is plain decoding. `num_draft_tokens` is
            mlx_lm's name for block_size - 1.
        requested_at: `time.perf_counter()` when the user asked, if that was before this call; the clocks start there.
        stop: strings that end the answer and are not part of it.
        mode: "auto" verifies as many drafts as pay here and rests where none do, "dflash" insists, "plain" does not.
            How many depends on time, and never changes greedy text, nor sampled text with a `seed`; text drawn
            without one from MLX's global state is exact but need not repeat (use `seed`, or rule="match").
        rule: "rejection" or "match" at a temperature: two exact rules. "match" gives the same text as plain
            sampling with the same seed, "rejection" accepts more.
        exact: greedy only: near-ties in a block are decided again by a forward over one token, as plain decoding
            decides them; a number is the margin in log-probability (True: by dtype). A step each: `dflash_mlx.exact`.
        kv_bits, kv_group_size, quantized_kv_start: as in mlx_lm, for attention layers; sliding windows and recurrent
            states stay as they are. The tokens are those of plain decoding with the same three.
        strict: a draft that turns out not to work (NaN, or nothing of it accepted) raises `DraftFault`; otherwise
            decoding goes on plainly, with a note.
        pipelined: submit the next draft before the host reads what was accepted, so that the device does not wait for
            it. The same greedy text, and the same draws; not measured on Apple hardware.
        kernels: for blocks of drafts: "auto" runs the Metal kernels that `load` found right and faster here, "off"
            none, names ("qmm_small_m,sdpa_rows") only these. Without Metal all are off.
    Raises:
        ValueError: an argument is out of range or not honoured; the message names it.
        DFlashError: the models do not fit together or are not supported.
    """
    if input_embeddings is not None:
        raise ValueError(
            "`input_embeddings` is not honoured by this version of dflash_mlx. Leave it out, or generate with mlx_lm."
        )
    if num_draft_tokens is not None:
        if block_size is not None:
            raise ValueError("`num_draft_tokens` and `block_size` say the same thing; pass one of them.")
        if not isinstance(num_draft_tokens, int):
            raise ValueError(f"`num_draft_tokens` has to be an integer of 1 or more, got {num_draft_tokens!r}.")
        block_size = num_draft_tokens + 1
    options = Options(
        max_tokens=max_tokens,
        prefill_step_size=prefill_step_size,
        block_size=block_size,
        mode=mode,
        rule=rule,
        policy=as_policy(sampler),
        processors=tuple(logits_processors or ()),
        max_kv_size=max_kv_size,
        requested_at=requested_at,
        exact=exact,
        strict=strict,
        pipelined=pipelined,
        kernels=kernels,
        quantization=None if kv_bits is None else KVQuantization(kv_bits, kv_group_size, quantized_kv_start),
    )
    with nullcontext() if stream is None else mx.stream(stream):  # what may run depends on its device
        request = plan(model, draft_model, options, prompt_cache)
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    ids = encode(tokenizer, prompt)
    request.check_prompt(ids)
    stops = StopStrings([stop] if isinstance(stop, str) else list(stop or ()))
    responses = _respond(request, tokenizer, ids, stops, prompt_progress_callback)
    return _on_stream(stream, responses) if stream is not None else responses


def generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompt: str | mx.array | Sequence[int],
    verbose: bool = False,
    **kwargs: object,
) -> str:
    """The whole answer as text; arguments as in `stream_generate`. `verbose` prints it and the statistics."""
    text, last = "", None
    for last in stream_generate(model, tokenizer, prompt, **kwargs):  # type: ignore[arg-type]
        text += last.text
        if verbose:
            print(last.text, end="", flush=True)
    if verbose and last is not None:
        print("", *summary_lines(last), sep="\n")
    return text


def encode(tokenizer: TokenizerWrapper, prompt: str | mx.array | Sequence[int]) -> list[int]:
    """Prompt ids; special tokens are added to text as mlx_lm adds them (unless it starts with the BOS token)."""
    if isinstance(prompt, str):
        add = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
        return list(tokenizer.encode(prompt, add_special_tokens=add))
    if isinstance(prompt, mx.array):
        return prompt.tolist()  # type: ignore[return-value]
    return [int(token) for token in prompt]


def _respond(
    request: Request,
    tokenizer: TokenizerWrapper,
    ids: list[int],
    stops: StopStrings,
    progress: Progress | None,
) -> Generator[GenerationResponse]:
    threads.leave_cleanly()
    eos, detokenizer, notes = frozenset(tokenizer.eos_token_ids), tokenizer.detokenizer, request.notes_for(ids)
    session = request.open(eos)
    try:
        template = _template(request, session, len(ids), notes)
        commits = decode(
            session,
            ids,
            max_tokens=request.max_tokens,
            stop=eos,
            prefill_step_size=request.options.prefill_step_size,
            progress=progress,
        )
        with wired_limit(request.target.model), closing(commits):
            for commit in commits:
                session.timings.mark_burst()
                for index, token in enumerate(commit.tokens):
                    session.timings.emitted += 1
                    text = stops.feed(_decode(detokenizer, token, hidden=token in eos))
                    finish = commit.finish_reason if index == len(commit.tokens) - 1 else None
                    if finish and stops.matched is None:
                        text += stops.feed(_flush(detokenizer)) + stops.flush()
                    if stops.matched is not None:
                        finish = "stop"
                    response = _response(template, session, commit, index, text, finish)
                    session.undelivered -= 1  # what fails or is interrupted before this was not given to anybody
                    yield response
                    threads.leave_cleanly()  # another thread may have taken over
                    if finish:
                        return
    finally:
        try:
            threads.leave_cleanly()
        finally:
            request.close(session)


def _template(request: Request, session: Session, prompt_tokens: int, notes: tuple[str, ...]) -> GenerationResponse:
    """What all responses of a request have in common."""
    return GenerationResponse(
        text="",
        token=-1,
        logprobs=mx.array([]),
        from_draft=False,
        prompt_tokens=prompt_tokens,
        prompt_tps=0.0,
        generation_tokens=0,
        generation_tps=0.0,
        peak_memory=0.0,
        mode=request.mode,
        notes=notes,
        block_size=request.block_size,
        pipelined=request.pipelined,
        draft_vocabulary=request.draft.reduced_size if request.draft and request.mode == "dflash" else None,
        cached_tokens=session.cache.length,
        recomputed_tokens=0 if request.prompt_cache is None else request.prompt_cache.recomputed,
        stats=session.stats,
        timings=session.timings,
    )


def _decode(detokenizer: StreamingDetokenizer, token: int, *, hidden: bool) -> str:
    """The text that `token` completes; end markers are not text."""
    if not hidden:
        detokenizer.add_token(token)
    return detokenizer.last_segment


def _flush(detokenizer: StreamingDetokenizer) -> str:
    detokenizer.finalize()
    return detokenizer.last_segment


def _response(
    template: GenerationResponse, session: Session, commit: Commit, index: int, text: str, finish: str | None
) -> GenerationResponse:
    timings, watch = template.timings, session.schedule
    found = watch if isinstance(watch, Watch) else None
    return replace(
        template,
        mode="plain" if found and found.stopped else template.mode,
        notes=(*found.notes, *template.notes) if found else template.notes,
        text=text,
        token=commit.tokens[index],
        logprobs=commit.log_probs[index],
        from_draft=index < commit.accepted,
        prompt_tps=timings.prompt_tps or 0.0,
        generation_tokens=timings.emitted,
        generation_tps=timings.decode_tps or 0.0,
        peak_memory=mx.get_peak_memory() / 1e9,
        finish_reason=finish,
        cycle=commit.cycle,
        accepted=commit.accepted,
        drafted=commit.drafted,
    )


def _on_stream(stream: mx.Stream, responses: Generator[GenerationResponse]) -> Generator[GenerationResponse]:
    """Run every step of the generator on `stream`, and nothing of the caller's."""
    try:
        while True:
            with mx.stream(stream):
                response = next(responses, None)
            if response is None:
                return
            yield response
    finally:
        with mx.stream(stream):
            responses.close()
