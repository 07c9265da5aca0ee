"""Every public name of RecIS is there with its arguments, in order, and their defaults, or is refused."""

import importlib
import importlib.util
import inspect

import pytest
import torch

from karvan.compat.imports import import_aliases, unsupported_modules
from karvan.compat.recis.framework import Trainer
from karvan.compat.recis.io import OrcDataset
from karvan.compat.unsupported import UnsupportedError

REQUIRED = inspect.Parameter.empty
DATASET = {
    "batch_size": REQUIRED,
    "worker_idx": 0,
    "worker_num": 1,
    "read_threads_num": 4,
    "pack_threads_num": None,
    "prefetch": 1,
    "is_compressed": False,
    "drop_remainder": False,
    "worker_slice_batch_num": None,
    "shuffle": False,
    "ragged_format": True,
    "transform_fn": None,
    "save_interval": 100,
    "dtype": torch.float32,
    "device": "cpu",
    "prefetch_transform": None,
    "user_define_module": None,
    "read_batch_size": None,
}
VARLEN = {"name": REQUIRED, "hash_type": None, "hash_bucket": 0, "trans_int8": False}
ADAM = {
    "param_dict": REQUIRED,
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.01,
}
ADAGRAD = {
    "param_dict": REQUIRED,
    "lr": 1e-3,
    "lr_decay": 0,
    "initial_accumulator_value": 0,
    "eps": 1e-10,
    "weight_decay": 0,
}
KAIMING = {"a": 0.0, "mode": "fan_in", "nonlinearity": "leaky_relu", "generator": None}
SIGNATURES = {
    "io.orc_dataset": {
        "OrcDataset": DATASET,
        "OrcDataset.add_path": {"file_path": REQUIRED},
        "OrcDataset.add_paths": {"file_paths": REQUIRED},
        "OrcDataset.varlen_feature": VARLEN,
        "OrcDataset.fixedlen_feature": {"name": REQUIRED, "default_value": REQUIRED},
        "OrcDataset.map": {"map_func": REQUIRED},
        "OrcDataset.transform_ragged_batch": {"func": REQUIRED},
        "OrcDataset.parse_from": {"io_confs": REQUIRED},
        "OrcDataset.dump_io_state": {},
        "OrcDataset.load_io_state": {"io_states": REQUIRED},
        "OrcDataset.reset": {},
    },
    "io.odps_dataset": {
        "OdpsDataset": DATASET,
        "OdpsDataset.add_path": {"odps_table": REQUIRED},
        "OdpsDataset.add_paths": {"odps_tables": REQUIRED},
        "OdpsDataset.get_table_size": {},
        "get_table_size": {"table_name": REQUIRED},
    },
    "ragged.tensor": {
        "RaggedTensor": {"values": REQUIRED, "offsets": REQUIRED, "weight": None, "dense_shape": None},
        "RaggedTensor.to_dense": {"default_value": 0.0},
        "RaggedTensor.to_sparse": {},
        "RaggedTensor.from_dense": {"dense": REQUIRED, "check_invalid": False, "invalid_value": 0},
        "RaggedTensor.from_numpy": {"values": REQUIRED, "offsets": REQUIRED},
    },
    "features": {
        "FeatureEngine": {"feature_list": REQUIRED},
        "Feature": {"name": REQUIRED},
        "Mod": {"mod_value": REQUIRED},
        "Hash": {"hash_type": REQUIRED},
    },
    "features.feature": {"Feature": {"name": REQUIRED}, "Feature.add_op": {"op": REQUIRED}},
    "features.feature_engine": {
        "FeatureEngine": {"feature_list": REQUIRED},
        "FeatureEngine.forward": {"data": REQUIRED, "remain_no_use_data": True},
    },
    "features.op": {
        "SelectField": {"name": REQUIRED, "dtype": torch.long, "dim": None, "from_dict": True},
        "SelectFields": {"input_list": REQUIRED},
        "Mod": {"mod_value": REQUIRED},
        "Bucketize": {"boundary": REQUIRED},
        "FeatureCross": {},
        "SequenceTruncate": {
            "seq_len": 64,
            "check_length": True,
            "truncate": True,
            "truncate_side": "left",
            "n_dims": 2,
            "dtype": torch.long,
        },
        "Hash": {"hash_type": REQUIRED},
        "IDMultiHash": {"num_buckets": REQUIRED, "prefix": "multi_hash"},
        "StringMultiHash": {"num_buckets": REQUIRED, "prefix": "str_multi_hash"},
    },
    "nn": {
        "EmbeddingEngine": {"emb_options": REQUIRED, "use_pinned_memory": False},
        "EmbeddingEngine.forward": {"samples": REQUIRED},
        "DynamicEmbedding": {"emb_opt": REQUIRED, "pg": None},
        "DynamicEmbedding.forward": {"ids": REQUIRED, "input_weights": None},
        "NoReduceEmbedding": {"emb": REQUIRED, "reverse_index": REQUIRED, "offsets": REQUIRED},
    },
    "nn.modules.embedding": {
        "EmbeddingOption": {
            "embedding_dim": 16,
            "block_size": 10240,
            "dtype": torch.float32,
            "device": torch.device("cpu"),
            "trainable": True,
            "pg": None,
            "max_partition_num": 65536,
            "shared_name": "embedding",
            "children": "a list",
            "coalesced": False,
            "initializer": None,
            "use_weight": True,
            "combiner": "sum",
            "combiner_kwargs": None,
            "grad_reduce_by": "worker",
            "hdmp_group_size": None,
            "hdmp_group_reduce_by": None,
            "filter_hook": None,
            "admit_hook": None,
            "fp16_enabled": False,
            "no_reduce": False,
        },
    },
    "nn.modules.hashtable": {
        "HashTable": {
            "embedding_shape": REQUIRED,
            "block_size": 5,
            "dtype": torch.float32,
            "device": torch.device("cpu"),
            "coalesced": False,
            "children": None,
            "slice": None,
            "initializer": None,
            "name": "hashtable",
            "grad_reduce_by": "worker",
            "filter_hook": None,
        },
        "HashTable.forward": {"ids": REQUIRED, "admit_hook": None},
        "HashTable.insert": {"ids": REQUIRED, "embeddings": REQUIRED},
        "HashTable.ids": {"child": None},
        "HashTable.embeddings": {"child": None},
        "HashTable.clear": {"child": None},
        "filter_out_sparse_param": {"model": REQUIRED},
    },
    "nn.hashtable_hook": {
        "AdmitHook": {"name": REQUIRED, "params": None},
        "FilterHook": {"name": REQUIRED, "params": None},
    },
    "nn.initializers": {
        "ConstantInitializer": {"init_val": 0.0},
        "UniformInitializer": {"a": 0.0, "b": 1.0, "generator": None},
        "NormalInitializer": {"mean": 0.0, "std": 1.0, "generator": None},
        "XavierUniformInitializer": {"gain": 1.0, "generator": None},
        "XavierNormalInitializer": {"gain": 1.0, "generator": None},
        "KaimingUniformInitializer": KAIMING,
        "KaimingNormalInitializer": KAIMING,
        "TruncNormalInitializer": {"mean": 0.0, "std": 1.0, "a": -2.0, "b": 2.0, "generator": None},
    },
    "optim": {
        "SparseAdam": {**ADAM, "amsgrad": False},
        "SparseAdamW": {**ADAM, "amsgrad": False},
        "SparseAdamWTF": {**ADAM, "use_nesterov": False},
        "SparseAdagrad": {**ADAGRAD, "save_update_info_interval": 0},
        "SparseRowWiseAdagrad": {**ADAGRAD, "maximize": False},
        "AdamWTF": {
            "params": REQUIRED,
            "lr": 1e-3,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 1e-2,
        },
    },
    "framework.trainer": {
        "TrainingArguments": {
            "gradient_accumulation_steps": 1,
            "output_dir": "output_dir",
            "model_bank": None,
            "log_steps": 100,
            "train_steps": None,
            "train_epoch": 1,
            "eval_steps": None,
            "save_steps": 1000,
            "max_to_keep": 5,
            "save_concurrency_per_rank": 4,
            "save_every_n_windows": 1,
            "save_every_n_epochs": None,
            "save_end": True,
            "load_update_steps": None,
            "load_update_windows": 1,
            "load_update_epochs": None,
            "params_not_save": None,
            "save_filter_fn": None,
            "saver_option": None,
            "ckpt_save_arg": None,
            "ckpt_load_arg": None,
            "mixed_precision": None,
            "window_iter": None,
            "eval_mos_report_uri": None,
            "prefetch": None,
        },
        "Trainer": {
            "model": REQUIRED,
            "args": None,
            "train_dataset": None,
            "eval_dataset": None,
            "hooks": None,
            "dense_optimizers": (None, None),
            "sparse_optimizer": None,
            "data_to_cuda": False,
            "ddp_find_unused_parameters": True,
            "ddp_broadcast_buffers": True,
            "saver": None,
            "ddp_gradient_as_bucket_view": False,
            "ddp_bucket_cap_mb": 25,
            "ddp_static_graph": False,
            "monitor_report_args": None,
        },
        "Trainer.train": {"train_steps": None},
        "Trainer.evaluate": {"eval_steps": None},
        "Trainer.train_and_evaluate": {
            "args": REQUIRED,
            "epochs": None,
            "train_steps": None,
            "eval_steps": None,
        },
        "Trainer.add_hook": {"hook": REQUIRED},
        "Trainer.add_hooks": {"hooks": REQUIRED},
    },
    "framework.metrics": {
        "add_metric": {"name": REQUIRED, "metric": REQUIRED},
        "get_log_metrics": {},
        "get_global_metrics": {},
    },
    "hooks": {
        "Hook": {},
        "LoggerHook": {"log_step": 10},
        "ProfilerHook": {"wait": 1, "warmup": 48, "active": 1, "repeat": 4, "output_dir": "./"},
        "HashTableFilterHook": {"filter_interval": 100},
        "ClipGradNormHook": {
            "dense_params": REQUIRED,
            "sparse_params": REQUIRED,
            "max_norm": REQUIRED,
            "error_if_nonfinite": False,
        },
        "MetricReportHook": {
            "model": REQUIRED,
            "report_args": None,
            "mixed_precision": None,
            "flops_state": None,
        },
    },
    "hooks.monitor_report_hook": {
        "ReportArguments": {
            "interval_step": 100,
            "tflops_peak": -1,
            "compute_precision": None,
            "eval_flops_ratio": 1 / 3,
            "min_peak_coverage": 0.99,
        }
    },
    "metrics.auroc": {
        "AUROC": {"num_thresholds": 200, "dist_sync_on_step": False},
        "AUROC.update": {"predictions": REQUIRED, "labels": REQUIRED},
        "AUROC.compute": {},
        "AUROC.forward": {"predictions": REQUIRED, "labels": REQUIRED},
        "AUROC.reset": {},
    },
    "metrics.gauc": {
        "Gauc": {},
        "Gauc.forward": {"labels": REQUIRED, "predictions": REQUIRED, "indicators": REQUIRED},
        "Gauc.reset": {},
    },
    "serialize": {
        "Saver": {
            "shard_index": 0,
            "shard_num": 1,
            "parallel": 8,
            "path": ".",
            "hashtables": None,
            "tensors": None,
            "filter_func": None,
        },
        "Saver.save": {},
        "Loader": {
            "checkpoint_path": REQUIRED,
            "hashtables": None,
            "tensors": None,
            "parallel": 16,
            "filter_func": None,
        },
        "Loader.load": {},
    },
    "serialize.checkpoint_reader": {
        "CheckpointReader": {"path": REQUIRED},
        "CheckpointReader.tensor_names": {},
        "CheckpointReader.read_tensor": {"name": REQUIRED},
        "CheckpointReader.tensor_shape": {"name": REQUIRED},
        "CheckpointReader.tensor_dtype": {"name": REQUIRED},
    },
    "io": {"OrcDataset": DATASET},
    "metrics": {"AUROC": {"num_thresholds": 200, "dist_sync_on_step": False}, "Gauc": {}},
    "nn.functional.array_ops": {
        "bucketize": {"input": REQUIRED, "boundaries": REQUIRED},
        "bucketize_mod": {"input": REQUIRED, "bucket": REQUIRED},
        "multi_hash": dict.fromkeys(("input", "muls", "primes", "bucket_num"), REQUIRED),
    },
    "nn.functional.hash_ops": {
        "farmhash": {"inputs": REQUIRED, "splits": REQUIRED},
        "murmurhash": {"inputs": REQUIRED, "splits": REQUIRED},
    },
    "nn.functional.ragged_ops": {
        "dense_to_ragged": {"tensor": REQUIRED, "check_invalid": False, "invalid_value": 0},
        "ragged_to_dense": {"values": REQUIRED, "offsets": REQUIRED, "default_value": 0.0},
        "ragged_to_sparse": {"values": REQUIRED, "row_splits": REQUIRED},
        "feature_cross_ragged": {
            **dict.fromkeys(("x_val", "x_offsets", "y_val", "y_offsets"), REQUIRED),
            **dict.fromkeys(("x_weight", "y_weight")),
        },
    },
    "nn.functional.fused_ops": {
        "fused_bucketize_gpu": {"values": REQUIRED, "boundaries": REQUIRED},
        "fused_uint64_mod_gpu": {"values": REQUIRED, "mods": REQUIRED},
        "fused_multi_hash": dict.fromkeys(("inputs", "muls", "primes", "bucket_nums"), REQUIRED),
        "fused_int64_to_string_int8": {"inputs": REQUIRED},
    },
    "utils.data_utils": {"copy_data_to_device": {"data": REQUIRED, "device": REQUIRED, "args": REQUIRED}},
    "utils.parser": {"ArgumentParser": {"args": REQUIRED}},
    "utils.logger": {"Logger": {"name": "a name", "level": 10}},
}
CASES = [(module, name) for module, names in SIGNATURES.items() for name in names]
FREE = ("a list", "a name")  # defaults that are made when they are needed


@pytest.mark.parametrize(("module", "name"), CASES)
def test_a_name_has_its_arguments(module, name):
    found = importlib.import_module(f"karvan.compat.recis.{module}")
    for part in name.split("."):
        found = getattr(found, part)
    given = {
        each.name: each.default
        for each in inspect.signature(found).parameters.values()
        if each.name != "self" and each.kind is not each.VAR_KEYWORD
    }
    expected = SIGNATURES[module][name]
    assert list(given) == list(expected)
    for argument, default in expected.items():
        if isinstance(default, torch.device):
            assert torch.device(given[argument]) == default
        elif default not in FREE:
            assert given[argument] == default, argument


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("hooks", "MLTrackerHook"),
        ("hooks", "TraceToOdpsHook"),
        ("hooks", "TraceToOdpsHookV2"),
        ("nn.modules.hashtable", "filter_out_trainable_sparse_param"),
        ("optim", "NamedAdam"),
        ("optim", "wrapped_named_optimizer"),
        ("nn.modules.hashtable", "gen_slice"),
        ("nn.modules.hashtable", "HashtableRegister"),
        ("io.odps_dataset", "init_odps_session"),
        ("io.window_io", "make_odps_window_io"),
        ("io.lake_dataset", "LakeDataset"),
        ("framework.checkpoint_manager", "Saver"),
        ("features.op", "Mask"),
        ("io", "LakeStreamDataset"),
        ("metrics", "GAUC"),
        ("nn.functional.array_ops", "parse_sample_id"),
        ("nn.functional.fused_ops", "fused_ids_encode_gpu"),
        ("nn.functional.hash_ops", "sdbmhash"),
        ("nn.functional.ragged_ops", "fused_ragged_cutoff_2D"),
    ],
)
def test_names_without_a_counterpart_say_what_to_use(module, name):
    with pytest.raises(
        UnsupportedError, match=f"recis.{module}.{name} is not supported: .* See docs/migrating"
    ):
        getattr(importlib.import_module(f"karvan.compat.recis.{module}"), name)
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = importlib.import_module(f"karvan.compat.recis.{module}").other


@pytest.mark.parametrize("module", ["fg.feature_generator", "hooks.checkpoint_hooks", "framework.exporter"])
def test_modules_without_a_counterpart_say_what_to_use(module):
    named = rf"'recis.{module.removesuffix('.feature_generator')}' is not supported: .* See docs/migrating"
    with import_aliases({"recis": "karvan.compat.recis"}), pytest.raises(ModuleNotFoundError, match=named):
        importlib.import_module(f"recis.{module}")


@pytest.mark.parametrize("module", sorted(unsupported_modules("recis")))
def test_no_module_is_said_to_be_missing_that_is_there(module):
    assert importlib.util.find_spec(f"karvan.compat.{module}") is None


@pytest.mark.parametrize(
    ("base", "method"),
    [
        (Trainer, "_train_step"),
        (Trainer, "build_saver"),
        (OrcDataset, "make_dataset_fn"),
    ],
)
def test_a_method_that_would_never_be_called_is_refused(base, method):
    with pytest.raises(UnsupportedError, match=f"{method} of Own is not supported"):
        type("Own", (base,), {method: lambda self: None})
    type("Own", (base,), {"other": lambda self: None})
