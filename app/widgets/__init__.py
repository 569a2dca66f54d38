"""Widgets, each with its .tcss beside it. Model and user text reaches them as `Content`, never as markup."""
