"""What huggingface_hub raises, in the user's words: what happened, why, and what to do about it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import huggingface_hub as hub
from huggingface_hub import errors

from dflash_mlx.errors import FetchError

_FULL = {errno.ENOSPC, errno.EDQUOT}
_NETWORK = (errors.HTTPError, ConnectionError, TimeoutError)  # offline mode is a ConnectionError
_RAISED = (OSError, RuntimeError, errors.HTTPError, errors.HFValidationError, errors.EntryNotFoundError)


class Unreachable(FetchError):
    """The hub did not answer, so what is not on this machine cannot be had."""


class NoRepository(FetchError):
    """The hub has no repository of this name that may be seen."""


class Gated(FetchError):
    """The repository exists, and its owner wants its licence accepted first."""


@contextmanager
def explained(name: str, revision: str | None = None) -> Iterator[None]:
    """Turn what huggingface_hub raises about this repository into a FetchError."""
    try:
        yield
    except FetchError:
        raise
    except _RAISED as error:
        raise _explain(error, name, revision) from error


def _explain(error: Exception, name: str, revision: str | None) -> FetchError:
    """The order matters: several of these classes are derived from others."""
    cause = error.__cause__
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(cause, errors.HfHubHTTPError):
        return _explain(cause, name, revision)  # hides that the hub did answer, with 429 or 500 say
    if isinstance(error, errors.HFValidationError):
        return FetchError(f"{name!r} is neither a folder here nor a repository's name ({error}).")
    if isinstance(error, errors.GatedRepoError):
        return Gated(
            f"{name} is gated: its owner lets only those download it who accepted its licence. Accept it on the "
            "repository's page, then run `hf auth login` with an account that did."
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return NoRepository(
            f"The hub has no repository {name}, or it is private. Check the name; for a private one run `hf auth "
            "login` (an expired token looks the same: `hf auth whoami`)."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return FetchError(
            f"{name} has no revision {revision!r}.{_known_revisions(name)} Ask for another; `main` is the newest."
        )
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return FetchError(f"{name} lacks a file that a model needs ({_first_line(error)}). Choose another repository.")
    if isinstance(error, errors.HfHubHTTPError):
        return _refusal(error, name)
    if isinstance(error, (errors.LocalEntryNotFoundError, *_NETWORK)):
        return _unreachable(name)
    if isinstance(error, OSError) and error.errno in _FULL:
        return FetchError(
            f"The disk of {hub.constants.HF_HUB_CACHE} is full ({error}), so {name} is not complete. Free some space "
            "or name another folder in HF_HOME; files that are complete are kept, and the next try fetches the rest."
        )
    return FetchError(
        f"Fetching {name} failed ({error}). Files that are complete are kept, and the next try fetches the rest. "
        "Check the connection and try again."
    )


def _unreachable(name: str) -> Unreachable:
    if hub.constants.HF_HUB_OFFLINE:
        why, then = "HF_HUB_OFFLINE forbids to ask the hub", "Unset it once"
    else:
        why, then = "the hub cannot be reached", "Connect once"
    return Unreachable(
        f"{name} is not complete in the local cache and {why}. {then}, or download the folder on another machine and "
        "give its path."
    )


def _refusal(error: errors.HfHubHTTPError, name: str) -> FetchError:
    """An answer of the hub that huggingface_hub has no class of its own for."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 429:
        return FetchError(
            f"The hub limits how often it may be asked, and refused {name} for now (status 429). Wait some minutes, "
            "or run `hf auth login`: accounts may ask more often."
        )
    if status is not None and status >= 500:
        return FetchError(f"The hub has trouble of its own (status {status}) and did not give {name}. Try again later.")
    return FetchError(f"The hub refused {name}: {_first_line(error)}. Check the name, and `hf auth whoami`.")


def _known_revisions(name: str) -> str:
    """What may be asked for instead; nothing if that cannot be had."""
    try:
        refs = hub.list_repo_refs(name)
    except Exception:  # the reason that matters is the revision
        return ""
    found = [ref.name for ref in [*refs.branches, *refs.tags]]
    return f" It has {', '.join(found[:8])}{' and more' if len(found) > 8 else ''}, and commits." if found else ""


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
