"""Templates from strangers: no way out of the sandbox, and no way to spend without bound."""

from __future__ import annotations

import pytest
from tiny_tokenizers import sentencepiece_gguf

from trivium.errors import TemplateError
from trivium.text import Tokenizer, sandbox

USER = [{"role": "user", "content": "hi"}]


def render(template: str, content: str = "hi", **kwargs: object) -> str:
    return TOKENIZER.render_chat([{"role": "user", "content": content}], template=template, **kwargs)  # type: ignore[arg-type]


TOKENIZER = Tokenizer.from_data(sentencepiece_gguf())
DOUBLINGS = "{% set a = [a, a] %}" * 60

ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['os'].system('true') }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ self.__init__ }}{{ self._TemplateReference__context }}",
    "{{ ''|attr('__class__') }}",
    "{{ '{0.__class__}'.format('') }}",
    "{{ '{0.__class__}'.format_map({'0': 1}) }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'a': 1}) }}",
    "{{ messages.clear() }}",
    "{% set ns = namespace(__x=1) %}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{% include 'x' %}",
    "{% import 'os' as os %}",
    "{% extends 'x' %}",
    "{{ dict.__subclasses__() }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ (1).__class__ }}",
    "{{ ().__class__.__bases__[0] }}",
    "{{ x.y.z }}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_ways_out_are_refused(template: str) -> None:
    with pytest.raises(TemplateError):
        render(template)


BOMBS = [
    "{% for i in range(10**9) %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10**9 }}",
    "{{ 10**9 * 'a' }}",
    "{{ [0] * 10**9 }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ 10 ** 10000 }}",
    "{{ 'a' | center(10**9) }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ 'a'.zfill(width=10**9) }}",
    "{{ 'a\nb' | indent(10**9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ 'a'.translate({97: 'b' * 1000000}) }}",
    "{% set a = 'a' * 1000000 %}{{ a.replace('a', a) }}",
    "{% set a = 'a' * 1000000 %}{{ a | replace('a', a) }}",
    "{% set a = 'a' * 1000000 %}{{ a.join(range(99999) | map('string')) }}",
    "{% set a = 'a' * 1000000 %}{{ range(99999) | join(a) }}",
    "{% set ns = namespace(a='a') %}{% for i in range(99) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "{% set ns = namespace(a='a') %}{% for i in range(99) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
    "{% set ns = namespace(a=[1]) %}{% for i in range(99) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "{% set ns = namespace(a=[1]) %}{% for i in range(99) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}{{ ns.a }}",
    "{% set a = [1] %}" + DOUBLINGS + "{{ a | tojson }}",
    "{% set a = [1] %}" + DOUBLINGS + "{{ a ~ 'x' }}",
    "{% set a = [1] %}" + DOUBLINGS + "{{ a | string }}",
    "{% set a = [1] %}" + DOUBLINGS + "{{ '%s' % a }}",
    "{% set a = [1] %}" + DOUBLINGS + "{{ '{}'.format(a) }}",
    "{% set a = [1] %}" + DOUBLINGS + "{{ a | join }}",
    "{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{{ lipsum(n=10**6) }}",
    "{{ (1).to_bytes(10**9) }}",
    "{{ strftime_now('%c' * 10**6) }}",
    "{{ messages | tojson(indent=10**9) }}",
    "{% set ns = namespace(a=9) %}{% for i in range(99) %}{% set ns.a = ns.a * ns.a %}{% endfor %}",
    "{{ [1] | batch(10**9, 0) | list }}",
    "{{ 'x' * 20000000 }}",
    "{% set a = 'a' * 9000000 %}{{ a }}{{ a }}",
]


@pytest.mark.parametrize("template", BOMBS)
def test_bombs_are_refused(template: str) -> None:
    with pytest.raises(TemplateError):
        render(template)


def test_bounds_are_stated_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_STEPS", 100)
    with pytest.raises(TemplateError, match="more than 100 steps"):
        render("{% for i in range(101) %}{% endfor %}")
    monkeypatch.setattr(sandbox, "MAX_SECONDS", -1.0)
    with pytest.raises(TemplateError, match="seconds"):
        render("{% for i in range(3) %}{% endfor %}")


def test_a_source_that_is_too_long_or_no_template_is_refused() -> None:
    with pytest.raises(TemplateError, match="more than 1000000 characters"):
        render("x" * 1_000_001)
    for source in ("{% for %}", "{{ 1 +", "{% unknown %}", "{{ x | nofilter }}", "{% if %}{% endif %}", "{% generation %}"):
        with pytest.raises(TemplateError, match="can't be compiled"):
            render(source)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (
            "{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}"
            "{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "02",
        ),
        (
            "{% for m in messages %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{{ loop.previtem is defined }}{% endfor %}",
            "1True1False",
        ),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}={{ v }}{% endfor %}", "a=1"),
        ("{% for x in [3, 1] | sort recursive %}{{ x }}{% endfor %}", "13"),
        ("{% for x in [1, 2, 3, 4] if x is even %}{{ x }}{% else %}none{% endfor %}", "24"),
        ("{% for x in messages | map(attribute='role') %}{{ x }}{{ loop.length }}{% endfor %}", "user1"),
        ("{% for x in missing %}{{ x }}{% else %}none{% endfor %}", "none"),
        ("{% generation %}in{% endgeneration %}out", "inout"),
        ("  {% if true %}\n  x\n  {% endif %}\ny", "  x\ny"),
        ("{{ none }}|{{ 1.0 }}|{{ true }}|{{ [1, 'a'] }}|{{ {'k': none} }}", "None|1.0|True|[1, 'a']|{'k': None}"),
        ("{{ 'a' ~ 1 ~ none ~ [1] }}", "a1None[1]"),
        ("{{ '**%s** %d%%' % ('a', 2) }} {{ '{} {a}'.format(1, a=2) }}", "**a** 2% 1 2"),
        ("{{ 'a,b'.split(',') | join('-') }}{{ '-'.join(['x', 'y']) }}", "a-bx-y"),
        ("{{ messages[0].content.replace('h', 'H') | upper | indent(2, true) }}", "  HI"),
        ("{{ 'abc'[::-1] }}{{ 'abc'.startswith('a') }}{{ 'x'.strip() }}{{ '  x\n'.rstrip() }}", "cbaTruex  x"),
        ("{% set ns = namespace(n=1) %}{% for i in range(3) %}{% set ns.n = ns.n * 2 %}{% endfor %}{{ ns.n }}", "8"),
        ("{% macro f(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{% endmacro %}{{ f(1) }}{{ f(1, b=3) }}", "12()13()"),
        ("{% macro f() %}[{{ caller() }}]{% endmacro %}{% call f() %}x{% endcall %}", "[x]"),
        ("{{ dict(a=1) | tojson }}{{ {'b': '<é>'} | tojson }}{{ [1, 2] | tojson(indent=1) }}", '{"a": 1}{"b": "<é>"}[\n 1,\n 2\n]'),
        ("{{ (messages | selectattr('role', 'equalto', 'user') | list)[0].content | default('x', true) }}", "hi"),
        ("{{ messages[5] is defined }}{{ 2 ** 10 }}{{ 7 // 2 }}{{ 7 % 4 }}{{ -3 | abs }}", "False1024333"),
    ],
)
def test_what_honest_templates_do_works(template: str, text: str) -> None:
    assert render(template) == text


def test_a_long_conversation_is_within_bounds() -> None:
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": f"message {i} " * 20} for i in range(2001)]
    again = "{% if loop.index0 > 0 and messages[loop.index0 - 1].role == m.role %}!{% endif %}"
    template = "{% for m in messages %}" + again + "{{ m.role + m.content }}{% endfor %}"
    assert len(TOKENIZER.render_chat(messages, template=template)) > 400_000


def test_the_date_is_todays() -> None:
    text = render("{{ strftime_now('%Y-%m-%d') }}")
    assert len(text) == 10
    assert text.startswith("20")


def test_one_rendering_spends_nothing_of_the_next() -> None:
    template = "{% for i in range(90000) %}{% endfor %}ok"
    assert [render(template) for _ in range(3)] == ["ok"] * 3
