"""Splits of a table into folds: whole patients, dealt out evenly; or whole machines, held out."""

import numpy as np
import pandas as pd

from rsnakit.resampling import wilson
from rsnakit.tables import TableError

SPLITS = ("patient", "machine")


def make_folds(table: pd.DataFrame, n_folds: int, seed: int, split: str = "patient") -> pd.Series:
    """A fold number for each row. A patient's rows are always in one fold.

    `patient`: the patients are what is dealt out, each with its label (any cancer) and its site: shuffled, sorted by label
    and site, and dealt one by one. So no two folds differ by more than one patient in any stratum, in either label, or in
    all, which splitting rows with groups as a side condition does not give: that can leave folds without positives.

    `machine`: whole machines are held out, as the test set has machines that training never saw. One by one, those with the
    most patients with cancer first, they go to the fold that has the fewest of these so far; those without any, to the fold
    with the fewest patients. Folds are then as uneven as the machines are, and the seed decides between equals alone. A
    patient with images of two machines goes whole with the one that made more of them (of equals, the first by name), so
    that a few images of a machine may lie on the other side. Images without a machine count as those of one more machine.

    Args:
        table: as `load_table` gives it, with `cancer`, and `site_id` or `machine_id`. The order of its rows does not matter.
        n_folds: 2 or more.
        seed: another one deals other folds.
        split: one of `SPLITS`.

    Returns:
        (N,) int64 Series on the table's index, values 0 to n_folds - 1.

    Raises:
        TableError: there are fewer patients (or machines) than folds, the column machine_id is missing, or a fold has no
            breast with cancer or none without; the message has a table of the folds.
        ValueError: another split.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r}: expected one of {', '.join(SPLITS)}")
    n_patients = table["patient_id"].nunique()
    if n_folds < 2 or n_patients < n_folds:
        raise TableError(f"{n_folds} folds of {n_patients} patients: at least 2 folds and a patient in each are needed")
    deal = _deal_patients if split == "patient" else _deal_machines
    fold_of, advice = deal(table, n_folds, np.random.default_rng(seed))
    folds = table["patient_id"].map(fold_of).astype(np.int64).rename("fold")
    counts = count_folds(table, folds)
    negative = counts["breasts"] - counts["positive breasts"]
    if len(counts) < n_folds or (counts["positive breasts"] == 0).any() or (negative == 0).any():
        raise TableError(
            f"a fold without positives, or without negatives, cannot be scored:\n{counts.to_string()}\n{advice}"
        )
    return folds


def _deal_patients(table: pd.DataFrame, n_folds: int, rng: np.random.Generator) -> tuple[pd.Series, str]:
    """The fold of each patient, and what to do where these cannot be scored."""
    sites = table.assign(site=table["site_id"].astype(str))
    patients = sites.groupby("patient_id", sort=True).agg(cancer=("cancer", "max"), site=("site", "min"))
    shuffled = patients.iloc[rng.permutation(len(patients))]
    dealt = shuffled.sort_values(["cancer", "site"], kind="stable").index
    fewer = f"take fewer folds than {n_folds}" if n_folds > 2 else "two folds need two with and two without"
    advice = f"Of {len(patients)} patients {int(patients['cancer'].sum())} have cancer; {fewer}."
    return pd.Series(np.arange(len(dealt)) % n_folds, index=dealt), advice


def _deal_machines(table: pd.DataFrame, n_folds: int, rng: np.random.Generator) -> tuple[pd.Series, str]:
    """The fold of each patient, its machine's, and what to do where these cannot be scored."""
    if "machine_id" not in table:
        raise TableError(
            f"split='machine' needs a column machine_id; found {', '.join(map(str, table.columns))}. Take split='patient'."
        )
    images = pd.DataFrame(
        {"patient_id": table["patient_id"], "machine": machine_names(table), "cancer": table["cancer"]}
    )
    of_patient = images.groupby(["patient_id", "machine"]).size().rename("n").reset_index()
    of_patient = of_patient.sort_values(["patient_id", "n", "machine"], ascending=[True, False, True], kind="stable")
    patients = of_patient.drop_duplicates("patient_id").set_index("patient_id")[["machine"]]
    patients["cancer"] = images.groupby("patient_id")["cancer"].max()
    machines = patients.groupby("machine", sort=True)["cancer"].agg(["sum", "size"])
    positive = int((machines["sum"] > 0).sum())
    advice = f"Of {len(machines)} machines {positive} have patients with cancer; "
    advice += f"take fewer folds than {n_folds}, or split='patient'." if n_folds > 2 else "take split='patient'."
    if len(machines) < n_folds:
        raise TableError(f"{n_folds} folds of {len(machines)} machines: a machine in each is needed. {advice}")
    shuffled = machines.iloc[rng.permutation(len(machines))]
    fold_of, totals = {}, np.zeros((2, n_folds), np.int64)  # patients with cancer, and all, of each fold
    for machine, n in shuffled.sort_values(["sum", "size"], ascending=False, kind="stable").iterrows():
        first, second = (totals[0], totals[1]) if n["sum"] else (totals[1], totals[0])
        fold = int(np.lexsort((second, first))[0])  # the last key is the first to go by
        fold_of[machine] = fold
        totals[:, fold] += n.to_numpy()
    return patients["machine"].map(fold_of), advice


def machine_names(table: pd.DataFrame) -> pd.Series:
    """`machine_id` of each row as text, the same whether it was read as 49 or 49.0; "missing" where there is none."""
    names = table["machine_id"].astype(object)
    text = names.map(lambda name: f"{name:.15g}" if isinstance(name, float) else str(name))
    return text.where(names.notna(), "missing")


def count_folds(table: pd.DataFrame, folds: pd.Series) -> pd.DataFrame:
    """Patients, breasts, positive breasts, images and, where they are known, machines of each fold: the table to look at
    before training."""
    breasts = (
        table.assign(fold=folds)
        .groupby("breast_id")
        .agg(
            fold=("fold", "first"),
            patient_id=("patient_id", "first"),
            cancer=("cancer", "first"),
            images=("cancer", "size"),
        )
    )
    counts = breasts.groupby("fold").agg(
        patients=("patient_id", "nunique"),
        breasts=("cancer", "size"),
        positive=("cancer", "sum"),
        images=("images", "sum"),
    )
    if "machine_id" in table:
        counts["machines"] = machine_names(table).groupby(folds).nunique()
    return counts.rename(columns={"positive": "positive breasts"})


def with_rates(counts: pd.DataFrame) -> pd.DataFrame:
    """What `count_folds` gives, with the share of breasts with cancer in each fold and its 95 % Wilson interval, in %."""
    low, high = wilson(counts["positive breasts"], counts["breasts"])
    rates = {"with cancer, %": counts["positive breasts"] / counts["breasts"], "95 % from": low, "to": high}
    return counts.assign(**{name: (100 * rate).round(1) for name, rate in rates.items()})


def check_folds(table: pd.DataFrame, folds: pd.Series) -> None:
    """Stops (TableError) where a patient stands in two folds, as its images would be trained on and scored, or a row in none.

    Args:
        table: the images.
        folds: fold numbers on the table's index.
    """
    if not folds.index.equals(table.index) or folds.isna().any():
        raise TableError(f"{len(table)} images and {folds.notna().sum()} fold numbers that are not on the same rows")
    n = folds.groupby(table["patient_id"]).nunique()
    if (n > 1).any():
        patient = n.index[n > 1][0]
        where = sorted(folds[table["patient_id"] == patient].unique().tolist())
        raise TableError(
            f"patient {patient} is in folds {where}, and {(n > 1).sum()} patients in all are in more than one"
        )


def debug_subset(table: pd.DataFrame, n_patients: int = 24, n_positive: int = 8, seed: int = 0) -> pd.DataFrame:
    """A few patients of a training table, with positives among them, for a first try."""
    cancer = table.groupby("patient_id")["cancer"].max()
    rng = np.random.default_rng(seed)
    positive, negative = (np.sort(cancer.index[cancer == c].to_numpy(dtype=object)) for c in (1, 0))
    n_positive = min(n_positive, n_patients, len(positive))
    chosen = [*rng.permutation(positive)[:n_positive], *rng.permutation(negative)[: n_patients - n_positive]]
    return table[table["patient_id"].isin(chosen)].reset_index(drop=True)
