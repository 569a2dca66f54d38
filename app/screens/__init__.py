"""Screens, each with its .tcss beside it."""
