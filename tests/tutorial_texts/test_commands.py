"""docs/seeds.md: every command that the texts print, with what it prints here now."""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace

import pytest
from support.processes import survivors, wait_until
from support.repository import ROOT

from tools.pages import seeds
from tools.pages.seed_texts import index
from tools.pages.seed_texts.running import place
from tools.pages.seed_texts.values import Text, TextCommand

# What stands in the texts as a command, by the name of its module. The course's second part prints
# none, but names a script and has its reader measure.
PRINTED = {
    "data_loading": (
        "pip install torchvision",
        "--synthetic-data",
        "--replicas",
    ),
    "hands_on": (
        "pip install -r requirements.txt",
        "python main.py --batch-size 64 --precision 32.32 --gradient-accumulation 3 --epochs 1",
        "python main.py --batch-size 64 --precision 16.16 --gradient-accumulation 3",
        "python main.py --batch-size 64 --precision 16.16 --gradient-accumulation 8",
        "python main.py --batch-size 64 --precision 16.16 --gradient-accumulation 8 "
        "--device-iteration 4",
        "python main.py --batch-size 64 --precision 16.16 --gradient-accumulation 8 "
        "--device-iteration 4 --eight-bit-io",
        "python main.py --batch-size 64 --precision 16.16 --gradient-accumulation 8 "
        "--device-iteration 4 --eight-bit-io --async-dataloader",
    ),
    "course_loading": (
        "python lfw_dataset.py",
        "python lfw_dataset.py -visualize_batch",
        "python lfw_dataset.py -get_timing -num_workers 1",
    ),
    "course_training": (
        "nn.DataParallel",
        "2-3 times faster",
        "distributed_example.sh",
        "1 and 2 GPUs",
    ),
    "pipelining": (
        "train_opts.setExecutionStrategy(pipelined_strategy)",
        "train_opts.Training.gradientAccumulation(gradient_accumulation)",
        "train_opts.TensorLocations.setOptimizerLocation",
        "train_opts.outputMode(poptorch.OutputMode.All)",
        "python3 -m pip install -r requirements.txt",
        "python3 -m pip install jupyter",
        "jupyter-notebook --no-browser --port <port number>",
        "ssh -NL <port number>:localhost:<port number> <your username>@<remote machine>",
        "python3 mnist_pipeline.py",
        "python3 mnist_pipeline.py --learning-rate 0.002 --debug --epochs 5",
        "python3 mnist_pipeline.py --profile --profile-dir pipeline_profile",
        "python3 mnist_pipeline.py --strategy sharded --profile --profile-dir sharding_profile",
        "python3 mnist_pipeline.py --offload-optimiser",
    ),
    "cnns": (
        "pip install -r requirements.txt",
        "python3 train.py --dataset imagenet --data-dir path-to/imagenet",
        "python restore.py --restore-path logs/RN20_bs32_BN_16.16_v0.9.115_3S9/",
        "python3 -m pytest",
        "python3 train.py --config my_config",
        "python3 train.py --config my_config --epochs 50",
        "python train.py --config mk2_resnet8_test --wandb",
        "gc-info -l",
        "--print-topology=yes",
        "--pipeline --shards 1 --pipeline-schedule Sequential --enable-recompute",
        "mk2_resnet50_mlperf_pod16_bs20",
        "mk2_resnet50_mlperf_pod64_lars",
        "mk2_resnet50_mlperf_pod128_lars",
        "mk2_resnet50_mlperf_pod256_lars",
    ),
}
TEXTS = index.texts()
COMMANDS = seeds.chosen(TEXTS, None)
_QUICK = 2  # seconds; make test-all runs commands of up to _LONG as well, make seeds all
_LONG = 20


def made_up(*commands: TextCommand) -> dict[str, Text]:
    return {"made_up": Text("A text: made up!", "device.md", commands)}


def command(text: str, program: str, **values) -> TextCommand:
    words = {"here": ("python", "-c", program) if program else ()}
    defaults = {"shows": (), "folder": "examples", "why": "It is short.", "seconds": 30}
    return TextCommand(text=text, **{**defaults, **words, **values})


GREETING = command(
    "python greet.py",
    "print('100%|##| 2/2 [00:01<00:00, 1.3s/it]\\nhello 12 in 3.4 s\\nbye')",
    shows=("100%|##| 2/2 [00:01<00:00, 2.1it/s]hello 5 in 7.8 s",),
)
TEXT = made_up(
    GREETING,
    command("python other.py", "print('b')", shows=("a",), numbers_vary=False, keep=("b",)),
    command("python silent.py --to {out}", "raise SystemExit(7)", code=7),
    command("ssh remote", "", why="There is no other machine."),
)


@pytest.fixture
def only(monkeypatch, tmp_path):
    """Let the program know one text, and write another page."""

    def use(texts: dict[str, Text]):
        monkeypatch.setattr(seeds, "all_texts", lambda: texts)
        monkeypatch.setattr(seeds, "PAGE", tmp_path / "seeds.md")
        return seeds.PAGE

    return use


def test_page_of_made_up_commands(only, golden):
    page = only(TEXT)
    assert seeds.main([]) == []
    found = page.read_text(encoding="utf-8")
    golden("seeds.md", re.sub(r"about \d+ s", "about 1 s", found))
    assert seeds.main(["--check"]) == []


def test_check_finds_what_is_printed_otherwise(only):
    page = only(made_up(GREETING))
    seeds.main([])
    written = page.read_text(encoding="utf-8")
    page.write_text(written.replace("hello 12", "hello 99"), encoding="utf-8")
    assert seeds.main(["--check"]) == []  # numbers vary
    changed = written.replace("bye\n", "bye bye\n")
    page.write_text(changed, encoding="utf-8")
    (failure,) = seeds.main(["--check"])
    assert failure.startswith("python greet.py: the page shows something else")
    assert "hello 12 in 3.4 s\nbye" in failure
    assert page.read_text(encoding="utf-8") == changed


def test_one_command_is_run_and_the_others_stay_as_they_are(only):
    page = only(TEXT)
    seeds.main([])
    before = re.sub(r"about \d+ s", "about 9 s", page.read_text(encoding="utf-8"))
    page.write_text(before.replace("\nb\n", "\nfrom before\n"), encoding="utf-8")
    seeds.main(["--only", "greet"])
    after = page.read_text(encoding="utf-8")
    assert "\nfrom before\n" in after
    assert after.count("about 9 s") == 2
    seeds.main(["--only", "made_up"])
    assert "\nfrom before\n" not in page.read_text(encoding="utf-8")


def test_unknown_text_is_refused_in_one_line(only, capsys):
    only(TEXT)
    with pytest.raises(SystemExit) as caught:
        seeds.main(["--only", "nothing"])
    assert caught.value.code == 2
    assert "--only nothing: no command has that" in capsys.readouterr().err


@pytest.mark.timeout(60)
def test_what_fails_or_takes_too_long_is_named_and_leaves_nothing(only, monkeypatch):
    mark = f"seeds-{time.monotonic_ns()}"
    monkeypatch.setenv("SEEDS_TEST_MARK", mark)
    # What it started does not end when it is asked to.
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print('begun', flush=True); time.sleep(100)"
    )
    sleeps = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {deaf!r}])"
    page = only(
        made_up(
            command("python fails.py", "print('why'); raise SystemExit(3)"),
            command("python sleeps.py", sleeps, seconds=2),
            GREETING,
        )
    )
    failures = seeds.main([])
    assert failures == [
        "python fails.py: exit code 3, expected 0\nwhy",
        "python sleeps.py: did not end within 2 s\nbegun",
    ]
    found = page.read_text(encoding="utf-8")
    assert "hello 12" in found
    assert found.count("It has not been run yet.") == 2
    wait_until(lambda: not survivors(f"SEEDS_TEST_MARK={mark}"), 10, "processes are left")


@pytest.mark.timeout(60)
def test_who_ends_the_program_ends_the_command_and_keeps_what_was_shown(only, monkeypatch):
    mark = f"seeds-{time.monotonic_ns()}"
    monkeypatch.setenv("SEEDS_TEST_MARK", mark)
    ends = f"import os, signal, time; os.kill({os.getpid()}, signal.SIGTERM); time.sleep(100)"
    page = only(made_up(GREETING, command("python ends.py", ends)))
    with pytest.raises(SystemExit) as caught:
        seeds.main([])
    assert caught.value.code == 143
    assert "hello 12" in page.read_text(encoding="utf-8")
    wait_until(lambda: not survivors(f"SEEDS_TEST_MARK={mark}"), 10, "processes are left")


@pytest.mark.examples
@pytest.mark.mpi
@pytest.mark.timeout(100)
def test_job_that_takes_too_long_leaves_no_instance(only, monkeypatch):
    mark = f"seeds-{time.monotonic_ns()}"
    monkeypatch.setenv("SEEDS_TEST_MARK", mark)
    sleeps = "print('begun', flush=True); import time; time.sleep(100)"
    words = ("python", "-m", "poprun_py", "-n", "2", "python", "-c", sleeps)
    only(made_up(replace(command("poprun sleeps.py", ""), here=words, seconds=8)))
    (failure,) = seeds.main([])
    assert failure.startswith("poprun sleeps.py: did not end within 8 s\n")
    assert failure.count("begun") == 2
    wait_until(lambda: not survivors(f"SEEDS_TEST_MARK={mark}"), 20, "instances are left")


def test_commands_write_into_a_copy():
    with place() as here:
        for folder in (".", "examples/common"):
            done = here.run(("python", "-c", "open('new', 'w')"), folder, {}, 30)
            assert done.code == 0
            assert (here.project / folder / "new").exists()
            assert not (ROOT / folder / "new").exists()
        done = here.run(("python", "-c", "import os; print(os.getcwd(), '{data}')"), ".", {}, 30)
        assert done.lines == ("poprun-py data",)


LISTING = """Graphcore device listing:
Partition: emulated [active]
-+- Id: [0], target: [Fabric], IPU-M host: [localhost], IPU#: [3], in use by: [12]
-+- Id: [1], target: [Fabric], IPU-M host: [localhost], IPU#: [2]
-+- Id: [2], target: [Multi IPU]
 |--- Id: [0], DNC Id: [0], IPU-M host: [localhost], IPU#: [3]
"""
OTHER_JOB = LISTING.partition("\n")[2].replace("emulated", "job-17764")


@pytest.mark.parametrize("others", ["", OTHER_JOB, OTHER_JOB * 2])
def test_other_jobs_of_the_machine_are_not_shown(others):
    with place() as here:
        done = here.run(("python", "-c", f"print({LISTING + others!r}, end='')"), ".", {}, 30)
    assert list(done.lines) == LISTING.replace(", in use by: [12]", "").splitlines()


@pytest.mark.parametrize("name", index.NAMES)
def test_every_printed_command_is_there(name):
    commands = [" ".join(one.text.split()) for one in TEXTS[name].commands]
    assert len(set(commands)) == len(commands)
    for printed in PRINTED[name]:
        if printed.split()[0] in ("python", "python3", "pip", "ssh", "jupyter-notebook", "gc-info"):
            assert printed in commands
        else:
            assert any(printed in one for one in commands), printed
    assert all(one.why for one in TEXTS[name].commands)
    assert (ROOT / "docs" / TEXTS[name].page).exists()


def test_every_command_was_run():
    printed = seeds.printed_on(seeds.PAGE.read_text(encoding="utf-8"))
    lacking = [one.text for text, one in COMMANDS if (text.title, one.text) not in printed]
    assert not lacking, "make seeds"


def rerun():
    """Commands that took at most ``_LONG`` seconds when the page was written."""
    shown = seeds.printed_on(seeds.PAGE.read_text(encoding="utf-8"))
    for text, one in COMMANDS:
        key = text.title, one.text
        if key in shown and shown[key].seconds <= _LONG:
            mark = pytest.mark.examples if shown[key].seconds <= _QUICK else pytest.mark.long
            yield pytest.param(text, one, id=one.text, marks=mark)


@pytest.mark.mpi
@pytest.mark.parametrize(("text", "one"), list(rerun()))
def test_command_prints_what_the_page_shows(text, one):
    printed, failures = seeds.run([(text, replace(one, seconds=100))])
    assert not failures, failures[0]
    before = seeds.printed_on(seeds.PAGE.read_text(encoding="utf-8"))
    assert seeds.differences([(text, one)], printed, before) == []
