"""What is left of a text when it goes to strangers: no secrets, no names of people and computers, no private paths.

It errs on the side of taking too much away. A path of the project stays, told from its root; of any other path the
ending stays, which says what kind of file it was. Redacting twice changes nothing.
"""

from __future__ import annotations

import getpass
import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_SECRET_MARK, _OUTSIDE_MARK = "<secret>", "<outside>"
_PERSON_MARK, _HOST_MARK, _EMAIL_MARK = "<user>", "<host>", "<e-mail>"
_SECRET_NAME_PATTERN = (
    r"(?:token|api[_-]?key|access[_-]?key|secret|password|passwd|passphrase|authorization|credentials?|cookie)"
)
_SECRET_PATTERNS = (
    r"(?<![A-Za-z0-9])(?:hf|hf_oauth|r8|gh[pousr]|github_pat|glpat|wandb_v1|xox[abeprs]|rpa|nvapi|civitai)[_-][\w-]{8,}",
    r"(?<![A-Za-z0-9])sk-[\w-]{8,}",
    r"(?:AKIA|ASIA)[0-9A-Z]{12,}",
    r"AIza[\w-]{30,}",
    r"eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*",
    r"(?<![0-9A-Za-z])[0-9a-fA-F]{32}(?:[0-9a-fA-F]{8})?(?![0-9A-Za-z])",  # 32 or 40 digits; a SHA-256 has 64
)
"""What keys and tokens of the services that people train with look like, whatever stands before them."""
_COMMON_NAMES = {"root", "user", "users", "home", "admin", "ubuntu", "debian", "runner", "localhost", "nobody", "local"}
"""Logins and hosts that name nobody."""

_KEY = re.compile("|".join(_SECRET_PATTERNS))
_NAMED = re.compile(
    rf"({_SECRET_NAME_PATTERN}['\"]?\s*[=:]\s*)(?!\s*{_SECRET_MARK})(\"[^\"\n]*\"|'[^'\n]*'|[^\s&,;\"']+)",
    re.IGNORECASE,
)
_BEARER = re.compile(rf"\b(Bearer|Basic)\s+(?!{_SECRET_MARK})[\w.~+/=-]{{6,}}", re.IGNORECASE)
_LOGIN = re.compile(rf"://(?!{_SECRET_MARK})[^/\s@\"']+@")
_EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_UUID = re.compile(r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}")
_SECRET_KEY = re.compile(rf"{_SECRET_NAME_PATTERN}$", re.IGNORECASE)

_STOP = r"\s\"'`<>|*?,;:()\[\]{}"
_START = r"(?:file:/+|/(?=[\w.~%@+-])|~[\w-]*[\\/]|[A-Za-z]:[\\/]+|\\\\+(?=\w)|(?:\.\.[\\/])+)"
_QUOTED = re.compile(rf"([\"'`])({_START}[^\"'`\n]*)\1")
_BARE = re.compile(
    rf"(?:(?<![\w.~<>/\\-])|(?<=[^\w]-))({_START}"
    rf"(?:[^{_STOP}]+(?: [^{_STOP}/\\]+){{0,4}}[\\/]+)*"  # folders, whose names may have blanks
    rf"(?:[^{_STOP}/\\]+(?: [^{_STOP}/\\]+){{0,4}}\.\w{{1,11}}\b|[^{_STOP}]*))"
)
_NETWORK = re.compile(rf"(?<![:\w/])//\w[^{_STOP}]*")


@dataclass(frozen=True)
class Redactor:
    """Takes away what is private. `roots`: folders whose paths may stay, each with the name that stands for it."""

    roots: tuple[tuple[Path, str], ...] = ()
    people: frozenset[str] = frozenset()
    hosts: frozenset[str] = frozenset()
    _numbers: dict[str, int] = field(default_factory=dict, compare=False)

    def text(self, text: str) -> str:
        shown = (
            (_BEARER, rf"\1 {_SECRET_MARK}"),
            (_NAMED, rf"\1{_SECRET_MARK}"),
            (_LOGIN, f"://{_SECRET_MARK}@"),
            (_KEY, _SECRET_MARK),
        )
        for pattern, replacement in shown:
            text = pattern.sub(replacement, text)
        for root, name in self.roots:
            text = _match_root(root).sub(lambda _, name=name: name, text)
        text = _QUOTED.sub(lambda found: f"{found[1]}{_mark_outside(found[2])}{found[1]}", text)
        for pattern in (_BARE, _NETWORK):
            text = pattern.sub(lambda found: _mark_outside(found[0]), text)
        text = _EMAIL.sub(_EMAIL_MARK, text)
        for names, replacement in ((self.people, _PERSON_MARK), (self.hosts, _HOST_MARK)):
            text = _match_words(names).sub(replacement, text) if names else text
        return _UUID.sub(self._number_device, text)

    def value(self, value: object) -> object:
        """What of JSON's values may be shown: texts, and the names of an object."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {
                self.text(str(name)): _SECRET_MARK
                if isinstance(item, str) and item and _SECRET_KEY.search(str(name))
                else self.value(item)
                for name, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.value(item) for item in value]
        return value

    def _number_device(self, found: re.Match[str]) -> str:
        """Devices are told apart, and no more."""
        return f"<id {self._numbers.setdefault(found[0].lower(), len(self._numbers) + 1)}>"


def build_redactor(project: Path, run: Path | None = None) -> Redactor:
    """A redactor that knows this computer: its home folders, logins and name."""
    home = Path.home()
    people = {home.name, *(os.environ.get(name, "") for name in ("USER", "USERNAME", "LOGNAME", "SUDO_USER"))}
    try:
        people.add(getpass.getuser())
    except (OSError, KeyError, ImportError):  # no entry for this user: a container
        people.discard("")
    hosts = {platform.node(), platform.node().partition(".")[0]}
    project = project.resolve()
    roots: list[tuple[Path, str]] = [(run, "run"), (run.resolve(), "run")] if run and run.is_absolute() else []
    roots += [(run.resolve(), "run")] if run and not run.is_absolute() else []
    if not home.is_relative_to(project):  # neither the home folder nor anything above it is a project
        roots.append((project, "."))
    return Redactor(tuple(roots), frozenset(filter(_is_name, people)), frozenset(filter(_is_name, hosts)))


def _is_name(word: str) -> bool:
    return len(word) > 2 and word.lower() not in _COMMON_NAMES


def _match_root(root: Path) -> re.Pattern[str]:
    """A folder as texts spell it: with its system's separators, with slashes, or with escaped backslashes."""
    spellings = dict.fromkeys((str(root), root.as_posix(), str(root).replace("\\", "\\\\")))
    return re.compile(rf"(?<![\w.~/\\-])(?:{'|'.join(map(re.escape, spellings))})(?=$|[\\/{_STOP}])")


def _match_words(names: Iterable[str]) -> re.Pattern[str]:
    longest = sorted(map(re.escape, names), key=len, reverse=True)
    return re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(longest)})(?![A-Za-z0-9])", re.IGNORECASE)


def _mark_outside(path: str) -> str:
    ending = re.search(r"[^/\\.](\.[A-Za-z0-9]{1,11})$", path)
    return _OUTSIDE_MARK + (ending[1] if ending else "")
