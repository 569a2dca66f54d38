"""Training a draft: prompts, the target's answers to them, and (later) the training itself.

`prompts` says what is asked, `batching` and `decoder` have the target answer, `dataset` keeps the answers, `generate`
is the command that does all of it, `recompute` completes a data set of which only the tokens are there.
"""
