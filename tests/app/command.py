"""The chat's command over a scripted model, as a program for a process of its own."""

from __future__ import annotations

from pathlib import Path

SCRIPTED = f"""
import sys, threading, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from dflash_mlx import chat
from dflash_mlx.app import app, endings
from dflash_mlx.app.screens.chat import ChatScreen
from scripted import Answer, FakeEngine, Script

script = Script(
    [Answer("Short."), Answer("many words " * 9000, cycle_s=0.01), Answer("Late.", gate=threading.Event())]
)

class ScriptedApp(app.ChatApp):
    def __init__(self, *args, **options):
        super().__init__(*args, engine=lambda post: FakeEngine(post, script), **options)

def broken(self):
    raise RuntimeError("a bug in the window")

def stuck(self):
    time.sleep(60)

app.ChatApp, endings.GRACE_S = ScriptedApp, 2.0
ChatScreen.action_undo, ChatScreen.action_race = broken, stuck
sys.exit(chat.main(["--demo"]))
"""
"""Its first answer is "Short.", its second one long, its third takes ten seconds to begin; /undo raises an exception in
the window, /race hangs it."""
