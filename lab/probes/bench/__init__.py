"""How fast decoding is: engine modes and peers over the same work, round by round, as rows.

`decode` measures modes over prompts (notebook 30_decode); `command` is `eagle3lab bench`, which adds scenarios, byte
floors and peers to the same rounds.
"""
