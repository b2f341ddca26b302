"""The course's program that loads faces: its options, and figures that are counted and measured."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest
from support.repository import ROOT

pytestmark = [
    pytest.mark.examples,
    pytest.mark.timeout(300),
    # The program itself leaves this out: more workers than cores are what it tries.
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


@pytest.fixture(scope="module")
def course():
    """Import a module of examples/course by name."""
    sys.path.insert(0, str(ROOT / "examples"))
    torch = importlib.import_module("torch")
    threads = torch.get_num_threads()
    yield lambda name: importlib.import_module(f"course.{name}")
    torch.set_num_threads(threads)
    sys.path.remove(str(ROOT / "examples"))
    for name in [name for name in sys.modules if name.split(".")[0] in ("course", "common")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def faces(course, tmp_path_factory):
    """Write 12 small pictures in LFW's layout."""
    image = importlib.import_module("PIL.Image")
    folder = tmp_path_factory.mktemp("data") / "lfw"
    for person in "abc":
        (folder / person).mkdir(parents=True)
        for number in range(4):
            picture = image.new("RGB", (40, 40), (60 * number, 80, 120))
            picture.save(folder / person / f"{person}_{number:04d}.jpg")
    return folder


@pytest.fixture
def run(course, faces, capsys):
    """Call the program with options; returns what it measured, and its lines."""

    def call(*options):
        timings = course("lfw_dataset").main(["-path_to_folder", str(faces), *options])
        return timings, capsys.readouterr().out.splitlines()

    return call


def test_without_options_the_pictures_are_counted(run):
    assert run() == ([], ["12 pictures of 3x40x40, batches of 32"])


@pytest.mark.parametrize("dash", ["-get_timing", "--get_timing", "--get-timing"])
def test_timing_is_of_five_passes(run, dash):
    (timing,), lines = run(dash, "-batches_to_check", "4", "-batch_size", "5")
    assert len(timing.seconds) == 5
    assert min(timing.seconds) > 0
    assert lines[1].startswith(f"Timing: {timing.mean:.3f}+-{timing.deviation:.3f} s, 0 workers")


def test_a_pass_has_as_many_batches_as_asked(course, faces):
    program = course("lfw_dataset")
    args = program.make_parser().parse_args(["-batch_size", "5"])
    loader = program.make_loader(program.LFWDataset(faces), args, 0, 4)
    assert [len(batch) for batch in loader] == [5, 5, 5, 5]


def test_workers_load_at_the_same_time(course, faces, monkeypatch):
    """Each of four workers waits for the other three before it loads a picture."""
    program = course("lfw_dataset")
    together = importlib.import_module("multiprocessing").get_context("fork").Barrier(4)

    class Together(program.LFWDataset):
        def __getitem__(self, index):
            together.wait(40)
            return super().__getitem__(index)

    args = program.make_parser().parse_args(
        ["-batch_size", "5", "-batches_to_check", "8", "-multiprocessing_context", "fork"]
    )
    monkeypatch.setattr(program, "RUNS", 1)
    (timing,) = program.measure(Together(faces), "slow", args, [4])
    assert (timing.workers, len(timing.seconds)) == (4, 1)


def test_kept_workers_are_started_once(course, faces, monkeypatch):
    """Their start is a pass that is not counted; without -keep_workers each pass starts them."""
    program = course("lfw_dataset")
    monkeypatch.setattr(program, "RUNS", 2)
    started = []
    context = importlib.import_module("multiprocessing").get_context("fork")

    class Noted(context.Process):
        def start(self):
            started.append(self)
            super().start()

    monkeypatch.setattr(context, "Process", Noted)
    args = program.make_parser().parse_args(["-batches_to_check", "2", "-batch_size", "2"])
    args.multiprocessing_context = context
    for keep, expected in ((True, 2), (False, 4)):
        started.clear()
        (timing,) = program.measure(program.LFWDataset(faces), "light", args, [2], keep=keep)
        assert (len(started), len(timing.seconds)) == (expected, 2)


def test_the_fastest_number_of_workers_is_told(course):
    program = course("lfw_dataset")
    alone = program.Timing("heavy", 0, (1.9, 2.1))
    assert program.verdict([alone, program.Timing("heavy", 1, (2.5, 2.5))]) == (
        "heavy: fastest with 0"
    )
    assert program.verdict([alone, program.Timing("heavy", 2, (1.25, 1.25))]) == (
        "heavy: fastest with 2, 1.60 times as fast as with 0"
    )
    close = program.verdict([alone, program.Timing("heavy", 2, (1.8, 2.0))])
    assert close.endswith("1.05 times as fast as with 0, which is within the deviations")


def test_a_batch_is_made_by_one_worker(course, faces):
    """Two messages for a batch and one handle of its memory, not two for each worker."""
    dataset = course("lfw_dataset").LFWDataset(faces)
    traffic = course("messages").count_messages(dataset, 2, 3, 5, "fork")
    assert traffic.asked == [0, 1, 2, 0, 1]
    assert traffic.loaded == [[0, 0], [1, 1], [2, 2], [0, 0], [1, 1]]
    assert (traffic.index_lists, traffic.batches, traffic.handles) == (5, 5, 5)
    assert traffic.farewells == 3
    assert traffic.ahead == 5  # two for each of three workers, as far as there are as many


def test_messages_are_told(run):
    _, lines = run("-count_messages", "-num_workers", "2", "-batch_size", "4")
    assert lines[1] == "batch 0: asked of worker 0, all 4 samples loaded by worker 0"
    assert "lists of indices to workers      3, 1 per batch" in lines
    _, lines = run("-count_messages", "-batch_size", "4")
    assert lines[1] == "3 batches, no messages: the main process loads them itself"


def test_workers_that_import_everything_anew_load_too(faces, tmp_path):
    lines = started(
        tmp_path, "-path_to_folder", faces, "-count_messages", "-num_workers", "1", "-batch_size",
        "4", "-multiprocessing_context", "spawn",
    )  # fmt: skip
    assert "lists of indices to workers      3, 1 per batch" in lines


def test_a_batch_is_drawn(run, tmp_path):
    image = importlib.import_module("PIL.Image")
    path = tmp_path / "batch.png"
    _, lines = run("-visualize_batch", "-heavy", "-output", str(path))
    assert lines[1] == f"the batch is in {path}, 786x394 points"
    with image.open(path) as picture:
        assert picture.size == (786, 394)
        assert len(picture.convert("RGB").getcolors(100_000)) > 10


def test_without_a_screen_the_batch_goes_to_a_file(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pyplot = importlib.import_module("matplotlib.pyplot")
    monkeypatch.setattr(pyplot, "get_backend", lambda: "agg")
    _, lines = run("-visualize_batch")
    assert lines[1].startswith("no screen for a window: the batch is in batch.png")
    assert (tmp_path / "batch.png").is_file()


def test_a_plot_has_every_kind_and_number_of_workers(run, tmp_path):
    path = tmp_path / "workers.svg"
    timings, _ = run(
        "-plot", str(path), "-workers", "0", "1", "-batches_to_check", "1", "-batch_size", "2",
        "-multiprocessing_context", "fork",
    )  # fmt: skip
    measured = [(timing.kind, timing.workers) for timing in timings]
    kinds = ("held in memory", "light", "heavy")
    assert measured == [(kind, workers) for kind in kinds for workers in (0, 1)]
    drawn = path.read_text()
    for words in ('id="workers-0"', 'id="workers-2"', "held in memory", "heavy", "num_workers"):
        assert words in drawn


def test_pin_memory_without_a_gpu_is_explained(run):
    torch = importlib.import_module("torch")
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    assert run("-pin_memory")[1][1].startswith("-pin_memory has no effect: this host does")


def test_a_folder_without_pictures_is_one_line(course, tmp_path, capsys):
    (tmp_path / "lfw").mkdir()
    with pytest.raises(SystemExit, match="2"):
        course("lfw_dataset").main(["-path_to_folder", str(tmp_path / "lfw")])
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "no jpg files in" in error


def test_sample_faces_are_whole_or_not_there(course, tmp_path, monkeypatch):
    pytest.importorskip("skimage")
    module = course("sample_faces")
    people = list(module._people())
    assert len(people) == 101

    def broken():
        yield people[0]
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_people", broken)
    with pytest.raises(KeyboardInterrupt):
        module.find_or_make(tmp_path / "lfw")
    assert not list(tmp_path.iterdir())

    monkeypatch.setattr(module, "_people", lambda: [people[0], people[-1]])
    assert module.find_or_make(tmp_path / "lfw") == (tmp_path / "lfw", True)
    assert module.find_or_make(tmp_path / "lfw") == (tmp_path / "lfw", False)
    files = sorted(path.name for path in tmp_path.rglob("*.jpg"))
    assert files[:2] == ["Eileen_Collins_0001.jpg", "Eileen_Collins_0002.jpg"]
    assert len(files) == 8
    image = importlib.import_module("PIL.Image")
    with image.open(tmp_path / "lfw" / "Person_000" / "Person_000_0001.jpg") as picture:
        assert (picture.size, picture.mode) == ((250, 250), "RGB")


def started(folder, *words, launcher=()):
    """Run the program in a process of its own, and return its lines."""
    program = ROOT / "examples" / "course" / "lfw_dataset.py"
    done = subprocess.run(
        [sys.executable, *launcher, program, *words], cwd=folder, text=True, timeout=110,
        capture_output=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


@pytest.mark.long
@pytest.mark.mpi
def test_instances_share_the_files(faces, tmp_path):
    lines = started(
        tmp_path, "-path_to_folder", faces, "-get_timing", "-batches_to_check", "2", "-batch_size",
        "3", launcher=("-m", "poprun_py", "--num-instances", "2", "--num-replicas", "2"),
    )  # fmt: skip
    assert len(lines) == 2
    assert lines[0] == "[1,0]<stdout>:12 pictures of 3x40x40, batches of 3"
    assert lines[1].startswith("[1,0]<stdout>:Timing: ")


def test_a_share_is_every_second_file(course, faces):
    program = course("lfw_dataset")
    shares = [program.LFWDataset(faces, part=part, parts=2).files for part in (0, 1)]
    assert sorted([*shares[0], *shares[1]]) == program.LFWDataset(faces).files
    assert not set(shares[0]) & set(shares[1])
