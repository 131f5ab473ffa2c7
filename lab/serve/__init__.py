"""One engine behind OpenAI's endpoints: completions and chats over HTTP, streamed or whole.

Imports `errors`, `options` and `pairs`, and of the core its async engine and its pipeline. `asked` reads what a client
asks for, `forms` writes what it gets, `refusals` says no in three parts, `counts` adds up, `service` holds the engine
and its places, `endpoints` binds them to paths, `command` to a socket and signals. Starlette and uvicorn (the extra
`serve`) are imported by `endpoints` and `command` alone. Another field of a request is a field in `asked` and a line of
docs/serve.md.
"""
