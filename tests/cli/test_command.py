import json
import re

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from lightning_5d.cli.configured import configuration_folder


@pytest.fixture
def composed():
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(configuration_folder()), version_base="1.3"):
        yield lambda *overrides: OmegaConf.to_container(compose("train", list(overrides)), resolve=False)


def test_help_names_the_commands(fived):
    status, output = fived("--help")
    assert status == 0
    assert {"train", "verify", "tokenize"} <= set(re.findall(r"^    (\w+)", output, re.MULTILINE))


def test_an_unknown_command_is_refused_with_those_there_are(fived):
    status, output = fived("trian")
    assert status == 2
    assert "train" in output
    assert "tokenize" in output


def test_train_help_lists_groups_and_choices(fived):
    status, output = fived("train", "--help")
    assert status == 0
    assert "strategy: context, ddp, expert, hybrid, pipeline, single, tensor, zero0, zero1, zero2, zero3" in output
    assert "recipe: long_context, moe_demo, pipeline_demo, python_docs_zero1" in output
    assert "data=text data.path=FILE_OR_FOLDER" in output


def test_verify_has_a_help_of_its_own(fived):
    status, output = fived("verify", "--help")
    assert status == 0
    assert "with the same run in one process" in output
    assert "fived verify strategy=zero3" in output
    assert "fived train [KEY" not in output


def test_cfg_job_shows_the_run_and_starts_nothing(fived, tmp_path):
    status, output = fived("train", "--cfg", "job", "optimizer.lr=0.5")
    assert status == 0
    shown = OmegaConf.create(output)
    assert shown.optimizer.lr == 0.5
    assert shown.strategy._args_[0].stage == 1
    assert shown.trainer.devices == 2
    assert list(tmp_path.iterdir()) == []


def test_without_arguments_the_run_is_the_recipe_of_the_demo(composed):
    assert composed() == composed("recipe=python_docs_zero1")
    other = composed("strategy=zero3", "data=text", "data.path=x", "recipe=python_docs_zero1")
    assert other["strategy"]["_args_"][0]["stage"] == 3


@pytest.mark.parametrize("stage", range(4))
def test_each_zero_stage_is_a_choice(composed, stage):
    from lightning_5d import FiveD, ZeRO
    from lightning_5d.cli.build import build

    strategy = build(OmegaConf.create(composed(f"strategy=zero{stage}")).strategy)
    assert isinstance(strategy, FiveD)
    assert [type(plugin) for plugin in strategy.plugins] == [ZeRO]
    assert strategy.plugins[0].stage == stage


def test_the_context_axis_is_set_by_key_and_its_methods_are_a_sweep(composed):
    from lightning_5d import ContextParallel, ZeRO
    from lightning_5d.cli.build import build

    for method in ("ring", "ulysses", "all_gather"):
        config = composed(
            "strategy=context", "context.size=4", f"context.method={method}", "context.balance=contiguous"
        )
        context, data = build(OmegaConf.create(config).strategy).plugins
        assert context == ContextParallel(4, method=method, balance="contiguous")
        assert data == ZeRO(stage=1)


def test_the_recipe_of_long_sequences_has_as_many_devices_as_its_axis_and_eight_times_the_demos_tokens(composed):
    demo, long = (OmegaConf.create(composed(f"recipe={name}")) for name in ("python_docs_zero1", "long_context"))
    assert long.model.decoder.context_length == 8 * demo.model.decoder.context_length
    assert (long.context.size, long.trainer.devices) == (4, 4)
    alone = OmegaConf.create(composed("recipe=long_context", "context.size=1"))
    assert alone.trainer.devices == 1


def test_adaptive_clipping_takes_the_place_of_the_trainers(composed):
    from lightning_5d.callbacks import GradientClipping
    from lightning_5d.cli.build import build

    usual, adaptive = composed(), composed("callbacks=adaptive_clipping")
    assert usual["trainer"]["gradient_clip_val"] == 1.0
    assert adaptive["trainer"]["gradient_clip_val"] is None
    assert adaptive["callbacks"].keys() == usual["callbacks"].keys()
    made = build(OmegaConf.create(adaptive["callbacks"]["gradient_clipping"]))
    assert isinstance(made, GradientClipping)
    assert (made.quantile, made.skip_spikes, made.clips, made.skips) == (0.9, 6.0, True, True)
    watching = build(OmegaConf.create(usual["callbacks"]["gradient_clipping"]))
    assert (watching.clips, watching.skips) == (False, False)


def test_one_process_and_lightnings_ddp_are_choices(composed):
    single = composed("strategy=single")
    assert (single["strategy"], single["trainer"]["devices"]) == ("auto", 1)
    assert composed("strategy=ddp")["strategy"] == "ddp"


def test_without_a_logger_nobody_watches_the_learning_rate(composed):
    # Lightning's monitor would end the run at its first step.
    assert composed("logger=none")["callbacks"]["learning_rate"] is None
    assert composed()["callbacks"]["learning_rate"] is not None


def test_every_group_option_composes(composed):
    for folder in sorted(path for path in configuration_folder().iterdir() if path.is_dir()):
        for option in sorted(file.stem for file in folder.glob("*.yaml")):
            assert composed(f"{folder.name}={option}"), f"{folder.name}={option}"


def test_all_problems_of_a_run_come_in_one_error_before_any_process_starts(fived, tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"na\xefve")
    status, output = fived(
        "train", "data=text", "data.path=latin.txt", "data.val_fraction=3", "data.batch_size=0",
        "strategy=hybrid", "trainer.devices=3", "model.decoder.num_heads=7", "ckpt_path=gone.ckpt",
        "trainer.precision=fp8", "callbacks.gradient_clipping.max_norm=-1", "callbacks.loss_scale.max_skips_in_a_row=0",
    )  # fmt: skip
    assert status == 1
    for part in (
        "byte 0xef at offset 2",
        "val_fraction is 3",
        "batch_size is 0",
        "3 ranks cannot be divided by dp_replicate=2",
        "hidden_size 192 does not give 7 heads",
        "num_kv_heads 2 does not divide num_heads 7",
        "ckpt_path is 'gone.ckpt', which does not exist",
        "precision='fp8' is not available",
        "max_norm=-1 is not positive",
        "max_skips_in_a_row=0 is less than 1",
    ):
        assert part in output
    assert "Traceback" not in output
    assert "\\n" not in output
    assert "Initializing distributed" not in output


def test_a_word_for_a_number_is_one_short_error(fived):
    status, output = fived("train", "optimizer.lr=abc", "optimizer.warmup_steps=-1")
    assert status == 1
    assert "optimizer lr is 'abc'; it must be a number of at least 0, such as 0.003." in output
    assert "optimizer warmup_steps is -1" in output
    assert "Traceback" not in output
    assert len(output.splitlines()) < 15


def test_data_too_small_for_the_ranks_is_refused_before_any_process_starts(fived, tmp_path):
    (tmp_path / "text.txt").write_text("x" * 300)
    status, output = fived(
        "train", "data=text", "data.path=text.txt", "data.sequence_length=10", "data.batch_size=20", "strategy=zero2"
    )
    assert status == 1
    assert "26 training windows" in output
    assert "2 data ranks, which takes 40; use batch_size 13" in output
    assert "Initializing distributed" not in output


def test_a_missing_path_is_asked_for(fived):
    status, output = fived("train", "data=text")
    assert status == 1
    assert "data.path" in output


def test_tokenize_writes_what_tokens_reads(fived, tmp_path):
    (tmp_path / "text.txt").write_text("naïve " * 40)
    status, output = fived("tokenize", "text.txt", "out.bin")
    assert status == 0
    assert "280 tokens of uint16" in output
    assert "fived train data=tokens data.path=out.bin" in output
    described = json.loads((tmp_path / "out.bin.json").read_text())
    assert described == {"dtype": "uint16", "vocab_size": 256, "count": 280, "bytes": 280, "tokenizer": "byte"}
    assert (tmp_path / "out.bin").stat().st_size == 560


def test_tokenize_lists_its_problems_and_fails(fived):
    status, output = fived("tokenize", "nowhere.txt", "no/out.bin", "--tokenizer", "nothing")
    assert status == 1
    for part in ("'nowhere.txt', which does not exist", "no', does not exist", "'nothing'"):
        assert part in output
    assert "Traceback" not in output
    status, output = fived("tokenize", "a", "b", "--no-such-option")
    assert status == 2


def test_activation_checkpointing_is_an_option_of_each_zero_stage(composed):
    from lightning_5d import ActivationCheckpointing
    from lightning_5d.cli.build import build

    for name, given, expected in (
        ("zero0", "full", ActivationCheckpointing()),
        ("zero1", "selective", ActivationCheckpointing("selective")),
        ("zero2", "0.5", ActivationCheckpointing(memory_budget=0.5)),
        ("zero3", "{mode: selective, every: 2}", ActivationCheckpointing("selective", every=2)),
        ("hybrid", '{modules: ["*.mlp"]}', ActivationCheckpointing(modules=("*.mlp",))),
    ):
        config = composed(f"strategy={name}", f"strategy.activation_checkpointing={given}")
        plugins = build(OmegaConf.create(config).strategy).plugins
        assert [plugin for plugin in plugins if isinstance(plugin, ActivationCheckpointing)] == [expected]


@pytest.mark.parametrize(
    ("overrides", "precision", "scale"),
    [
        ((), "32-true", None),
        (("trainer.precision=16-mixed",), "16-mixed", 65536.0),
        (
            ("trainer.precision=16-mixed", "precision=loss_scaling", "precision.loss_scaling.init_scale=8"),
            "16-mixed",
            8.0,
        ),
        (("recipe=zero1_memory_chart",), "16-mixed", 2.5e6),
        (("trainer.precision=bf16", "strategy=zero3", "precision.autocast=true"), "bf16-mixed", None),
    ],
)
def test_the_precision_plugin_itself_is_handed_over(composed, overrides, precision, scale):
    from lightning_5d import FiveDPrecision
    from lightning_5d.cli.build import _trainer

    config = OmegaConf.create(composed("callbacks=default", "logger=none", "output_dir=.", *overrides))
    config.callbacks = {}
    plugin = _trainer(config, lambda make: make()).precision_plugin
    assert isinstance(plugin, FiveDPrecision)
    assert plugin.precision == precision
    assert (plugin.scaler and plugin.scaler.scale) == scale


def test_a_pipeline_is_configured_beside_the_strategy(composed):
    from lightning_5d import PipelineParallel, ZeRO
    from lightning_5d.cli.build import build

    config = OmegaConf.create(composed("recipe=pipeline_demo", "pipeline.schedule=zb_v", "pipeline.split=[1,2,2,1]"))
    plugins = build(config.trainer.strategy).plugins
    assert plugins == (PipelineParallel(4, schedule="zb_v", microbatches=8, split=[1, 2, 2, 1]), ZeRO(stage=1))


def test_strategies_of_lightnings_own_get_its_precision_plugin(composed):
    from lightning.pytorch.plugins.precision import MixedPrecision

    from lightning_5d.cli.build import _trainer

    overrides = ("logger=none", "output_dir=.", "strategy=single", "trainer.precision=bf16-mixed")
    config = OmegaConf.create(composed(*overrides))
    config.callbacks = {}
    plugin = _trainer(config, lambda make: make()).precision_plugin
    assert type(plugin) is MixedPrecision
    assert plugin.precision == "bf16-mixed"


def test_the_recipe_of_experts_is_two_ranks_with_a_bias_and_a_chart(composed):
    from lightning_5d import ExpertParallel, ZeRO
    from lightning_5d.callbacks import ExpertLoad
    from lightning_5d.cli.build import build

    config = OmegaConf.create(composed("recipe=moe_demo", "expert.capacity_factor=1.25"))
    strategy = build(config.strategy)
    assert [type(plugin) for plugin in strategy.plugins] == [ExpertParallel, ZeRO]
    assert strategy.plugins[0] == ExpertParallel(2, capacity_factor=1.25)
    assert config.trainer.devices == 2
    assert config.model.decoder.moe.bias_rate > 0
    assert config.model.decoder.moe.balance == 0
    assert config.callbacks.expert_load._target_.endswith(ExpertLoad.__name__)
