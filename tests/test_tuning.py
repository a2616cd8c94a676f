"""rsnakit.tuning: what is chosen at made rates, whose answer is known, and how it is written down; once in earnest."""

import dataclasses
import math
from functools import partial
from types import SimpleNamespace

import pandas as pd
import pytest
import yaml

from rsnakit import data, deciding, feeding, params, stretches, tuning
from rsnakit.engine import LoopConfig, TrainConfig
from rsnakit.env import RunConfig
from rsnakit.models import ModelConfig
from rsnakit.params import from_mapping
from rsnakit.stretches import StretchError
from rsnakit.trials import Batches, Measured
from rsnakit.tried import COLUMNS, SHARES
from rsnakit.tuning import SpeedConfig, Tuner

MODEL = ModelConfig(backbone="test_efficientnet", weights="none")
TRAIN = TrainConfig(batch_size=8, epochs=2)
CPU, LOOP = RunConfig(device="cpu"), LoopConfig()
FULL = "the main memory is used up (RuntimeError: not enough memory)"
SPREAD = (0.99, 1.0, 1.01)


def rounds(rate: float, spread=SPREAD) -> tuple[float, ...]:
    return tuple(rate * share for share in spread)


class Made:
    """Trials whose rates are made: `rate` of a setting in images/s; above `room` images memory is full, twice as many fit where
    blocks are checkpointed or precision is half; `limits` that were given."""

    def __init__(self, rate, room: float = 1e9, compile_s: float = 10.0) -> None:
        self.rate, self.room, self.compile_s, self.limits, self.workload, self.closed = (
            rate,
            room,
            compile_s,
            [],
            None,
            0,
        )

    def __call__(self, workload) -> "Made":
        self.workload = workload
        return self

    def fits(self, setting) -> bool:
        return setting.batch_size <= self.room * (1 + setting.grad_checkpointing) * (1 + (setting.precision != "fp32"))

    def in_turn(self, settings, rounds_: int, limit_s: float) -> list[Measured]:
        self.limits.append(limit_s)
        found = []
        for setting in settings:
            rate = self.rate(setting)
            if isinstance(rate, str):
                found.append(Measured(error=rate))
            elif not self.fits(setting):
                found.append(Measured(error=FULL))
            else:
                compile_s = self.compile_s if setting.compile != "off" else 0.1
                memory = 100.0 * setting.batch_size / (1 + setting.grad_checkpointing)
                found.append(Measured(rate if isinstance(rate, tuple) else rounds(rate), compile_s, memory))
        return found

    def largest_batch(self, setting, limit_s: float) -> Batches:
        self.limits.append(limit_s)
        tried, largest = [], 0
        for size in (setting.batch_size, *(2**k for k in range(8))):
            fits = self.fits(dataclasses.replace(setting, batch_size=size))
            largest = max(largest, size * fits)
            rate = self.rate(dataclasses.replace(setting, batch_size=size))
            tried.append(
                {"batch": size, "fits": fits, "images_s": rate, "peak_mb": 9.0 * size, "why": "" if fits else FULL}
            )
        return Batches(largest, tried, "memory")

    def close(self) -> None:
        self.closed += 1


class Run:
    """A stretch whose rate is made from its workload, precision and number of workers."""

    def __init__(self, rate, workload, precision, workers) -> None:
        self.rate, self.peak_mb = rate(workload, precision, workers), 5.0

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        pass

    def begin(self, limit_s: float) -> None:
        if isinstance(self.rate, str):
            raise StretchError(self.rate)

    def round(self, seconds: float, limit_s: float) -> float:
        return self.rate


@pytest.fixture
def images(table, store) -> pd.DataFrame:
    return data.usable(table, store)[0]


@pytest.fixture
def make(images, store):
    def tuner(made: Made, model=MODEL, train=TRAIN, run=CPU, loop=LOOP, **speed) -> Tuner:
        return Tuner(images, store, model, train, run, loop, SpeedConfig(**speed), trials=made)

    return tuner


def chosen(rows: pd.DataFrame) -> list[str]:
    return rows.loc[rows["chosen"], "name"].tolist()


# ---- precision and layout


def of_precision(**rates: float):
    return lambda setting: rates[setting.precision] * (2 if setting.channels_last else 1)


@pytest.mark.parametrize(("asked", "bf16", "best"), [
    ("auto", 30.0, "bf16, channels last"), ("fp32", 12.0, "fp32, channels last"), ("bf16", 12.0, "fp32, channels last"),
    ("fp32", 20.1, "fp32, channels last"), ("bf16", 19.9, "bf16, channels last"),
])  # fmt: skip
def test_the_faster_precision_is_chosen_and_the_asked_one_stays_within_the_spread(make, asked, bf16, best):
    """fp32 gives 20 images/s: as for EfficientNet-Lite0 on CPUs, half precision may be slower."""
    tuner = make(Made(of_precision(fp32=20.0, bf16=bf16)), run=RunConfig(device="cpu", precision=asked))
    rows = tuner.precisions()
    assert list(rows.columns) == list(COLUMNS)
    assert chosen(rows) == [best] and rows["name"].iloc[0].startswith("fp32" if asked == "auto" else asked)
    assert tuner.settings == {"precision": best.split(",")[0], "channels_last": True}
    assert rows.loc[rows["name"].str.startswith("fp16"), "skipped"].str.contains("a CPU is slow in fp16").all()
    assert "trains 2 times as many images/s" in tuner.reasons["channels_last"]
    assert tuner.table.equals(rows)


def test_every_round_has_to_be_won(make):
    def rate(setting):
        return (10.0, 10.0, 30.0, 30.0, 10.0) if setting.precision == "fp32" else (30.0, 30.0, 29.0, 60.0, 60.0)

    tuner = make(Made(rate), run=RunConfig(device="cpu", precision="fp32"))
    assert chosen(tuner.precisions()) == ["fp32, channels last"]  # 3 times at the median, but once slower
    assert "within the spread" in tuner.reasons["precision"]


@pytest.mark.parametrize(
    ("new", "said"), [((8.0, 11.0, 8.0), True), ((8.0, 7.0, 8.0), False), ((12.0, 9.0, 13.0), True)]
)
def test_both_ways_it_is_said_what_the_rounds_leave_open(new, said):
    text = deciding.compared("bf16", new, "fp32", (10.0, 10.0, 10.0))
    assert text.endswith("which is within the spread of the rounds") == said


def test_a_precision_whose_loss_is_nan_is_skipped_with_the_reason(make):
    nan = "the loss is nan in bf16 on cpu"
    tuner = make(Made(lambda setting: nan if setting.precision == "bf16" else 7.0))
    rows = tuner.precisions().set_index("name")
    assert rows.loc["bf16", "skipped"] == nan and math.isnan(rows.loc["bf16", "images_s"])
    assert tuner.settings["precision"] == "fp32" and nan in tuner.reasons["precision"]


def test_a_precision_that_the_device_refuses_is_replaced(make):
    tuner = make(Made(of_precision(fp32=20.0, bf16=12.0)), run=RunConfig(device="cpu", precision="fp16"))
    tuner.precisions()
    assert tuner.settings["precision"] == "fp32"
    assert tuner.reasons["precision"].startswith("fp16 was asked for, but a CPU is slow in fp16")


# ---- compiling


def of_compile(off: float, default: float, most=5.0):
    return lambda setting: {"off": off, "default": default, "max-autotune": most}[setting.compile]


@pytest.mark.parametrize(("epochs", "best"), [(1, "off"), (400, "default")])
def test_compiling_has_to_pay_within_the_training(make, epochs, best):
    """Twice 10 s (training, scoring) at a gain of 1/10 - 1/20 s an image pay after 400 images: 50 steps of 8."""
    tuner = make(Made(of_compile(10.0, 20.0)), train=dataclasses.replace(TRAIN, epochs=epochs))
    assert tuner.epoch_items < 400 < 400 * tuner.epoch_items
    rows = tuner.compiling().set_index("name")
    assert rows.index[1] == "default (pays after 50 steps)" and rows.index[2] == "max-autotune (never pays)"
    assert chosen(rows.reset_index())[0].split()[0] == best == tuner.settings["compile"]
    assert "pays after 50 steps" in tuner.reasons["compile"] and "images/s as not compiled" in tuner.reasons["compile"]
    steps = tuner.epoch_items * epochs / 8
    assert f"this training has {steps:,.0f}" in tuner.reasons["compile"]


def test_a_training_in_sessions_compiles_in_each(make):
    """800 images at 20 images/s are 40 s: in sessions of 8 s it begins five times."""
    made = Made(of_compile(10.0, 20.0))
    epochs = -(-800 // make(made).epoch_items)
    train = dataclasses.replace(TRAIN, epochs=epochs)
    assert make(made, train=train).compiling()["chosen"].tolist()[1]
    tuner = make(made, train=train, run=RunConfig(device="cpu", max_hours=8 / 3600))
    assert not tuner.compiling()["chosen"].tolist()[1]


def test_what_cannot_be_compiled_is_skipped(make):  # T12
    tuner = make(Made(of_compile(10.0, "there is no C++ compiler g++", "too slow")), loop=LoopConfig(compile="default"))
    rows = tuner.compiling()
    assert rows["name"].tolist() == ["default", "off", "max-autotune"] and chosen(rows) == ["off"]
    assert rows["skipped"].tolist() == ["there is no C++ compiler g++", "", "too slow"]
    assert "no C++ compiler" in tuner.reasons["compile"]


def test_what_was_asked_stays_compiled_where_there_is_no_time_to_try_it(make):
    late = "it was not done after 16 s, and was ended"
    rows = make(Made(of_compile(10.0, late)), loop=LoopConfig(compile="default")).compiling()
    assert chosen(rows) == ["default"] and "compiles for longer than default" in rows["skipped"].iloc[2]


def test_what_was_asked_stays_where_there_was_no_time_to_measure_it(make):
    late = "it was not done after 0 s, and was ended"
    tuner = make(Made(lambda setting: late if setting.channels_last else 10.0))
    rows = tuner.precisions()
    assert chosen(rows) == ["fp32, channels last"] and rows["skipped"].iloc[0] == late
    assert tuner.settings == {"precision": "fp32", "channels_last": True}
    failed = make(Made(lambda setting: "the loss is nan" if setting.channels_last else 10.0)).precisions()
    assert chosen(failed) == ["fp32"]


# ---- memory


def of_checkpointing(setting) -> float:
    return 10.0 / (1.3 if setting.grad_checkpointing else 1.0)


@pytest.mark.parametrize(
    ("asked", "room", "best"), [(False, 8, False), (True, 8, False), (False, 4, True), (True, 4, True)]
)
def test_checkpointing_is_for_what_does_not_fit_without(make, asked, room, best):
    model = dataclasses.replace(MODEL, grad_checkpointing=asked)
    tuner = make(Made(of_checkpointing, room), model=model, run=RunConfig(device="cpu", precision="fp32"))
    rows = tuner.checkpointing()
    assert tuner.settings == {"grad_checkpointing": best}
    assert rows["name"].iloc[0] == ("checkpointed" if asked else "without checkpointing")
    words = "1.3 times as long and 0.5 times the memory" if room == 8 else "do not fit without"
    assert words in tuner.reasons["grad_checkpointing"]


def test_where_nothing_fits_smaller_batches_are_taken_with_steps_of_as_many_images(make):
    """Of 8 images one fits, two in half precision, and twice as many checkpointed: 2 to a batch, and 4 batches to a step."""
    tuner = make(Made(lambda setting: 10.0, room=1), run=RunConfig(device="cpu", precision="fp32"))
    rows = tuner.precisions().set_index("name")
    assert (rows["batch"] == 4).all() and tuner.settings["precision"] == "bf16"  # alone fits, checkpointed
    assert rows.loc["fp32", "skipped"] == FULL and rows.loc["bf16", "images_s"] == 10
    tuner.checkpointing()
    assert tuner.settings["grad_checkpointing"] is False
    tuner.batches()
    assert tuner.settings["batch_size"] == 2 and tuner.settings["accumulate"] == 4
    assert "8 do not fit" in tuner.reasons["batch_size"] and "sees 8 images, as before" in tuner.reasons["batch_size"]


def test_where_not_even_two_images_fit_without_it_blocks_are_checkpointed(make):
    tuner = make(Made(lambda setting: 10.0, room=1), run=RunConfig(device="cpu", precision="fp32"))
    tuner.batches()
    assert tuner.settings == {"grad_checkpointing": True, "batch_size": 2, "accumulate": 4}


def test_the_asked_batch_stays_where_it_fits_and_both_precisions_are_measured(make):
    tuner = make(Made(lambda setting: 10.0 + setting.batch_size, 16), run=RunConfig(device="cpu", precision="fp32"))
    rows = tuner.batches()
    assert chosen(rows) == ["fp32, batch 8"] * 2  # tried twice by the fake
    assert tuner.settings == {"batch_size": 8} and "fp32 16, bf16 32" in tuner.reasons["batch_size"]
    largest = rows[rows["images_s"] > 0].groupby(rows["name"].str.split(",").str[0])["batch"].max()
    assert largest.to_dict() == {"fp32": 16, "bf16": 32}
    assert rows.loc[rows["batch"] == 64, "skipped"].eq(FULL).all()


def test_what_fits_of_smaller_batches_is_taken_though_time_was_too_short_for_the_largest(make):
    made = Made(lambda setting: 10.0)
    tried = [
        {"batch": 8, "fits": False, "images_s": math.nan, "why": FULL},
        {"batch": 4, "fits": True, "images_s": 9, "why": ""},
    ]
    made.largest_batch = lambda setting, limit_s: Batches(4, tried, "time")
    tuner = make(made)
    tuner.batches()
    assert tuner.settings == {"batch_size": 4, "accumulate": 2} and "fp32 at least 4" in tuner.reasons["batch_size"]
    made.largest_batch = lambda setting, limit_s: Batches(0, tried[:1], "time")
    tuner = make(made)
    tuner.batches()
    assert tuner.settings == {"batch_size": 8} and "as asked: the main memory" in tuner.reasons["batch_size"]


def test_checkpointing_that_gives_room_is_among_the_settings_at_once(make):
    tuner = make(Made(of_checkpointing, room=4), run=RunConfig(device="cpu", precision="fp32"))
    tuner._trials.fits = lambda setting: setting.grad_checkpointing
    tuner.precisions()
    assert tuner.settings["grad_checkpointing"] is True and "8 have no room" in tuner.reasons["grad_checkpointing"]


def test_a_model_without_blocks_is_not_checkpointed_for_want_of_room(make):
    """Trials then refuse the second way, and not for room."""
    tuner = make(
        Made(lambda setting: "VGG: no blocks found to checkpoint" if setting.grad_checkpointing else 1.0, room=1)
    )
    tuner.precisions()
    assert tuner._now["grad_checkpointing"] is False and "grad_checkpointing" not in tuner.settings


def test_the_fastest_batch_is_one_that_training_takes(make):
    """Trials repeat images, so that more fit than an epoch has."""
    few = make(Made(lambda s: 10.0 + s.batch_size), tune_batch=True)
    few.epoch_items = 20
    few.batches()
    assert few.settings["batch_size"] == 16
    train = dataclasses.replace(TRAIN, batch_size=8, min_positives=4)
    tuner = make(Made(lambda s: 100.0 / s.batch_size), train=train, tune_batch=True)
    tuner.batches()
    assert tuner.settings["batch_size"] == 8  # of 4 all would be positive


@pytest.mark.parametrize(("accumulate", "expected"), [(0, 1), (4, 2)])
def test_the_fastest_batch_is_taken_when_asked_for(make, accumulate, expected):
    train = dataclasses.replace(TRAIN, accumulate=accumulate)
    tuner = make(Made(lambda s: 10.0 + s.batch_size, 16), train=train, tune_batch=True)
    tuner.batches()
    assert tuner.settings["batch_size"] == 16 and tuner._now["accumulate"] == expected
    assert "it decides the result" in tuner.reasons["batch_size"]


# ---- the loader, and all together


@pytest.fixture
def loaders(monkeypatch):
    """Loaders whose rates are made."""

    def put(**of_format) -> None:
        def rates(images, store, train, formats, workers, seconds, **_):
            rows = [
                (name, n, of_format.get(name, 1.0) * (n + 1), 0, 0, "") for name in formats for n in workers
            ]  # workers add up
            frame = pd.DataFrame(rows, columns=["store_format", "workers", "images_s", "low", "high", "skipped"])
            return frame.assign(low=0.9 * frame["images_s"], high=1.1 * frame["images_s"])

        monkeypatch.setattr(tuning.feeding, "rates", rates)
        monkeypatch.setattr(tuning.env, "cores", lambda: 2)

    return put


@pytest.fixture
def runs(monkeypatch):
    """Stretches whose rates are made."""
    real = stretches.best_of
    return lambda rate: monkeypatch.setattr(stretches, "best_of", partial(real, stretch=partial(Run, rate)))


def test_the_limit_has_both_rates(make, loaders):
    loaders(block8=30.0)
    tuner = make(Made(lambda setting: 10.0))
    rows = tuner.loading()
    assert tuner.limit[:3] == ("model", 30.0, 10.0)
    assert "the loader gives 30 images/s" in str(tuner.limit) and "loading takes 25 % of the time" in str(tuner.limit)
    assert rows["name"].iloc[0] == "block8, 0 workers" and chosen(rows) == ["block8, 0 workers"]
    assert tuner.rate == pytest.approx(7.5)  # in turns: 1/10 + 1/30 s an image
    loaders(block8=5.0)
    tuner = make(Made(lambda setting: 10.0))
    tuner.loading()
    assert tuner.limit.by == "loader"


def test_the_rate_of_the_model_is_that_of_what_was_chosen(make, loaders):
    """Not of the one round that it had by itself while another way was compiled; and anew where the batch changed."""
    loaders(block8=30.0)
    made = Made(lambda s: {"off": 10.0, "default": "it was not done after 3 s"}.get(s.compile, 1.0))
    real = made.in_turn

    def cut(settings, count, limit_s):
        found = real(settings, count, limit_s)
        late = any(each.error for each in found)
        return [dataclasses.replace(each, images_s=(3.0,)) if each.images_s and late else each for each in found]

    made.in_turn = cut
    tuner = make(made, run=RunConfig(device="cpu", precision="fp32"))
    tuner.precisions(), tuner.compiling()
    assert tuner.rate == 10
    made.rate = lambda setting: 20.0 if setting.batch_size == 4 else 10.0
    made.fits = lambda setting: setting.batch_size <= 4
    tuner.batches(), tuner.loading()
    assert tuner.settings["batch_size"] == 4 and tuner.limit.model == 20


@pytest.mark.parametrize(("gain", "workers"), [(1.5, 2), (0.9, 0)])
def test_workers_are_taken_only_where_they_pay_end_to_end(make, loaders, runs, gain, workers):
    """On a CPU they compete with the model: the loader alone says nothing."""
    loaders(block8=4.0)
    runs(lambda workload, precision, n: 3.0 * (gain if n else 1))
    tuner = make(Made(lambda setting: 12.0))
    tuner.loading()
    rows = tuner.together()
    assert tuner.settings["num_workers"] == workers
    assert tuner.table.query("part == 'loader'").pipe(chosen) == [f"block8, {workers} workers"]
    assert rows["name"].iloc[0] == "as asked" and tuner.rate == 3.0 * max(1, gain)
    said = "end to end with 2 workers it trains 1.5 times as many images/s as with 0 workers (4.5 against 3)"
    assert tuner.reasons["num_workers"].startswith(said if gain > 1 else "as asked")


@pytest.mark.parametrize(("gain", "best"), [(1.5, "raw16"), (1.0, "block8")])
def test_another_store_is_taken_only_where_it_pays_end_to_end(make, loaders, runs, gain, best):
    loaders(block8=1.0, raw16=20.0, png8=90.0)
    runs(lambda workload, precision, n: 3.0 * (gain if str(workload.store).endswith("raw16") else 1))
    tuner = make(Made(lambda setting: 12.0), run=RunConfig(device="cpu", num_workers=2))
    tuner.loading()
    rows = tuner.together()
    assert rows["name"].tolist()[-2:] == ["from a sample as block8", "from a sample as raw16"]
    assert tuner.settings["store_format"] == best
    assert ("02_preprocess" in tuner.reasons["store_format"]) == (best == "raw16")
    assert chosen(rows) == ["from a sample as raw16" if best == "raw16" else "as asked"]


def test_what_was_chosen_stays_where_time_is_too_short_to_train_with_it(make, runs):
    """It compiles first, say: that it is slower nobody has seen."""
    late = "it was not done after 20 s, and was ended"
    runs(lambda workload, precision, n: late if precision == "bf16" else 3.0)
    tuner = make(Made(of_precision(fp32=10.0, bf16=20.0)), run=RunConfig(device="cpu", precision="fp32"))
    tuner.precisions()
    rows = tuner.together()
    assert tuner.settings["precision"] == "bf16" and rows["skipped"].tolist() == ["", late]
    assert chosen(rows) == ["as chosen"] and "end to end" not in tuner.reasons["precision"]


@pytest.mark.parametrize(("disk", "memory", "said"), [
    (1000, 1e12, "raw16 needs"), (1e12, 1000, "raw16 takes"), (1e12, 1e12, ""),
])  # fmt: skip
def test_a_store_that_has_no_room_is_not_tried(make, loaders, runs, monkeypatch, disk, memory, said):
    """A sample of it is in memory, where every format is fast."""
    monkeypatch.setattr(feeding.shutil, "disk_usage", lambda _: SimpleNamespace(free=disk))
    monkeypatch.setattr(feeding.device_memory, "available", lambda: memory)
    loaders(block8=1.0, raw16=20.0)
    runs(lambda workload, precision, n: 3.0 * (1.5 if str(workload.store).endswith("raw16") else 1))
    tuner = make(Made(lambda setting: 12.0), run=RunConfig(device="cpu", num_workers=2))
    tuner.loading(), tuner.together()
    assert tuner.settings["store_format"] == ("block8" if said else "raw16")
    assert said in tuner.reasons["store_format"]


@pytest.mark.parametrize(("end_to_end", "best"), [(2.0, "bf16"), (0.8, "fp32")])
def test_what_was_asked_comes_back_where_the_rest_is_slower(make, runs, end_to_end, best):
    runs(lambda workload, precision, n: 3.0 * (end_to_end if precision == "bf16" else 1))
    tuner = make(Made(of_precision(fp32=10.0, bf16=20.0)), run=RunConfig(device="cpu", precision="fp32"))
    tuner.precisions()
    assert tuner.settings["precision"] == "bf16"
    rows = tuner.together()
    assert tuner.settings["precision"] == best and chosen(rows) == ["as chosen" if best == "bf16" else "as asked"]
    assert ("end to end" in tuner.reasons["precision"]) == (best == "fp32")


def test_two_trainings_without_room_beside_each_other_are_measured_one_by_one():
    alive = []

    class Large(Run):
        def begin(self, limit_s):
            if alive:
                raise StretchError(FULL)
            alive.append(self)

        def close(self):
            if self in alive:
                alive.remove(self)

    jobs = [(10.0, "fp32", 0), (20.0, "fp32", 0)]
    stretch = partial(Large, lambda workload, precision, workers: workload)
    found, best = stretches.best_of(jobs, lambda: 50.0, stretch)
    assert [each.median for each in found] == [10, 20] and best == 1 and not alive


@pytest.mark.parametrize(("on_cpu", "asked", "expected"), [
    (True, ("block8", 2), [("block8", 0)]),  # 1/10 + 1/40 s an image against 1/10 + 1/20
    (False, ("block8", 2), []),  # beside a GPU that takes 10, 20 are enough
    (False, ("block8", 0), [("block8", 2)]),  # in turns 8
    (True, ("block8", 0), []),  # raw16 and its 41 promise less than 3 % more, and png8 keeps 8 bits of 12
])  # fmt: skip
def test_loaders_that_promise_nothing_are_not_tried(on_cpu, asked, expected):
    rates = {("block8", 0): 40.0, ("block8", 2): 20.0, ("raw16", 0): 41.0, ("png8", 0): 900.0, ("png16", 0): math.nan}
    assert deciding.loaders_worth_a_try(rates, asked, 10.0, on_cpu) == expected


@pytest.mark.parametrize(("asked", "largest", "expected"), [
    ((8, 1), 8, (8, 1)), ((8, 1), 7, (4, 2)), ((16, 2), 7, (4, 8)), ((12, 1), 5, (4, 3)), ((48, 2), 20, (16, 6)),
    ((17, 1), 8, (6, 3)),  # a prime: a step of 18
])  # fmt: skip
def test_a_step_keeps_its_images_in_smaller_batches(asked, largest, expected):
    assert deciding.same_step(*asked, largest) == expected
    batch, steps = deciding.same_step(*asked, largest, world=2)
    assert (batch <= largest and steps % 2 == 0) or (batch, steps) == asked


# ---- what is told


@pytest.mark.parametrize(("ratio", "positives", "seen"), [(3.0, 100, 1200), (0.0, 100, 1000), (9.0, 100, 1000)])
def test_hours_count_what_an_epoch_shows(make, runs, ratio, positives, seen):
    """900 negatives, and a third or a ninth as many positives; or all as they are."""
    runs(lambda *_: 5.0)
    tuner = make(
        Made(lambda setting: 9.0), train=dataclasses.replace(TRAIN, negatives_per_positive=ratio, min_positives=0)
    )
    tuner.together()
    assert tuner.hours(1000, 3, positives) == pytest.approx(3 * seen / 5.0 / 3600)


def test_the_file_is_what_notebooks_and_papermill_read(make, runs, loaders, tmp_path):
    loaders(block8=4.0)
    runs(lambda workload, precision, n: 2.0 if precision == "bf16" else 1.0)
    tuner = make(Made(of_precision(fp32=10.0, bf16=20.0)))
    for part in (tuner.precisions, tuner.compiling, tuner.checkpointing, tuner.batches, tuner.loading, tuner.together):
        part()
    path = tmp_path / "work" / "tuned.yaml"
    assert tuner.write(path) == path == tuner.write(path)  # over the old one
    assert [file.name for file in path.parent.iterdir()] == ["tuned.yaml"]
    values = yaml.safe_load(path.read_text())
    assert values == {
        "precision": "bf16", "channels_last": True, "compile": "off", "grad_checkpointing": False, "num_workers": 0
    }  # fmt: skip
    configs = params._known_configs()
    assert len(from_mapping(values, *configs)) == len(configs)
    run, loop = from_mapping(values, RunConfig, LoopConfig)
    assert (run.precision, loop.compile, loop.channels_last) == ("bf16", "off", True)
    text = path.read_text()
    assert (
        'compile: "off"  # ' in text and "test_efficientnet, 64x32, batches of 8 images" in text and "torch 2." in text
    )


def test_a_smaller_batch_is_written_with_its_steps(make, tmp_path):
    tuner = make(Made(lambda setting: 10.0, room=4), run=RunConfig(device="cpu", precision="fp32"))
    tuner._trials.fits = lambda setting: setting.batch_size <= 4
    tuner.batches()
    values = yaml.safe_load(tuner.write(tmp_path / "tuned.yaml").read_text())
    assert values == {"batch_size": 4, "accumulate": 2}


def test_what_the_file_says_beside_what_was_asked(make, tmp_path):
    """papermill takes -p after -f: the file's settings are no flags, and all others that were asked are."""
    run, train = RunConfig(device="cpu", precision="bf16"), dataclasses.replace(TRAIN, batch_size=4)
    tuner = make(Made(of_precision(fp32=20.0, bf16=12.0)), run=run, train=train)
    tuner.precisions(), tuner.batches()
    values = yaml.safe_load(tuner.write(tmp_path / "tuned.yaml").read_text())
    assert values == tuner.decided == {"precision": "fp32", "channels_last": True}
    assert params.flags(run, train, without=tuner.decided) == "-p device cpu -p epochs 2 -p batch_size 4"


@pytest.mark.parametrize("odd", ["\x1b[31merror\x1b[0m", "\udce4", "a\nb: [", "\u2028", "\x00", "# {", "é ✓"])
def test_whatever_a_reason_says_the_file_is_read(odd):
    text = deciding.as_yaml([f"for {odd}"], {"compile": "off", "accumulate": 2}, {"compile": odd, "accumulate": odd})
    assert yaml.safe_load(text.encode()) == {"compile": "off", "accumulate": 2}
    assert text.count("\n") == 4 and ("error" not in odd or 'off"  # error\n' in text)


def test_the_time_is_kept_and_what_is_cut_says_so(make, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("rsnakit.tried.time.monotonic", lambda: clock[0])
    made = Made(lambda setting: 10.0)
    real = made.in_turn

    def slow(settings, count, limit_s):
        clock[0] += limit_s
        return real(settings, count, limit_s)

    made.in_turn = slow
    tuner = make(made, tune_minutes=1.0)
    tuner.precisions(), tuner.compiling(), tuner.checkpointing()
    assert sum(made.limits) == pytest.approx(60 * 7 / 16) and tuner.left == pytest.approx(60 * 9 / 16)
    tuner.left = 0.5
    rows = pd.concat([tuner.precisions(), tuner.compiling(), tuner.checkpointing(), tuner.batches(), tuner.together()])
    able = rows[~rows["name"].str.startswith("fp16")]
    assert able["skipped"].str.contains("no time was left").all() and able["images_s"].isna().all()
    assert math.isnan(tuner.rate) or tuner.rate == 10


def test_breasts_are_counted_where_the_model_sees_these(make, images):
    tuner = make(Made(lambda setting: 10.0), model=dataclasses.replace(MODEL, views="mean"))
    assert tuner.unit == "breasts" and tuner.items == images["breast_id"].nunique()
    tuner.precisions()
    assert "breasts/s" in tuner.reasons["channels_last"]


def test_a_table_of_one_class_is_refused_as_training_refuses_it(store, images):
    one = images[images["cancer"] == 0]
    with pytest.raises(ValueError, match="both are needed"):
        Tuner(
            one, store, MODEL, TRAIN, RunConfig(device="cpu"), LoopConfig(), SpeedConfig(), trials=Made(lambda s: 1.0)
        )


def test_settings_that_training_refuses_are_refused_at_once(make):
    with pytest.raises(ValueError, match="set both to 0"):
        make(Made(lambda s: 1.0), dataclasses.replace(MODEL, views="mean"), dataclasses.replace(TRAIN, mixup=0.4))


def test_a_device_that_is_not_there_is_said(store, images, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(RuntimeError, match="device cuda was asked for, but"):
        Tuner(images, store, MODEL, TRAIN, RunConfig(device="cuda"), LoopConfig(), SpeedConfig())


@pytest.mark.slow
def test_all_parts_in_earnest(store, images, tmp_path):
    """On whatever this machine is: a table without holes, a file that is read, and no process left."""
    from multiprocessing import active_children

    speed = SpeedConfig(tune_minutes=0.6)
    tuner = tuning.tune(images, store, MODEL, TRAIN, RunConfig(device="cpu"), LoopConfig(), speed)
    table = tuner.table
    assert set(table["part"]) == set(SHARES) and not active_children()
    assert ((table["images_s"] > 0) | (table["skipped"] != "")).all()
    assert table.groupby("part")["chosen"].sum().le(1).all()
    assert from_mapping(yaml.safe_load(tuner.write(tmp_path / "tuned.yaml").read_text()), RunConfig)
