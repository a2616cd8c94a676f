"""What Kaggle lists of a data set's files, against what was bundled."""

import csv
import re
from collections.abc import Mapping

from rsnakit import client

PAGE = 200  # files a page, the most that Kaggle lists at once


def listed(data_set: str) -> dict[str, int | None]:
    """Bytes by path of a data set's files on Kaggle, all pages; None where they are given in other units."""
    found: dict[str, int | None] = {}
    token, seen = "", set()
    while token not in seen:
        seen.add(token)
        more = ("--page-token", token) if token else ()
        reply = client.run("datasets", "files", data_set, "--csv", "--page-size", str(PAGE), *more)
        lines = reply.text.splitlines()
        begin = next((i for i, line in enumerate(lines) if line.startswith("name,size")), None)
        if reply.status or begin is None:
            raise client.failure(reply, f"listing the files of the data set {data_set}")
        for row in csv.DictReader(lines[begin:]):
            found[row["name"].lstrip("/")] = int(row["size"]) if row["size"].isdecimal() else None
        following = re.search(r"^Next Page Token = (\S+)", reply.text, re.MULTILINE)
        token = following[1] if following else ""
    return found


def differences(listed: Mapping[str, int | None], expected: Mapping[str, int]) -> tuple[list[str], list[str]]:
    """What a list of files on Kaggle lacks of what was bundled, in sentences: faults, and what could not be compared.

    Args:
        listed: bytes by path, as Kaggle lists them: top folders travel as archives, which it unpacks into folders again.
        expected: bytes by path, as bundled.
    """
    faults, notes = [], []
    archives = {name[: -len(".zip")] for name in listed if name.endswith(".zip") and "/" not in name}
    packed = {top for path in expected if (top := path.partition("/")[0]) in archives and "/" in path}
    packed = {top for top in packed if not any(name.startswith(f"{top}/") for name in listed)}
    if packed:
        notes.append(f"{', '.join(sorted(packed))} are listed as archives, what is inside could not be compared.")
    compared = {
        path: size for path, size in expected.items() if path.partition("/")[0] not in packed or "/" not in path
    }
    missing = sorted(compared.keys() - listed.keys())
    flat = [path for path in missing if "/" in path and path.rpartition("/")[2] in listed]
    if flat:
        faults.append(f"{len(flat)} files have lost their folders, {flat[0]} among them.")
    if gone := [path for path in missing if path not in flat]:
        faults.append(f"{len(gone)} files are missing, {', '.join(gone[:3])} among them.")
    if odd := [path for path in sorted(compared.keys() & listed.keys()) if listed[path] not in (None, compared[path])]:
        sizes = f"{odd[0]} with {listed[odd[0]]:,} bytes for {compared[odd[0]]:,}"
        faults.append(f"{len(odd)} files have another size, {sizes} among them.")
    return faults, notes
