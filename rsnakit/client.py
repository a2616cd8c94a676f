"""Kaggle's own client, run as a process: what it says is told in plain sentences, and no secret is in anything that is shown.

It is never imported: that asks for credentials, and without them ends the process. It finds them itself, wherever a person may
have put them, and no command that is run here has any in its arguments.
"""

import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

# Before it the client could not tell a data set's version from the one before, and went on without a file that it had failed to
# upload; before 1.8.4 it left out which GPU is asked for.
NEEDED = (2, 2)
HIDDEN = "[hidden]"
SETTINGS = "https://www.kaggle.com/settings/api"
HOW = (
    f"Make a token at {SETTINGS} and put it into $KAGGLE_API_TOKEN or ~/.kaggle/access_token; kaggle.json, $KAGGLE_USERNAME "
    "with $KAGGLE_KEY, and `kaggle auth login` do too."
)
# What the client's output gives away, by kind; the first that fits counts.
KINDS = {
    "missing": r"No module named kaggle|No module named '?kagglesdk",
    "network": r"Failed to resolve|Max retries exceeded|Failed to establish|Connection (?:refused|reset|aborted)|ProxyError"
    r"|ConnectionError|timed? ?out|SSLError|RemoteDisconnected|Network is unreachable",
    "credentials": r"\b401 Client Error|Unauthorized|Unauthenticated|Authentication required to call|Invalid credentials",
    "too often": r"\b429 Client Error|Too Many Requests|rate limited",
    "server": r"\b5\d\d Server Error|problem on Kaggle's side",
    "not there": r"\b404 Client Error|\b[Nn]ot [Ff]ound",
    "cut short": r"Upload unsuccessful",
    "refused": r"\b403 Client Error|Forbidden|\bdenied|don't have access",
}
SENTENCES = {
    "missing": "Kaggle's client is not installed in this Python: pip install -r requirements.txt",
    "network": "Kaggle cannot be reached: there is no network, or a proxy or firewall that keeps api.kaggle.com out.",
    "credentials": f"Kaggle does not take the credentials (401): the key or token is wrong, or was revoked. {HOW}",
    "too often": "Kaggle was asked too often (429): wait a few minutes and give the same command again.",
    "server": "Kaggle has a fault of its own at the moment: give the same command again later.",
    "not there": "Kaggle finds nothing of that name (404).",
    "cut short": "A file could not be uploaded: give the same command again.",
    "refused": "Kaggle refuses it to this user (403): it is somebody else's, or the token has no right to it.",
}
SECRET_VARIABLE = re.compile(r"KAGGLE_\w*(KEY|TOKEN|PASSWORD|SECRET)\w*", re.IGNORECASE)
SECRET_FILES = ("kaggle.json", "access_token", "access_token.txt", "credentials.json")
SHORTEST = 4  # characters of a secret: shorter ones would be found in any word
PATIENCE = 15  # questions in a row that may fail while something is waited for
BAR = re.compile(r"\s*\d+%\|")  # of an upload


Say = Callable[[str], None]  # takes a line of progress


class PublishError(ValueError):
    """What cannot be brought to Kaggle, or ended badly there; the message says what was found and what to do."""


@dataclass(frozen=True)
class Reply:
    """What the client answered: its exit status, and all it printed, which may hold secrets."""

    status: int
    text: str = field(repr=False)

    @property
    def kind(self) -> str:
        """One of `KINDS`, or "" where nothing of the kind was said."""
        return next((kind for kind, pattern in KINDS.items() if re.search(pattern, self.text)), "")


def command(*arguments: str) -> list[str]:
    """The client's command line, by this environment's Python; -P, so that no folder named kaggle stands in its way."""
    return [sys.executable, "-P", "-m", "kaggle", *arguments]


def shown(*arguments: str) -> str:
    """The same, quoted for a shell."""
    return shlex.join(command(*arguments))


def check() -> str:
    """The client's version.

    Raises:
        PublishError: it is not installed, or older than `NEEDED`.
    """
    try:
        version = importlib.metadata.version("kaggle")
    except importlib.metadata.PackageNotFoundError:
        raise PublishError(SENTENCES["missing"]) from None
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[: len(NEEDED)])
    if numbers < NEEDED:
        needed = ".".join(map(str, NEEDED))
        raise PublishError(
            f"Kaggle's client is {version}, expected {needed} or later: older ones leave out that a T4 is asked for, and files "
            f"that could not be uploaded. pip install -U 'kaggle>={needed}'"
        )
    return version


def run(*arguments: str, say: Say | None = None, limit_s: float | None = 600.0) -> Reply:
    """Runs the client, with nothing to read from, and waits for it.

    Args:
        say: gets each line as it comes, without secrets and progress bars.
        limit_s: seconds after which it is ended, as one that hangs is; None for an upload, which takes its time.
    """
    # With $VERBOSE the client prints its requests, with the key in their headers, between the lines that are read here.
    environ = {name: value for name, value in os.environ.items() if name not in ("VERBOSE", "VERBOSE_OUTPUT")}
    process = subprocess.Popen(
        command(*arguments), env=environ | {"PYTHONIOENCODING": "utf-8"}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
    )  # fmt: skip
    lines, timed_out = [], threading.Event()
    clock = threading.Timer(limit_s or 0, lambda: (timed_out.set(), process.kill()))
    if limit_s is not None:
        clock.start()
    try:
        for line in process.stdout:
            lines.append(line)
            if say and line.strip() and not BAR.match(line):
                say(redact(line.rstrip()))
        status = process.wait()
    finally:
        clock.cancel()
        process.kill()
        process.stdout.close()
        process.wait()
    if timed_out.is_set():
        lines.append(f"timed out after {limit_s:.0f} s\n")
    return Reply(status, "".join(lines))


def user() -> str:
    """Whose credentials the client finds; a token's owner is asked for at Kaggle.

    Raises:
        PublishError: there are none, or they are not taken.
    """
    reply = run("config", "view")
    found = re.search(r"^- username: (\S+)\s*$", reply.text, re.MULTILINE)
    if reply.status == 0 and found and found[1] != "None":
        return found[1]
    if reply.kind not in ("credentials", ""):
        raise failure(reply, "looking for credentials")
    if has_token():
        why = "Kaggle does not take the access token: it is wrong, has expired or was revoked."
    else:
        why = "there are no credentials for Kaggle."
    raise PublishError(f"looking for credentials: {why} {HOW}")


def wait(
    what: str,
    arguments: tuple[str, ...],
    read: Callable[[str], tuple[str, bool]],
    hours: float,
    poll_s: float,
    say: Say,
) -> str:
    """Asks again and again until something has ended, and says when its state changes.

    Args:
        read: makes of what the client printed the state, and whether that is the end.

    Returns:
        The last state.

    Raises:
        PublishError: after so many hours, or `PATIENCE` failures in a row; one may be a network that went away for a moment.
    """
    end, failed, state = time.monotonic() + hours * 3600, 0, ""
    while True:
        reply = run(*arguments)
        if reply.status:
            failed += 1
            if failed > PATIENCE or reply.kind == "credentials":
                raise failure(reply, f"waiting for {what}, which goes on at Kaggle")
        else:
            failed, before = 0, state
            state, ended = read(reply.text)
            if state != before:
                say(f"{what}: {state}")
            if ended:
                return state
        if time.monotonic() >= end:
            raise PublishError(
                f"{what} is {state or 'unknown'} after {hours:g} h, and goes on at Kaggle. Ask later: {shown(*arguments)}"
            )
        time.sleep(min(poll_s, max(end - time.monotonic(), 0)))


def failure(reply: Reply, doing: str, hints: dict[str, str] | None = None) -> PublishError:
    """The error for a reply: what was being done, why it failed in a sentence, and the client's last lines.

    Args:
        doing: such as `uploading the data set`.
        hints: sentences for kinds of failure, in the place of those of `SENTENCES`.
    """
    sentences = SENTENCES | (hints or {})
    said = f"The client said:\n{tail(reply.text)}" if reply.text.strip() else "The client said nothing."
    why = sentences.get(reply.kind, f"Kaggle's client failed (exit status {reply.status}).")
    return PublishError(redact(f"{doing}: {why} {said}"))


def tail(text: str, lines: int = 8) -> str:
    """The last lines of what the client printed, indented, without secrets and progress bars."""
    kept = [line for line in text.splitlines() if line.strip() and not BAR.match(line)]
    return redact("\n".join(f"  {line}" for line in kept[-lines:]))


def redact(text: str) -> str:
    """The text without keys, tokens and passwords, and without what follows the ? of an address, which may grant access to
    whoever has it; those of Kaggle's pages do not."""
    for secret in sorted(secrets(), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    text = re.sub(r"\b(Basic|Bearer) +[\w.~+/=-]+", rf"\1 {HIDDEN}", text)
    text = re.sub(r"://[^/@\s]+@", f"://{HIDDEN}@", text)
    return re.sub(r"((?:https?://(?!(?:www\.)?kaggle\.com/)|url: /)[^\s?'\"]*\?)[^\s'\"]+", rf"\1{HIDDEN}", text)


def secrets() -> set[str]:
    """What must not be shown: keys and tokens of the environment and of the client's files, as they are now.

    They are read anew each time, since the client gets itself new tokens.
    """
    found = set()
    for name, value in os.environ.items():
        if SECRET_VARIABLE.fullmatch(name):
            found |= {value} | _inside(Path(value))  # a token's variable may name its file
    for folder in _folders():
        for name in SECRET_FILES:
            found |= _inside(folder / name)
    return {secret for secret in found if len(secret) >= SHORTEST}


def has_token() -> bool:
    """Whether there is an access token, by which alone nobody's name can be told."""
    home = Path("~/.kaggle").expanduser()
    return bool(os.environ.get("KAGGLE_API_TOKEN")) or any((home / name).exists() for name in SECRET_FILES[1:3])


def _folders() -> set[Path]:
    """Where the client's versions look for credentials."""
    home, variables = Path("~").expanduser(), (os.environ.get("KAGGLE_CONFIG_DIR"), os.environ.get("XDG_CONFIG_HOME"))
    folders = {home / ".kaggle", home / ".config" / "kaggle"}
    return folders | {Path(value) for value in variables if value} | {Path(v) / "kaggle" for v in variables[1:] if v}


def _inside(path: Path) -> set[str]:
    """The secrets of a file: of JSON what is called a key or token, else its lines; none where it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):  # not there, or a token taken for a path, too long or with a zero byte
        return set()
    try:
        values = json.loads(text)
    except ValueError:
        return {line.strip() for line in text.splitlines()}
    if not isinstance(values, dict):
        return {text.strip()}
    return {str(value) for name, value in values.items() if re.search("key|token|password|secret", name, re.IGNORECASE)}
