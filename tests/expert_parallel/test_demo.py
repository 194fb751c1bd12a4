"""The recipe that trains a mixture of experts and draws their load."""

import json
import os
import re
from pathlib import Path

import pytest

from tests.ranks.warm_job import run_warm_job

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["model.decoder.hidden_size=48", "model.decoder.intermediate_size=96", "trainer.limit_val_batches=0"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_it_ends_with_a_chart_of_all_experts_of_both_ranks(tmp_path):
    status, output = run_warm_job(
        2, "-m", "lightning_5d.cli", "train", "recipe=moe_demo", *SMALL, "trainer.max_steps=3", f"hydra.run.dir={tmp_path}",
        folder=ROOT, environment=os.environ, seconds=100,
    )  # fmt: skip
    assert status == 0, output
    data = json.loads((tmp_path / "experts" / "expert_load.json").read_text())
    assert data["steps"] == [[1, 1], [2, 2], [3, 3]]
    assert len(data["layers"]) == 3
    for layer in data["layers"].values():
        # Two ranks, eight rows of 64 bytes, two experts for each.
        assert [sum(step) for step in layer["tokens"]] == [2 * 8 * 64 * 2] * 3
        assert max(map(abs, layer["bias"][-1])) == pytest.approx(3 * 0.005)
    (chart,) = re.findall(r"^Experts, chart: +(.*)$", output, re.MULTILINE)
    assert Path(chart).exists()
    last = [layer["imbalance"][-1] for layer in data["layers"].values()]
    assert output.count(f"Experts: the busiest has {sum(last) / 3:.2f} times the mean") == 1
    assert "returned a view tensor" not in output
