"""The callback on a Trainer: what it records under each stage, what it writes, and what it leaves alone."""

import csv
import json
import os
import re
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_5d import FiveD, ZeRO
from lightning_5d.callbacks import MemoryProfiler
from lightning_5d.launch import supervisor
from lightning_5d.memory import MemoryRecord
from lightning_5d.memory.charts import draw_folder
from tests.modules import TinyLM, loader
from tests.ranks.failure import RankError
from tests.trainers import quiet

TRAINER = {"backend": None, "timeout": 50.0}
LAYERS, WIDTH = 3, 32


def model(**arguments):
    return TinyLM(layers=LAYERS, width=WIDTH, **arguments)


def fit(profiler, module=None, **arguments):
    arguments = {"max_steps": 3, "limit_val_batches": 0} | arguments
    trainer = quiet(callbacks=[profiler], **arguments)
    trainer.fit(module or model(), loader(64, batch_size=4))
    return trainer


class FailsInBackward(TinyLM):
    """Raises in the backward of its second step, on one rank."""

    def __init__(self, rank=0, **arguments):
        super().__init__(**arguments)
        self.rank, self.calls = rank, 0

    def backward(self, loss, *args, **kwargs):
        self.calls += 1
        super().backward(loss, *args, **kwargs)
        if self.calls == 2 and self.global_rank == self.rank:
            raise RuntimeError("no memory left")


def sizes(module):
    return sum(p.numel() * p.itemsize for p in module.parameters())


def test_one_process_weights_gradients_and_moments_to_the_byte(tmp_path):
    profiler = MemoryProfiler(tmp_path, steps=2)
    module = model()
    fit(profiler, module)
    record = MemoryRecord.load(tmp_path / "memory_rank0.json")
    phi = sizes(module)
    names = [(phase.step, phase.name) for phase in record.phases]
    one_step = ["gather", "forward", "backward", "clip", "step", "between"]
    assert names == [(0, "setup"), *((step, name) for step in (1, 2) for name in one_step)]
    assert record.at_end("setup", 0)["weights"] == phi
    assert record.at_end("backward", 1)["gradients"] == phi
    assert record.at_end("clip", 1)["optimizer momentum"] == 0
    for step in (1, 2):
        end = record.at_end("step", step)
        assert end["weights"] == end["gradients"] == end["optimizer momentum"] == end["optimizer variance"] == phi
        assert end["master weights"] == end["communication buffers"] == 0
        assert end["optimizer step"] == 4 * len(list(module.parameters()))
    assert record.at_end("forward", 2)["gradients"] == 0
    assert record.at_end("forward", 2)["activations"] > 0.5 * phi


def test_tied_weights_count_once(tmp_path):
    tied, untied = MemoryProfiler(tmp_path / "tied"), MemoryProfiler(tmp_path / "untied")
    fit(tied, model(tied=True))
    fit(untied, model())
    difference = untied.recorder.record.highest()["weights"] - tied.recorder.record.highest()["weights"]
    assert difference == 13 * WIDTH * 4


def test_the_model_is_recorded_while_it_is_built(tmp_path):
    class Built(TinyLM):
        def configure_model(self):
            torch.zeros(1 << 20)  # gone again: only a recording that has begun can tell

    profiler = MemoryProfiler(tmp_path)
    fit(profiler, Built())
    setup = profiler.recorder.record.phases[0]
    assert setup.name == "setup"
    assert sum(setup.peak.values()) > 4 << 20


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_window_counts_optimizer_steps(tmp_path, accumulate):
    profiler = MemoryProfiler(tmp_path, start=2, steps=2)
    fit(profiler, max_steps=5, accumulate_grad_batches=accumulate)
    record = MemoryRecord.load(tmp_path / "memory_rank0.json")
    assert sorted({phase.step for phase in record.phases}) == [2, 3]
    batches = sorted({phase.batch for phase in record.phases})
    assert batches == list(range(accumulate + 1, 3 * accumulate + 1))
    assert [phase.name for phase in record.phases].count("clip") == 2
    assert record.at_end("gather", 2)["gradients"] == 0 or record.at_end("gather", 2)["optimizer momentum"] > 0


def test_nothing_is_installed_outside_the_window(tmp_path):
    seen = []

    class Looks(TinyLM):
        def training_step(self, batch, batch_idx):
            mode = torch.utils._python_dispatch._get_current_dispatch_mode()
            hooks = any(p._post_accumulate_grad_hooks for p in self.parameters())
            wrapped = {"training_step", "configure_gradient_clipping"} & set(vars(self))
            seen.append((mode is not None, bool(wrapped), hooks))
            return super().training_step(batch, batch_idx)

    resize = torch.UntypedStorage.resize_
    fit(MemoryProfiler(tmp_path, start=2, steps=1), Looks(), max_steps=4)
    assert [row[:2] for row in seen] == [(False, False), (True, True), (False, False), (False, False)]
    assert not seen[2][2]
    assert not seen[3][2]
    assert torch.UntypedStorage.resize_ is resize


def test_training_is_the_same_with_it(tmp_path):
    modules = [model(), model()]
    fit(MemoryProfiler(tmp_path), modules[0])
    fit(L.Callback(), modules[1])
    for a, b in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        assert torch.equal(a, b)


def test_manual_optimization_has_its_phases(tmp_path):
    class Manual(TinyLM):
        def __init__(self):
            super().__init__(layers=LAYERS, width=WIDTH)
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    profiler = MemoryProfiler(tmp_path, steps=2)
    fit(profiler, module := Manual())
    record = profiler.recorder.record
    assert [p.name for p in record.phases if p.step == 2] == [
        "gather",
        "forward",
        "backward",
        "forward",
        "step",
        "between",
    ]
    assert record.at_end("step", 1)["optimizer variance"] == sizes(module)


def test_a_run_that_fails_in_the_middle_leaves_its_files(tmp_path):
    with pytest.raises(RuntimeError, match="no memory left"):
        fit(MemoryProfiler(tmp_path, steps=4), FailsInBackward(layers=LAYERS, width=WIDTH))
    record = MemoryRecord.load(tmp_path / "memory_rank0.json")
    assert record.failure == "RuntimeError: no memory left"
    assert record.phases[-1].name == "backward"
    assert record.phases[-1].step == 2
    assert record.at_end("backward", 2)["gradients"] > 0
    assert (tmp_path / "memory_rank0.png").read_bytes().startswith(b"\x89PNG")
    assert "The run failed: RuntimeError: no memory left" in (tmp_path / "memory_rank0.html").read_text()
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_csv_and_json_tell_the_same(tmp_path):
    fit(MemoryProfiler(tmp_path, steps=1))
    record = MemoryRecord.load(tmp_path / "memory_rank0.json")
    with (tmp_path / "memory_rank0.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(record.points)
    for row, point in zip(rows, record.points, strict=True):
        assert int(row["total"]) == point.total
        assert int(row["activations"]) == point.bytes.get("activations", 0)
        assert row["phase"] == record.phases[point.phase].name
    assert record.failure is None


def test_pages_need_no_network_and_carry_the_numbers(tmp_path):
    profiler = MemoryProfiler(tmp_path, steps=1, title="A <run>")
    fit(profiler)
    for name in ("memory_rank0.html", "memory_summary.html"):
        page = (tmp_path / name).read_text()
        assert not re.search(r"https?://|src=|@import|url\(|<link", page)
        assert "A &lt;run&gt;" in page
        assert "prefers-color-scheme: dark" in page
    page = (tmp_path / "memory_rank0.html").read_text()
    data = json.loads(re.search(r"const data = (.*);\n", page)[1])
    assert max(map(sum, zip(*data["bands"].values(), strict=True))) == pytest.approx(
        sum(profiler.recorder.record.peak().values()), rel=0.005
    )
    assert len(data["x"]) == len(data["where"]) == len(data["bands"]["weights"])


def test_peaks_go_to_the_logger_and_the_summary(tmp_path):
    profiler = MemoryProfiler(steps=1)
    module = model()
    logger = CSVLogger(tmp_path, name="", version="run")
    fit(profiler, module, logger=logger, log_every_n_steps=1)
    assert profiler.folder == tmp_path / "run" / "memory"
    with (tmp_path / "run" / "metrics.csv").open() as file:
        logged = [float(row[key]) for row in csv.DictReader(file) if row.get(key := "memory_peak_MiB/weights")]
    assert logged == [pytest.approx(sizes(module) / 2**20)]
    summary = json.loads((profiler.folder / "memory_summary.json").read_text())
    assert summary["highest"]["weights"] == {"bytes": sizes(module), "rank": 0}


def test_a_resumed_run_goes_on_counting_and_records_no_step_twice(tmp_path):
    first = MemoryProfiler(tmp_path / "first", steps=2)
    trainer = fit(first, max_steps=3)
    trainer.save_checkpoint(tmp_path / "three.ckpt")
    again = MemoryProfiler(tmp_path / "again", steps=2)
    trainer = quiet(callbacks=[again], max_steps=5, max_epochs=2, limit_val_batches=0)
    trainer.fit(model(), loader(64, batch_size=4), ckpt_path=tmp_path / "three.ckpt")
    assert again.state_dict()["step"] == 5
    assert not (tmp_path / "again").exists()
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_it_is_silent_where_nothing_is_trained(tmp_path):
    trainer = quiet(callbacks=[MemoryProfiler(tmp_path / "files")], limit_val_batches=1)
    trainer.validate(model(), loader(8, batch_size=4), verbose=False)
    assert not (tmp_path / "files").exists()


@pytest.mark.parametrize("setting", [{"steps": 0}, {"start": 0}, {"resolution": 1.5}, {"steps": True}])
def test_wrong_settings_are_refused(setting):
    (name, value), *_ = setting.items()
    with pytest.raises(ValueError, match=re.escape(f"MemoryProfiler({name}={value!r})")):
        MemoryProfiler(**setting)


def _stages(rank: int, stage: int, folder: str) -> None:
    trainer = quiet(
        strategy=FiveD(ZeRO(stage=stage)),
        devices=2,
        callbacks=[MemoryProfiler(folder, steps=2)],
        max_steps=3,
        limit_val_batches=0,
    )
    trainer.fit(model(), loader(32, batch_size=4))


def padded_share(module, ranks):
    """Bytes of the shards of one rank: rows are padded to a multiple of the ranks."""
    return sum(-(-p.shape[0] // ranks) * p[0].numel() * p.itemsize for p in module.parameters())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_stage_holds_what_it_should_to_the_padding(ranks, tmp_path, stage):
    ranks(2, _stages, stage, str(tmp_path), **TRAINER)
    module = model()
    phi, share = sizes(module), padded_share(module, 2)
    records = [MemoryRecord.load(tmp_path / f"memory_rank{rank}.json") for rank in range(2)]
    for record in records:
        assert record.world_size == 2
        end = record.at_end("step", 2)
        full = share if stage == 3 else phi  # at stages 1 and 2 the shard is a part of the whole
        slack = 13 * WIDTH * 4 if stage else 0  # the padding of the vocabulary's 13 rows
        assert full <= end["weights"] <= full + slack
        state = phi if stage == 0 else share
        for category in ("optimizer momentum", "optimizer variance"):
            assert state - slack <= end[category] <= state
        pages = 4096 * (LAYERS + 1) if stage else 0  # each block's gradients lie in whole pages
        assert state - slack <= end["gradients"] <= state + pages + slack
        assert end["communication buffers"] > 0
    if stage == 3:
        forward = records[0].at_end("forward", 2)
        block = sum(p.numel() * 4 for p in module.layers[0].parameters())
        root = phi - LAYERS * block
        assert forward["weights"] <= share + root + 2 * slack
        highest = max(p.highest["weights"] for p in records[0].phases if p.name in ("forward", "backward"))
        assert share + root + block <= highest <= share + root + 2 * block + 2 * slack
    names = {path.name for path in tmp_path.iterdir()}
    parts = {f"memory_rank{rank}.{kind}" for rank in range(2) for kind in ("csv", "json", "png", "html")}
    assert names == parts | {f"memory_summary.{kind}" for kind in ("json", "png", "html")}
    summary = json.loads((tmp_path / "memory_summary.json").read_text())
    assert [peak["rank"] for peak in summary["ranks"]] == [0, 1]


def _fails(rank: int, folder: str) -> None:
    supervisor.GRACE_SECONDS = 20.0  # for rank 0 to write its file, on busy cores too; the process ends with the call
    trainer = quiet(
        strategy=FiveD(ZeRO(stage=1), timeout=10),
        devices=2,
        callbacks=[MemoryProfiler(folder, steps=4)],
        max_steps=5,
        limit_val_batches=0,
    )
    trainer.fit(FailsInBackward(rank=1, layers=LAYERS, width=WIDTH), loader(64, batch_size=4))


def test_one_rank_that_fails_leaves_the_files_of_both(ranks, tmp_path):
    with pytest.raises(RankError, match="no memory left"):
        ranks(2, _fails, str(tmp_path), **TRAINER)
    failed = MemoryRecord.load(tmp_path / "memory_rank1.json")
    assert failed.failure == "RuntimeError: no memory left"
    other = MemoryRecord.load(tmp_path / "memory_rank0.json")
    assert max(phase.step for phase in other.phases) >= 1
    files = {path.name for path in draw_folder(tmp_path, "After a failure")}
    assert {"memory_rank0.png", "memory_rank1.html", "memory_summary.png"} <= files


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_gives_the_allocators_numbers_and_a_snapshot(tmp_path):
    fit(MemoryProfiler(tmp_path, steps=2), accelerator="cuda", devices=1)
    record = MemoryRecord.load(tmp_path / "memory_rank0.json")
    assert record.device == "cuda"
    for phase in record.phases:
        assert phase.allocator is not None
        assert phase.allocator["peak_allocated"] >= sum(phase.end.values())
    assert os.path.getsize(Path(tmp_path) / "memory_rank0.pickle") > 0
