"""rsnakit.ensemble and rsnakit.replica: all folds and flips of an image, on all devices, whatever half precision, memory and
compilers do."""

import dataclasses
import itertools
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from rsnakit import ensemble, env, models, replica, runs
from rsnakit.engine import TrainConfig
from rsnakit.ensemble import Pass, Scorer, devices_of, levels
from rsnakit.models import ModelConfig
from rsnakit.preprocess import PreprocessConfig
from rsnakit.replica import Replica

MODEL = ModelConfig(backbone="test_resnet", weights="none", pooling="avg")
PIXELS = PreprocessConfig(height=64, width=32)
ALL = levels([0, 1], "all")[0]
FIRST = (Pass(0),)


def make_run(work: Path, config: ModelConfig = MODEL, folds: int = 2) -> Path:
    """A run as training leaves it, with random weights: another model in each fold."""
    settings = runs.settings_of(PIXELS, config, TrainConfig(epochs=1), "data", True, False)
    folder = runs.open_run(work, "run", settings)
    for fold in range(folds):
        torch.manual_seed(fold)
        net = models.build_model(config)
        nn.init.normal_(net.head.weight)
        described = {"preprocess": dataclasses.asdict(PIXELS), "prior": 0.1, "epoch": 1, "select": "last"}
        models.save_model(net, folder / f"fold{fold}", **described)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("work"))


def images_of(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 4096, (count, 1, 64, 32), dtype=np.uint16)


def batches_of(count: int, size: int = 3) -> list[dict]:
    return [{"image": images_of(size, number), "number": number} for number in range(count)]


def by_hand(net: nn.Module, images: np.ndarray, flips: tuple[int, ...]) -> np.ndarray:
    """Logits of one image after another, which NumPy turned and scaled."""
    with torch.no_grad():
        shown = [np.flip(image, flips).astype(np.float32) / np.float32(4095) for image in images[:, None]]
        return np.array([net(torch.from_numpy(image.copy()))["cancer"].item() for image in shown])


# What is done with an image


def test_levels_drop_flips_first_and_then_folds_from_the_end():
    flipped = tuple(Pass(fold, (3,)) for fold in (0, 2, 3))
    plain = tuple(Pass(fold) for fold in (0, 2, 3))
    assert levels([0, 2, 3], "hflip") == [plain + flipped, plain, plain[:2], plain[:1]]
    assert levels([0, 2, 3], "none") == [plain, plain[:2], plain[:1]]
    assert levels([1], "none") == [(Pass(1),)]
    assert [len(level) for level in levels([0, 1, 2, 3], "all")] == [16, 4, 3, 2, 1]
    assert levels([0], "diagonal")[0] == (Pass(0), Pass(0, (2, 3)))


def test_every_fold_sees_every_flip(run):
    images = images_of(5)
    scorer = Scorer(run, ["cpu"], batch_size=8)
    found = scorer.score(images, ALL)
    assert list(found) == list(ALL) and len(ALL) == 8
    for each in ALL:
        net = models.load_model(run / f"fold{each.fold}")
        assert found[each].dtype == np.float32 and found[each].shape == (5,)
        np.testing.assert_allclose(found[each], by_hand(net, images, each.flips), atol=1e-5, err_msg=str(each))
    assert np.ptp([found[each] for each in ALL], axis=0).min() > 1e-3  # a hundred times what they may be off


def test_pixels_are_what_training_sees_and_are_shared(run):
    """All 4,096 values to the bit; a flip is one tensor for both folds."""
    images = np.arange(4096, dtype=np.uint16).reshape(2, 1, 64, 32)
    scorer, seen = Scorer(run, ["cpu"], batch_size=2), []
    for net in scorer.ensemble.models.values():
        net.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    scorer.score(images, (Pass(0), Pass(1), Pass(0, (3,)), Pass(1, (3,))))
    assert [each is other for each, other in itertools.pairwise(seen)] == [True, False, True]
    expected = images.astype(np.float32) / 4095  # as data.MammogramDataset has it
    assert seen[0].dtype == torch.float32 and seen[0].numpy().tobytes() == expected.tobytes()
    assert seen[2].numpy().tobytes() == np.ascontiguousarray(expected[..., ::-1]).tobytes()


def test_models_of_breasts_give_features(tmp_path):
    run = make_run(tmp_path, dataclasses.replace(MODEL, views="attention"), folds=1)
    scorer, images = Scorer(run, ["cpu"], batch_size=2), images_of(3)
    assert scorer.ensemble.by_breast
    found = scorer.score(images, FIRST)[Pass(0)]
    net = scorer.ensemble.models[0]
    with torch.no_grad():
        expected = net.features(torch.from_numpy(images.astype(np.float32) / 4095)).numpy()
    assert found.shape == (3, net.channels) and found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-5)


# Half precision, memory, compilers


class Line(nn.Module):
    """(B,) `weight` times the mean of an image, plus `bias`, in the precision at hand; notes the shapes that it was shown."""

    def __init__(self, weight: float, bias: float = 0.0, room: int = 99, full: Exception | None = None) -> None:
        super().__init__()
        self.full = full or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self.linear, self.room, self.shown = nn.Linear(1, 1), room, []
        with torch.no_grad():
            self.linear.weight.fill_(weight)
            self.linear.bias.fill_(bias)

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        self.shown.append(len(images))
        if len(images) > self.room:
            raise self.full
        return {"cancer": self.linear(images.mean((2, 3))).squeeze(1)}


def grey(*values: int) -> np.ndarray:
    return np.stack([np.full((1, 8, 4), value, np.uint16) for value in values])


def test_what_overflows_in_half_precision_is_done_again_in_full():
    """fp16 ends at 65,504: the bright images overflow in the one fold, and only these are done again, there alone."""
    nets = {0: Line(6e4, 1e4), 1: Line(1.0)}
    found = Replica(nets, "cpu", "fp16", "off", 8, False).score(grey(0, 4095, 819, 4095), (Pass(0), Pass(1)))
    np.testing.assert_allclose(found[Pass(0)], [1e4, 7e4, 2.2e4, 7e4], rtol=1e-3)
    np.testing.assert_allclose(found[Pass(1)], [0, 1, 0.2, 1], rtol=1e-3)
    assert nets[0].shown == [4, 2] and nets[1].shown == [4]


def test_what_is_not_finite_in_full_precision_stays_so():
    nets = {0: Line(float("nan")), 1: Line(1.0)}
    for precision, times in (("fp32", 1), ("bf16", 2)):
        nets[0].shown.clear()
        found = Replica(nets, "cpu", precision, "off", 8, False).score(grey(0, 4095), (Pass(0), Pass(1)))
        assert np.isnan(found[Pass(0)]).all() and np.isfinite(found[Pass(1)]).all()
        assert nets[0].shown == [2] * times


def test_where_memory_does_not_suffice_images_come_in_halves(capsys):
    net = Line(1.0, room=3)
    device = Replica({0: net}, "cpu", "fp32", "off", 8, False)
    for _ in range(2):
        found = device.score(grey(*range(0, 4000, 500)), FIRST)[Pass(0)]
        np.testing.assert_allclose(found, np.arange(0, 4000, 500) / 4095, rtol=1e-5)
    assert net.shown == [8, 4, *[2] * 8]  # tried again once, and not with each batch
    said = capsys.readouterr().out
    assert said.count("has no room for 8 images at a time, and gets 4") == 1 and said.count("NOTE") == 2


@pytest.mark.parametrize(
    "said",
    [
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "GET was unable to find an engine to execute this computation",
        "FIND was unable to find an engine to execute this computation",
        "Unable to find a valid cuDNN algorithm to run convolution",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
        "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8",
    ],
)
def test_a_lack_of_room_has_many_names(said):
    net = Line(1.0, room=2, full=RuntimeError(said))
    found = Replica({0: net}, "cpu", "fp32", "off", 8, False).score(grey(*range(0, 4000, 500)), FIRST)[Pass(0)]
    np.testing.assert_allclose(found, np.arange(0, 4000, 500) / 4095, rtol=1e-5)
    assert net.shown == [8, 4, 2, 2, 2, 2]


def test_an_image_for_which_there_is_no_room_at_all_is_an_error():
    with pytest.raises(torch.OutOfMemoryError, match=r"2\.00 GiB"):
        Replica({0: Line(1.0, room=0)}, "cpu", "fp32", "off", 8, False).score(grey(1, 2, 3), FIRST)


def test_compiled_code_sees_one_shape(monkeypatch):  # T13
    compiled = []

    def fake(function, **options):
        compiled.append(options)
        return function

    monkeypatch.setattr(torch, "compile", fake)
    net = Line(1.0)
    device = Replica({0: net}, "cpu", "fp32", "max-autotune", 4, False)
    for count in (4, 3, 1):
        found = device.score(grey(*range(0, 100 * count, 100)), FIRST)[Pass(0)]
        np.testing.assert_allclose(found, np.arange(0, 100 * count, 100) / 4095, rtol=1e-5)
    assert net.shown == [4, 4, 4]
    assert compiled == [{"mode": "max-autotune-no-cudagraphs", "dynamic": False}]


def test_where_compiling_fails_models_run_uncompiled(monkeypatch, capsys):
    def broken(images):
        raise RuntimeError("no kernel image\nand many lines more")

    monkeypatch.setattr(torch, "compile", lambda function, **_: broken)
    device = Replica({0: Line(1.0), 1: Line(2.0)}, "cpu", "fp32", "default", 4, False)
    for _ in range(2):
        found = device.score(grey(0, 4095), (Pass(0), Pass(1)))
        assert found[Pass(0)].tolist() == [0, 1] and found[Pass(1)].tolist() == [0, 2]
    said = capsys.readouterr().out
    assert said == "NOTE: cpu: compiling failed, and the models run uncompiled (no kernel image)\n"


def test_whether_to_compile_is_asked_and_said(run, monkeypatch, capsys):
    monkeypatch.setattr(env, "choose_compile", lambda device, wanted: env.Choice("off", "there is no C++ compiler"))
    Scorer(run, ["cpu"], compile="default")
    assert capsys.readouterr().out == "compile on cpu: off: there is no C++ compiler\n"
    Scorer(run, ["cpu"])
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_compiled_models_give_the_same_and_are_compiled_once(run):  # T13
    """35 images in batches of 8, on a device in two threads; two folds."""
    if env.choose_compile("cpu", "default").value == "off":
        pytest.skip("nothing can be compiled here")
    from torch._dynamo.utils import counters

    counters.clear()
    images = images_of(35)
    batches = [{"image": images[first : first + 8], "first": first} for first in range(0, 35, 8)]
    found, plain = {}, Scorer(run, ["cpu"], batch_size=8)
    scorer = Scorer(run, ["cpu", "cpu"], compile="default", batch_size=8)
    for _ in range(3):
        scorer.run(batches, lambda: ALL, lambda batch, outputs, _: found.update({batch["first"]: outputs}))
    assert 1 <= counters["stats"]["unique_graphs"] <= 2  # models of the same layers may share their code
    for batch in batches:
        expected = plain.score(batch["image"], ALL)
        for each in ALL:
            np.testing.assert_allclose(found[batch["first"]][each], expected[each], atol=1e-4)


# Devices that share the work


@pytest.fixture
def three_threads():
    """torch computes with three threads, which is no number that anything sets."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("devices", [["cpu", "cpu"], ["cpu", "cpu:0"], ["cpu"]])
def test_devices_that_share_the_work_give_what_one_gives(run, devices, three_threads):
    scorer = Scorer(run, devices, batch_size=3)
    taken, workers, batches = {}, set(), batches_of(12)

    def passes() -> tuple[Pass, ...]:
        workers.add((threading.current_thread().name, torch.get_num_threads()))
        return ALL

    def take(batch: dict, outputs: dict, seconds: float) -> None:
        assert threading.current_thread() is threading.main_thread() and seconds > 0
        assert batch["number"] not in taken
        taken[batch["number"]] = outputs

    scorer.run(iter(batches), passes, take)
    with ThreadPoolExecutor(1) as other:  # a thread that begins now has what is set for all
        assert other.submit(torch.get_num_threads).result() == torch.get_num_threads() == 3
    torch.set_num_threads(1)  # as each of the workers: what is added up in another order may be off by a bit
    assert sorted(taken) == list(range(12))
    for batch in batches:
        expected = scorer.score(batch["image"], ALL)
        assert list(taken[batch["number"]]) == list(ALL)
        for each in ALL:
            np.testing.assert_array_equal(taken[batch["number"]][each], expected[each])
    assert len(workers) == (env.cores() if devices == ["cpu"] else 2)
    assert {threads for _, threads in workers} == {1}  # each computes on one core


def test_what_is_done_may_change_from_batch_to_batch(run):
    left, taken = iter([ALL, ALL, *[FIRST] * 3]), {}
    Scorer(run, ["cpu", "cpu"]).run(
        batches_of(5), lambda: next(left), lambda batch, outputs, _: taken.update({batch["number"]: tuple(outputs)})
    )
    assert sorted(taken.values()) == sorted([ALL, ALL, *[FIRST] * 3])


def test_no_more_batches_are_held_than_are_needed(run):
    """However long they take: of a generator without end only a few are asked for beyond those that are done."""
    scorer, given, taken = Scorer(run, ["cpu", "cpu"]), [], []
    scorer.ensemble.models[0].register_forward_pre_hook(lambda *_: time.sleep(0.02))  # slower than what feeds it

    def batches():
        for number in itertools.count():
            given.append(number)
            yield {"image": images_of(1), "number": number}

    class Enough(Exception):
        pass

    def take(batch: dict, outputs: dict, seconds: float) -> None:
        taken.append(batch["number"])
        assert len(given) - len(taken) <= 2 * 2  # each of two is at one, and has another
        if len(taken) == 20:
            raise Enough

    with pytest.raises(Enough):
        scorer.run(batches(), lambda: FIRST, take)


class Trouble(Exception):
    pass


@pytest.mark.parametrize("where", ["batches", "passes", "model", "take"])
def test_what_is_raised_anywhere_comes_through(run, where):
    """And neither threads nor what gives batches are left at work."""
    scorer, closed, counted = Scorer(run, ["cpu", "cpu"]), [], itertools.count()

    def trouble(here: str) -> None:
        if where == here and next(counted) >= 4:
            raise Trouble(here)

    def batches():
        try:
            for batch in batches_of(50):
                trouble("batches")
                yield batch
        finally:
            closed.append(True)

    def passes() -> tuple[Pass, ...]:
        trouble("passes")
        return FIRST

    scorer.ensemble.models[0].register_forward_pre_hook(lambda *_: trouble("model"))
    with pytest.raises(Trouble, match=where):
        scorer.run(batches(), passes, lambda *_: trouble("take"))
    assert closed == [True]
    assert threading.active_count() == 1 or not any("_work" in thread.name for thread in threading.enumerate())


def test_ctrl_c_ends_it_while_it_waits_for_a_device(run):
    scorer, working, go_on = Scorer(run, ["cpu", "cpu"]), threading.Event(), threading.Event()

    def interrupt() -> None:
        working.wait(60)
        os.kill(os.getpid(), signal.SIGINT)
        threading.Timer(0.2, go_on.set).start()

    def hold(*_) -> None:
        working.set()
        go_on.wait(60)

    scorer.ensemble.models[0].register_forward_pre_hook(hold)
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        scorer.run(batches_of(50), lambda: FIRST, lambda *_: None)
    assert go_on.is_set()
    assert not any("_work" in thread.name for thread in threading.enumerate())


# What fails


def failing(monkeypatch, fails) -> None:
    """Lets `Replica.score` raise where `fails(replica, images)` says so."""
    score = Replica.score

    def score_or_fail(self, images, passes):
        if fails(self, images):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return score(self, images, passes)

    monkeypatch.setattr(Replica, "score", score_or_fail)


def scores_of(scorer: Scorer, batches: list[dict]) -> tuple[dict, dict]:
    """First fold's outputs by batch, each taken once, and the errors by batch and place."""
    taken, errors = {}, {}

    def take(batch: dict, outputs: dict, seconds: float) -> None:
        assert batch["number"] not in taken
        taken[batch["number"]] = outputs[Pass(0)]
        errors.update({(batch["number"], place): error for place, error in batch.get("errors", {}).items()})

    scorer.run(iter(batches), lambda: FIRST, take)
    assert not any("_work" in thread.name for thread in threading.enumerate())
    return taken, errors


@pytest.mark.parametrize("batch", range(0, 12, 5))
def test_one_device_that_fails_leaves_its_work_to_the_others(run, monkeypatch, capsys, three_threads, batch):
    """From the first batch that it gets, or later; none is lost or done twice."""
    batches, bad, counted = batches_of(12), [], itertools.count()
    whole, _ = scores_of(Scorer(run, ["cpu", "cpu"], batch_size=3), batches)

    def fails(replica: Replica, images: np.ndarray) -> bool:
        if next(counted) == batch:
            bad.append(threading.get_ident())
        return threading.get_ident() in bad

    failing(monkeypatch, fails)
    taken, errors = scores_of(Scorer(run, ["cpu", "cpu"], batch_size=3), batches)
    assert sorted(taken) == list(range(12)) and not errors and len(bad) == 1
    for number in taken:
        np.testing.assert_array_equal(taken[number], whole[number])
    assert capsys.readouterr().out.count("NOTE: cpu fails, and is done without (RuntimeError: CUDA error") == 1
    assert torch.get_num_threads() == 3


def test_where_the_last_device_fails_the_cpu_goes_on_if_asked(run, monkeypatch, capsys):
    """Two devices that fail at their first batch; and again, once they are known."""
    failing(monkeypatch, lambda replica, images: replica.device == "cpu:0")
    batches = batches_of(9)
    with pytest.raises(RuntimeError, match="illegal memory"):
        scores_of(Scorer(run, ["cpu:0", "cpu:0"]), batches)
    scorer = Scorer(run, ["cpu:0", "cpu:0"], keep_going=True)
    for _ in range(2):
        taken, errors = scores_of(scorer, batches)
        assert sorted(taken) == list(range(9)) and not errors
    net = models.load_model(run / "fold0")
    np.testing.assert_allclose(taken[4], by_hand(net, batches[4]["image"], ()), atol=1e-5)
    assert next(scorer.ensemble.models[0].parameters()).device == torch.device("cpu")
    said = capsys.readouterr().out
    assert said.count("cpu:0 fails") == 3 and said.count("NOTE: no device is left, and the CPU goes on") == 2


def test_where_everything_fails_it_ends_with_the_error(run, monkeypatch):
    failing(monkeypatch, lambda replica, images: True)
    for devices in (["cpu"], ["cpu", "cpu"], ["cpu:0", "cpu:0"]):
        for keep_going in (False, True):
            scorer = Scorer(run, devices, keep_going=keep_going)
            for error in ("illegal memory", "illegal memory|no device is left"):
                with pytest.raises(RuntimeError, match=error):
                    scores_of(scorer, batches_of(20))


def bright(images: np.ndarray) -> np.ndarray:
    return (images == 5000).any((1, 2, 3))


@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu"]])
def test_images_that_models_fail_over_cost_themselves(run, monkeypatch, capsys, devices):
    """In three batches of twelve, one of which has nothing else; an error of a batch alone, which is over, costs nothing."""
    batches = batches_of(12)
    whole, _ = scores_of(Scorer(run, devices, batch_size=3), batches)
    bad = {(2, 1), (7, 0), (7, 2), (9, 0), (9, 1), (9, 2)}
    for number, place in bad:
        batches[number]["image"][place, 0, 0, 0] = 5000
    once = itertools.count()
    failing(monkeypatch, lambda replica, images: bright(images).any() or (len(images) == 3 and next(once) == 3))
    taken, errors = scores_of(Scorer(run, devices, batch_size=3), batches)
    assert set(errors) == bad
    assert set(errors.values()) == {
        "the model failed: RuntimeError: CUDA error: an illegal memory access was encountered"
    }
    for number in range(12):
        kept = [place for place in range(3) if (number, place) not in bad]
        np.testing.assert_allclose(taken[number][kept], whole[number][kept], atol=1e-5)
        assert np.isnan(np.delete(taken[number], kept)).all() and taken[number].shape == (3,)
    assert "NOTE: 3 of 3 images of a batch: the model failed" in capsys.readouterr().out


@pytest.mark.parametrize("count", [2, 50])
def test_an_error_that_spares_no_image_is_no_images_error(run, monkeypatch, count):
    """Of code that fails over whatever is not black; of a few batches, too. Where it has to go on, it does."""
    failing(monkeypatch, lambda replica, images: images.any())
    with pytest.raises(RuntimeError, match="illegal memory"):
        scores_of(Scorer(run, ["cpu", "cpu"]), batches_of(count))
    taken, errors = scores_of(Scorer(run, ["cpu", "cpu"], keep_going=True), batches_of(count))
    assert len(errors) == 3 * count and all(np.isnan(found).all() for found in taken.values())


def test_a_batch_that_loses_a_device_half_way_goes_to_another(run, monkeypatch):
    """An image may leave a device in ruins: what it is asked from then on it fails over, too."""
    batches, ruined = batches_of(6), set()
    batches[3]["image"][1, 0, 0, 0] = 5000
    whole, _ = scores_of(Scorer(run, ["cpu", "cpu"], batch_size=3), batches)

    def fails(replica: Replica, images: np.ndarray) -> bool:
        if len(images) == 1 and bright(images).any() and not ruined:
            ruined.add(threading.get_ident())
        return threading.get_ident() in ruined or (len(images) == 3 and bright(images).any())

    failing(monkeypatch, fails)
    taken, errors = scores_of(Scorer(run, ["cpu", "cpu"], batch_size=3), batches)
    assert len(ruined) == 1 and not errors
    for number in range(6):
        np.testing.assert_allclose(taken[number], whole[number], atol=1e-5)


@pytest.mark.parametrize("allowed", [0, 1])
def test_fewer_threads_than_devices(run, monkeypatch, capsys, allowed):
    start, counted = threading.Thread.start, itertools.count()

    def refuse(thread: threading.Thread) -> None:
        if "_work" in thread.name and next(counted) >= allowed:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    scorer = Scorer(run, ["cpu", "cpu", "cpu"])
    if not allowed:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            scores_of(scorer, batches_of(5))
    else:
        assert sorted(scores_of(scorer, batches_of(5))[0]) == list(range(5))
        assert "NOTE: models run in 1 of 3 threads; no more are to be had" in capsys.readouterr().out


@pytest.mark.parametrize("full", [["cpu:0"], ["cpu:0", "cpu:1"]])
def test_a_device_without_room_for_the_models_is_done_without_if_asked(run, monkeypatch, capsys, full):
    to = nn.Module.to

    def no_room(net: nn.Module, device: str = "", **options) -> nn.Module:
        if device in full:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return to(net, "cpu" if device.startswith("cpu") else device, **options)

    monkeypatch.setattr(nn.Module, "to", no_room)
    with pytest.raises(torch.OutOfMemoryError):
        Scorer(run, ["cpu:0", "cpu:1"], "bf16")
    scorer, images = Scorer(run, ["cpu:0", "cpu:1"], "bf16", keep_going=True), images_of(2)
    assert (scorer.devices, scorer.precision) == ((["cpu"], "fp32") if len(full) == 2 else (["cpu:1"], "bf16"))
    said = capsys.readouterr().out
    for name in full:
        assert f"NOTE: the models cannot be brought to {name}, which is done without (OutOfMemoryError: CUDA" in said
    expected = by_hand(models.load_model(run / "fold0"), images, ())
    np.testing.assert_allclose(scorer.score(images, FIRST)[Pass(0)], expected, atol=1e-5 if len(full) == 2 else 0.1)


def test_a_fold_that_cannot_be_read_is_left_out_if_asked(tmp_path, capsys):
    run = make_run(tmp_path, folds=3)
    for fold, size in ((1, 100), (2, 50_000)):
        os.truncate(run / f"fold{fold}" / "best.safetensors", size)
    with pytest.raises(models.WeightsError, match="fold1"):
        ensemble.load_ensemble(run)
    found = ensemble.load_ensemble(run, keep_going=True)
    assert list(found.models) == [0] and found.prior == pytest.approx(0.1)
    said = capsys.readouterr().out
    assert "NOTE: fold 1 cannot be read, and is left out (WeightsError: " in said and "NOTE: fold 2 cannot" in said
    os.truncate(run / "fold0" / "best.safetensors", 100)
    with pytest.raises(models.WeightsError, match="fold0"):
        ensemble.load_ensemble(run, keep_going=True)


def test_which_devices_share_the_work(monkeypatch):
    def choose(wanted: str) -> env.Choice:
        if wanted == "cuda:1":
            raise RuntimeError("device cuda:1 was asked for, but Tesla P100 cannot run torch")
        return env.Choice({"auto": "cuda"}.get(wanted, wanted), "")

    monkeypatch.setattr(env, "choose_device", choose)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert devices_of("auto") == devices_of("cuda") == ["cuda:0", "cuda:2"]
    assert devices_of("cuda:2") == ["cuda:2"]
    assert devices_of("cpu") == ["cpu"] and devices_of("mps") == ["mps"]


def test_tta_is_named_as_in_the_parameters():
    assert set(ensemble.TTA) == {"none", "hflip", "vflip", "diagonal", "all"}
    assert all(views[0] == () for views in replica.TTA.values())
