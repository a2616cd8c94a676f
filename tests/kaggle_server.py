"""A stand-in for Kaggle that its real client talks to: on the loopback address, with what was sent to it kept for the tests."""

import base64
import io
import json
import textwrap
import threading
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

KEY = "0123456789abcdef0123456789abcdef"  # of the legacy kind
TOKEN = "KGAT_fedcba9876543210fedcba9876543210"
USER = "ann"

# The client's address of Kaggle is built in; it is changed as its Python starts. All else of it is as installed.
REDIRECT = """
import os
from kagglesdk import kaggle_env
for place in (kaggle_env.KaggleEnv.PROD, kaggle_env.KaggleEnv.TEST):
    kaggle_env._env_to_endpoint[place] = os.environ["KAGGLE_STAND_IN"]
"""
NOWHERE = "http://127.0.0.1:9"  # a proxy for all that does not go to the loopback address: nothing listens there


@dataclass
class Kaggle:
    """What this Kaggle holds, and how it shall behave.

    Attributes:
        calls: requests in order: the name of the method, and its arguments.
        data_sets: by id, a version each: its files by path, archives unpacked into folders of their names as Kaggle does.
        requests: for data sets and versions of them.
        kernels: requests for notebooks and versions of them.
        submissions: of versions of notebooks to the competition.
        processing: states that a data set goes through before it is ready, a question each.
        kernel_states: states of a notebook's run, a question each; the last stays.
        failure_message, log: of a notebook's run.
        rejections: HTTP statuses by method, given in turn before it works; -1 cuts the connection.
        invalid: sources that a notebook asks for and does not get, by kind.
        refusal: why a notebook or a data set is refused, without an HTTP status.
        listing: how files are listed: `nested`, `flat` (without folders), `top` (those in no folder), `archives`, `short`
            (one is missing), `cut` (one is half as long).
        put_status: what an upload ends with.
        page: files a page of a list.
        echo: error texts hold the credentials that came with the request.
    """

    calls: list[tuple[str, dict]] = field(default_factory=list)
    data_sets: dict[str, list[dict[str, bytes]]] = field(default_factory=dict)
    requests: list[dict] = field(default_factory=list)
    kernels: list[dict] = field(default_factory=list)
    submissions: list[dict] = field(default_factory=list)
    blobs: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    processing: list[str] = field(default_factory=list)
    kernel_states: list[str] = field(default_factory=lambda: ["COMPLETE"])
    failure_message: str = ""
    log: list[str] = field(default_factory=list)
    rejections: dict[str, list[int]] = field(default_factory=dict)
    invalid: dict[str, list[str]] = field(default_factory=dict)
    refusal: str = ""
    listing: str = "nested"
    put_status: int = 200
    page: int = 200
    echo: bool = False
    address: str = ""

    def methods(self) -> list[str]:
        return [method for method, _ in self.calls]

    # ---- what the client asks for, by method

    def introspect_token(self, request: Mapping) -> dict:
        right = request["token"] == TOKEN
        return {"active": right, "username": USER if right else None}

    def get_dataset_status(self, request: Mapping) -> dict:
        self._versions(request)
        return {"status": self.processing.pop(0) if self.processing else "READY"}

    def get_dataset(self, request: Mapping) -> dict:
        return {"currentVersionNumber": len(self._versions(request))}

    def start_blob_upload(self, request: Mapping) -> dict:
        token = f"blob{len(self.blobs)}"
        self.blobs[token] = (request["name"], b"")
        return {"token": token, "createUrl": f"{self.address}/upload/{token}?upload_id=granted-{KEY[::-1]}"}

    def create_dataset(self, request: Mapping) -> dict:
        id = f"{request['ownerSlug']}/{request['slug']}"
        return self._add(id, request)

    def create_dataset_version(self, request: Mapping) -> dict:
        return self._add(f"{request['ownerSlug']}/{request['datasetSlug']}", request["body"])

    def list_dataset_files(self, request: Mapping) -> dict:
        files = {name: len(content) for name, content in self._versions(request)[-1].items()}
        nested = sorted(name for name in files if "/" in name)
        if self.listing == "flat":
            files = {name.rpartition("/")[2]: size for name, size in files.items()}
        elif self.listing in ("top", "archives"):
            files = {name: size for name, size in files.items() if "/" not in name}
            if self.listing == "archives":
                files |= {f"{name.partition('/')[0]}.zip": 1 for name in nested}
        elif self.listing == "short":
            del files[nested[-1]]
        elif self.listing == "cut":
            files[nested[-1]] //= 2
        begin, size = int(request.get("pageToken") or 0), min(request["pageSize"], self.page)
        page = sorted(files)[begin : begin + size]
        token = str(begin + size) if begin + size < len(files) else ""
        date = "2026-01-01T00:00:00Z"
        rows = [{"name": name, "totalBytes": files[name], "creationDate": date} for name in page]
        return {"datasetFiles": rows, "nextPageToken": token}

    def save_kernel(self, request: Mapping) -> dict:
        if self.refusal:
            return {"error": self.refusal}
        self.kernels.append(dict(request))
        url = f"https://www.kaggle.com/code/{request['slug']}"
        invalid = {f"invalid{kind.capitalize()}Sources": names for kind, names in self.invalid.items()}
        return {"versionNumber": len(self.kernels), "url": url, "ref": f"/{request['slug']}"} | invalid

    def get_kernel_session_status(self, request: Mapping) -> dict:
        state = self.kernel_states.pop(0) if len(self.kernel_states) > 1 else self.kernel_states[0]
        return {"status": state, "failureMessage": self.failure_message}

    def list_kernel_session_output(self, request: Mapping) -> dict:
        return {"log": json.dumps([{"stream_name": "stdout", "time": 1.0, "data": line} for line in self.log])}

    def create_code_submission(self, request: Mapping) -> dict:
        self.submissions.append(dict(request))
        return {"message": "Successfully submitted", "ref": 1}

    def get_submission_limits(self, request: Mapping) -> dict:
        return {"numAllowedNow": 4}

    def _versions(self, request: Mapping) -> list[dict[str, bytes]]:
        """Raises: KeyError, which is answered by 403 as Kaggle does, where there is no such data set."""
        return self.data_sets[f"{request['ownerSlug']}/{request['datasetSlug']}"]

    def _add(self, id: str, request: Mapping) -> dict:
        if self.refusal:
            return {"status": "error", "error": self.refusal}
        self.requests.append(dict(request))
        files = {}
        for file in request["files"]:
            name, content = self.blobs[file["token"]]
            if name.endswith(".zip"):
                archive = zipfile.ZipFile(io.BytesIO(content))
                folder = name.removesuffix(".zip")
                files |= {f"{folder}/{n}": archive.read(n) for n in archive.namelist() if not n.endswith("/")}
            else:
                files[name] = content
        self.data_sets.setdefault(id, []).append(files)
        return {"status": "ok", "url": f"https://www.kaggle.com/datasets/{id}", "ref": id}


class Stand:
    """The server, as a context manager that gives the `Kaggle` behind it; and the environment that leads a client to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder  # holds what redirects the client
        self.kaggle = Kaggle()

    def __enter__(self) -> "Stand":
        (self.folder / "redirect").mkdir(parents=True)
        (self.folder / "home").mkdir()
        (self.folder / "redirect" / "sitecustomize.py").write_text(textwrap.dedent(REDIRECT))
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"kaggle": self.kaggle}))
        self.server.daemon_threads = True
        self.kaggle.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def environ(self, credentials: str = "key") -> dict[str, str]:
        """Variables for the client.

        Args:
            credentials: `key`, `token`, `wrong key`, `wrong token`, or `` for none.
        """
        variables = {
            "HOME": str(self.folder / "home"),
            "PYTHONPATH": str(self.folder / "redirect"),
            "KAGGLE_STAND_IN": self.kaggle.address,
        }
        variables |= dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), NOWHERE)
        variables |= dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1")
        wrong = {"key": KEY[::-1], "token": TOKEN[:5] + TOKEN[:4:-1]}
        kind = credentials.removeprefix("wrong ")
        if kind == "key":
            value = wrong["key"] if credentials.startswith("wrong") else KEY
            variables |= {"KAGGLE_USERNAME": USER, "KAGGLE_KEY": value}
        elif kind == "token":
            variables |= {"KAGGLE_API_TOKEN": wrong["token"] if credentials.startswith("wrong") else TOKEN}
        return variables


class Handler(BaseHTTPRequestHandler):
    """HTTP around a `Kaggle`."""

    kaggle: Kaggle
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        method = self.path.rpartition("/")[2]
        request = json.loads(self._body() or b"{}")
        self.kaggle.calls.append((method, request))
        authorization = self.headers.get("Authorization", "")
        basic = base64.b64encode(f"{USER}:{KEY}".encode()).decode()
        if (left := self.kaggle.rejections.get(method)) and (status := left.pop(0)):
            if status < 0:
                self.close_connection = True
                self.connection.close()
            else:
                self._answer({"code": status, "message": self._reason(status, authorization)}, status)
        elif method != "IntrospectToken" and authorization not in (f"Basic {basic}", f"Bearer {TOKEN}"):
            self._answer({"code": 401, "message": self._reason(401, authorization)}, 401)
        else:
            name = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in method).lstrip("_")
            try:
                self._answer(getattr(self.kaggle, name)(request))
            except KeyError:
                self._answer({"code": 403, "message": "Permission 'datasets.get' was denied"}, 403)

    def do_PUT(self) -> None:
        token = self.path.rpartition("/")[2].partition("?")[0]
        self.kaggle.blobs[token] = (self.kaggle.blobs[token][0], self._body())
        self._answer({}, self.kaggle.put_status)

    def _reason(self, status: int, authorization: str) -> str:
        return f"{status} Client Error: refused for url: {self.kaggle.address}{self.path}" + (
            f" with {authorization}" if self.kaggle.echo else ""
        )

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, content: Mapping, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Kaggle-ApiVersion", "99.0.0")  # so that the client warns that it is old, as it mostly will
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Says nothing."""
