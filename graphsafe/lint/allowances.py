"""Comments in the source that allow a finding: ``# graphsafe: allow GS101 the reason``.

Requirements
------------
1. A comment allows one rule on its own line or, if it has a line to itself, on the next line of code.
2. It needs a known rule (id or name) and a reason; otherwise it allows nothing and is a finding itself (GS112).
3. Only comments count: the same words in a string are text.
"""

from __future__ import annotations

import io
import linecache
import re
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass

from graphsafe.errors import Location, error
from graphsafe.lint.report import Finding
from graphsafe.rules import rule

__all__ = ["apply"]

_COMMENT = re.compile(r"#\s*graphsafe:\s*allow\b[ \t]*(\S*)[ \t]*(.*)")


@dataclass(frozen=True)
class _Allowance:
    rule_id: str
    reason: str


def _read(file: str) -> tuple[dict[int, list[_Allowance]], list[Finding]]:
    """Allowances of a file by the line they are for, and findings about malformed ones."""
    source = "".join(linecache.getlines(file))
    found: dict[int, list[_Allowance]] = {}
    wrong: list[Finding] = []
    if "graphsafe:" not in source:
        return found, wrong
    waiting: list[_Allowance] = []
    alone = True
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                match = _COMMENT.match(token.string)
                if match is None:
                    continue
                made = _checked(match, Location(file, token.start[0], "a comment"), wrong)
                if made is not None and alone:
                    waiting.append(made)
                elif made is not None:
                    found.setdefault(token.start[0], []).append(made)
            elif token.type in (tokenize.NEWLINE, tokenize.NL):
                alone = True
            elif token.type not in (tokenize.INDENT, tokenize.DEDENT):
                alone = False
                if waiting:
                    found.setdefault(token.start[0], []).extend(waiting)
                    waiting = []
    except (tokenize.TokenError, SyntaxError):  # text that Python did not compile as a file, a notebook's magic say
        return found, wrong
    return found, wrong


def _checked(match: re.Match[str], where: Location, wrong: list[Finding]) -> _Allowance | None:
    key, reason = match.group(1), match.group(2).strip()
    try:
        named = rule(key)
    except KeyError:
        wrong.append(Finding.of(error("bad-allowance", f"{key or 'nothing'!r} is no known rule", where=where)))
        return None
    if not reason:
        wrong.append(Finding.of(error("bad-allowance", f"{named} is allowed without a reason", where=where)))
        return None
    return _Allowance(named.id, reason)


def apply(findings: Iterable[Finding], files: Iterable[str]) -> tuple[list[Finding], list[Finding]]:
    """Split into findings that stand and those that a comment in one of ``files`` allows."""
    standing: list[Finding] = []
    allowed: list[Finding] = []
    allowances: dict[str, dict[int, list[_Allowance]]] = {}
    for file in sorted(set(files)):
        allowances[file], wrong = _read(file)
        standing += wrong
    for finding in findings:
        where = finding.where
        here = allowances.get(where.file, {}).get(where.line, []) if where else []
        finding.allowed = next((a.reason for a in here if a.rule_id == finding.rule.id), None)
        (standing if finding.allowed is None else allowed).append(finding)
    return standing, allowed
