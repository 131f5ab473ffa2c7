"""From text to a (target, draft) pair: corpus, tokenizer, target, its own greedy text, draft, and what they are worth.

Read in the order things happen: `corpus`, `tokenizer`, `target`, `ngram` (the yardstick), `generation`, `draft`,
`teaching`, `evaluation`, `card`. `fit` is the loop both stages share. `lab.training.command` calls them in turn.
"""
