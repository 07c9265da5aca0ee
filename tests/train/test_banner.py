"""What a fit says before its first step and after it was stopped."""

import io
import re
import signal

import torch
from train_helpers import StopAt, batches, loader, trainer

import karvan as kv
from karvan.train import PlainProgress


def shown_by(fit, data, **options):
    """What a Trainer shows while it trains."""
    stream = io.StringIO()
    fit.progress = PlainProgress(stream)
    fit.fit(data, **options)
    return stream.getvalue()


def block_of(text):
    """The lines of the banner; paths of tests may be too long for a line."""
    found = re.match(r"Karvan .*\n(?:  .*\n)*", text)[0]
    assert all(len(line) <= 80 for line in found.splitlines() if "/" not in line)
    return re.sub(r"\n {9,}", " ", found).splitlines()


def test_a_fit_begins_with_data_tables_parameters_device_precision_and_folder(tmp_path):
    text = shown_by(trainer(checkpoints=tmp_path), loader())
    assert block_of(text) == [
        f"Karvan {kv.__version__}: Small on cpu, fp32",
        "  data    memory, 192 records",
        "  tables  2: user (4), item (8); Adagrad, lr 0.1",
        "  dense   241 parameters; Adam, lr 0.01",
        f"  folder  {tmp_path}, a new run",
    ]


def test_a_fit_that_resumes_says_so_and_a_second_fit_of_a_trainer_has_no_banner(tmp_path):
    trainer(checkpoints=tmp_path, callbacks=[StopAt(5)]).fit(batches())
    fit = trainer(checkpoints=tmp_path)
    assert block_of(shown_by(fit, batches()))[-1] == f"  folder  {tmp_path}, resumed at step 5"
    assert "Karvan" not in shown_by(fit, batches(), data_name="more")


class Wide(torch.nn.Module):
    """Many tables of one width, and a small net."""

    def __init__(self):
        super().__init__()
        self.embeddings = kv.EmbeddingEngine({f"feature_{i}": kv.Table(4) for i in range(26)})
        self.top = torch.nn.Linear(4, 1)

    def forward(self, batch):
        return self.top(self.embeddings(batch)["feature_0"])[:, 0]


def test_many_tables_are_summarised_in_lines_of_80_columns():
    data = [{f"feature_{i}": torch.arange(4) for i in range(26)} | {"label": torch.ones(4)}]
    lines = block_of(shown_by(trainer(Wide(), precision="bf16"), data))
    assert lines[0].endswith(": Wide on cpu, bf16")
    assert lines[1] == "  data    1 batch"
    assert lines[2].startswith("  tables  26 of dim 4: feature_0, feature_1, ")
    assert lines[2].endswith("feature_7, and 18 more; Adagrad, lr 0.1")
    assert lines[-1] == "  folder  none: there will be no checkpoints"


class Interrupt(kv.callbacks.Callback):
    """Ctrl-C after a step."""

    def on_step_end(self, trainer, logs):
        if logs.step == 3:
            signal.raise_signal(signal.SIGINT)


def test_a_program_that_was_stopped_says_how_to_resume(tmp_path):
    text = shown_by(trainer(checkpoints=tmp_path, callbacks=[Interrupt()]), batches())
    assert text.splitlines()[-2:] == [
        f"Stopped by Ctrl-C after step 3; checkpoint at {tmp_path / 'step-000000000003'}.",
        "To resume, run the program again.",
    ]
    nothing_saved = shown_by(trainer(callbacks=[Interrupt()]), batches())
    assert nothing_saved.splitlines()[-1] == "Stopped by Ctrl-C after step 3; there are no checkpoints."
