"""Chats as JSON, and chat templates that would take more than they may."""

from __future__ import annotations

HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a * b %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "output": "{% for a in range(99999) %}{% for b in range(99999) %}{{ 'x' * 1000 }}{% endfor %}{% endfor %}",
    "memory": "{{ 'x' * 10 ** 10 }}",
    "one number": "{{ 10 ** (10 ** 9) }}",
    "width": "{{ '%999999999d' % 1 }}",
    "a constant": "{{ 'x' | center(10 ** 10) }}{% if 10 ** (10 ** 9) %}{% endif %}",
    "division": "{{ 1 / 0 }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "nothing": "{{ nowhere.near.here }}",
    "refusal": "{{ raise_exception('x' * 10000) }}",
}


def chat(messages: str, more: str = "") -> bytes:
    return f'{{"model":"tiny","max_tokens":1{more},"messages":{messages}}}'.encode()


def message(content: str) -> str:
    return f'[{{"role":"user","content":{content}}}]'
