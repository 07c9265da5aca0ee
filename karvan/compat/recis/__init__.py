"""The names of RecIS, over Karvan."""

__version__ = "1.0.0"
"""The version of RecIS that most names are of."""

_CHECKPOINTS = "give TrainingArguments output_dir, save_steps, max_to_keep and model_bank."
_MONITORS = "use ProfilerHook, or kv.loggers."

MISSING_MODULES = {
    "data": "sample in the model, or write the samples into the data.",
    "fg": "make features and embeddings by Feature and EmbeddingOption.",
    "framework.checkpoint_compat": _CHECKPOINTS,
    "framework.exporter": "use kv.InferContext.",
    "framework.filesystem": "use fsspec, or paths with a protocol.",
    "framework.pipeline_utils": "leave it out: batches are always prepared in advance.",
    "framework.server": "use kv.InferContext.",
    "hooks.auto_profiler_hook": _MONITORS,
    "hooks.checkpoint_hooks": _CHECKPOINTS,
    "hooks.memory_access_hook": _MONITORS,
    "hooks.metric_report_hook": "import it from recis.hooks.",
    "hooks.ml_tracker_hook": "use kv.loggers, such as TensorBoardLogger.",
    "hooks.module_flops_hook": _MONITORS,
    "hooks.trace_to_odps_hook": "write predictions by kv.train.write_predictions.",
    "io.dataset_config": "declare columns by varlen_feature and fixedlen_feature.",
    "metrics.mean": "report numbers by add_metric: evaluations give their means.",
    "monitor": _MONITORS,
    "nn.functional.embedding_ops": "use EmbeddingEngine, or torch.segment_reduce.",
    "nn.functional.reduce_function_registry": "use EmbeddingOption(no_reduce=True).",
    "nn.modules.models": "call FeatureEngine and EmbeddingEngine in a module of your own.",
    "optim.grad_norm": "use ClipGradNormHook, or clip_norm of kv.optim.",
    "optim.named_optimizer": "use torch's optimizers: checkpoints find parameters by name anyway.",
    "optim.sparse_adagrad_sum": "use SparseAdagrad.",
    "optim.sparse_row_wise_adagrad_sum": "use SparseRowWiseAdagrad.",
    "utils.profiler": _MONITORS,
}
"""Modules of RecIS that have no counterpart, and what to use instead; see `karvan.compat.import_aliases`."""
