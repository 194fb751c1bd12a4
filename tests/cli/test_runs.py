"""Whole runs of several processes, as a person starts them."""

import csv
import re

import pytest

from tests.cli.conftest import RECORDER, TINY, ranks_of
from tests.ranks.warm import run_warm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
STRATEGY = "strategy=zero1"


def only_folder(path):
    (folder,) = path.glob("outputs/*/*")
    return folder


def assert_one_run_of_two_ranks(folder):
    first, second = ranks = ranks_of(folder)
    assert [fact["rank"] for fact in ranks] == [0, 1]
    assert first["world"] == second["world"] == 2
    assert first["pid"] != second["pid"]
    for name in ("cwd", "checkpoints", "root", "strategy"):
        assert first[name] == second[name], name
    assert first["checkpoints"].startswith(str(folder))
    return ranks


def test_the_demo_leaves_everything_in_one_folder(fived, tmp_path):
    status, output = fived("train", *TINY, *RECORDER, STRATEGY, "hydra.job.chdir=true", timeout=300)
    assert status == 0, output
    folder = only_folder(tmp_path)
    ranks = assert_one_run_of_two_ranks(folder)
    assert {fact["strategy"] for fact in ranks} == {"FiveD"}
    assert {fact["cwd"] for fact in ranks} == {str(folder)}

    with (folder / "csv" / "metrics.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [int(row["step"]) for row in rows if row["val_loss"]] == [1, 3]
    assert {"train_loss", "gradient_norm", "tokens_per_second", "val_bits_per_byte"} <= set(rows[0])
    assert all(float(row["gradient_norm"]) > 0 for row in rows if row["gradient_norm"])
    best = min(float(row["val_loss"]) for row in rows if row["val_loss"])
    (checkpoint,) = (folder / "checkpoints").iterdir()
    assert f"val_loss{best:.3f}" in checkpoint.name
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "sample.txt").read_text().startswith("The ")

    entropy = float(re.search(r"Unigram entropy of the training text: +([\d.]+) bits per byte", output)[1])
    loss = float(re.search(r"Validation loss after 4 steps: +([\d.]+) bits per byte", output)[1])
    last = next(row for row in reversed(rows) if row["val_bits_per_byte"])
    assert loss == pytest.approx(float(last["val_bits_per_byte"]), abs=1e-3)
    assert 4.3 < entropy < 5.0
    assert str(checkpoint) in output
    assert f"Run folder:       {folder}" in output
    assert output.count("Validation loss after") == 1


def test_a_sweep_runs_each_job_once_with_its_own_two_ranks(fived, tmp_path):
    sweep = ("--multirun", "seed=1,2", *TINY, *RECORDER, STRATEGY)
    status, output = fived("train", *sweep, timeout=300)
    assert status == 0, output
    (folder,) = tmp_path.glob("multirun/*/*")
    jobs = [folder / "0", folder / "1"]
    assert sorted(path for path in folder.iterdir() if path.is_dir()) == jobs
    ranks = [fact for job in jobs for fact in assert_one_run_of_two_ranks(job)]
    assert len(list(folder.glob("*/ranks/*.json"))) == 4
    assert ranks[0]["pid"] == ranks[2]["pid"]
    assert ranks[1]["pid"] != ranks[3]["pid"]
    assert not (tmp_path / "outputs").exists()
    losses = re.findall(r"Validation loss after 4 steps: +([\d.]+)", output)
    assert len(losses) == 2
    assert losses[0] != losses[1]


def test_ranks_that_torchrun_started_share_one_folder(environment, tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "lightning_5d.cli")
    arguments = ("train", *TINY, *RECORDER, STRATEGY)
    status, output = run_warm(*torchrun, *arguments, folder=tmp_path, environment=environment, seconds=300)
    assert status == 0, output
    folder = only_folder(tmp_path)
    assert_one_run_of_two_ranks(folder)
    assert (folder / ".hydra" / "config.yaml").is_file()
    assert output.count("Validation loss after") == 1


def test_verify_compares_the_configured_run_with_one_process(fived):
    status, output = fived("verify", "model=tiny", STRATEGY, timeout=300)
    assert status == 0, output
    assert re.search(r"pass: .*2 ranks against one process, 3 steps", output)


def test_a_tokenized_folder_trains_and_is_sampled_as_text(fived, tmp_path):
    (tmp_path / "books").mkdir()
    for name in ("one.txt", "two.txt"):
        (tmp_path / "books" / name).write_text("It was the best of times, it was the worst of times. " * 40)
    assert fived("tokenize", "books", "books.bin")[0] == 0
    status, output = fived("train", *TINY, "data=tokens", "data.path=books.bin", "strategy=single")
    assert status == 0, output
    assert (only_folder(tmp_path) / "sample.txt").read_text().startswith("The ")
    assert re.search(r"Validation loss after 4 steps: +[\d.]+ bits per byte", output)
