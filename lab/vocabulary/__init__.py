"""A draft's vocabulary chosen by how often the target's tokens occur, and what a smaller one costs and saves.

Read in the order things happen: `counts` (of text, prompts or the target's own answers), `choose` (the most frequent,
and what ends a turn), `command` (writes the cut head), `measure` (acceptance and the head's time by size), `figures`.
Only notebooks and the command line import this room. A new source of counts is a function in `counts`.
"""
