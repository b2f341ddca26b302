"""Commands of the tutorial texts: their outputs match the records and docs/seeds.md."""

from __future__ import annotations

import re

import pytest
from support.repository import ROOT
from tutorial_texts import records
from tutorial_texts.comparison import NO, PARTLY, YES, holds
from tutorial_texts.records import TEXTS
from tutorial_texts.values import Text, TextCommand

from tools.running.printed import comparable
from tools.running.project_copy import project_copy

# The commands of the texts, copied from them, by the names of the modules. The course's second
# module names a script and asks for measurements instead of printing commands.
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
    "course": (
        "python lfw_dataset.py",
        "python lfw_dataset.py -visualize_batch",
        "python lfw_dataset.py -get_timing -num_workers 1",
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

PAGE = (ROOT / "docs" / "seeds.md").read_text(encoding="utf-8")
_ROW = re.compile(r"^\|((?: [^|]+ \|)+)$", re.M)
_CODE = re.compile(r"`([^`]+)`")


def commands():
    """Yield the commands that run. Those of more than two seconds are long."""
    for name, text in TEXTS.items():
        for one in text.commands:
            if one.here:
                mark = pytest.mark.examples if one.quick else pytest.mark.long
                yield pytest.param(name, one, id=one.text, marks=mark)


def rows(text: str):
    """Yield the cells of each row of the tables in a part of the page, without their heads."""
    for row in _ROW.findall(text):
        cells = [cell.strip() for cell in row.split(" |")[:-1]]
        if not cells[0].startswith("-") and cells[0] not in ("text", "command"):
            yield cells


def command_of(text: Text, words: str) -> TextCommand:
    """Return the only command that ends with these words, or else the only one with them."""
    ending = [one for one in text.commands if one.text.endswith(words)]
    (found,) = ending or [one for one in text.commands if words in one.text]
    return found


@pytest.mark.parametrize("name", TEXTS)
def test_every_printed_command_is_there(name):
    commands = [" ".join(one.text.split()) for one in TEXTS[name].commands]
    assert len(set(commands)) == len(commands)
    for printed in PRINTED[name]:
        if printed.split()[0] in ("python", "python3", "pip", "ssh", "jupyter-notebook", "gc-info"):
            assert printed in commands
        else:
            assert any(printed in one for one in commands), printed
    assert (ROOT / "docs" / TEXTS[name].page).exists()


@pytest.mark.parametrize("name", TEXTS)
def test_every_command_that_runs_has_a_record(name):
    assert [*records.read(name)] == [one.text for one in TEXTS[name].commands if one.here]


@pytest.mark.mpi
@pytest.mark.timeout(700)
@pytest.mark.parametrize(("name", "one"), list(commands()))
def test_command_prints_its_record(name, one, request):
    compiling = any(line.startswith("Graph compilation") for line in one.shows)
    with project_copy() as here:
        out = here.folder / "out"
        out.mkdir()
        done = here.run(one.here, one.folder, {"out": str(out)}, one.seconds, compiling=compiling)
    problem = done.problem(one.code, one.seconds)
    assert not problem, "\n".join([problem, *done.lines])
    patterns = one.keep or ("",)
    lines = [line for line in done.lines if any(re.search(each, line) for each in patterns)]
    if request.config.getoption("--rewrite-goldens"):
        records.write(name, one.text, lines)
    now, then = (
        comparable([line.rstrip() for line in each], numbers_vary=one.numbers_vary)
        for each in (lines, records.read(name)[one.text])
    )
    assert now == then


def test_the_page_counts_the_commands_that_hold():
    counts = {cells[0]: cells[1:] for cells in rows(PAGE.partition("\n## ")[0])}
    found = []
    for name, text in TEXTS.items():
        recorded = records.read(name)
        kinds = [holds(one, recorded.get(one.text, [])) for one in text.commands]
        found.append([len(kinds), *(kinds.count(kind) for kind in (YES, PARTLY, NO))])
        anchor = re.sub(r"[^\w -]", "", text.title.lower()).replace(" ", "-")
        assert counts.pop(f"[{text.title}](#{anchor})") == [str(number) for number in found[-1]]
    assert counts == {"all texts": [str(sum(column)) for column in zip(*found, strict=True)]}


@pytest.mark.parametrize("name", TEXTS)
def test_the_page_shows_what_the_text_and_the_record_show(name):
    """In each row, code names one command, lines of the text, and lines of the record."""
    section = PAGE.partition(f"\n## {TEXTS[name].title}\n")[2].partition("\n## ")[0]
    found = [*rows(section)]
    assert found
    for named, text, here, *_ in found:
        one = command_of(TEXTS[name], *_CODE.findall(named))
        for code in _CODE.findall(text):
            assert any(code in line for line in one.shows), code
        for code in _CODE.findall(here):
            assert any(code in line for line in records.read(name)[one.text]), code
