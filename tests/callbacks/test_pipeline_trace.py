"""The callback on Trainers whose pipeline sleeps: which steps it records, what it logs and writes, and when it is silent."""

import csv
import json
import warnings

import lightning.pytorch as L
import pytest
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_5d import FiveD, PipelineParallel, ZeRO
from lightning_5d.callbacks import PipelineTrace
from lightning_5d.callbacks.pipeline_trace import pipeline_of
from lightning_5d.pipeline_parallel import make_schedule, simulate
from lightning_5d.pipeline_parallel.schedule import flatten
from lightning_5d.pipeline_parallel.trace import Event, StepTrace
from tests.modules import TinyLM, loader
from tests.pipeline_parallel.sleeping import Sleeping
from tests.trainers import quiet

SEPARATE = {"backend": None, "timeout": 50.0}


def fit(callback, *plugins, devices=1, module=None, **settings):
    settings = {"max_steps": 3, "limit_val_batches": 1} | settings
    trainer = quiet(strategy=FiveD(*plugins), devices=devices, callbacks=[callback], **settings)
    trainer.fit(module or TinyLM(), loader(64, batch_size=4), loader(4, batch_size=4))
    return trainer


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_only_chosen_steps_are_recorded(tmp_path):
    callback = PipelineTrace(steps=(2, 5), every=3, folder=tmp_path, png=False, html=False, chrome=False)
    trainer = fit(callback, Sleeping(1, seconds=0.0), max_steps=7)
    assert pipeline_of(trainer).recorded == [False, True, True, False, True, True, False]
    assert names(tmp_path) == [f"step{step:06d}.json" for step in (2, 3, 5, 6)]
    assert pipeline_of(trainer).recorder is None
    assert StepTrace.load(tmp_path / "step000005.json").step == 5


def test_of_accumulated_batches_the_last_one_is_recorded(tmp_path):
    callback = PipelineTrace(steps=2, folder=tmp_path, png=False, html=False)
    trainer = fit(callback, Sleeping(1, seconds=0.0), accumulate_grad_batches=3)
    assert pipeline_of(trainer).recorded == [False] * 3 + [True] * 3 + [False] * 3
    assert names(tmp_path) == ["step000002.chrome.json", "step000002.json"]
    assert len(callback.summaries) == 1
    assert sum(event.kind == "F" for event in callback.trace.ranks[0]) == 4


def test_after_a_resume_steps_are_counted_on(tmp_path):
    fit(L.Callback(), Sleeping(1, seconds=0.0)).save_checkpoint(tmp_path / "three.ckpt")
    callback = PipelineTrace(steps=(2, 5), folder=tmp_path / "traces", png=False, html=False, chrome=False)
    trainer = quiet(
        strategy=FiveD(Sleeping(1, seconds=0.0)), devices=1, callbacks=[callback], max_steps=6, max_epochs=2
    )
    trainer.fit(TinyLM(), loader(64, batch_size=4), ckpt_path=tmp_path / "three.ckpt")
    assert names(tmp_path / "traces") == ["step000005.json"]


def test_pictures_of_steps_in_a_row_are_drawn_after_the_last_of_them(tmp_path):
    there = []

    class Looks(TinyLM):
        def on_train_batch_start(self, batch, batch_idx):
            there.append(len(list(tmp_path.glob("*.png"))))

    callback = PipelineTrace(steps=(1, 2), folder=tmp_path)
    fit(callback, Sleeping(1, seconds=0.0), module=Looks())
    assert there == [0, 0, 2]
    kinds = ("chrome.json", "html", "json", "png")
    assert names(tmp_path) == sorted(f"step00000{step}.{kind}" for step in (1, 2) for kind in kinds)
    assert sorted(path.name for path in callback.files) == names(tmp_path)


def test_a_run_that_fails_keeps_what_it_has_recorded(tmp_path):
    class Fails(TinyLM):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise RuntimeError("no")
            return super().training_step(batch, batch_idx)

    callback = PipelineTrace(steps=(2, 3, 4), folder=tmp_path)
    with pytest.raises(RuntimeError, match="no"):
        fit(callback, Sleeping(1, seconds=0.0), module=Fails(), max_steps=6)
    assert names(tmp_path) == [f"step000002.{kind}" for kind in ("chrome.json", "html", "json", "png")]


def test_without_a_pipeline_it_says_so_once_and_does_nothing(tmp_path):
    with pytest.warns(UserWarning, match="records nothing: there is no pipeline at work") as caught:
        trainer = fit(PipelineTrace(steps=2, folder=tmp_path / "none"), ZeRO(stage=0))
    assert sum("PipelineTrace" in str(warning.message) for warning in caught) == 1
    assert "pipeline/bubble" not in trainer.callback_metrics
    assert not (tmp_path / "none").exists()


def test_a_run_that_ends_before_its_steps_says_so(tmp_path):
    with pytest.warns(UserWarning, match="recorded nothing: training ended at step 3, before 40, 50"):
        fit(PipelineTrace(steps=(50, 40), folder=tmp_path), Sleeping(1, seconds=0.0))


def test_where_all_is_well_it_does_not_warn(tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*PipelineTrace.*")
        fit(PipelineTrace(steps=1, folder=tmp_path, png=False, html=False), Sleeping(1, seconds=0.0))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"steps": 0}, "steps has 0; steps are counted from 1"),
        ({"steps": (1, 2.5)}, "steps has 2.5"),
        ({"steps": True}, "steps has True"),
        ({"every": 0}, "every=0 must be a whole number of at least 1"),
        ({"steps": ()}, "there is no step to record; give steps=(4,) or every=100"),
        ({"data_ranks": "both"}, "data_ranks='both' is unknown"),
    ],
)
def test_wrong_settings_are_refused(settings, said):
    with pytest.raises(MisconfigurationException) as error:
        PipelineTrace(**settings)
    assert said in str(error.value)


def _two_stages(rank: int, folder: str, schedule: str) -> dict[str, float]:
    callback = PipelineTrace(steps=2, folder=f"{folder}/traces")
    logger = CSVLogger(folder, name="", version="run") if rank == 0 else False
    trainer = fit(callback, Sleeping(2, schedule), devices=2, logger=logger, log_every_n_steps=50)
    assert (callback.trace is not None) == (rank == 0)
    return {name: float(value) for name, value in trainer.callback_metrics.items() if "/" in name}


@pytest.mark.alone
def test_two_ranks_come_together_on_one_clock(ranks, tmp_path):
    schedule = make_schedule("1f1b", 2, 4)
    right = pytest.approx(simulate(schedule).bubble_ratio, abs=0.1)
    planned = []
    for number in range(8):  # another load on the machine may disturb a measurement, and not all of them
        folder = tmp_path / str(number)
        logged = ranks(2, _two_stages, str(folder), "1f1b", **SEPARATE)
        trace = StepTrace.load(folder / "traces" / "step000002.json")
        planned.append(trace.planned.bubble_ratio)
        if planned[-1] == right:
            break
    assert planned[-1] == right, planned
    assert names(folder / "traces") == [f"step000002.{kind}" for kind in ("chrome.json", "html", "json", "png")]
    assert trace.schedule == schedule
    for rank in range(2):
        computed = [(event.kind, event.stage, event.microbatch) for event in trace.ranks[rank] if event.computes]
        assert computed == [(action.kind, action.stage, action.microbatch) for action in schedule.rows[rank]]
        assert all(event.seconds >= 0.0039 for event in trace.ranks[rank] if event.computes)
    messages = list(trace.messages())
    assert len(messages) == 8
    assert all(send.start < receive.end for _, send, _, receive in messages)
    assert trace.clock_error == 0.0
    assert trace.actual.peak_activations == simulate(schedule).peak_activations == (2, 1)
    assert logged[0] == logged[1]
    assert logged[0]["pipeline/bubble"] == pytest.approx(trace.actual.bubble_ratio, rel=1e-5)
    assert logged[0]["pipeline/bubble_planned"] == pytest.approx(trace.planned.bubble_ratio, rel=1e-5)
    with (folder / "run" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("pipeline/bubble")]
    assert [(int(row["step"]), float(row["pipeline/bubble"])) for row in rows] == [
        (1, pytest.approx(logged[0]["pipeline/bubble"]))
    ]
    chrome = json.loads((folder / "traces" / "step000002.chrome.json").read_text())
    assert {event["pid"] for event in chrome["traceEvents"]} == {0, 1}


def _two_pipelines(rank: int, folder: str) -> tuple[float, list[str]]:
    callback = PipelineTrace(steps=1, folder=folder, data_ranks="all", png=False, html=False, chrome=False)
    trainer = fit(callback, Sleeping(2), ZeRO(stage=0), devices=4, max_steps=1)
    return float(trainer.callback_metrics["pipeline/bubble"]), [path.name for path in callback.files]


@pytest.mark.slow
def test_every_data_rank_can_write_its_own_pipeline_and_all_log_the_mean(ranks, tmp_path):
    found = ranks(4, _two_pipelines, str(tmp_path), **SEPARATE)
    assert [files for _, files in found] == [["step000001.json"], ["step000001_data1.json"], [], []]
    traces = [StepTrace.load(tmp_path / name) for name in names(tmp_path)]
    assert [trace.data_rank for trace in traces] == [0, 1]
    mean = sum(trace.actual.bubble_ratio for trace in traces) / 2
    assert [bubble for bubble, _ in found] == [pytest.approx(mean, rel=1e-5)] * 4


def _trains(rank: int, folder: str, schedule: str, options: dict[str, int]) -> float:
    callback = PipelineTrace(steps=2, folder=folder, png=False, html=False)
    pipeline = PipelineParallel(2, schedule=schedule, microbatches=4, **options)
    trainer = fit(callback, pipeline, devices=2, module=TinyLM(layers=4))
    return float(trainer.callback_metrics["pipeline/bubble"])


@pytest.mark.parametrize(
    ("schedule", "options"),
    [("afab", {}), ("1f1b", {}), ("zb_h1", {}), ("interleaved_1f1b", {"chunks": 2}), ("zb_v", {}), ("dualpipe", {})],
)
def test_the_executor_does_what_the_schedule_says_and_keeps_what_the_simulator_counts(
    ranks, tmp_path, schedule, options
):
    bubbles = ranks(2, _trains, str(tmp_path), schedule, options, **SEPARATE)
    trace = StepTrace.load(tmp_path / "step000002.json")
    planned = make_schedule(schedule, 2, 4, **options)
    assert trace.schedule == planned
    for rank, row in enumerate(planned.rows):
        computed = [(event.kind, event.stage, event.microbatch) for event in trace.ranks[rank] if event.computes]
        assert computed == [(action.kind, action.stage, action.microbatch) for action in flatten(row)]
        assert trace.ranks[rank][-1].live == 0
    assert trace.actual.peak_activations == simulate(planned).peak_activations
    messages = list(trace.messages())
    kinds = [event.kind for events in trace.ranks for event in events]
    assert len(messages) == kinds.count("send") == kinds.count("receive") > 0
    assert all(send.start <= receive.end for _, send, _, receive in messages)
    assert {event.nbytes for _, *ends in messages for event in ends if isinstance(event, Event)} == {6 * 8 * 4}
    assert bubbles == [pytest.approx(trace.actual.bubble_ratio, rel=1e-5)] * 2
