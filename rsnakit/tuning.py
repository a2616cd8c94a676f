"""What settings train fastest here, by trying them: precision, layout, compiling, checkpointing, batch, loader."""

import dataclasses
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from rsnakit import deciding, env, feeding, stretches
from rsnakit.deciding import Limit, beats, compared, layout_name
from rsnakit.env import RunConfig
from rsnakit.feeding import NO_TIME
from rsnakit.fields import check_all
from rsnakit.look import counted, times
from rsnakit.models import ModelConfig
from rsnakit.params import setting
from rsnakit.recipe import LoopConfig, TrainConfig
from rsnakit.store import FORMATS, Store
from rsnakit.trainer import unit_of
from rsnakit.trials import Batches, Measured, Setting, Trials, Workload
from rsnakit.tried import LEAST_S, Tried, row_of

PRECISIONS, MODES = ("fp32", "bf16", "fp16"), ("off", "default", "max-autotune")
CUT = ("was not done", NO_TIME, "not tried", "no time was left")  # how it is said that time was too short
OF_MODES = (0.75, 1.0)  # of what is left, to compile in each mode
LOADER_S = (0.3, 1.5)  # that a loader is measured for: at least, at most
LONG = 2000  # images that a sample is repeated to, so that epochs are no shorter than a real one's


@dataclasses.dataclass(frozen=True)
class SpeedConfig:
    """How long settings are tried for."""

    tune_minutes: float = setting(3.0, low=0.1, high=600.0)  # of trying settings, all parts together
    tune_batch: bool = setting(False)  # the fastest batch size is taken too; it decides the result, and lr goes with it

    def __post_init__(self) -> None:
        check_all(self)


class Tuner(Tried):
    """Tries settings for a training on the device at hand, part by part, and keeps what is faster.

    Parts may be called in any order, or left out; the order of `tune` is the best, as each goes on with what was chosen. Each
    gets a share of what is left of `tune_minutes`, gives up what takes longer, and says so. What was asked stays unless
    something else is faster beyond the spread of the rounds, which take turns. Except for batch_size and accumulate, and the
    rounding of pixels in another store, nothing here changes what a training comes to.

    A context manager, since trials run in a process of their own: `with Tuner(...) as tuner: tuner.precisions()`. `close`
    ends it as well, and `together` does so by itself. Arguments, attributes and errors are those of `Tried`, with a
    `SpeedConfig` in place of its minutes.
    """

    def __init__(
        self, images: pd.DataFrame, store: Store | Path | str, model_config: ModelConfig, train_config: TrainConfig,
        run_config: RunConfig, loop_config: LoopConfig, speed_config: SpeedConfig,
        trials: Callable[[Workload], Trials] = Trials,
    ) -> None:  # fmt: skip
        minutes, self.tune_batch = speed_config.tune_minutes, speed_config.tune_batch
        super().__init__(images, store, model_config, train_config, run_config, loop_config, minutes, trials)

    # ---- the parts

    def precisions(self) -> pd.DataFrame:
        """Tries fp32, bf16 and fp16, each with channels last and without; where not one of them has room for the batch that is
        asked, with checkpointing, and then with smaller batches."""
        asked = self._now["precision"], self._now["channels_last"]
        pairs = sorted(((p, layout) for p in PRECISIONS for layout in (True, False)), key=lambda pair: pair != asked)
        cannot = {name: problem for name in PRECISIONS if (problem := self._problem(name))}
        able = [pair for pair in pairs if pair[0] not in cannot]
        with self._part("precision") as left:
            found = dict(zip(able, self._first_that_fit(able, left), strict=True))
        best = deciding.winner({pair: measured.images_s for pair, measured in found.items()}, asked)
        if asked in found and _cut(found[asked]):
            best = asked  # nothing is known of it, so that nothing is known to be better
        rows = []
        for pair in pairs:
            measured = found.get(pair) or Measured(error=cannot[pair[0]])
            rows.append(row_of("precision", layout_name(*pair), self._batch, measured, pair == best))
        self._now |= {"precision": best[0], "channels_last": best[1]}
        self._model_rate = found[best].median
        others = {name: problem for name, problem in cannot.items() if not (self._refused and name == self._wanted)}
        reasons = deciding.precision_reasons(best, found, others, self.unit)
        if self._refused:
            reasons["precision"] = f"{self._wanted} was asked for, but {self._refused}; {reasons['precision']}"
        if self._now["grad_checkpointing"] != self.asked["grad_checkpointing"]:
            batch = self.asked["batch_size"]
            reasons["grad_checkpointing"] = f"without it batches of {batch} have no room in any precision"
        return self._keep("precision", rows, reasons)

    def compiling(self) -> pd.DataFrame:
        """Tries `torch.compile`, which is taken only where it is won back within the training that is asked for."""
        asked = self.asked["compile"]
        total = self.epoch_items * self.train_config.epochs / self.world
        found = {"off": Measured(error=NO_TIME)}
        names, reasons, seconds = dict.fromkeys(MODES, ""), {}, {"off": math.inf}
        with self._part("compile") as left:
            for mode, share in zip(MODES[1:], OF_MODES, strict=True):
                if mode == MODES[-1] and CUT[0] in found[MODES[1]].error:
                    found[mode] = Measured(
                        error=f"not tried: it compiles for longer than {MODES[1]}, which was not done"
                    )
                    reasons[mode] = f"{mode}: {found[mode].error}"
                    continue
                pair = [self._setting(compile="off"), self._setting(compile=mode)]
                off, found[mode] = self._in_turn(pair, share * left())
                if off.error or found[mode].error:
                    reasons[mode] = f"{mode}: {found[mode].error or off.error}"
                    found["off"] = found["off"] if found["off"].images_s else off
                    continue
                found["off"], new = off, found[mode]
                cost = self._sessions(total / new.median) * max(0.0, new.compile_s)
                pays = deciding.pays_after(cost, new.median, off.median)
                names[mode] = " (never pays)" if math.isinf(pays) else f" (pays after {pays / self._batch:,.0f} steps)"
                reasons[mode] = deciding.compile_reason(
                    mode, new, off, pays, total / self._batch, self._batch, self.unit
                )
                if pays < total and (mode == asked or beats(new.images_s, off.images_s)):
                    seconds[mode] = deciding.TIMES_COMPILED * cost + total / new.median
        best = min(seconds, key=seconds.get)
        if _cut(found[asked]):  # nothing is known against it
            best, reasons[asked] = asked, f"as asked: {found[asked].error}"
        modes = sorted(MODES, key=lambda mode: mode != asked)
        rows = [row_of("compile", mode + names[mode], self._batch, found[mode], mode == best) for mode in modes]
        self._now["compile"] = best
        known = not math.isnan(self._model_rate) and best == asked
        if found[best].images_s and not (known and len(found[best].images_s) < deciding.FEW):
            self._model_rate = found[best].median  # but for a round of its own while another way was compiled
        order = (best,) if best in reasons else MODES[1:]
        return self._keep("compile", rows, {"compile": "; ".join(reasons[mode] for mode in order)})

    def checkpointing(self) -> pd.DataFrame:
        """Tries checkpointing, which is taken only where the batch that is asked does not fit without."""
        batch, asked = self.asked["batch_size"], self.asked["grad_checkpointing"]
        ways = [self._setting(grad_checkpointing=on, compile="off", batch_size=batch) for on in (asked, not asked)]
        with self._part("checkpointing") as left:
            found = dict(zip((asked, not asked), self._in_turn(ways, left()), strict=True))
        best, reason = deciding.checkpointing_choice(batch, asked, found[False], found[True])
        names = {True: "checkpointed", False: "without checkpointing"}
        rows = [row_of("checkpointing", names[on], batch, found[on], on == best) for on in found]
        if found[best].images_s:
            if self._now["compile"] == "off":
                self._model_rate = found[best].median
            elif best != self._now["grad_checkpointing"] or self._batch != batch:
                self._model_rate = math.nan  # what it was does not hold for this
            self._batch = batch
        self._now["grad_checkpointing"] = best
        return self._keep("checkpointing", rows, {"grad_checkpointing": reason})

    def batches(self) -> pd.DataFrame:
        """Looks for the largest batch that fits, in the chosen precision and, to compare, in half precision or fp32. The batch
        that is asked stays where it fits, unless `tune_batch` says that the fastest is to be taken."""
        own, asked = self._now["precision"], self.asked["batch_size"]
        half = next((name for name in PRECISIONS[1:] if not self._problem(name)), None)
        names = [own, *filter(None, [half if own == "fp32" else "fp32"])]
        found, fastest = {}, None
        with self._part("batch") as left:
            for place, name in enumerate(names):
                start = self._setting(precision=name, compile="off", batch_size=asked)
                limit_s = left() / (len(names) - place) * (0.8 if self.tune_batch else 1)
                found[name] = self._trials.largest_batch(start, limit_s=limit_s) if limit_s >= LEAST_S else Batches()
            if found[own].ended == "memory" and found[own].largest < 2 and not self._now["grad_checkpointing"]:
                self._now["grad_checkpointing"] = True  # without it there is no training
                self.reasons["grad_checkpointing"] = "without it not even a batch of 2 fits"
                start = self._setting(precision=own, compile="off", batch_size=asked)
                found[own] = self._trials.largest_batch(start, limit_s=max(LEAST_S, left()))
            if self.tune_batch:
                fastest = self._fastest_batch(found[own], left())
        reason = self._choose_batch(found[own], fastest)
        if self._now["batch_size"] != self._batch and self._now["batch_size"] != asked:
            self._batch, self._model_rate = self._now["batch_size"], math.nan  # `loading` measures it
        largest = ", ".join(deciding.largest_in_words(name, found[name]) for name in names)
        rows = []
        for name, sizes in found.items():
            for size in sizes.tried or [{"batch": asked, "fits": False, "why": NO_TIME}]:
                measured = Measured(
                    (size["images_s"],) if size["fits"] else (),
                    peak_mb=size.get("peak_mb", math.nan),
                    error=size["why"],
                )
                chosen = (name, size["batch"]) == (own, self._now["batch_size"])
                rows.append(row_of("batch", f"{name}, batch {size['batch']}", size["batch"], measured, chosen))
        reasons = {"batch_size": f"{reason}; largest that fits: {largest}"}
        if self._now["accumulate"] != self.asked["accumulate"]:
            reasons["accumulate"] = self._step_in_words()
        return self._keep("batch", rows, reasons)

    def loading(self) -> pd.DataFrame:
        """Measures the loader by store format and number of workers, without a model, and says whether it or the model is the
        limit. Another loader that promises something is tried by `together`, which decides."""
        asked = self.asked["store_format"], self.asked["num_workers"]
        formats = sorted(FORMATS, key=lambda name: name != asked[0])
        workers = sorted({*feeding.worker_counts(max(1, env.cores() // self.world)), asked[1]})
        with self._part("loader") as left:
            if math.isnan(self._model_rate):
                self._model_rate = self._in_turn([self._setting()], left() / 2)[0].median
            self.close()  # its memory and cores are the loader's now
            seconds = np.clip(0.6 * left() / (len(formats) * len(workers)), *LOADER_S)
            model_config, train, _ = self._configs(self._now)
            self.loader_rates = found = feeding.rates(
                self.images, self.store, train, formats, workers, seconds, model_config=model_config,
                device=self.device, limit_s=left(),
            )  # fmt: skip
        rate_of = dict(zip(zip(found["store_format"], found["workers"], strict=True), found["images_s"], strict=True))
        self._candidates, without = self._loaders_with_room(rate_of, asked)
        by = "loader" if rate_of[asked] < self._model_rate else "model"
        self.limit = Limit(by, rate_of[asked], self._model_rate, *asked, self.unit)
        rows = []
        for row in sorted(found.itertuples(), key=lambda row: (row.store_format, row.workers) != asked):
            rates = () if row.skipped else (row.low, row.images_s, row.high)
            name, measured = feeding.loader_name(row.store_format, row.workers), Measured(rates, error=row.skipped)
            chosen = (row.store_format, row.workers) == asked
            rows.append(row_of("loader", name, self._now["batch_size"], measured, chosen))
        kept = f"as asked: {self.limit}"
        return self._keep("loader", rows, {"num_workers": kept, "store_format": "; ".join([kept, *without])})

    def together(self) -> pd.DataFrame:
        """Trains in earnest, loader and all: with what was asked and with what was chosen, in turn; and with a loader that
        promised something. What was asked comes back where the rest is no faster."""
        self.close()
        tried = {"as asked": self.asked}
        if self._now != self.asked:
            tried["as chosen"] = dict(self._now)
        for image_format, workers in self._candidates:
            if image_format == self.asked["store_format"]:
                name = "as chosen" if "as chosen" in tried else "as asked"
                tried[f"{name}, {counted(workers, 'worker')}"] = {**self._now, "num_workers": workers}
        with self._part("together") as left:
            formats = [name for name, _ in self._candidates if name != self.asked["store_format"]]
            until = left() * (0.4 if formats else 0.0)
            found, best = self._best_of(list(tried.values()), lambda: left() - until)
            names = list(tried)
            if best is not None:
                best = self._judge(names, list(tried.values()), found, best)
            rows = [
                row_of("together", name, values["batch_size"], measured, place == best)
                for place, (name, values, measured) in enumerate(zip(names, tried.values(), found, strict=True))
            ]
            for image_format in formats:
                others = self._other_store(image_format, left)
                for row in rows if others[-1]["chosen"] else ():
                    row["chosen"] = False  # of all that was tried this is what is taken
                rows += others
        for row in self._rows.get("loader", ()):
            row["chosen"] = row["name"] == feeding.loader_name(self._now["store_format"], self._now["num_workers"])
        return self._keep("together", rows, {})

    # ---- helpers

    def _loaders_with_room(
        self, rate_of: dict[tuple[str, int], float], asked: tuple[str, int]
    ) -> tuple[list[tuple[str, int]], list[str]]:
        """Loaders that are worth a try, and why stores that would be have no room."""
        without: dict[str, str] = {}
        while True:
            rates = {key: rate for key, rate in rate_of.items() if key[0] not in without}
            found = deciding.loaders_worth_a_try(rates, asked, self._model_rate, self.device == "cpu")
            others = {name for name, _ in found if name != asked[0]}
            reasons = {name: why for name in others if (why := feeding.no_room(self.store, name))}
            if not reasons:
                return found, list(without.values())
            without |= reasons

    def _first_that_fit(self, pairs: Sequence[tuple[str, bool]], left: Callable[[], float]) -> list[Measured]:
        """Each precision and layout, in the first way in which any of them has room."""
        asked, batch = self.asked["grad_checkpointing"], self.asked["batch_size"]
        smaller = [(True, batch >> k) for k in range(1, batch.bit_length())]
        for on, size in [(asked, batch), *([] if asked else [(True, batch)]), *smaller]:
            settings = [Setting(*pair, "off", on, size) for pair in pairs]
            found = self._in_turn(settings, left())
            if any(each.images_s for each in found):
                self._now["grad_checkpointing"], self._batch = on, size
                break
            if not any(map(deciding.lacks_room, found)):  # a smaller batch would not help
                break
        return found

    def _fastest_batch(self, found: Batches, limit_s: float) -> tuple[int, str] | None:
        """The fastest batch that was found, where it beats the one that is asked in turn with it; and why."""
        asked, least = self.asked["batch_size"], self._least_batch()
        # A batch of more than an epoch holds would be smaller in training than the one that was timed.
        fits = [size for size in found.tried if size["fits"] and least <= size["batch"] <= max(asked, self.epoch_items)]
        best = max(fits, key=lambda size: size["images_s"], default={"batch": asked})["batch"]
        if best == asked:
            return None
        old, new = self._in_turn([self._setting(compile="off", batch_size=size) for size in (asked, best)], limit_s)
        if not beats(new.images_s, old.images_s):
            return None
        return best, compared(f"a batch of {best}", new.images_s, f"one of {asked}", old.images_s, self.unit)

    def _choose_batch(self, found: Batches, fastest: tuple[int, str] | None) -> str:
        """Sets batch_size and accumulate, and says why."""
        asked, accumulate = self.asked["batch_size"], self.asked["accumulate"]
        if fastest:
            self._now["batch_size"] = best = fastest[0]
            if accumulate > self.world:  # fewer batches to a step, so that it sees what it saw
                steps = max(1, round(asked * accumulate / (best * self.world)))
                self._now["accumulate"] = steps * self.world
            return f"{fastest[1]}; it decides the result, and lr goes with it: {self._step_in_words()}"
        if found.largest >= asked:
            return "as asked, which fits"
        least = self._least_batch()
        if found.largest < least:
            if found.ended == "memory":
                return f"as asked, though it does not fit: not even {least} do ({_why(found)})"
            return f"as asked: {_why(found)}"
        batch, steps = deciding.same_step(asked, accumulate, found.largest, self.world, least)
        self._now |= {"batch_size": batch, "accumulate": steps}
        before, after = self.epoch_items, self._epoch_items(self.items, self.positives, batch, steps)
        text = f"{asked} do not fit ({_why(found)}); {self._step_in_words()}"
        if abs(after - before) > 0.01 * before:
            text += (
                f"; as min_positives counts for each batch, an epoch has {after:,} {self.unit} instead of {before:,}"
            )
        return text

    def _least_batch(self) -> int:
        """The smallest batch that training takes: there has to be a negative beside the positives of each."""
        config = self.train_config
        return max(2, config.min_positives + 1 if config.negatives_per_positive else 2)

    def _step_in_words(self) -> str:
        step, before = (of["batch_size"] * of["accumulate"] for of in (self._now, self.asked))
        same = f"an optimiser step sees {step} {self.unit}"
        return f"{same}, as before" if step == before else f"{same} instead of {before}"

    def _best_of(
        self,
        tried: Sequence[dict],
        left: Callable[[], float],
        images: pd.DataFrame | None = None,
        stores: Sequence = (),
    ) -> tuple[list[Measured], int | None]:
        """Trainings with these settings against each other, on the store or on one each of `stores`."""
        images, jobs = self.images if images is None else images, []
        for place, values in enumerate(tried):
            store = stores[place] if stores else self.store.path
            workload = Workload(images, store, *self._configs(values), self.device)
            jobs.append((workload, values["precision"], values["num_workers"]))
        return stretches.best_of(jobs, left)

    def _judge(self, names: Sequence[str], tried: Sequence[dict], found: Sequence[Measured], best: int) -> int:
        """Takes what was best end to end, and gives its number; what time was too short to measure, but was chosen before, is
        not judged and stays."""
        now = dict(self._now)
        chosen = names.index("as chosen") if "as chosen" in names else 0
        if best == 0 and chosen and _cut(found[chosen]):
            return chosen
        self._now, self._end_to_end = dict(tried[best]), found[best].median
        for name, value in now.items():
            if self._now[name] != value and name in self.reasons:
                old = found[chosen]
                why = old.error or compared(
                    "what was chosen", old.images_s, "what was asked", found[0].images_s, self.unit
                )
                if name == "num_workers":
                    new, than = (f"with {counted(n, 'worker')}" for n in (self._now[name], value))
                    why = compared(f"{new} it", found[best].images_s, than, old.images_s, self.unit)
                    self.reasons[name] = f"end to end {why}; {self.limit}"
                else:
                    self.reasons[name] = f"as asked: end to end {why}; by itself: {self.reasons[name]}"
        return best

    def _other_store(self, image_format: str, left: Callable[[], float]) -> list[dict]:
        """Rows of training from a sample of the store in two formats; the other one is taken where it is faster."""
        names = [f"from a sample as {name}" for name in (self.asked["store_format"], image_format)]
        workers = next(count for name, count in self._candidates if name == image_format)
        values = [self._now, {**self._now, "num_workers": workers, "store_format": image_format}]
        found, best = [Measured(error=NO_TIME)] * 2, None
        if left() >= LEAST_S:
            unit = unit_of(self.model_config)
            sample = feeding.sampled(self.images, self.store, unit)
            with tempfile.TemporaryDirectory(prefix="rsnakit-") as folder:
                stores = []
                for each in (self.asked["store_format"], image_format):
                    stores.append(Path(folder) / each)
                    feeding.written(sample, self.store, each, stores[-1])
                repeated = feeding.repeated(sample, -(-LONG // len(sample)))
                found, best = self._best_of(values, left, repeated, stores)
        if best == 1:
            self._now, self._end_to_end = dict(values[1]), found[1].median
            why = compared(image_format, found[1].images_s, self.asked["store_format"], found[0].images_s, self.unit)
            size = feeding.size_ratio(image_format, self.asked["store_format"], self.store.shape)
            self.reasons["store_format"] = (
                f"end to end {why}, from a sample in memory; 02_preprocess has to make that store, {times(size)} "
                "times as big, in a store_dir of its own if one is named; pixels may differ by a rounding, so that a run that "
                "has begun goes on with the store it has"
            )
            self.reasons["num_workers"] = self.reasons["store_format"]
        return [
            row_of("together", name, self._now["batch_size"], measured, place == 1 and best == 1)
            for place, (name, measured) in enumerate(zip(names, found, strict=True))
        ]


def tune(
    images: pd.DataFrame, store: Store | Path | str, model_config: ModelConfig, train_config: TrainConfig,
    run_config: RunConfig, loop_config: LoopConfig, speed_config: SpeedConfig,
) -> Tuner:  # fmt: skip
    """All parts of a `Tuner`, which see, one after another; within `tune_minutes` and what processes take to start."""
    with Tuner(images, store, model_config, train_config, run_config, loop_config, speed_config) as tuner:
        for part in ("precisions", "compiling", "checkpointing", "batches", "loading", "together"):
            getattr(tuner, part)()
    return tuner


def _cut(measured: Measured) -> bool:
    """Whether time was too short to measure it, so that nothing is known."""
    return any(words in measured.error for words in CUT)


def _why(found: Batches) -> str:
    """What stopped the search for the largest batch."""
    reasons = [size["why"] for size in found.tried if size["why"]]
    return reasons[-1] if reasons else "no time was left to find the largest"
