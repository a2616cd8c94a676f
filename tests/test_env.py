import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rsnakit import device, env, mounts, packages, params

SLUG = "rsna-breast-cancer-detection"


def test_import_is_light():
    code = "import sys, rsnakit.env, rsnakit.params; print(sorted({'torch', 'pandas', 'numpy'} & set(sys.modules)))"
    root = Path(env.__file__).parents[1]
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# ---- where


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, "local"),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, "kaggle"),
        # Kaggle's image derives from Colab's and keeps its variables
        ({"KAGGLE_KERNEL_RUN_TYPE": "Batch", "COLAB_RELEASE_TAG": "r", "COLAB_GPU": "1"}, "kaggle"),
        ({"COLAB_RELEASE_TAG": "release-colab-external"}, "colab"),
        ({"PAPERSPACE_NOTEBOOK_REPO_ID": "r1"}, "paperspace"),
        ({"PAPERSPACE_CLUSTER_ID": "c1"}, "paperspace"),
        # keys that a person carries on a machine of their own
        ({"KAGGLE_USERNAME": "me", "KAGGLE_KEY": "k", "PAPERSPACE_API_KEY": "k"}, "local"),
    ],
)
def test_where_by_variables(tmp_path, environ, name):
    place = env.where(environ, root=tmp_path)
    assert place.name == name
    assert name == "local" or place.reason.split()[0].lstrip("$") in environ


@pytest.mark.parametrize(
    ("folders", "name"),
    [
        (("kaggle/working", "kaggle/input", "content/sample_data"), "kaggle"),
        (("content/sample_data",), "colab"),
        (("notebooks", "storage"), "paperspace"),
        (("notebooks",), "local"),
        (("storage",), "local"),
    ],
)
def test_where_by_folders(tmp_path, folders, name):
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
    assert env.where({}, root=tmp_path).name == name


def test_a_rehearsal_says_what_stands_for_the_root(tmp_path):
    """In a process of its own, for it is read at the start."""
    (tmp_path / "kaggle/working").mkdir(parents=True)
    competition(tmp_path / "kaggle/input/competitions" / SLUG)
    code = "from rsnakit import env; print(env.where().name, env.find_data().path, env.work_folder())"
    environ = {"RSNAKIT_ROOT": str(tmp_path), "PATH": os.environ["PATH"]}
    repository = Path(env.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repository, env=environ, capture_output=True, text=True, check=True
    )
    folders = ("kaggle/input/competitions/" + SLUG, "kaggle/working/work")
    assert done.stdout.split() == ["kaggle", *(str(tmp_path / folder) for folder in folders)]


# ---- data


@pytest.fixture
def machine(tmp_path):
    """An empty machine: its root and a repository on it."""
    repository = tmp_path / "home" / "repository"
    repository.mkdir(parents=True)
    return {"root": tmp_path, "repository": repository}


def competition(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "train.csv").write_text("patient_id,image_id\n")
    return folder


def test_data_is_found_in_order(machine):
    root, repository = machine["root"], machine["repository"]
    assert env.find_data(environ={}, **machine).is_demo
    expected = [
        competition(repository / "data"),
        competition(root / "kaggle/input/competitions" / SLUG),
        competition(root / "kaggle/input" / SLUG),
    ]
    for folder in reversed(expected):
        found = env.find_data(environ={}, **machine)
        assert found.path == folder and not found.is_demo
        shutil.rmtree(folder)
    competition(repository / "data" / SLUG)
    assert env.find_data(environ={}, **machine).path == repository / "data" / SLUG

    other, another = competition(root / "other"), competition(root / "another")
    assert env.find_data(environ={"RSNA_DATA": str(other)}, **machine).path == other
    assert env.find_data(str(another), environ={"RSNA_DATA": str(other)}, **machine).path == another
    assert env.find_data("demo", environ={"RSNA_DATA": str(other)}, **machine).path is None


def test_relative_data_dir(machine, monkeypatch):
    folder = competition(machine["repository"] / "mine")
    (machine["repository"] / "notebooks").mkdir()
    monkeypatch.chdir(machine["repository"] / "notebooks")
    assert env.find_data("mine", environ={}, **machine).path == folder
    here = competition(machine["repository"] / "notebooks" / "mine")  # the current folder goes first
    assert env.find_data("mine", environ={}, **machine).path == here


@pytest.mark.parametrize("source", ["data_dir", "$RSNA_DATA"])
def test_named_folder_never_becomes_the_demo(machine, source):
    def find(folder):
        if source == "data_dir":
            return env.find_data(str(folder), environ={}, **machine)
        return env.find_data(environ={"RSNA_DATA": str(folder)}, **machine)

    right = competition(machine["root"] / "sets" / "rsna")
    (right / "train_images").mkdir()
    with pytest.raises(FileNotFoundError) as missing:
        find(machine["root"] / "sets" / "rnsa")
    assert "is not a folder" in str(missing.value) and source in str(missing.value)
    assert f"did you mean {right}?" in str(missing.value)
    with pytest.raises(FileNotFoundError, match=r"neither train\.csv nor test\.csv") as parent:
        find(machine["root"] / "sets")
    assert f"did you mean {right}?" in str(parent.value)
    with pytest.raises(FileNotFoundError) as child:
        find(right / "train_images")
    assert f"did you mean {right}?" in str(child.value)


def test_no_demo_while_kaggle_scores(machine):
    environ = {"KAGGLE_KERNEL_RUN_TYPE": "Batch", "KAGGLE_IS_COMPETITION_RERUN": "1"}
    with pytest.raises(FileNotFoundError, match="not mounted"):
        env.find_data(environ=environ, **machine)
    folder = competition(machine["root"] / "kaggle/input/competitions" / SLUG)
    assert env.find_data(environ=environ, **machine).path == folder


# ---- work folder and disk


def test_work_folder_order(machine, monkeypatch):
    root, repository = machine["root"], machine["repository"]
    assert env.work_folder(environ={}, **machine) == repository / "work"
    kaggle = {"KAGGLE_KERNEL_RUN_TYPE": "Batch"}
    assert env.work_folder(environ=kaggle, **machine) == root / "kaggle/working/work"
    kaggle["RSNAKIT_WORK"] = str(root / "elsewhere")
    assert env.work_folder(environ=kaggle, **machine) == root / "elsewhere"
    monkeypatch.chdir(root)
    assert env.work_folder("here/deep", environ=kaggle, **machine) == root / "here" / "deep"
    assert all(not list(folder.iterdir()) for folder in (root / "elsewhere", root / "here/deep"))  # the trial is gone


def test_a_drive_that_is_not_mounted_is_no_place_to_work(machine, monkeypatch):
    """The folder would be made on Colab's own disk, which goes with the session."""
    drive = machine["root"] / "content/drive"
    with pytest.raises(OSError, match=r"drive is not mounted.*drive\.mount"):
        env.work_folder(str(drive / "MyDrive/rsnakit"), environ={}, **machine)
    assert not drive.exists()
    monkeypatch.setattr(os.path, "ismount", lambda path: path == drive)
    assert env.work_folder(str(drive / "MyDrive/rsnakit"), environ={}, **machine).is_dir()


def test_work_folder_that_cannot_be_written(machine, monkeypatch):
    (machine["root"] / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot write to the work folder .*RSNAKIT_WORK"):
        env.work_folder(str(machine["root"] / "file" / "work"), environ={}, **machine)

    def read_only(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(env.tempfile, "TemporaryFile", read_only)
    with pytest.raises(OSError, match="Read-only file system") as caught:
        env.work_folder(environ={}, **machine)
    assert caught.value.errno == errno.EROFS


def test_check_disk(tmp_path):
    folder = tmp_path / "not" / "yet"
    stat = os.statvfs(tmp_path)
    env.check_disk(folder, stat.f_bavail * stat.f_frsize / 2, "the store")
    assert not folder.exists()
    with pytest.raises(OSError, match=r"the store needs 1000000000\.00 GB .* GB free") as caught:
        env.check_disk(folder, 1e18, "the store")
    assert caught.value.errno == errno.ENOSPC and str(tmp_path) in str(caught.value)


# ---- cores


def test_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert env.cores(root=tmp_path) == 8  # no control group
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    for line, expected in [("max 100000\n", 8), ("250000 100000\n", 3), ("50000 100000", 1), ("3200000 100000", 8)]:
        (group / "cpu.max").write_text(line)
        assert env.cores(root=tmp_path) == expected
    (group / "cpu.max").unlink()
    (group / "cpu").mkdir()
    (group / "cpu/cpu.cfs_period_us").write_text("100000\n")
    for quota, expected in [("-1\n", 8), ("400000\n", 4)]:
        (group / "cpu/cpu.cfs_quota_us").write_text(quota)
        assert env.cores(root=tmp_path) == expected


# ---- device and precision


@pytest.fixture
def gpu(monkeypatch):
    """Make torch report a GPU: gpu(name, capability). One that doesn't run lacks kernels; one without `bf16` emulates it."""

    def install(name, capability, runs=True, bf16=True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
        monkeypatch.setattr(
            torch.cuda,
            "is_bf16_supported",
            lambda including_emulation=True: including_emulation or (bf16 and capability[0] >= 8),
        )
        plain_ones = torch.ones

        def ones(*size, device=None, **kwargs):
            if not runs:
                raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore lines")
            return plain_ones(*size, **kwargs)

        monkeypatch.setattr(torch, "ones", ones)

    return install


# T12
def test_gpu_without_kernels(gpu):
    gpu("Tesla P100-PCIE-16GB", (6, 0), runs=False)
    choice = env.choose_device("auto")
    assert choice.value == "cpu"
    for part in ("P100", "6.0", "no kernel image"):
        assert part in choice.reason
    assert "\n" not in choice.reason
    with pytest.raises(RuntimeError, match="no kernel image"):
        env.choose_device("cuda")


def test_choose_device(gpu):
    assert env.choose_device("cpu").value == "cpu"
    if not torch.cuda.is_available() and not torch.backends.mps.is_available():
        assert env.choose_device().value == "cpu"
        with pytest.raises(RuntimeError, match="sees no CUDA GPU"):
            env.choose_device("cuda:0")
    gpu("Tesla T4", (7, 5))
    assert env.choose_device().value == "cuda" and "T4" in env.choose_device().reason
    assert env.choose_device("cuda:0").value == "cuda:0"
    with pytest.raises(RuntimeError, match="only 1 CUDA"):
        env.choose_device("cuda:1")
    with pytest.raises(ValueError, match="expected auto, cpu"):
        env.choose_device("gpu")


# T12
@pytest.mark.parametrize(
    ("name", "capability", "auto", "refused"),
    [
        ("Tesla P100-PCIE-16GB", (6, 0), "fp32", ("fp16", "bf16")),
        ("Tesla V100-SXM2-16GB", (7, 0), "fp16", ("bf16",)),
        ("Tesla T4", (7, 5), "fp16", ("bf16",)),
        ("NVIDIA A100-SXM4-40GB", (8, 0), "bf16", ()),
        ("NVIDIA RTX 6000 Ada", (8, 9), "bf16", ()),
        ("NVIDIA H200", (9, 0), "bf16", ()),
    ],
)
def test_precision_of_gpus(gpu, name, capability, auto, refused):
    gpu(name, capability)
    choice = env.choose_precision("cuda")
    assert choice.value == auto
    assert name in choice.reason
    assert env.choose_precision(torch.device("cuda", 0)).value == auto
    for wanted in ("fp32", "fp16", "bf16"):
        if wanted in refused:
            with pytest.raises(ValueError, match=f"{name}.*use {auto}"):
                env.choose_precision("cuda", wanted)
        else:
            assert env.choose_precision("cuda", wanted).value == wanted


def test_new_gpu_with_emulated_bf16(gpu):
    gpu("NVIDIA A100-SXM4-40GB", (8, 0), bf16=False)
    assert env.choose_precision("cuda").value == "fp16"


def test_precision_elsewhere():
    assert env.choose_precision("cpu").value == "fp32"
    assert env.choose_precision("cpu", "bf16").value == "bf16"
    with pytest.raises(ValueError, match=r"CPU is slow in fp16.*use bf16"):
        env.choose_precision("cpu", "fp16")
    assert env.choose_precision("mps").value == "fp32"
    with pytest.raises(ValueError, match="mps; use fp32"):
        env.choose_precision("mps", "fp16")
    with pytest.raises(ValueError, match="expected auto, fp32, bf16 or fp16"):
        env.choose_precision("cpu", "float16")


# ---- the first cell


@pytest.mark.parametrize("layout", ["flat", "nested"])
def test_on_kaggle_it_is_said_what_is_mounted(machine, layout):  # I02
    root, repository = machine["root"], machine["repository"]
    none = env._found("kaggle", **machine)
    assert none[0] == f"package: {repository}"
    assert f"competition: none is mounted; add {SLUG} to" in none[1] and none[2] == "runs: none is mounted"
    flat = layout == "flat"
    mounted = competition(root / "kaggle/input" / (SLUG if flat else f"competitions/{SLUG}"))
    bundle = root / "kaggle/input" / ("run-a" if flat else "datasets/me/run-a")
    (bundle / "runs" / "a").mkdir(parents=True)
    (bundle / "bundle.json").touch()
    assert env._found("kaggle", **machine)[1:3] == [f"competition: {mounted}", f"runs: {bundle / 'runs' / 'a'}"]
    assert env._found("colab", **machine)[:1] == none[:1] and len(env._found("colab", **machine)) <= 2


def test_little_disk_is_said(machine, monkeypatch):  # K08
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2.5e9))
    assert env._found("paperspace", **machine)[-1] == f"NOTE: only 2.5 GB of disk are free in {Path.cwd()}"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=19e9))
    assert len(env._found("paperspace", **machine)) == 1


# K05
def test_kaggles_p100_is_refused(gpu, tmp_path):
    gpu("Tesla P100-PCIE-16GB", (6, 0), runs=False)
    with pytest.raises(RuntimeError) as caught:
        device.check_gpu(tmp_path)
    for part in ("P100", "6.0", "no kernel image", "Choose the accelerator GPU T4 x2"):
        assert part in str(caught.value)


# K05
@pytest.mark.parametrize("sign", ["dev/nvidia0", "proc/driver/nvidia/gpus/0000:00:04.0", "dev/nvidiactl", ""])
@pytest.mark.parametrize("hidden", [None, "", "-1", "0"])
def test_a_gpu_that_torch_does_not_see_is_refused_unless_it_is_hidden(tmp_path, monkeypatch, capsys, sign, hidden):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    if sign:
        (tmp_path / sign).mkdir(parents=True)
    if sign in ("", "dev/nvidiactl") or hidden in ("", "-1"):
        device.check_gpu(tmp_path)
        assert capsys.readouterr().out.startswith("NOTE: no GPU: ")
    else:
        with pytest.raises(RuntimeError, match=r"sees no CUDA GPU.*T4 x2"):
            device.check_gpu(tmp_path)


def test_a_gpu_that_computes_is_fine(gpu, tmp_path, capsys):
    gpu("Tesla T4", (7, 5))
    device.check_gpu(tmp_path)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("place", ["local", "colab", "kaggle"])
def test_start_installs_then_keeps_then_says_then_checks(tmp_path, monkeypatch, capsys, place):
    """Nothing is installed on a machine of one's own; what is installed comes first, as the rest may need it."""
    done = []
    for module, name in ((packages, "bring"), (mounts, "keep_work"), (device, "check_gpu")):
        monkeypatch.setattr(module, name, lambda *arguments, name=name: done.append((name, arguments)))
    monkeypatch.setattr(env, "where", lambda *_: env.Place(place, "a test says so"))
    monkeypatch.setattr(env, "ROOT", tmp_path)
    monkeypatch.setattr(env, "describe", lambda: done.append("said") or "on a machine")
    params.start(place == "colab")
    bring = [("bring", (place, Path(env.__file__).parents[1]))] if place != "local" else []
    keep = [("keep_work", (place, tmp_path))] if place == "colab" else []
    check = [("check_gpu", (tmp_path,))] if place == "kaggle" else []
    assert done == [*bring, *keep, "said", *check] and "on a machine" in capsys.readouterr().out


# ---- compile


@pytest.fixture
def compiler(monkeypatch):
    """Stands in for the first try of torch.compile: compiler(error) has it fail; what was compiled is listed."""
    tried, errors = [], []

    def compiled(function, **options):
        tried.append(function)
        if errors:
            raise errors[0]
        return function

    monkeypatch.setattr(torch, "compile", compiled)
    compiler = errors.append
    return compiler, tried


def with_triton(monkeypatch, there=True):
    found = device.importlib.util.find_spec
    monkeypatch.setattr(
        device.importlib.util,
        "find_spec",
        lambda name: (object() if there else None) if name == "triton" else found(name),
    )


# T12
@pytest.mark.parametrize("wanted", ["default", "max-autotune"])
@pytest.mark.parametrize(
    ("name", "capability", "able"),
    [("Tesla P100-PCIE-16GB", (6, 0), False), ("Quadro P5000", (6, 1), False), ("Tesla V100-SXM2-16GB", (7, 0), True),
     ("Tesla T4", (7, 5), True), ("NVIDIA A100-SXM4-40GB", (8, 0), True)],
)  # fmt: skip
def test_compile_is_off_on_gpus_too_old_for_it(gpu, compiler, monkeypatch, wanted, name, capability, able):
    gpu(name, capability)
    with_triton(monkeypatch)
    monkeypatch.setattr(torch, "arange", lambda n, device: torch.tensor(range(8), dtype=torch.float32))
    choice = env.choose_compile("cuda", wanted)
    assert choice.value == (wanted if able else "off")
    assert name in choice.reason and ("too old" in choice.reason) is not able
    assert len(compiler[1]) == able  # tried before it is promised, and not where it can't be
    # T12: with bf16 switched on as well each says what it can't
    if capability < (8, 0):
        with pytest.raises(ValueError, match=name):
            env.choose_precision("cuda", "bf16")


def test_compile_needs_triton_on_a_gpu(gpu, compiler, monkeypatch):
    gpu("Tesla T4", (7, 5))
    with_triton(monkeypatch, there=False)
    choice = env.choose_compile(torch.device("cuda", 0), "default")
    assert choice.value == "off" and "Triton is not installed" in choice.reason and not compiler[1]


def test_compile_off_asks_nothing(compiler, monkeypatch):
    monkeypatch.setenv("PATH", "")
    for where in ("cpu", "cuda", "mps"):
        assert env.choose_compile(where, "off") == env.Choice("off", "asked for")
    assert env.choose_compile("cpu").value == "off" and not compiler[1]
    with pytest.raises(ValueError, match="expected off, default or max-autotune"):
        env.choose_compile("cpu", "on")


def test_compile_on_a_cpu_needs_a_compiler(compiler, monkeypatch, tmp_path):
    assert env.choose_compile("cpu", "max-autotune").value == "max-autotune"
    monkeypatch.setenv("CXX", "no-such-compiler")
    choice = env.choose_compile("cpu", "default")
    assert choice.value == "off" and "no C++ compiler no-such-compiler" in choice.reason and "$CXX" in choice.reason
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C++ compiler" in env.choose_compile("cpu", "default").reason
    assert len(compiler[1]) == 1


def test_compile_on_a_cpu_whose_compiler_fails(compiler):
    """As without Python's headers; of the many lines the two that tell are shown."""
    compiler[0](
        RuntimeError(
            "CppCompileError: C++ compile error\n\nCommand:\ng++ x.cpp\n\nx.cpp:1: fatal error: Python.h: none"
        )
    )
    choice = env.choose_compile("cpu", "default")
    assert choice.value == "off" and "\n" not in choice.reason
    assert "default was asked for, but a first try failed (CppCompileError" in choice.reason
    assert "Python.h" in choice.reason


def test_compile_elsewhere(compiler):
    choice = env.choose_compile("mps", "default")
    assert choice.value == "off" and "mps" in choice.reason and not compiler[1]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(os.environ.get("CXX") or "g++") is None, reason="there is no C++ compiler")
def test_compile_tried_in_earnest():
    choice = env.choose_compile("cpu", "default")
    assert choice.value == "default", choice.reason


def test_start_says_where_and_why(capsys, gpu):
    gpu("Tesla T4", (7, 5))
    params.start()
    out = capsys.readouterr().out
    for part in (torch.__version__.split("+")[0], "device cuda: Tesla T4", "precision fp16", "only emulates bf16"):
        assert part in out


# ---- RunConfig


def test_run_config():
    assert params.from_mapping({}, env.RunConfig) == env.RunConfig()
    config = params.from_mapping({"fold": 3, "device": "cuda:1", "max_hours": 6, "debug": "true"}, env.RunConfig)
    assert (config.fold, config.device, config.max_hours, config.debug) == ("3", "cuda:1", 6.0, True)
    for wrong in ({"fold": "first"}, {"fold": -1}, {"device": "gpu"}, {"run": "a/b"}, {"run": ".."}, {"n_jobs": -1}):
        with pytest.raises(params.ParameterError, match=next(iter(wrong))):
            params.from_mapping(wrong, env.RunConfig)


def test_submissions_go_where_kaggle_looks_and_debug_never_does(tmp_path):
    work, real, debug = tmp_path / "work", env.RunConfig(), env.RunConfig(debug=True)
    kaggle = {"KAGGLE_KERNEL_RUN_TYPE": "Batch"}
    assert env.submission_folder(work, real, "r", {}, tmp_path) == work / "submissions" / "r"
    assert env.submission_folder(work, real, "r", kaggle, tmp_path) == tmp_path / "kaggle" / "working"
    for environ in ({}, kaggle):
        assert env.submission_folder(work, debug, "r", environ, tmp_path) == work / "submissions" / "debug-r"
