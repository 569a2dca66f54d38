"""The command palette: the table of actions, in its order, with the key and the slash command of each."""

from __future__ import annotations

from functools import partial

from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.screen import Screen

from dflash_mlx.app.actions import ACTIONS, Action


def how(action: Action) -> str:
    """The other ways to the same action."""
    return " · ".join(filter(None, (action.key, action.command)))


class ActionProvider(Provider):
    """Actions of the chat screen, which run there after the palette has closed."""

    async def discover(self) -> Hits:
        for action in ACTIONS:
            if action.palette:
                yield DiscoveryHit(action.title, partial(self._run, self.screen, action), help=how(action))

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for action in ACTIONS:
            text = f"{action.title} {action.command}" if action.slash else action.title
            score = matcher.match(text)
            if action.palette and score > 0:
                yield Hit(
                    score, matcher.highlight(action.title), partial(self._run, self.screen, action), help=how(action)
                )

    @staticmethod
    async def _run(screen: Screen[object], action: Action) -> None:
        await screen.run_action(f"screen.{action.name}")
