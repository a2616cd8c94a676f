"""The bundle to Kaggle by its own client: a data set, what of it arrived, the notebook, how it ended, and what to do next.

Nothing is sent before the bundle, the client, the credentials and the owner are found right. What the client says without an
exit status (a source that does not exist, a file that could not be uploaded) is an error here.
"""

import functools
import json
import re
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rsnakit import bundle, checking, client, listing
from rsnakit.bundle import Bundle
from rsnakit.client import PublishError, Say
from rsnakit.files import read_json
from rsnakit.mounts import SLUG

__all__ = ["PublishError", "Published", "publish"]

SITE = "https://www.kaggle.com"
RULES = f"{SITE}/competitions/{SLUG}/rules"
LISTINGS = 3  # how often the list of files is asked for before files count as missing: it may lag
READY, FAILED = "ready", ("failed", "deleted")  # of a data set; all others are steps on the way
COMPLETE, ENDED = "complete", ("complete", "error", "cancelacknowledged")  # of a notebook
PUSHED = re.compile(r"Kernel version (?:(\d+) )?successfully pushed\.\s+Please check progress at (\S+)")
HINTS = {
    "quota": "Kaggle gives a number of GPU hours a week: `kaggle quota` says what is left and when it begins anew.",
    "session count": f"Stop a notebook that is running: {SITE}/code/active-events",
    "phone": f"Verify your phone number: {SITE}/settings",
    "not found": "The notebook's id may be somebody else's; bundle with your own user name as --owner.",
}


@dataclass(frozen=True)
class Published:
    """What is on Kaggle now.

    Attributes:
        data_set, notebook: their addresses.
        version: of the notebook, as a submission names it; None where Kaggle did not say.
        status: of the notebook's run: `complete`, or `pushed` where it was not waited for.
        submit: the command that submits it.
    """

    data_set: str
    notebook: str
    version: int | None
    status: str
    submit: str


def publish(
    dist: Path,
    dry_run: bool = False,
    message: str = "",
    wait: bool = True,
    public: bool = False,
    upload: bool = True,
    compare: bool = True,
    poll_s: float = 20.0,
    data_set_hours: float = 2.0,
    notebook_hours: float = 24.0,
    say: Say | None = None,
) -> Published | None:
    """Brings a bundle to Kaggle as a data set and a notebook that runs there, and says each step.

    Args:
        dist: the bundle's folder, `work/dist`.
        dry_run: show the commands and run none.
        message: of the data set's version, and of the submission; made of the run's name if empty.
        wait: for the end of the notebook's run, which queues for a GPU; without it the run may still fail.
        public: a data set that is new can be seen by everybody.
        upload: False leaves the data set as it is on Kaggle and sends the notebook alone.
        compare: stop where Kaggle lists other files than were bundled.
        poll_s: seconds between two questions while something is waited for.
        data_set_hours, notebook_hours: how long Kaggle may take over the one and the other.
        say: takes a line of progress; printed if None.

    Returns:
        What is there now, None of a dry run.

    Raises:
        PublishError: anything that stands in the way or went wrong; nothing of it shows a key or a token.
        rsnakit.bundle.BundleError: `dist` is not as it was bundled.
        rsnakit.slugs.SlugError: an id or a title that Kaggle would refuse or take for another.
    """
    tell = say or functools.partial(print, flush=True)

    def say(text: str) -> None:
        tell(client.redact(text))

    made = bundle.read(dist)
    data_set, notebook = _ids(made)
    message = message or f"{made.run} by rsnakit"
    steps = _commands(made, data_set, notebook, message, public)
    for note in filter(None, (*made.notes, checking.verdict_note(made))):
        say(f"NOTE: {note}")
    if dry_run:
        _show(steps, upload, say)
        return None
    of_client, user = client.check(), _check_user(made.owner)
    say(f"client {of_client}, user {user}, run {made.run}, {made.size / 1e6:,.1f} MB")
    _bring_data_set(made, data_set, steps, upload, data_set_hours, poll_s, say)
    if compare:
        _compare(data_set, made, poll_s, say)
    version, address = _push(steps["push"], say)
    submit = _submission(notebook, version, message)
    status = "pushed"
    if wait:
        # Asked without its version, Kaggle may still tell how the one before ended.
        status = _follow(f"{notebook}/{version}" if version else notebook, address, notebook_hours, poll_s, say)
    published = Published(f"{SITE}/datasets/{data_set}", address, version, status, submit)
    say(f"data set: {published.data_set}\nnotebook: {address}")
    say(f"{'next' if wait else 'next, once it is complete'}: {submit}")
    return published


# ---- before anything is sent


def _ids(made: Bundle) -> tuple[str, str]:
    """The ids of data set and notebook, `owner/slug`."""
    about = read_json(made.kernel / bundle.KERNEL_METADATA)
    if about["id"] != (notebook := f"{made.owner}/{made.kernel_slug}"):
        raise PublishError(
            f"{made.kernel / bundle.KERNEL_METADATA}: id is {about['id']!r}, and the data set is {made.owner}'s: both must "
            "be of one owner. Bundle again with your user name on Kaggle as --owner."
        )
    return f"{made.owner}/{made.slug}", notebook


def _commands(made: Bundle, data_set: str, notebook: str, message: str, public: bool) -> dict[str, tuple[str, ...]]:
    """What is sent, by step."""
    folder = str(made.dataset)
    return {
        "user": ("config", "view"),
        "look": ("datasets", "status", data_set, "--format", "json"),
        "create": ("datasets", "create", "-p", folder, "-r", "zip", *(["--public"] if public else [])),
        "version": ("datasets", "version", "-p", folder, "-r", "zip", f"--message={message}"),
        "list": ("datasets", "files", data_set, "--csv", "--page-size", str(listing.PAGE)),
        "push": ("kernels", "push", "-p", str(made.kernel)),
        "status": ("kernels", "status", notebook),
    }


def _show(steps: Mapping[str, tuple[str, ...]], upload: bool, say: Say) -> None:
    notes = {
        "user": "whose credentials these are",
        "look": "whether the data set is there; and again until it is ready",
        "create": "where it is not there",
        "version": "where it is there",
        "list": "what of it arrived",
        "push": "the notebook, which runs there",
        "status": "until its run has ended",
    }
    say("A dry run: these commands would be run, and none was.")
    for name, arguments in steps.items():
        if upload or name not in ("create", "version"):
            say(f"{client.shown(*arguments)}  # {notes[name]}")


def _check_user(owner: str) -> str:
    """The user whose credentials the client finds, who must be the bundle's owner."""  # K02
    user = client.user()
    if user.lower() != owner.lower():
        raise PublishError(
            f"the bundle is {owner}'s and the credentials are {user}'s: Kaggle would refuse it, or answer that it does not "
            f"find the notebook. Bundle again with --owner {user}, or use {owner}'s credentials."
        )
    return user


# ---- the data set


def _bring_data_set(
    made: Bundle, data_set: str, steps: Mapping, upload: bool, hours: float, poll_s: float, say: Say
) -> None:
    """Uploads the data set, or a new version of it, and waits until Kaggle has unpacked it."""
    reply = client.run(*steps["look"])
    there = reply.status == 0
    # Kaggle answers 403 of what is not there, too; what else it may say in words is said again by the upload.
    if not there and reply.kind not in ("not there", "refused", ""):
        raise client.failure(reply, f"looking for the data set {data_set}")
    if not there and not upload:
        raise PublishError(f"the data set {data_set} is not on Kaggle: publish without leaving out its upload")
    status, before = _state(reply.text) if there else ("", 0)
    if there and status not in (READY, *FAILED):
        say(f"data set {data_set}: Kaggle still works on the version before ({status})")
        before = _settled(steps["look"], data_set, None, hours, poll_s, say)
    if not upload:
        return
    say(f"data set {data_set}: {f'a version after {before}' if there else 'new'}, {len(made.files) + 1} files")
    _upload(steps["version" if there else "create"], made.dataset, say)
    _settled(steps["look"], data_set, before, hours, poll_s, say)


def _upload(arguments: tuple[str, ...], folder: Path, say: Say) -> None:
    reply = client.run(*arguments, say=say, limit_s=None)
    doing = "uploading the data set"
    refused = re.search(r"creation error: (.*)", reply.text)
    if refused:
        hint = " Give another with --title of `python -m rsnakit.kaggle bundle`." * ("already in use" in refused[1])
        raise PublishError(client.redact(f"{doing}: Kaggle refuses it: {refused[1].strip()}{hint}"))
    hints = {
        "refused": "Kaggle refuses it (403): the token may not create data sets, or the space for private ones is used up."
    }
    if reply.status or "is being created" not in reply.text:
        raise client.failure(reply, doing, hints)
    names = {path.name if path.is_file() else f"{path.name}.zip" for path in folder.iterdir()}
    arrived = set(re.findall(r"Upload successful: (.+) \(", reply.text))
    if lost := sorted(names - {bundle.DATA_SET_METADATA} - arrived):  # K06
        raise PublishError(client.redact(f"{doing}: {', '.join(lost)} did not arrive.\n{client.tail(reply.text)}"))


def _settled(
    arguments: tuple[str, ...], data_set: str, after: int | None, hours: float, poll_s: float, say: Say
) -> int:
    """Waits until Kaggle works on a data set no more, and, where a version is given, one after it is ready; its version."""

    def read(text: str) -> tuple[str, bool]:
        status, version[0] = _state(text)
        if after is None:
            return status, status in (READY, *FAILED)
        if status in FAILED:
            raise PublishError(
                f"data set {data_set}: Kaggle says it has {status}; look at {SITE}/datasets/{data_set} and publish again"
            )
        return status, status == READY and (version[0] > after or not after)  # where it had a number

    version = [0]
    client.wait(f"data set {data_set}", arguments, read, hours, poll_s, say)
    return version[0]


def _state(text: str) -> tuple[str, int]:
    """Status and version of a data set, by what the client printed, which may begin with a warning."""
    found = re.search(r"\{.*\}", text)
    state = json.loads(found[0]) if found else {}
    return state.get("status", "unknown"), state.get("current_version_number") or 0


def _compare(data_set: str, made: Bundle, poll_s: float, say: Say) -> None:
    """Stops where Kaggle's list of files lacks what was bundled."""  # K06
    expected = {path: entry["bytes"] for path, entry in made.files.items()}
    expected[bundle.MANIFEST] = (made.dataset / bundle.MANIFEST).stat().st_size
    for attempt in range(LISTINGS):
        if attempt:
            time.sleep(poll_s)
        faults, notes = listing.differences(listing.listed(data_set), expected)
        if not faults:
            break
    for note in notes:
        say(f"NOTE: {note}")
    if faults:
        raise PublishError(
            f"data set {data_set}: Kaggle lists other files than were bundled. {' '.join(faults)} Look at "
            f"{SITE}/datasets/{data_set}; where all is there after all, publish with upload=False and compare=False "
            "(--no-upload --no-compare)."
        )
    say(f"data set {data_set}: {len(expected)} files arrived")


# ---- the notebook


def _push(arguments: tuple[str, ...], say: Say) -> tuple[int | None, str]:
    """Sends the notebook, which Kaggle then runs; its version and address."""
    reply = client.run(*arguments)
    doing = "sending the notebook"
    if refused := re.search(r"Kernel push error: (.*)", reply.text):
        hint = next((hint for word, hint in HINTS.items() if word in refused[1].lower()), "")
        raise PublishError(
            client.redact(f"{doing}: Kaggle refuses it: {refused[1].strip().rstrip('.')}. {hint}".rstrip())
        )
    pushed = PUSHED.search(reply.text)
    if reply.status or not pushed:
        hints = {
            "refused": f"Kaggle refuses it (403): accept the competition's rules at {RULES}; may the token write notebooks?"
        }
        raise client.failure(reply, doing, hints)
    version, address = int(pushed[1]) if pushed[1] else None, pushed[2]
    faults = []
    for what, names in re.findall(r"not valid (dataset|competition|kernel) sources .*?: \[(.*)\]", reply.text):
        why = "it does not exist, or this user may not use it"
        if what == "competition":
            why = f"accept the rules at {RULES}"
        faults.append(f"Kaggle did not attach the {what} source {names}: {why}.")
    if "does not resolve to the specified id" in reply.text:  # K01
        faults.append("Kaggle makes another id of the notebook's title than the one it has; bundle again.")
    if faults:
        raise PublishError(
            client.redact(f"{doing}: {' '.join(faults)} Version {version} runs without it; stop it at {address}")
        )
    say(f"notebook: version {version} runs at {address}")
    return version, address


def _follow(notebook: str, address: str, hours: float, poll_s: float, say: Say) -> str:
    """Waits for the end of the notebook's run."""

    def read(text: str) -> tuple[str, bool]:
        found = re.search(r'has status "([^"]+)"', text)
        status = found[1].rpartition(".")[2].replace("_", "").lower() if found else "unknown"
        reason.append(why[1] if (why := re.search(r'Failure message: "(.*)"', text, re.DOTALL)) else "")
        return status, status in ENDED

    reason: list[str] = []
    status = client.wait(f"notebook {notebook}", ("kernels", "status", notebook), read, hours, poll_s, say)
    if status != COMPLETE:
        ended = "was cancelled" if status.startswith("cancel") else "ended with an error"
        why = f": {reason[-1].strip()}" if reason[-1] else "."
        log = f"{_log(notebook)}\nAll of it: kaggle kernels logs {notebook}, or {address}"
        raise PublishError(client.redact(f"the notebook's run {ended}{why}\n{log}"))
    return status


def _log(notebook: str, lines: int = 20) -> str:
    """The last lines of a run's log."""
    reply = client.run("kernels", "logs", notebook)
    if reply.status:
        return "Its log could not be fetched."
    try:
        log = "".join(entry["data"] for entry in json.loads(reply.text[reply.text.index("[") :]))
    except (ValueError, KeyError, TypeError):  # other versions print it as it is
        log = reply.text
    return f"Its log ends so:\n{client.tail(log, lines)}" if log.strip() else "Its log is empty."


def _submission(notebook: str, version: int | None, message: str) -> str:
    """The command that submits a version of the notebook to the competition."""
    number = str(version) if version else "VERSION"
    what = ("-k", notebook, "-v", number, "-f", "submission.csv", f"--message={message}")
    return shlex.join(("kaggle", "competitions", "submit", SLUG, *what))
