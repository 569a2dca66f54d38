"""Training a draft: prompts, the target's answers to them, the training itself, what the draft accepts, its export.

prompts/, sources       what is asked
generate, generation_memory, batching, decoder, dataset, recompute      the answers: made, kept, completed
recipe, architecture, initialise        what is trained, and what it begins with
blocks, forward, losses, step, optimise     one step
trainer, prepare, checkpoint, run_folder        all steps, stopped and resumed
evaluate, matches, held_out, export, card       what came of it
log, progress, watch, charts        what is seen of it
command, asked, supply, outlook, judging        `dflash-metal train`
"""
