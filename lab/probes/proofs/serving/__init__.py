"""Many clients at a server of the pair that ships: its own process, real sockets, answers known beforehand.

`plan` says how many and what of, `questions` are asked and their answers made offline, `connection` speaks HTTP,
`clients` ask until the time is up, `server` is the process, `load` one run of all that, `checks` judge it. It needs the
extra `serve`; the clients are the standard library's. Another way to misuse a server is a line of `questions.BAD`.
"""
