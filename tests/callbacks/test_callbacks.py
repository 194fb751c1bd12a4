import lightning.pytorch as L
import pytest
import torch

from lightning_5d.callbacks import GradientClipping, LossPlot, Progress, TextSample, Throughput
from lightning_5d.callbacks.loss_plot import draw_losses
from lightning_5d.data import TextFiles
from lightning_5d.models import DecoderConfig, LanguageModel


@pytest.fixture
def data(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    return TextFiles(tmp_path / "text.txt", sequence_length=16, batch_size=4)


def fit(tmp_path, data, *callbacks, module=None, **settings):
    torch.manual_seed(0)
    module = module or LanguageModel(DecoderConfig.preset("tiny", context_length=16))
    defaults = {"max_steps": 6, "logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    if not any(isinstance(callback, Progress) for callback in callbacks):
        defaults["enable_progress_bar"] = False
    trainer = L.Trainer(accelerator="cpu", default_root_dir=tmp_path, callbacks=[*callbacks], **defaults | settings)
    trainer.fit(module, datamodule=data)
    return trainer, module


def test_the_gradient_norm_is_the_one_before_clipping(tmp_path, data):
    class Norms(L.Callback):
        def __init__(self):
            self.before, self.after = [], []

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            self.before.append(norm(pl_module))

        def on_before_zero_grad(self, trainer, pl_module, optimizer):
            if any(p.grad is not None for p in pl_module.parameters()):
                self.after.append(norm(pl_module))

    def norm(module):
        return torch.cat([p.grad.flatten() for p in module.parameters()]).norm().item()

    norms = Norms()
    trainer, _ = fit(tmp_path, data, GradientClipping(), norms, gradient_clip_val=0.1)
    assert float(trainer.callback_metrics["gradient_norm"]) == pytest.approx(norms.before[-1], rel=1e-5)
    assert norms.before[-1] > 0.2
    assert norms.after[-1] == pytest.approx(0.1, rel=1e-3)


def test_the_plot_holds_the_logged_losses_and_the_unigram_line(tmp_path, data, monkeypatch):
    drawn = {}

    def draw(train, val, **settings):
        drawn.update(train=train, val=val, **settings)
        return draw_losses(train, val, **settings)

    monkeypatch.setattr("lightning_5d.callbacks.loss_plot.draw_losses", draw)
    trainer, _ = fit(tmp_path, data, LossPlot(tmp_path / "run" / "loss.png"), val_check_interval=2)
    assert [step for step, _ in drawn["train"]] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in drawn["val"]] == [2, 4, 6]
    assert drawn["val"][-1][1] == pytest.approx(float(trainer.callback_metrics["val_bits_per_byte"]))
    assert drawn["unigram"] == data.unigram_entropy()
    assert drawn["unit"] == "bits per byte"
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_plot_is_labelled():
    axes = draw_losses([(1, 5.0), (2, 3.0)], [(2, 2.5)], unigram=4.0, unit="bits per byte", title="A run").axes[0]
    assert axes.get_title() == "A run"
    assert axes.get_xlabel() == "optimizer step"
    assert axes.get_ylabel() == "loss in bits per byte"
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert any("validation, at last 2.50" in label for label in labels)
    assert any("unigram entropy of the text, 4.00" in label for label in labels)
    assert axes.get_ylim()[0] == 0
    assert draw_losses([], [], unigram=None, unit="bits per token", title="Nothing").axes


def test_the_sample_comes_from_the_trained_weights(tmp_path, data):
    sample = TextSample(tmp_path / "run" / "sample.txt", prompt="the q", tokens=12, temperature=0, seed=1)
    _, module = fit(tmp_path, data, sample)
    expected = module.decoder.generate(torch.tensor([list(b"the q")]), 12, temperature=0)[0].tolist()
    assert sample.text == data.decode(expected)
    assert (tmp_path / "run" / "sample.txt").read_text() == sample.text


def test_the_bar_shows_loss_speed_and_norm_and_no_version(tmp_path, data):
    bar = Progress(refresh_rate=1)
    trainer, module = fit(tmp_path, data, bar, Throughput(), GradientClipping(), logger=True)
    shown = bar.get_metrics(trainer, module)
    assert {"train_loss", "tokens_per_second", "gradient_norm"} <= set(shown)
    assert "v_num" not in shown
