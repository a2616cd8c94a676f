"""Methods replaced at run time: nested, copied, pickled, averaged, compiled."""

import copy
import dataclasses
import functools
import pickle
import threading
import warnings

import pytest
import torch
from timm.utils import ModelEmaV3
from torch import nn

from rsnakit.patching import original, patched, replace_method, restore


class Counter:
    """A plain object: no module, with a recursive method."""

    step = 1

    def __init__(self, start=0):
        self.start = start

    def count(self, n):
        return self.start if n == 0 else self.count(n - 1) + self.step

    @property
    def double(self):
        return 2 * self.start

    @staticmethod
    def fixed():
        return 7


class Affine(nn.Module):
    """weight * x + bias, from the sum of two methods, so that results have a closed form."""

    def __init__(self, weight=2.0, bias=1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))
        self.register_buffer("bias", torch.tensor(bias))

    def scale(self, x):
        return self.weight * x

    def forward(self, x):
        return self.scale(x) + self.bias


class Parent(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Affine(2.0), Affine(5.0)

    def forward(self, x):
        return self.second(self.first(x))


def plus_ten(self, x):
    return original(self, "forward")(x) + 10


def times_three(self, x):
    return original(self, "forward")(x) * 3


def forward(self, x):  # named as the method it replaces, which pickled bound methods get wrong
    return self.weight * x - self.bias


def test_one_object_changes_and_the_others_of_its_class_do_not():
    model = Parent()
    assert replace_method(model.first, "forward", plus_ten) is model.first
    assert model.first(3.0) == 17  # 2*3 + 1, + 10
    assert model.second(3.0) == 16 and Affine()(3.0) == 7
    assert model(3.0) == 5 * 17 + 1  # the parent calls the replaced one
    assert original(model.first, "forward")(3.0) == 7
    assert restore(model.first, "forward") is model.first
    assert model(3.0) == 5 * 7 + 1
    assert model.first.__dict__.keys() == Affine().__dict__.keys()  # nothing of it stays behind


def test_arguments_reach_the_function_whatever_their_names():
    counter = replace_method(Counter(), "count", lambda self, *args, **options: (self.start, args, options))
    replace_method(counter, "count", lambda self, *args, **options: original(self, "count")(*args, **options))
    assert counter.count(1, name=2, obj=3, func=4, self_=5) == (0, (1,), {"name": 2, "obj": 3, "func": 4, "self_": 5})


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_nested_replacements_call_the_one_below_and_are_restored_in_order(depth):
    model, expected = Affine(), [7.0]
    for level in range(depth):
        step = (plus_ten, times_three)[level % 2]
        replace_method(model, "forward", step)
        expected.append(expected[-1] + 10 if step is plus_ten else expected[-1] * 3)
        assert model(3.0) == expected[-1]
    for value in reversed(expected[:-1]):
        assert original(model, "forward")(3.0) == value
        restore(model, "forward")
        assert model(3.0) == value


def test_a_method_that_calls_itself_meets_every_level_again():
    counter = Counter(1)
    for _ in range(2):
        replace_method(counter, "count", lambda self, n: original(self, "count")(n) * 2)
    # Each of the calls of count, at n = 2, 1, 0, is doubled twice: ((1*4 + 1)*4 + 1)*4
    assert counter.count(2) == 84


def test_an_exception_inside_leaves_the_levels_right():
    model = Affine()
    replace_method(model, "forward", plus_ten)
    replace_method(model, "forward", lambda self, x: original(self, "forward")(x))
    with pytest.raises(TypeError):
        model("text")
    assert model(3.0) == 17


def test_an_object_that_is_not_running_gives_its_latest_original_to_another_that_is():
    model = Parent()
    for _ in range(2):
        replace_method(model.first, "forward", plus_ten)
    replace_method(model, "forward", lambda self, x: original(self.first, "forward")(x))
    replace_method(model, "forward", lambda self, x: original(self, "forward")(x))
    assert model(3.0) == 17


def test_threads_do_not_disturb_each_other():
    model, started, go_on, seen = Affine(), threading.Event(), threading.Event(), []

    def waiting(self, x):
        if threading.current_thread() is other:
            started.set()
            go_on.wait(10)
        return original(self, "forward")(x) + 1

    replace_method(model, "forward", waiting)
    replace_method(model, "forward", times_three)
    other = threading.Thread(target=lambda: seen.append(model(3.0).item()))
    other.start()
    started.wait(10)  # the other thread is in the lower level; this one in none
    assert original(model, "forward")(3.0) == 8
    go_on.set()
    other.join()
    assert seen == [24.0]


def test_patched_is_restored_on_exceptions_and_however_often_it_was_replaced_within():
    model = replace_method(Affine(), "forward", times_three)
    with pytest.raises(RuntimeError, match="stop"), patched(model, "forward", plus_ten) as same:
        assert same is model and model(3.0) == 31
        replace_method(model, "forward", plus_ten)
        raise RuntimeError("stop")
    assert model(3.0) == 21
    with patched(model, "forward", plus_ten):
        restore(model, "forward")
    assert model(3.0) == 21


def test_what_stood_in_the_object_before_comes_back():
    counter = Counter()
    counter.count = own = lambda n: n * 100
    replace_method(counter, "count", lambda self, n: original(self, "count")(n) + 1)
    assert counter.count(2) == 201
    restore(counter, "count")
    assert counter.count is own


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("forwards", ["Affine has no method forwards", "near it: forward"]),
        ("bias", ["Affine has bias, but as a tensor"]),
        ("training", ["Affine has training, but as a value"]),
        ("__call__", ["looks such names up on the class; replace forward"]),
        ("dump_patches", ["as a value of the class"]),
    ],
)
def test_a_name_that_is_no_method_of_a_module_says_what_it_is(name, words):
    for call in (lambda m: replace_method(m, name, plus_ten), lambda m: patched(m, name, plus_ten).__enter__()):
        with pytest.raises(AttributeError) as error:
            call(Affine())
        assert all(word in str(error.value) for word in words), error.value


def test_other_names_that_are_no_methods():
    with pytest.raises(AttributeError, match=r"Parent has first, but as a module.*model.first, 'forward'"):
        replace_method(Parent(), "first", plus_ten)
    with pytest.raises(AttributeError, match="Counter has double, but as a property"):
        replace_method(Counter(), "double", plus_ten)
    with pytest.raises(AttributeError, match="Counter has fixed, but as a static"):
        replace_method(Counter(), "fixed", plus_ten)
    with pytest.raises(AttributeError, match=r"DataParallel has no method scale, but its .module has"):
        replace_method(nn.DataParallel(Affine()), "scale", plus_ten)
    with pytest.raises(AttributeError, match=r"no method scales; near it: scale"):
        original(Affine(), "scales")


def test_objects_that_cannot_hold_a_method():
    class Slots:
        __slots__ = ()

        def count(self):
            return 1

    with pytest.raises(TypeError, match="Slots objects have no __dict__"):
        replace_method(Slots(), "count", plus_ten)
    with pytest.raises(TypeError, match="list objects have no __dict__"):
        replace_method([], "append", plus_ten)
    with pytest.raises(TypeError, match="Affine is a class"):
        replace_method(Affine, "forward", plus_ten)
    with pytest.raises(TypeError, match="expected a function"):
        replace_method(Affine(), "forward", 3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_torchscript_is_refused():
    with pytest.raises(TypeError, match="compiled by TorchScript"):
        replace_method(torch.jit.trace(Affine(), torch.ones(())), "forward", plus_ten)


def test_a_frozen_dataclass_and_a_subclass_of_a_builtin_can_be_patched():
    @dataclasses.dataclass(frozen=True)
    class Frozen:
        value: int

        def get(self):
            return self.value

    class Items(list):
        pass

    assert replace_method(Frozen(3), "get", lambda self: original(self, "get")() + 1).get() == 4
    items = replace_method(Items([1]), "append", lambda self, x: original(self, "append")(2 * x))
    items.append(4)
    assert items == [1, 8]


def test_restoring_what_was_not_replaced_or_was_overwritten_is_an_error():
    model = replace_method(Affine(), "scale", lambda self, x: x)
    with pytest.raises(ValueError, match=r"Affine.forward was not replaced.*replaced: scale"):
        restore(model, "forward")
    model.scale = lambda x: 0
    with pytest.raises(ValueError, match="set by other means after"):
        restore(model, "scale")
    del model.scale
    with pytest.raises(ValueError, match="set by other means after"):
        restore(model, "scale")


def test_an_untouched_method_is_its_own_original():
    assert original(Affine(), "forward")(3.0) == 7


def test_hooks_still_run():
    model, seen = replace_method(Affine(), "forward", plus_ten), []
    model.register_forward_pre_hook(lambda _, inputs: (inputs[0] + 1,))
    model.register_forward_hook(lambda _, inputs, output: seen.append(output))
    assert model(torch.tensor(2.0)) == 17 and seen == [17.0]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_calls_itself(copied):
    model = Parent()
    for step in (plus_ten, times_three):
        replace_method(model.first, "forward", step)
    twin = copied(model)
    with torch.no_grad():
        twin.first.weight.fill_(100.0)
        twin.first.bias.fill_(0.0)
    assert twin.first(3.0) == 3 * (300 + 10)
    assert original(twin.first, "forward")(3.0) == 310
    assert twin(3.0) == 5 * 930 + 1
    assert model.first(3.0) == 51
    restore(twin.first, "forward")
    restore(twin.first, "forward")
    assert twin.first(3.0) == 300 and model.first(3.0) == 51


def test_a_copy_of_a_plain_object_calls_itself():
    counter = replace_method(Counter(1), "count", lambda self, n: original(self, "count")(n) * 2)
    twin = copy.deepcopy({"list": [counter, counter]})["list"]
    assert twin[0] is twin[1]
    twin[0].start = 50
    assert twin[0].count(0) == 100 and counter.count(0) == 2


def test_a_function_named_like_the_method_survives_pickling(tmp_path):
    model = replace_method(Affine(), "forward", forward)
    assert pickle.loads(pickle.dumps(model))(3.0) == 5
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert loaded(3.0) == 5 and restore(loaded, "forward")(3.0) == 7


def test_a_lambda_says_that_it_cannot_be_pickled():
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(replace_method(Affine(), "forward", lambda self, x: x))


def test_state_dict_is_untouched_and_round_trips_strictly():
    plain, model = Parent(), replace_method(replace_method(Parent(), "forward", plus_ten), "forward", times_three)
    assert list(model.state_dict()) == list(plain.state_dict())
    with torch.no_grad():
        plain.first.weight.fill_(4.0)
    model.load_state_dict(plain.state_dict())
    plain.load_state_dict(model.state_dict())
    assert model(1.0) == 3 * (plain(1.0) + 10)
    assert model.half()(torch.ones((), dtype=torch.half)).dtype == torch.half


class NormNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(1, momentum=0.5)

    def forward(self, x):
        return self.norm(x)


def shifted(self, x):
    return original(self, "forward")(x - 1)


def test_ema_of_a_patched_model_follows_weights_and_buffers_and_calls_itself():  # T11
    model = replace_method(NormNet(), "forward", shifted)
    ema = ModelEmaV3(model, decay=0.75)
    x = torch.full((4, 1), 6.0)  # shifted to 5: the mean goes 0, 2.5, 3.75
    mean = expected = 0.0
    weight = expected_weight = 1.0
    for step in range(3):
        model(x)
        with torch.no_grad():
            model.norm.weight += 1
        ema.update(model)
        mean, weight = mean + 0.5 * (5 - mean), 2.0 + step
        expected = 0.75 * expected + 0.25 * mean
        expected_weight = 0.75 * expected_weight + 0.25 * weight
    averaged = ema.module.norm
    assert torch.allclose(averaged.running_mean, torch.tensor([expected]))
    assert torch.allclose(averaged.weight, torch.tensor([expected_weight]))
    assert averaged.num_batches_tracked == model.norm.num_batches_tracked == 3  # copied, not averaged
    # The patched forward of the copy: shifted, then by the averaged statistics, not by the model's own.
    variance = 0.75**3 + 0.25 * (0.75**2 * 0.5 + 0.75 * 0.25 + 0.125)
    by_hand = (8 - 1 - expected) / (variance + 1e-5) ** 0.5 * expected_weight
    model.eval()
    assert torch.allclose(ema(torch.full((4, 1), 8.0)), torch.full((4, 1), by_hand))
    assert not torch.allclose(model(torch.full((4, 1), 8.0)), torch.full((4, 1), by_hand))


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield functools.partial(torch.compile, backend="eager", fullgraph=True)
    torch.compiler.reset()


def hundred(self, x):
    return original(self, "forward")(x) + 100


def compiled_in(how, compiler):
    """A model and what a user calls of it, compiled in one of three ways and called once."""
    model = Parent()
    if how == "torch.compile":
        called = compiler(model)
    elif how == "model.compile":
        called = model
        model.compile(backend="eager", fullgraph=True)
    else:
        called = compiler(lambda x: model(x))
    called(torch.tensor(3.0))
    return model, called


@pytest.mark.parametrize(
    ("how", "name"),
    [("torch.compile", ""), ("torch.compile", "first"), ("model.compile", "first"), ("function", "first")],
)
def test_a_patch_after_compiling_is_in_force_at_once_and_says_so(how, name, fresh_compiler):
    model, called = compiled_in(how, fresh_compiler)
    part, x = model.get_submodule(name), torch.tensor(3.0)
    plain, once = (36, 136) if name == "" else (36, 536)
    assert called(x) == plain
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        replace_method(part, "forward", hundred)
        assert called(x) == once
        restore(part, "forward")
        assert called(x) == plain
    words = [str(w.message) for w in told if "torch.compile" in str(w.message)]
    # A compiled function holds the model in a closure, where it is not looked for; its result is right all the same.
    assert len(words) == (0 if how == "function" else 2)
    if words:
        kind = type(part).__name__
        assert words[0].startswith(f"{kind}.forward was replaced after torch.compile of Parent")
        assert "restored" in words[-1]


def test_a_compiled_module_is_patched_inside(fresh_compiler):
    model = Parent()
    compiled = fresh_compiler(model)
    compiled(torch.tensor(3.0))
    with pytest.warns(UserWarning, match="after torch.compile"):
        assert replace_method(compiled, "forward", hundred) is compiled
    assert compiled(torch.tensor(3.0)) == 136 and model(torch.tensor(3.0)) == 136
    assert original(compiled, "forward")(torch.tensor(3.0)) == 36
    with pytest.warns(UserWarning, match="Parent.forward was restored after torch.compile"):
        restore(compiled, "forward")
    assert compiled(torch.tensor(3.0)) == 36


def test_patches_before_compiling_and_of_other_models_say_nothing(fresh_compiler):
    model = replace_method(replace_method(Parent(), "forward", hundred), "forward", hundred)
    compiled = fresh_compiler(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiled(torch.tensor(3.0)) == 236  # in one graph, the levels with it
        replace_method(Affine(), "forward", hundred)
