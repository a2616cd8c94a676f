"""The way to Kaggle: `python -m rsnakit.kaggle bundle|rehearse|publish`, and the same as functions for a notebook.

    python -m rsnakit.kaggle bundle RUN --owner NAME     # work/dist/: a data set and the inference notebook
    python -m rsnakit.kaggle rehearse                    # both run here as Kaggle would run them, on a test set made to hurt
    python -m rsnakit.kaggle publish                     # up, by Kaggle's own client

No module of the kit imports Kaggle's client, which asks for credentials when it is imported; `publishing` runs it.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from rsnakit import bundle, env, publishing, rehearsal, runs, slugs, wheels
from rsnakit.bundle import Bundle
from rsnakit.rehearsal import Rehearsal

__all__ = ["Bundle", "Rehearsal", "find", "main"]

FAILED, MISUSED = 1, 2  # exit statuses


def find(run: str, work: Path) -> Path:
    """The folder of a run that is named, or given as a folder.

    Raises:
        rsnakit.runs.RunError: there is none; the message lists those there are.
    """
    folder = Path(run)
    if (folder / "config.json").is_file():
        return folder.resolve()
    return runs.find_run(work, run, is_demo=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line.

    Args:
        arguments: those of the process if None.

    Returns:
        The exit status: 0, or 1 where it could not be done or the rehearsal failed, with the reason on stderr.
    """
    options = _parser().parse_args(arguments)
    try:
        return options.do(options)
    except (ValueError, OSError) as error:  # all that the kit raises for what it finds are of these kinds
        print(f"{options.command}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        sent = "; what is at Kaggle already goes on there" if options.command == "publish" else ""
        print(f"{options.command}: stopped by Ctrl-C{sent}", file=sys.stderr)
        return FAILED


def _bundle(options: argparse.Namespace) -> int:
    work = env.work_folder(options.work_dir)
    run, folder = find(options.run, work), None if options.no_wheels else work / "wheels"
    slugs.check_owner(options.owner)
    if folder:
        wheels.take(folder, bundle.requirements(run))
    made = bundle.make(
        run,
        options.owner,
        work / "dist",
        title=options.title,
        parameters=dict(options.parameters),
        wheels_folder=folder,
    )
    print(made.table().to_string())
    print(f"{made.folder}: data set {made.owner}/{made.slug}, {len(made.files)} files, {made.size / 1e6:,.1f} MB,")
    print(f"and notebook {made.owner}/{made.kernel_slug}")
    for note in made.notes:
        print(f"NOTE: {note}")
    print(f"next: python -m rsnakit.kaggle rehearse{_same_place(options)}")
    return 0


def _rehearse(options: argparse.Namespace) -> int:
    work = env.work_folder(options.work_dir)
    found = rehearsal.rehearse(
        work / "dist", options.competition, images=options.images, gpu_speedup=options.gpu_speedup
    )
    print(found.table().to_string())
    print("\n".join(found.sentences()))
    if not found.ok:
        return FAILED
    print(f"next: python -m rsnakit.kaggle publish{_same_place(options)}")
    return 0


def _publish(options: argparse.Namespace) -> int:
    work = env.work_folder(options.work_dir)
    publishing.publish(
        work / "dist",
        dry_run=options.dry_run,
        message=options.message,
        wait=not options.no_wait,
        public=options.public,
        upload=not options.no_upload,
        compare=not options.no_compare,
    )
    return 0


def _same_place(options: argparse.Namespace) -> str:
    return f" --work-dir {options.work_dir}" if options.work_dir else ""


def _parameter(text: str) -> tuple[str, object]:
    """`name=value` as papermill's `-p name value` reads it."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r}: expected name=value, such as threshold=percentile")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError:
        raise argparse.ArgumentTypeError(f"{text!r}: {value!r} is no value; put quotes around a text") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rsnakit.kaggle", description="Brings a trained run to Kaggle and rehearses it before that."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, do: object, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.add_argument("--work-dir", default="", help="where runs are and dist/ is made; work/ if not given")
        added.set_defaults(do=do)
        return added

    making = command("bundle", _bundle, "Makes work/dist/: a data set and the inference notebook.")
    making.add_argument("run", metavar="RUN", help="name of a run in work/runs, or its folder")
    making.add_argument("--owner", required=True, help="your user name on Kaggle, as in kaggle.com/NAME")
    making.add_argument(
        "--title", default="", help="of the data set and the notebook; rsnakit and the run if not given"
    )
    making.add_argument(
        "-p", dest="parameters", type=_parameter, action="append", default=[], metavar="NAME=VALUE",
        help="a parameter of the notebook, such as -p threshold=percentile; may be given several times",
    )  # fmt: skip
    making.add_argument("--no-wheels", action="store_true", help="leave out the packages that Kaggle may lack")

    trying = command("rehearse", _rehearse, "Runs work/dist/ as Kaggle would, offline, on test sets made to hurt.")
    trying.add_argument(
        "--competition", type=Path, help="its folder; the one that is found, else the demo, if not given"
    )
    trying.add_argument("--images", type=int, default=200, help="in the large test set; %(default)s if not given")
    trying.add_argument(
        "--gpu-speedup", type=float, default=1.0, metavar="TIMES",
        help="how many times faster the models run on Kaggle's GPU than here, for the hours; 1 takes them as measured",
    )  # fmt: skip

    sending = command("publish", _publish, "Uploads work/dist/ by Kaggle's client and waits for the notebook.")
    sending.add_argument("--dry-run", action="store_true", help="only show the commands")
    sending.add_argument("--message", default="", help="of the data set's version")
    sending.add_argument("--public", action="store_true", help="a new data set can be seen by everybody")
    sending.add_argument(
        "--no-upload", action="store_true", help="send the notebook alone; the data set stays as it is"
    )
    sending.add_argument(
        "--no-compare", action="store_true", help="go on where Kaggle lists other files than were bundled"
    )
    sending.add_argument("--no-wait", action="store_true", help="do not wait for the notebook to end")
    return parser


if __name__ == "__main__":
    sys.exit(main())
