"""The recipe that trains in a pipeline and draws it."""

import os
import re
from pathlib import Path

import pytest

from lightning_5d.pipeline_parallel import make_schedule, simulate
from lightning_5d.pipeline_parallel.trace import StepTrace
from tests.ranks.warm_job import run_warm_job

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["model.decoder.hidden_size=48", "model.decoder.intermediate_size=96", "model.decoder.context_length=32"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_any_schedule_by_override_ends_with_both_charts_and_says_where_they_are(tmp_path):
    status, output = run_warm_job(
        4, "-m", "lightning_5d.cli", "train", "recipe=pipeline_demo", "pipeline.schedule=zb_v", *SMALL,
        "trainer.max_steps=3", "callbacks.pipeline_trace.steps=[3]", f"hydra.run.dir={tmp_path}",
        folder=ROOT, environment=os.environ, seconds=100,
    )  # fmt: skip
    assert status == 0, output
    trace = StepTrace.load(tmp_path / "pipeline" / "step000003.json")
    assert trace.schedule == make_schedule("zb_v", 4, 8)
    assert trace.actual.peak_activations == simulate(trace.schedule).peak_activations
    charts = re.findall(r"^Pipeline, chart: +(.*)$", output, re.MULTILINE)
    assert charts == [str(tmp_path / "pipeline" / f"step000003.{kind}") for kind in ("png", "html")]
    assert all(Path(chart).exists() for chart in charts)
    said = f"{trace.actual.bubble_ratio:.1%} measured, {trace.planned.bubble_ratio:.1%} planned"
    assert f"Pipeline, bubble: {said}" in output
