"""Heads written in the published formats: what each can hold, and how it says it.

`head` is a head freed of its format, `forms` the table of what a format's own readers obey, a file a format writes it,
and `convert` ties them together. Only `checkpoint` imports this; a new format is a file here and a row of `forms`.
"""
