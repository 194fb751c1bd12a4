"""The picture of ZeRO-1 in fp16: what the recipe records, to the byte."""

import math
import os
from pathlib import Path

import pytest

from lightning_5d.memory import MemoryRecord
from lightning_5d.models import DecoderConfig, LanguageModel
from tests.ranks.warm_job import run_warm_job

ROOT = Path(__file__).resolve().parents[2]
STEPS, SKIPPED, RANKS = 6, 3, 2


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The folder of one run of the recipe, and what it printed."""
    folder = tmp_path_factory.mktemp("chart")
    status, output = run_warm_job(
        RANKS, "-m", "lightning_5d.cli", "train", "recipe=zero1_memory_chart", f"hydra.run.dir={folder}",
        folder=ROOT, environment=os.environ, seconds=100,
    )  # fmt: skip
    assert status == 0, output
    return folder / "memory", output


@pytest.fixture(scope="module")
def model():
    """The recipe's."""
    return LanguageModel(
        DecoderConfig(
            vocab_size=256,
            hidden_size=192,
            intermediate_size=512,
            num_layers=4,
            num_heads=6,
            num_kv_heads=2,
            context_length=32,
        )
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("rank", range(RANKS))
def test_every_category_at_every_step_to_the_byte(recorded, model, rank):
    folder, _ = recorded
    record = MemoryRecord.load(folder / f"memory_rank{rank}.json")
    parameters = list(model.parameters())
    phi = sum(p.numel() for p in parameters)
    assert all(p.shape[0] % RANKS == 0 for p in parameters), "no padding in this model"
    half = 4 * phi // RANKS
    for step in range(1, STEPS + 1):
        end = record.at_end("between", step)
        assert end["weights"] == 2 * phi
        assert end["master weights"] == half
        state = 0 if step <= SKIPPED else half
        assert end["optimizer momentum"] == state
        assert end["optimizer variance"] == state
        during = [phase for phase in record.phases if phase.step == step and phase.name != "gather"]
        assert {phase.highest["weights"] for phase in during} == {2 * phi}
        assert {phase.highest["master weights"] for phase in during} == {half}
        # Between backward and the next step there are fp32 gradients of this rank's half, in whole pages for each block.
        blocks = [list(layer.parameters()) for layer in model.decoder.layers]
        inside = {id(p) for block in blocks for p in block}
        groups = [*blocks, [p for p in parameters if id(p) not in inside]]
        pages = sum(math.ceil(4 * sum(p.numel() for p in group) / RANKS / 4096) * 4096 for group in groups)
        assert record.at_end("backward", step)["gradients"] == pages
        forward, backward = (record.at_end(name, step) for name in ("forward", "backward"))
        assert forward["activations"] > 2 * phi // 2
        assert backward["activations"] < forward["activations"] / 100
        assert end["communication buffers"] > 0
    phases = [phase.name for phase in record.phases if phase.step == SKIPPED]
    assert "step" not in phases
    assert [phase.name for phase in record.phases if phase.step == SKIPPED + 1].count("step") == 1


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_exactly_three_steps_overflow_and_the_pictures_are_there(recorded):
    folder, _ = recorded
    for rank in range(RANKS):
        record = MemoryRecord.load(folder / f"memory_rank{rank}.json")
        made = [phase.step for phase in record.phases if phase.name == "step"]
        assert made == list(range(SKIPPED + 1, STEPS + 1))
        assert (folder / f"memory_rank{rank}.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "memory_summary.html").exists()
