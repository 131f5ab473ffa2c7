"""The process that writes chats out: a request a line on stdin, a reply a line on stdout, limits around each.

    python template_process.py CPU_SECONDS BYTES

A request has `template`, `variables` and `most_letters`; a reply has `text`, or the `error` that the template ended
with. A template that takes more processor time ends the process with SIGPROF; one that asks for more memory gets none.

Source: the environment is that of transformers 5, utils/chat_template_utils.py, `_cached_compile_jinja_template`, so
that a template gives what it gives there; `tests/core/test_chat.py` holds the two together.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant said; here it is written as it stands."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own name and type)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """The body, called in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: jinja2.runtime.Macro) -> str:
        return caller()


def main(cpu_s: int, most_bytes: int) -> None:
    """Answers until stdin ends."""
    _limit_memory(most_bytes)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        _limit_time(cpu_s)
        try:
            reply = {"text": _written(request)}
        except Exception as error:  # a template is a program of the checkpoint's and may raise anything
            reply = {"error": f"{type(error).__name__}: {str(error)[:1000]}"}
        _limit_time(0)
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


def _written(request: dict[str, Any]) -> str:
    """The text; pieces are counted as they come, so that a long one ends early."""
    pieces, left = [], request["most_letters"]
    for piece in _compiled(request["template"]).generate(**request["variables"]):
        left -= len(piece)
        if left < 0:
            raise OverflowError(f"more than {request['most_letters']} letters")
        pieces.append(piece)
    return "".join(pieces)


@lru_cache(maxsize=4)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _limit_memory(most_bytes: int) -> None:
    """So much beyond what is in use now; no files, no dumps. Where a system has no such limits, time alone is kept."""
    if sys.platform != "linux":
        return
    import resource

    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + most_bytes, used + most_bytes))
    sys.dont_write_bytecode = True  # of what is imported late an empty file would stay, which no process can read
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_time(cpu_s: int) -> None:
    """The process ends after so much processor time from now; 0 takes the limit away."""
    if sys.platform != "win32":
        import signal

        signal.setitimer(signal.ITIMER_PROF, cpu_s)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
