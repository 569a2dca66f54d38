"""What opens a screen of its own over the chat, or writes a file: chats, models, settings, races, the editor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from textual import on
from textual.app import SuspendNotSupported

from dflash_mlx.app import commands, editor, export
from dflash_mlx.app.lines import StoreError
from dflash_mlx.app.screens.chats import ChatsScreen
from dflash_mlx.app.screens.controls import ControlsScreen
from dflash_mlx.app.screens.help import HelpScreen, info
from dflash_mlx.app.screens.models import Choice
from dflash_mlx.app.screens.race import RaceScreen
from dflash_mlx.app.screens.sheet import Sheet
from dflash_mlx.app.screens.system import SystemScreen
from dflash_mlx.app.screens.talk import NOT_NOW, Talk
from dflash_mlx.app.settings import Settings
from dflash_mlx.app.widgets.prompt import Prompt

TITLES = {"parameters": "Parameters", "system": "System prompt"}
"""Of the sheet that `/show` opens."""


class Dialogs(Talk):
    """`action_<name>` is the action of the table, `command_<name>` the same with a value behind the slash command."""

    # Chats ------------------------------------------------------------------------------------------------

    def action_clear(self) -> None:
        self.call_next(self._clear)

    async def _clear(self) -> None:
        self.session.clear()
        await self.show_conversation()

    def action_chats(self) -> None:
        def chosen(id: str | None) -> None:
            self.call_next(self.resume, id)

        keeper = self.session.keeper
        self.app.push_screen(ChatsScreen(keeper.store, keeper.id), chosen)

    async def command_chats(self, value: str) -> None:
        await self.resume(value)

    async def resume(self, id: str | None) -> None:
        """Go on with a saved chat; None changes nothing, but the open one may have been renamed or deleted."""
        session = self.session
        if id is None:
            if session.keeper.lost:
                session.clear()
                await self.show_conversation()
            self.show_names()
            return
        try:
            self.prompt.add_before(session.resume(id))
        except StoreError as error:
            self.hint(str(error))
        await self.show_conversation()

    async def command_rename(self, value: str) -> None:
        if not self.session.conversation.turns:
            self.hint("The chat has no message yet; it is named when it has one.")
            return
        self.session.keeper.retitled(value)
        self.show_names()
        self.hint("Named.")

    async def action_export(self) -> None:
        await self.command_export("")

    async def command_export(self, value: str) -> None:
        session = self.session
        if not session.conversation.turns:
            self.hint("There is no message to export yet.")
            return
        title = session.keeper.title or "Chat"
        model = session.card.model or session.card.target if session.card is not None else ""
        path = Path(value or export.default_name(title)).expanduser()
        text = export.to_markdown(session.conversation, title, model, session.settings.system)
        try:
            export.write_markdown(path, text)
        except StoreError as error:
            self.hint(str(error))
        else:
            self.hint(f"Written to {path.resolve()}")

    # Models, settings, races ------------------------------------------------------------------------------

    def action_models(self) -> None:
        self.chat_app.choose_model()

    async def command_load(self, value: str) -> None:
        choice = Choice.typed(value)
        self.chat_app.load_model(choice.model, choice.draft)

    def change(self, settings: Settings, said: str) -> None:
        """Other settings, from the next message on."""
        self.session.change(settings)
        self.show_numbers()
        self.hint(f"{said[:1].upper()}{said[1:]}, from the next message on.")

    def action_controls(self) -> None:
        def use(settings: Settings | None) -> None:
            if settings is not None:
                self.change(settings, "Changed")

        self.app.push_screen(ControlsScreen(self.session.settings, self.session.card), use)

    def action_system(self) -> None:
        def use(text: str | None) -> None:
            if text is not None:
                said = "system prompt set" if text else "no system prompt"
                self.change(replace(self.session.settings, system=text), said)

        self.app.push_screen(SystemScreen(self.session.settings.system), use)

    def action_race(self) -> None:
        """With the message in the box, or else with the last one."""
        session = self.session
        written = commands.parse(self.prompt.text, session.settings) if self.prompt.text else None
        problem = session.refusal or (NOT_NOW if session.busy else "")
        if not problem and session.card is not None and session.card.draft is None:
            problem = "A race needs a draft, and none is loaded. F2 or /models chooses another pair."
        if problem:
            self.hint(problem)
            return
        race = session.race(written.text if isinstance(written, commands.Say) else "")
        if race is None:
            self.hint("There is no message to race with: write one, then F5.")
        else:
            self.app.push_screen(RaceScreen(*race))

    async def action_info(self) -> None:
        await self.command_info("info")

    async def command_info(self, value: str) -> None:
        session = self.session
        sections = info(session.card, session.settings, session.keeper.id)
        prompt = ("System prompt", (("", session.settings.system or "the template's own"),))
        shown = {"parameters": sections[1:2], "system": (prompt,)}
        self.app.push_screen(Sheet(TITLES.get(value, "What is loaded"), shown.get(value, sections)))

    @on(Prompt.HelpWanted)
    def action_help(self) -> None:
        self.app.push_screen(HelpScreen())

    async def command_help(self, value: str) -> None:
        self.action_help()

    def action_palette(self) -> None:
        self.app.action_command_palette()

    @on(Prompt.EditorWanted)
    def action_editor(self) -> None:
        """The box's text in the user's editor; the engine works on meanwhile."""
        try:
            with self.app.suspend():
                text = editor.edit(self.prompt.text)
        except SuspendNotSupported:
            self.hint("This terminal cannot be lent to an editor.")
        except editor.EditorError as error:
            self.hint(str(error))
        else:
            self.prompt.set_text(text)
        self.app.refresh(layout=True)
