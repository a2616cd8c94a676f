"""A Dask cluster as a place where joblib works: it is asked what it has, and this package travels to its workers.

joblib's own backend does the work; what is added to it here is that a lost task is told of instead of waited for. The
package `distributed` is imported only where a cluster is used.
"""

import contextlib
import hashlib
import io
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rsnakit

if TYPE_CHECKING:
    from distributed import Client
    from joblib.parallel import ParallelBackendBase

ANSWER_S = 15  # a scheduler that is there answers within this time
WORKERS_S = 60  # and has its first worker within this one: some start them only when there is work
SAME = ("numpy", "pydicom", "imagecodecs", "Pillow", "opencv-python")  # other versions could give other pixels
NEEDED = ("joblib",)  # in whatever version
# Asked of each process as text, which any Python understands: by name of a package its version, or None.
VERSIONS = (
    "{name: next((found.version for found in __import__('importlib.metadata').metadata.distributions(name=name)), None)"
    " for name in names} | {'Python': '.'.join(map(str, __import__('sys').version_info[:2]))}"
)
LOST: list = []  # what a task gives whose worker died over it, again and again

# What a process of the cluster runs before the package arrives, lest modules of an older one stay in use. Python 3.13 fails
# at an archive that it has met before, unless it forgets that (KeyError in pkgutil).
FORGET = """
import sys
if "rsnakit" in sys.modules and {name!r} not in sys.modules["rsnakit"].__file__:
    for module in [module for module in sys.modules if module.split(".")[0] == "rsnakit"]:
        del sys.modules[module]
sys.path[:] = [place for place in sys.path if not place.endswith(".rsnakit.zip")]
for place in [place for place in sys.path_importer_cache if place.endswith(".rsnakit.zip")]:
    del sys.path_importer_cache[place]
"""


class ClusterError(RuntimeError):
    """A Dask cluster that cannot be worked with; the message says what is wrong with it and what to do."""


@contextlib.contextmanager
def connect(address: str) -> Iterator["Client"]:
    """A client of the scheduler at `address`, whose workers have this package now, those that join later too.

    Raises:
        ClusterError: `distributed` is not installed, nothing answers at the address, there are no workers, or they lack
            packages or have other versions of what decides pixels.
    """
    try:
        from distributed import Client
    except ImportError:
        raise ClusterError("a Dask cluster needs the package distributed: pip install distributed") from None
    cause = ""
    try:
        client = Client(address, timeout=ANSWER_S, set_as_default=False)
    except (OSError, ValueError) as error:
        cause = str(error)
    if cause:  # raised down here: that error behind this one would keep the half-made client and its thread alive
        raise ClusterError(
            f"{address}: no Dask scheduler answers there within {ANSWER_S} s ({cause}). `dask scheduler` starts one and "
            "prints its address, such as tcp://host:8786; a firewall may be in between."
        )
    with client:
        _wait_for_worker(client, address)
        names = {"names": (*SAME, "opencv-python-headless", *NEEDED)}
        scheduler = {"scheduler": client.run_on_scheduler(eval, VERSIONS, names)}
        # A copy, since eval adds the built-in functions to it, and a notebook's own one can't be pickled.
        here = eval(VERSIONS, dict(names))
        _check_packages(here, scheduler | client.run(eval, VERSIONS, names), address)
        _send_package(client)
        yield client


def backend(client: "Client") -> "ParallelBackendBase":
    """joblib's backend on the client's cluster. A task whose worker died over it, again and again, gives `LOST`."""
    from distributed import KilledWorker
    from joblib._dask import DaskDistributedBackend

    submit_task = vars(DaskDistributedBackend).get("submit") or DaskDistributedBackend.apply_async

    class Backend(DaskDistributedBackend):
        def effective_n_jobs(self, n_jobs: int) -> int:
            return max(2, super().effective_n_jobs(n_jobs))  # with one, joblib would do all of it in this process

        def submit(self, func: Callable, callback: Callable | None = None) -> Any:
            future = submit_task(self, func, callback)
            # joblib gets to hear of results only, and would wait for ever for a task that has none.
            future.add_done_callback(lambda done: callback(done.exception()) if done.exception() else None)
            return future

        apply_async = submit  # its name in earlier versions of joblib

        def retrieve_result_callback(self, out: Any) -> Any:
            if isinstance(out, KilledWorker):
                return [LOST]
            if isinstance(out, BaseException):
                raise out
            return super().retrieve_result_callback(out)

    return Backend(client=client)


def describe_workers(client: "Client") -> str:
    """What has become of them where nothing is done any more, for a message."""
    if client.ncores():
        return f"its {len(client.ncores())} workers hang or are busy with other work; `dask worker` starts more"
    return "all its workers are gone; `dask worker` starts one, and anew if it dies, unless told --no-nanny"


def _wait_for_worker(client: "Client", address: str) -> None:
    if client.ncores():
        return
    try:
        client.submit(int, pure=False).result(timeout=WORKERS_S)  # work to do makes an adaptive cluster start workers
    except TimeoutError:
        raise ClusterError(
            f"{address}: the scheduler had no workers within {WORKERS_S} s. `dask worker {address}` starts one."
        ) from None


def _check_packages(here: dict, there: dict[str, dict], address: str) -> None:
    """Compares versions by package, as VERSIONS gives them: of this process, and of the cluster's processes by name."""
    for versions in (here, *there.values()):
        versions["opencv-python"] = versions["opencv-python"] or versions["opencv-python-headless"]
    wrong = []
    for process, versions in there.items():
        # The scheduler only passes tasks on.
        names = ("Python", "joblib") if process == "scheduler" else ("Python", *SAME, *NEEDED)
        missing = [name for name in names if not versions[name]]
        other = [name for name in ("Python", *SAME) if name in names and versions[name] not in (None, here[name])]
        if missing:
            wrong.append(f"{process} lacks {', '.join(missing)}")
        if other:
            wrong.append(f"{process} has {', '.join(f'{name} {versions[name]} (here {here[name]})' for name in other)}")
    if wrong:
        raise ClusterError(
            f"{address}: the cluster has other packages than this process: {'; '.join(wrong)}. Images could come out "
            "differently there, or not at all: run scheduler, workers and this in the same environment."
        )


def _send_package(client: "Client") -> None:
    from distributed.diagnostics.plugin import UploadFile

    archive = _zipped(Path(rsnakit.__file__).parent)
    name = f"{hashlib.sha256(archive).hexdigest()[:16]}.rsnakit.zip"
    client.run(exec, FORGET.format(name=name), {})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(archive)
        # As Client.upload_file does it, but under one name: there, each version ever sent would stay and go to each new
        # worker, in whatever order.
        client.register_plugin(UploadFile(str(path)), name="rsnakit")


def _zipped(package: Path) -> bytes:
    """The modules of a package as a ZIP archive, the same bytes for the same modules."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as files:
        for path in sorted(package.glob("*.py")):
            files.writestr(zipfile.ZipInfo(f"{package.name}/{path.name}"), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return archive.getvalue()
