"""rsnakit.publishing, client and listing: what Kaggle's real client sends to a stand-in, and what is said where it cannot.

No test talks to anything but the loopback address: the client's address of Kaggle is another one, and its proxy leads nowhere.
"""

import base64
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import traceback
from pathlib import Path

import pytest
from kaggle_server import KEY, TOKEN, USER, Kaggle, Stand
from small_run import TINY, write_run

from rsnakit import bundle, client, listing, publishing, slugs
from rsnakit.bundle import BundleError
from rsnakit.publishing import Published, PublishError

RUN = "fold run-1"
DATA_SET, NOTEBOOK = f"{USER}/rsnakit-fold-run-1", f"{USER}/rsnakit-fold-run-1-inference"
SENDING = {"StartBlobUpload", "CreateDataset", "CreateDatasetVersion", "SaveKernel", "CreateCodeSubmission"}
FILES = {
    "requirements.txt": b"numpy>=1.26\n",
    "rsnakit/__init__.py": b"__version__ = '0'\n",
    "rsnakit/env.py": b"",
    f"runs/{RUN}/config.json": b"{}\n",
    f"runs/{RUN}/fold0/best.safetensors": bytes(range(256)) * 9,
    f"runs/{RUN}/fold1/best.safetensors": bytes(range(255, -1, -1)) * 9,  # of the same name and size as the other's
    "wheels/small-1.0-py3-none-any.whl": b"PK\x03\x04" + b"\x00" * 99,
}


@pytest.fixture
def dist(tmp_path) -> Path:
    """A bundle of a few small files, as `bundle.make` lays it out."""
    data_set, kernel = tmp_path / "dist" / "dataset", tmp_path / "dist" / "kernel"
    for path, content in FILES.items():
        (data_set / path).parent.mkdir(parents=True, exist_ok=True)
        (data_set / path).write_bytes(content)
    files = {path: {"bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for path, c in FILES.items()}
    owner, slug = DATA_SET.split("/")
    described = {
        "run": RUN,
        "owner": owner,
        "slug": slug,
        "rsnakit": "0",
        "folds": [0, 1],
        "notes": ["a try"],
        "files": files,
    }
    title = "rsnakit fold run 1"
    metadata = {
        "id": NOTEBOOK, "title": f"{title} inference", "code_file": "04_inference.ipynb", "language": "python",
        "kernel_type": "notebook", "is_private": True, "enable_gpu": True, "enable_internet": False,
        "machine_shape": "NvidiaTeslaT4", "dataset_sources": [DATA_SET],
        "competition_sources": ["rsna-breast-cancer-detection"], "kernel_sources": [], "model_sources": [],
    }  # fmt: skip
    cell = {"cell_type": "code", "source": ["threshold = 'auto'  # ä\n", "run = ''"], "outputs": [], "metadata": {}}
    notebook = {"cells": [cell | {"execution_count": None}], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    kernel.mkdir()
    for path, content in (
        (data_set / "bundle.json", described),
        (data_set / "dataset-metadata.json", {"title": title, "id": DATA_SET, "licenses": [{"name": "other"}]}),
        (kernel / "kernel-metadata.json", metadata),
        (kernel / "04_inference.ipynb", notebook),
    ):
        path.write_text(json.dumps(content), encoding="utf-8")
    return tmp_path / "dist"


@pytest.fixture
def stand(tmp_path, monkeypatch):
    """A Kaggle on this machine that the client, run from here, talks to."""
    try:
        client.check()
    except PublishError as error:
        pytest.skip(str(error))
    with Stand(tmp_path / "stand") as server:
        use(server, monkeypatch)
        monkeypatch.setattr(client, "PATIENCE", 1)
        yield server


@pytest.fixture
def there(dist, stand) -> Kaggle:
    """A Kaggle that has the data set."""
    files = {path.relative_to(dist / "dataset").as_posix(): path.read_bytes() for path in dist.glob("dataset/**/*.*")}
    stand.kaggle.data_sets[DATA_SET] = [files]
    return stand.kaggle


def use(server: Stand, monkeypatch: pytest.MonkeyPatch, credentials: str = "key") -> None:
    for name in [name for name in os.environ if name.startswith("KAGGLE_") or name in ("XDG_CONFIG_HOME", "ALL_PROXY")]:
        monkeypatch.delenv(name)
    for name, value in server.environ(credentials).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def raw(monkeypatch) -> list[str]:
    """All that the client prints, as it prints it."""
    kept, run = [], client.run

    def keep(*arguments, **options):
        reply = run(*arguments, **options)
        kept.append(reply.text)
        return reply

    monkeypatch.setattr(client, "run", keep)
    return kept


def publish(dist: Path, **options) -> tuple[Published | None, str]:
    """What is given back, and all that was said."""
    lines: list[str] = []
    published = publishing.publish(dist, poll_s=0.01, say=lines.append, **options)
    return published, "\n".join(lines)


def refusal(dist: Path, **options) -> str:
    """The error's text; its traceback and all that was said before hold nothing that must not be shown."""
    lines: list[str] = []
    with pytest.raises(PublishError) as caught:
        publishing.publish(dist, poll_s=0.01, say=lines.append, **options)
    error = caught.value
    shown = "\n".join((*lines, str(error), repr(error), *traceback.format_exception(error)))
    assert not [secret for secret in held() if secret in shown]
    return str(error)


def held() -> list[str]:
    """Secrets, in the forms in which they travel."""
    return [KEY, KEY[::-1], TOKEN, base64.b64encode(f"{USER}:{KEY}".encode()).decode()]


def commands_in(said: str) -> list[list[str]]:
    """The command lines that a dry run shows, by word."""
    return [shlex.split(line, comments=True) for line in said.splitlines() if " -m kaggle " in line]


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | values), encoding="utf-8")


def test_what_arrives_is_what_was_bundled(dist, stand):
    stand.kaggle.processing, stand.kaggle.page = ["BLOBS_RECEIVED"], 4
    stand.kaggle.kernel_states = ["QUEUED", "RUNNING", "COMPLETE"]
    published, said = publish(dist)

    bundled = {path.relative_to(dist / "dataset").as_posix(): path.read_bytes() for path in dist.glob("dataset/**/*.*")}
    del bundled["dataset-metadata.json"]
    assert set(bundled) == {*FILES, "bundle.json"}
    assert stand.kaggle.data_sets == {DATA_SET: [bundled]}
    created = stand.kaggle.requests[0]
    assert (created["isPrivate"], created["title"], created["licenseName"]) == (True, "rsnakit fold run 1", "other")

    (kernel,) = stand.kaggle.kernels
    notebook = json.loads((dist / "kernel" / "04_inference.ipynb").read_text(encoding="utf-8"))
    notebook["cells"][0]["source"] = "".join(notebook["cells"][0]["source"])  # the server takes a cell as one string
    assert json.loads(kernel.pop("text")) == notebook
    assert {name: value for name, value in kernel.items() if value not in ([], False, None)} == {
        "slug": NOTEBOOK, "newTitle": "rsnakit fold run 1 inference", "language": "python", "kernelType": "notebook",
        "isPrivate": True, "enableGpu": True, "machineShape": "NvidiaTeslaT4", "datasetDataSources": [DATA_SET],
        "competitionDataSources": ["rsna-breast-cancer-detection"],
    }  # fmt: skip  # K05
    assert kernel["enableInternet"] is False

    assert published.data_set == f"https://www.kaggle.com/datasets/{DATA_SET}" and published.version == 1
    assert published.notebook == f"https://www.kaggle.com/code/{NOTEBOOK}" and published.status == "complete"
    for text in (published.data_set, published.notebook, published.submit, "blobs_received", "queued", "running"):
        assert text in said


def test_a_dry_run_shows_the_commands_and_runs_none(dist, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    published, said = publish(dist, dry_run=True, message="it's fold 1")
    assert published is None and said.startswith("NOTE: a try\n")
    lines = commands_in(said)
    assert [line[4:6] for line in lines] == [
        ["config", "view"], ["datasets", "status"], ["datasets", "create"], ["datasets", "version"], ["datasets", "files"],
        ["kernels", "push"], ["kernels", "status"],
    ]  # fmt: skip
    assert lines[2] == client.command("datasets", "create", "-p", str(dist / "dataset"), "-r", "zip")  # K06
    assert lines[3][-1] == "--message=it's fold 1"
    assert "--public" in publish(dist, dry_run=True, public=True)[1]
    assert "datasets create" not in publish(dist, dry_run=True, upload=False)[1]


@pytest.mark.parametrize(
    ("credentials", "expected"),
    [
        ("", "there are no credentials for Kaggle"),
        ("wrong token", "does not take the access token"),
        ("wrong key", "does not take the credentials"),
    ],
)
def test_credentials_that_are_missing_or_wrong(dist, stand, monkeypatch, credentials, expected):
    use(stand, monkeypatch, credentials)
    text = refusal(dist)
    assert expected in text and client.SETTINGS in text
    assert not SENDING & set(stand.kaggle.methods())


@pytest.mark.parametrize("place", ["$KAGGLE_CONFIG_DIR", "~/.kaggle", "~/.config/kaggle", "access_token"])
def test_credentials_wherever_the_client_finds_them(stand, monkeypatch, tmp_path, place):
    use(stand, monkeypatch, "")
    home = Path(os.environ["HOME"])
    folder = {"~/.config/kaggle": home / ".config/kaggle", "$KAGGLE_CONFIG_DIR": tmp_path / "elsewhere"}.get(
        place, home / ".kaggle"
    )
    folder.mkdir(parents=True)
    if place == "$KAGGLE_CONFIG_DIR":
        monkeypatch.setenv("KAGGLE_CONFIG_DIR", str(folder))
    secret = KEY
    if place == "access_token":
        (folder / place).write_text(secret := TOKEN)
    else:
        (folder / "kaggle.json").write_text(json.dumps({"username": USER, "key": KEY}))
    assert client.user() == USER
    assert client.redact(f"-{secret}-") == "-[hidden]-"


def test_another_owners_bundle_is_refused_before_anything_is_sent(dist, stand, monkeypatch):  # K02
    monkeypatch.setenv("KAGGLE_USERNAME", "ben")
    text = refusal(dist)
    assert "the bundle is ann's and the credentials are ben's" in text and "--owner ben" in text
    assert not stand.kaggle.calls


@pytest.mark.parametrize(
    ("file", "values", "error", "expected"),
    [
        ("kernel/kernel-metadata.json", {"id": f"ben/{NOTEBOOK.split('/')[1]}"}, PublishError, "one owner"),  # K02
        ("kernel/kernel-metadata.json", {"id": "INSERT_USER/x"}, slugs.SlugError, "INSERT_USER"),  # K02
        ("kernel/kernel-metadata.json", {"title": "RSNA: Train (v2)!"}, slugs.SlugError, "rsna-train-v2"),  # K01
        ("dataset/dataset-metadata.json", {"id": "INSERT_USER/INSERT_SLUG_HERE"}, BundleError, "INSERT_USER"),
    ],
)
def test_ids_that_cannot_be_right_are_refused_here(dist, monkeypatch, file, values, error, expected):
    change(dist / file, **values)
    monkeypatch.setattr(subprocess, "Popen", None)
    for dry_run in (False, True):
        with pytest.raises(error, match=re.escape(expected)):
            publish(dist, dry_run=dry_run)


def test_a_client_that_is_missing_or_too_old(dist, monkeypatch):
    def version(_: str) -> str:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(subprocess, "Popen", None)
    monkeypatch.setattr(importlib.metadata, "version", version)
    assert "pip install -r requirements.txt" in refusal(dist)
    for old in ("1.7.4.2", "1.8.4", "2.1.2"):  # K05
        monkeypatch.setattr(importlib.metadata, "version", lambda _, old=old: old)
        assert f"is {old}, expected 2.2 or later" in refusal(dist)
    for new in ("2.2.0", "2.10", "3.0.0a1"):
        monkeypatch.setattr(importlib.metadata, "version", lambda _, new=new: new)
        assert client.check() == new


def test_no_network(dist, stand, monkeypatch):
    stand.server.server_close()  # nothing listens there any more
    assert "cannot be reached" in refusal(dist)
    use(stand, monkeypatch, "token")
    assert "cannot be reached" in refusal(dist)


LISTED = {path: len(content) for path, content in FILES.items()}


@pytest.mark.parametrize(
    ("seen", "faults", "notes"),
    [
        (LISTED, [], []),
        (LISTED | {"more.txt": 1}, [], []),
        (dict.fromkeys(LISTED), [], []),  # sizes as 12KB say nothing
        (
            {path.rpartition("/")[2]: size for path, size in LISTED.items()},
            [r"6 files have lost their folders, rsnakit/__init__\.py"],
            [],
        ),
        ({path: size for path, size in LISTED.items() if "/" not in path}, ["6 files are missing, rsnakit/"], []),
        ({path: size for path, size in LISTED.items() if "fold1" not in path}, [r"1 files are missing, .*fold1"], []),
        (LISTED | {"requirements.txt": 3}, ["1 files have another size, requirements.txt with 3 bytes for 12"], []),
        (
            {"requirements.txt": 12, "rsnakit.zip": 1, "runs.zip": 1, "wheels.zip": 1},
            [],
            ["rsnakit, runs, wheels are listed as archives"],
        ),
        (
            {"requirements.txt": 12, "rsnakit.zip": 1, "runs.zip": 1},
            ["1 files are missing, wheels/"],
            ["rsnakit, runs are"],
        ),
    ],
)
def test_a_list_of_files_against_what_was_bundled(seen, faults, notes):  # K06
    for found, patterns in zip(listing.differences(seen, LISTED), (faults, notes), strict=True):
        assert len(found) == len(patterns)
        for sentence, pattern in zip(found, patterns, strict=True):
            assert re.match(pattern, sentence)


def test_nothing_secret_is_shown(tmp_path, monkeypatch):
    home = tmp_path / "home"
    (home / ".kaggle").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    for name in [name for name in os.environ if name.startswith("KAGGLE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KAGGLE_KEY", "key-of-the-environment")
    token = tmp_path / "token"
    token.write_text("token-of-a-file\n")
    monkeypatch.setenv("KAGGLE_API_TOKEN", str(token))
    (home / ".kaggle" / "kaggle.json").write_text('{"username": "anna", "key": "key-of-a-file"}')
    (home / ".kaggle" / "credentials.json").write_text(
        '{"refresh_token": "r3fresh", "username": "anna", "scopes": ["a"]}'
    )
    text = client.redact(
        "anna: key-of-the-environment, token-of-a-file, key-of-a-file, r3fresh; Authorization: Basic YW5uOmtleQ== "
        "Bearer abc.def-1; ProxyError http://anna:pass@proxy:80 with url: /upload/1?upload_id=5x&a=b (Caused by "
        "https://storage.googleapis.com/a/b?X-Goog-Signature=5f) https://www.kaggle.com/code/ann/x?scriptVersionId=1"
    )
    assert text == (
        "anna: [hidden], [hidden], [hidden], [hidden]; Authorization: Basic [hidden] Bearer [hidden]; ProxyError "
        "http://[hidden]@proxy:80 with url: /upload/1?[hidden] (Caused by "
        "https://storage.googleapis.com/a/b?[hidden] https://www.kaggle.com/code/ann/x?scriptVersionId=1"
    )
    monkeypatch.setenv("KAGGLE_API_TOKEN", "x" * 9000)  # no path can be so long
    assert client.redact("x" * 9000) == "[hidden]"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("Kernel push error: see previous output", "Kaggle refuses it: see previous output"),
        ("Kernel version successfully pushed.  Please check progress at None", "Version None runs without it"),
        (
            "Kernel version 3 successfully pushed.  Please check progress at https://k",
            "Version 3 runs without it; stop it at https://k",
        ),
        ("", "The client said:"),
    ],
)
def test_a_title_that_makes_another_id_at_kaggle(dist, monkeypatch, said, expected):  # K01
    warning = (
        "Your kernel title does not resolve to the specified id. This may result in surprising behavior. We suggest making "
        "your title something that resolves to the specified id."
    )
    monkeypatch.setattr(client, "run", lambda *_, **__: client.Reply(0, f"{warning}\n{said}\n"))
    with pytest.raises(PublishError, match=re.escape(expected)):
        publishing._push(("kernels", "push"), print)


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("Maximum weekly GPU quota of 30.00 hours reached.", "`kaggle quota` says what is left"),
        ("Maximum batch GPU session count of 2 reached.", "Stop a notebook that is running"),
        ("Kernel not found", "may be somebody else's"),  # K02
    ],
)
def test_why_a_notebook_is_refused_and_what_to_do(monkeypatch, reason, expected):
    monkeypatch.setattr(client, "run", lambda *_, **__: client.Reply(0, f"Kernel push error: {reason}\n"))
    with pytest.raises(PublishError) as caught:
        publishing._push(("kernels", "push"), print)
    assert reason.rstrip(".") in str(caught.value) and expected in str(caught.value)


def test_an_upload_that_goes_on_without_a_file(dist, monkeypatch):  # K06
    """As clients before 2.2.5 do, with an exit status of 0."""
    said = [
        f"Upload successful: {name} (1KB)" for name in ("requirements.txt", "rsnakit.zip", "wheels.zip", "bundle.json")
    ]
    said += [
        "Upload unsuccessful: runs.zip",
        "Your private Dataset is being created. Please check progress at https://k",
    ]
    monkeypatch.setattr(client, "run", lambda *_, **__: client.Reply(0, "\n".join(said)))
    with pytest.raises(PublishError, match=r"the data set: runs\.zip did not arrive"):
        publishing._upload((), dist / "dataset", print)
    said[-2] = "Upload successful: runs.zip (1KB)"
    publishing._upload((), dist / "dataset", print)


def test_a_new_data_set_is_ready_whether_or_not_kaggle_gives_its_number(monkeypatch):
    reply = client.Reply(0, 'Warning: old\n{"status": "ready", "current_version_number": null}')
    monkeypatch.setattr(client, "run", lambda *_: reply)
    assert publishing._settled((), DATA_SET, 0, 1.0, 0.01, print) == 0
    with pytest.raises(PublishError, match="is ready after 0 h"):  # still the version before
        publishing._settled((), DATA_SET, 1, 0.0, 0.01, print)


def test_a_client_that_hangs_is_ended(stand):
    reply = client.run("datasets", "status", DATA_SET, limit_s=0.01)
    assert reply.status != 0 and reply.kind == "network"


def test_requests_are_not_printed_where_a_person_asked_other_tools_to_be_verbose(stand, monkeypatch):
    monkeypatch.setenv("VERBOSE", "1")
    stand.kaggle.data_sets[DATA_SET] = [{}]
    reply = client.run("datasets", "status", DATA_SET)
    warning, answer = reply.text.splitlines()
    assert (reply.status, answer) == (0, "ready") and "outdated" in warning


@pytest.mark.slow
class TestRounds:
    """Whole rounds with the real client: some ten of its processes each."""

    def test_a_later_version_by_a_token_and_its_submission(self, dist, stand, monkeypatch, raw):
        use(stand, monkeypatch, "token")
        stand.kaggle.data_sets[DATA_SET] = [{"old.txt": b""}]
        stand.kaggle.processing = ["REPROCESSING"]  # of the version before
        published, said = publish(dist, message="fold 1, again")
        assert set(stand.kaggle.data_sets[DATA_SET][1]) == {*FILES, "bundle.json"}
        assert stand.kaggle.requests[0]["versionNotes"] == "fold 1, again"
        assert said.index("reprocessing") < said.index("a version after 1")
        assert TOKEN not in said + "".join(raw)

        submit = shlex.split(published.submit)
        assert submit[0] == "kaggle" and client.run(*submit[1:]).status == 0
        assert stand.kaggle.submissions == [
            {
                "competitionName": "rsna-breast-cancer-detection", "kernelOwner": USER, "kernelSlug": NOTEBOOK.split("/")[1],
                "kernelVersion": 1, "fileName": "submission.csv", "submissionDescription": "fold 1, again",
            }
        ]  # fmt: skip

    def test_a_bundle_of_a_run(self, stand, table, store, tmp_path):
        fold_of = {patient: number % 2 for number, patient in enumerate(table["patient_id"].unique())}
        run = write_run(tmp_path / "runs" / "first", table, store, fold_of)
        described = json.loads((run / "config.json").read_text())
        change(run / "config.json", settings=described["settings"] | {"model": dataclasses.asdict(TINY)})
        made = bundle.make(run, USER, tmp_path / "dist", parameters={"threshold": 0.5})
        publish(made.folder, wait=False)
        (files,) = stand.kaggle.data_sets.values()
        assert {
            name: hashlib.sha256(content).hexdigest() for name, content in files[0].items() if name in made.files
        } == {name: entry["sha256"] for name, entry in made.files.items()}
        (kernel,) = stand.kaggle.kernels
        sent, bundled = (
            json.loads(kernel["text"]),
            json.loads((made.kernel / bundle.NOTEBOOK).read_text(encoding="utf-8")),
        )
        sources = ["".join(cell["source"]) for cell in bundled["cells"]]
        assert [cell["source"] for cell in sent["cells"]] == sources and len(sources) > 5

    def test_what_a_dry_run_shows_is_what_runs(self, dist, stand, monkeypatch):
        _, said = publish(dist, dry_run=True)
        shown = commands_in(said)
        ran, command = [], client.command
        monkeypatch.setattr(client, "command", lambda *arguments: ran.append(command(*arguments)) or ran[-1])
        publish(dist)
        once = [line for i, line in enumerate(ran) if line not in ran[:i] and "--page-token" not in line]
        expected = [line for line in shown if "version" not in line]
        expected[-1][-1] += "/1"  # of which version the status is asked is known once it is pushed
        assert once == expected

    def test_the_notebook_alone(self, dist, there):
        published, said = publish(dist, upload=False, wait=False)
        assert SENDING & set(there.methods()) == {"SaveKernel"}
        assert (published.version, published.status) == (1, "pushed") and "once it is complete" in said
        there.data_sets.clear()
        assert "is not on Kaggle" in refusal(dist, upload=False)

    @pytest.mark.parametrize(
        ("kind", "names", "expected"),
        [
            ("dataset", [DATA_SET], f"did not attach the dataset source '{DATA_SET}': it does not exist"),
            (
                "competition",
                ["rsna-breast-cancer-detection"],
                "accept the rules at https://www.kaggle.com/competitions/rsna",
            ),
        ],
    )
    def test_a_source_that_is_not_attached_is_an_error(self, dist, there, kind, names, expected):
        there.invalid = {kind: names}
        text = refusal(dist, upload=False, compare=False)
        assert expected in text and "Version 1 runs without it" in text

    def test_a_notebook_that_is_refused(self, dist, there):
        there.refusal = "Maximum weekly GPU quota of 30.00 hours reached."
        assert "GPU quota of 30.00 hours reached. Kaggle gives" in refusal(dist, upload=False, compare=False)

    def test_a_title_that_is_taken(self, dist, stand):
        stand.kaggle.refusal = 'The requested title "rsnakit fold run 1" is already in use by a dataset.'
        text = refusal(dist)
        assert "already in use" in text and "--title" in text and not stand.kaggle.kernels
        stand.kaggle.refusal = "The space for private data sets is used up."
        assert refusal(dist) == f"uploading the data set: Kaggle refuses it: {stand.kaggle.refusal}"

    @pytest.mark.parametrize(
        ("method", "statuses", "expected"),
        [
            ("GetDatasetStatus", [500], "has a fault of its own"),
            ("CreateDatasetVersion", [403], "space for private ones is used up"),
            ("SaveKernel", [403], "(403): accept the competition's rules at https://"),
            ("SaveKernel", [429], "asked too often"),
            ("GetKernelSessionStatus", [500, 500], "waiting for notebook"),
        ],
    )
    def test_errors_of_the_server(self, dist, there, raw, method, statuses, expected):
        there.rejections = {method: statuses}
        there.echo = True  # the client prints what it is told, with the key
        assert expected in refusal(dist, upload=method == "CreateDatasetVersion", compare=False)
        assert any(secret in text for text in raw for secret in held())

    def test_credentials_that_are_revoked_meanwhile(self, dist, there):
        there.processing, there.rejections = ["REPROCESSING"], {"GetDatasetStatus": [0, 401]}
        assert "does not take the credentials" in refusal(dist)
        assert there.methods() == ["GetDatasetStatus", "GetDataset", "GetDatasetStatus"]

    def test_a_failure_while_waiting_is_passed_over(self, dist, there):
        there.rejections = {"GetKernelSessionStatus": [503, 0, -1]}
        there.kernel_states = ["RUNNING", "COMPLETE"]
        assert publish(dist, upload=False, compare=False)[0].status == "complete"

    def test_a_file_that_is_not_taken(self, dist, stand):
        stand.kaggle.put_status = 400
        text = refusal(dist)
        assert "could not be uploaded" in text and not stand.kaggle.data_sets and not stand.kaggle.kernels

    @pytest.mark.parametrize(
        ("how", "expected"), [("flat", "lost their folders"), ("short", "1 files are missing"), ("cut", "another size")]
    )
    def test_files_that_did_not_arrive_whole(self, dist, there, monkeypatch, how, expected):  # K06
        there.listing = how
        monkeypatch.setattr(publishing, "LISTINGS", 2)
        text = refusal(dist, upload=False)
        assert expected in text and DATA_SET in text and not there.kernels
        assert there.methods().count("ListDatasetFiles") == 2

    def test_archives_that_are_not_unpacked_yet_are_noted(self, dist, there):
        there.listing = "archives"
        _, said = publish(dist, upload=False, wait=False)
        assert "NOTE: rsnakit, runs, wheels are listed as archives" in said

    def test_a_data_set_that_fails_or_takes_too_long(self, dist, there):
        there.processing = ["READY", "BLOBS_RECEIVED", "FAILED"]
        assert "Kaggle says it has failed" in refusal(dist)
        there.processing = ["REPROCESSING"] * 9
        text = refusal(dist, data_set_hours=0)
        assert "is reprocessing after 0 h" in text and "datasets status" in text and not there.kernels

    @pytest.mark.parametrize(
        ("state", "expected"),
        [("ERROR", "ended with an error: out of memory"), ("CANCEL_ACKNOWLEDGED", "was cancelled")],
    )
    def test_a_run_that_ends_badly(self, dist, there, state, expected):
        there.kernel_states = ["RUNNING", state]
        there.failure_message = "out of memory"
        there.log = [f"line {i}\n" for i in range(40)] + [f"print({KEY!r})\n"]
        text = refusal(dist, upload=False, compare=False)
        assert expected in text and "line 39" in text and "line 3\n" not in text and "print('[hidden]')" in text
        assert f"kaggle kernels logs {NOTEBOOK}" in text


def test_the_stand_in_keeps_what_it_promises():
    """A data set that is not there is refused as Kaggle does, and lists have pages: else the tests above would show less."""
    kaggle = Kaggle(data_sets={"ann/x": [{f"{i}.txt": b"12" for i in range(9)}]}, page=4)
    with pytest.raises(KeyError):
        kaggle.get_dataset_status({"ownerSlug": "ann", "datasetSlug": "y"})
    page = kaggle.list_dataset_files({"ownerSlug": "ann", "datasetSlug": "x", "pageSize": 200})
    assert len(page["datasetFiles"]) == 4 and page["nextPageToken"] == "4"
