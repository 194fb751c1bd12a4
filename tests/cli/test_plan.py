import sys

import pytest

from lightning_5d.cli import main


@pytest.fixture
def plan(monkeypatch, capsys, tmp_path):
    """Run `fived plan show` in this process; gives status, output and errors."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["fived", "plan", "show", *map(str, arguments)])
        try:
            status = main()
        except SystemExit as stop:
            status = stop.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_a_recipes_model_is_shown_as_it_would_be_cut(plan, tmp_path):
    status, output, errors = plan("--tensor", 2, "--sequence-parallel", "recipe=python_docs_zero1", "model=tiny")
    assert (status, errors) == (0, "")
    assert "Styles:  Decoder.parallel_plan\nBlocks:  2 of decoder.layers.* (automatic)\n" in output
    (q,) = [line for line in output.splitlines() if "self_attn.q_proj" in line]
    assert "column, 2 of 4 heads" in q
    assert "weight 8x16" in q
    assert "behind it the sequence is whole again" in output
    assert not list(tmp_path.iterdir())


def test_a_hugging_face_model_needs_no_configuration_of_its_own(plan):
    model = ["model=tiny", "~model.decoder", "~model.optimizer", "model._target_=tests.cli.test_plan.llama"]
    status, output, _ = plan("--tensor", 4, *model)
    assert status == 0
    assert "Styles:  LlamaForCausalLM._tp_plan" in output
    assert "1 of 2 key/value heads, each on 2 ranks" in output


def llama():
    from tests.tensor_parallel.models import Holder, hugging_face

    return Holder(hugging_face("Llama"))


def test_what_is_wrong_is_shown_in_its_place(plan):
    status, output, errors = plan("--tensor", 3, "model=tiny")
    assert (status, output) == (1, "")
    assert errors.startswith("1. tp=3 does not divide the heads of decoder.layers.*.self_attn")
    assert "Degrees that work for the whole model: 1, 2, 4" in errors


def test_the_number_of_ranks_has_to_come_from_somewhere(plan):
    status, _, errors = plan("model=tiny")
    assert status == 1
    assert "give --tensor N" in errors
    assert plan("--tensor", 0, "model=tiny")[0] == 1


def test_an_unknown_choice_is_said_without_a_traceback(plan):
    status, _, errors = plan("--tensor", 2, "model=none")
    assert status == 1
    assert "Could not find 'model/none'" in errors


def test_a_context_axis_is_shown_by_the_positions_of_each_rank(plan):
    status, output, _ = plan("strategy=context", "context.size=4", "model=tiny", "--length", 64)
    assert status == 0
    assert output.splitlines()[0] == "Context axis of 4 (ring, zigzag): of 64 tokens each rank holds 16."
    assert "rank 1  8-15, 48-55   1.00\n" in output
    assert "A rank sends per attention layer and sequence" in output
    assert "of 32 tokens" in plan("strategy=context", "model=tiny")[1]


def test_an_expert_axis_is_shown_by_the_experts_of_each_rank(plan):
    status, output, _ = plan("recipe=moe_demo", "trainer.devices=4")
    assert status == 0
    assert "decoder.layers.*.mlp.experts (3)  8        2      4 " in output
    assert "rank 0, 2  experts 0-3\nrank 1, 3  experts 4-7\n" in output
    assert "at rest" in plan("recipe=moe_demo", "trainer.devices=4", "strategy._args_.1.stage=3")[1]
    status, output, errors = plan("recipe=moe_demo", "trainer.devices=4", "expert.size=3")
    assert (status, output) == (1, "")
    assert "3 does not divide the 4 ranks that experts live on" in errors
    assert "has no MoE layer" in plan("model=tiny", "strategy=expert")[2]
