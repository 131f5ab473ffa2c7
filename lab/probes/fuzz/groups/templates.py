"""Chat templates, which are programs: those that ask for too much, that reach outside, and valid ones cut and bent."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from lab.probes.fuzz.damage import DEEP, damaged_bytes
from lab.probes.fuzz.group import Group
from lab.probes.fuzz.pairs import SmallPair, copied, prepare_talking_pair, talk

SETTINGS, FILE = "tokenizer_config.json", "chat_template.jinja"
_GREEDY = (
    "{{{{ 'x' * {n} }}}}", "{{{{ 'x'|center({n}) }}}}", "{{{{ 'x'.ljust({n}) }}}}", "{{{{ '%{n}d' % 1 }}}}",
    "{{{{ '{{:{n}}}'.format(1) }}}}", "{{{{ [0] * {n} }}}}", "{{{{ range({n})|list }}}}", "{{{{ 2 ** {n} }}}}",
    "{{{{ (2 ** {n})|string }}}}", "{{% for i in range({n}) %}}{{{{ i }}}}{{% endfor %}}",
    "{{% for i in range(99999) %}}{{% for j in range(99999) %}}{{{{ i * j }}}}{{% endfor %}}{{% endfor %}}",
    "{{% set n = namespace(t='x') %}}{{% for i in range({n}%99) %}}{{% set n.t = n.t ~ n.t %}}{{% endfor %}}{{{{n}}}}",
    "{{% set n = namespace(t=[0]) %}}{{% for i in range({n}%99) %}}{{% set n.t = n.t + n.t %}}{{% endfor %}}{{{{n}}}}",
    "{{{{ 'x'|indent({n}) }}}}", "{{{{ ('a' * 9999)|replace('a', 'b' * 9999)|replace('b', 'c' * {n}) }}}}",
    "{{{{ 'a b'|wordwrap(1, wrapstring='c' * {n}) }}}}", "{{{{ messages|tojson(indent={n}) }}}}",
    "{{{{ lipsum({n}) }}}}",
    "{{{{ (1).to_bytes({n}, 'big')|string }}}}", "{{{{ 'x\\t'.expandtabs({n}) }}}}", "{{{{ '1'.zfill({n}) }}}}",
    "{{% macro m(k) %}}{{{{ m(k + 1) ~ m(k + 1) }}}}{{% endmacro %}}{{{{ m(0) }}}}",
    "{{{{ ('a' * 30)|urlize({n}) }}}}", "{{{{ [1]|batch({n}, 0)|list }}}}", "{{{{ [1]|slice({n})|list }}}}",
    "{{{{ strftime_now('%Y' * {n}) }}}}", "{{{{ raise_exception('x' * {n}) }}}}", "{{{{ 'x'.join('y' * {n}) }}}}",
    "{{{{ dict(a='x' * {n})|xmlattr }}}}", "{{{{ 1|round({n}) }}}}", "{{{{ 1.5|round(-{n}) }}}}",
    "{{{{ ('a' * 50 ~ '!')|striptags|truncate({n}) }}}}", "{{{{ 'a'.translate({{97: 'b' * {n}}}) }}}}",
)  # fmt: skip
_REACHING = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ cycler.__init__.__globals__.os.system('touch ../canary') }}",
    "{{ self.__init__.__globals__ }}", "{{ lipsum.__globals__['os'].popen('touch ../canary').read() }}",
    "{% include 'tokenizer.json' %}", "{% import '/etc/passwd' as p %}{{ p }}", "{% extends 'a' %}",
    "{{ messages|attr('__class__')|attr('__init__') }}", "{{ raise_exception.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}", "{{ messages.append(1) }}", "{{ messages[0].update({'role': 'x'}) }}",
    "{{ '{0.__class__}'.format(1) }}", "{{ strftime_now.__globals__['os'] }}", "{{ (1).__class__.__bases__ }}",
    "{{ strftime_now(3) }}", "{{ raise_exception() }}", "{{ '\\ud800' }}", "{{ '\\x00' * 3 }}", "{% generation %}a",
    "{% generation %}a{% endgeneration %}", "{{ {}.a.b }}", "{{ 1 / 0 }}", "{{ caller() }}", "{% break %}", "",
)  # fmt: skip


def _make(pair: SmallPair, random: Random, folder: Path) -> None:
    copied(pair.target, folder)
    settings = json.loads((folder / SETTINGS).read_text())
    template = _template(settings["chat_template"], random)
    if random.random() < 0.5:
        settings["chat_template"] = template.decode("utf-8", "surrogateescape")
        (folder / SETTINGS).write_text(json.dumps(settings))
    else:
        (folder / FILE).write_bytes(template)


def _template(valid: str, random: Random) -> bytes:
    kind = random.randrange(6)
    if kind < 2:
        n = random.choice(("9", "100000", "10**8", "10**9", "10**10", "2**40", "10**(10**10)", "messages"))
        return random.choice(_GREEDY).format(n=n).encode()
    if kind == 2:
        return random.choice(_REACHING).encode()
    if kind == 3:
        inner = random.choice((("(", ")"), ("[", "]"), ("{% if 1 %}", "{% endif %}"), ("-", ""), ("not ", "")))
        deep = inner[0] * random.choice((100, DEEP)) + "1" + inner[1] * DEEP
        return (deep if inner[0][0] == "{" else "{{ " + deep + " }}").encode()
    data = damaged_bytes(valid.encode(), random)
    return data * random.choice((1, 1, 1, 1000))


GROUPS = (
    Group(
        "templates",
        "chat templates of a target, to the pipeline",
        prepare_talking_pair,
        _make,
        lambda pair, folder: talk(folder),
        most_cpu_s=12.0,  # a template may take 5 s, and there are a chat to try it with and one to write
    ),
)
