"""What a Trainer, its result and its checkpoints look like in a notebook."""

import dataclasses

import torch
from train_helpers import StopAt, batches, model, trainer

import karvan as kv


def test_a_trainer_says_what_it_trains_and_how_far_it_is(tmp_path):
    fit = trainer(metrics={"auc": kv.metrics.AUC()}, checkpoints=tmp_path)
    fit.fit(batches(3))
    assert repr(fit).splitlines() == [
        "Trainer(",
        "  model: Small, 241 parameters, on cpu",
        "  tables: user (4), item (8)",
        "  loss: BinaryCrossEntropy(label='label', output=None, weight=None)",
        "  dense_optimizer: Adam(lr=0.01)",
        "  sparse_optimizer: Adagrad(lr=0.1)",
        "  metrics: auc",
        f"  checkpoints: {tmp_path}",
        "  progress: step 3, 1 epoch, 48 samples",
        ")",
    ]


def test_the_repr_of_a_small_trainer_leaves_out_what_it_has_not():
    def own_loss(output, batch):
        return output.mean()

    shown = repr(kv.Trainer(torch.nn.Linear(2, 1), own_loss, dense_optimizer=torch.optim.SGD))
    assert "own_loss" in shown
    for word in ("tables", "metrics", "checkpoints", "sparse", "ranks", "0x"):
        assert word not in shown


def test_many_tables_are_not_all_listed():
    net = torch.nn.ModuleDict({"e": kv.EmbeddingEngine({f"c{i}": kv.Table(2) for i in range(26)})})
    fit = kv.Trainer(net, lambda o, b: o, sparse_optimizer=kv.optim.SGD(lr=0.1))
    assert "c7 (2), and 18 more" in repr(fit)


def test_a_result_prints_as_a_few_lines_and_its_repr_has_everything(tmp_path):
    fit = trainer(metrics={"auc": kv.metrics.AUC()}, checkpoints=tmp_path, callbacks=[StopAt(3)])
    result = fit.fit(batches(4), eval_data=batches(1), eval_every=2)
    first, *others = str(result).splitlines()
    assert first.startswith("Trained 3 steps in ")
    assert first.endswith(": now at step 3, 0 epochs, 48 samples")
    evaluation = f"loss {result.evaluation['loss']:.5g}  auc {result.evaluation['auc']:.5g}"
    assert others == [
        "  stopped     enough",
        f"  training    auc {result.metrics['auc']:.5g}",
        f"  evaluation  {evaluation}  (at step 2)",
        f"  checkpoint  {result.checkpoint}",
    ]
    assert "2 of them skipped" in str(dataclasses.replace(result, skipped=2))
    assert f"seconds={result.seconds!r}" in repr(result)


def test_checkpoints_say_what_is_kept_and_what_is_there(tmp_path):
    checkpoints = kv.Checkpoints(tmp_path / "run", keep_best=("auc", "max"))
    options = "keep_last=3, keep_best=('auc', 'max')"
    assert repr(checkpoints) == f"Checkpoints('{tmp_path / 'run'}', {options}: none yet)"
    net = model()
    for step in (0, 10):
        checkpoints.save(step, {}, net, block=True)
    assert repr(checkpoints) == f"Checkpoints('{tmp_path / 'run'}', {options}: 2 of steps 0, 10)"
