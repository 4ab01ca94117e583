"""diffusion-pipe's two TOMLs: the run, and the dataset that it names.

Source of names, defaults and meanings (facts only, it is GPL): tdrussell/diffusion-pipe examples, train.py,
models/anima.py, models/base.py. It reads with `dict.get`: an unknown key is ignored there. Its adapter has alpha =
rank, and covers every linear layer of a block, the modulation's included, and the text conditioner.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finitune.config.imported_config import ImportedConfig
from finitune.importers.conversions import (
    build_datasets_by_resolution,
    convert_compute_dtype,
    convert_optimizer_name,
    convert_saved_dtype,
    convert_schedule_name,
    convert_storage_dtype,
    to_whole_number,
    wrap_in_list,
)
from finitune.importers.mapping import (
    ConfigFileReader,
    ConvertedValue,
    ImportAccount,
    KeyMapping,
    apply_converter,
    convert_as_is,
    convert_boolean,
    convert_number,
    convert_positive,
    convert_whole_number,
    get_nested_mapping,
    make_choice_converter,
    map_constant,
    map_implicit,
    map_no_effect,
    map_to,
    map_unsupported,
    mark_no_effect,
    mark_unsupported,
    prefix_keys,
    take_changed,
    take_value,
)
from finitune.report import Finding, Level

_PROGRAM_NAME = "diffusion-pipe"
_TRAINED_FAMILY = "anima"
_FULL_FACTOR_RANK = 100_000
_MODULATION_PATTERN = r".*\.adaln_modulation_(self_attn|cross_attn|mlp)\..*"
_BUCKET_REMEDY = "set bucket_reso_steps, min_bucket_reso and max_bucket_reso: buckets are kohya's here"
_STATES_WITH_FILES = map_implicit("a state is written with each file, to resume from")
_PIPELINE_ONLY = map_no_effect("only with several pipeline_stages")


def _convert_epochs(value: Any, beside: Mapping[str, Any]) -> ConvertedValue:
    if "max_steps" in beside:
        return mark_unsupported("max_steps counts; there whichever is reached first")
    return convert_whole_number(value, beside)


def _convert_batch_size(value: Any, beside: Mapping[str, Any]) -> ConvertedValue:
    if isinstance(value, list):
        return take_changed(int(value[0][1]), "each size's own stands in its [[datasets]]")
    return convert_whole_number(value, beside)


def _convert_huber(value: Any, beside: Mapping[str, Any]) -> ConvertedValue:
    return take_changed(float(value), "kohya's form, 2c times theirs", objective__loss_type="huber")


def _convert_checkpointing(value: Any, beside: Mapping[str, Any]) -> ConvertedValue:
    return take_changed(True, "without unsloth's offload") if value == "unsloth" else convert_boolean(value, beside)


def _convert_adapter_rank(value: Any, beside: Mapping[str, Any]) -> ConvertedValue:
    if beside.get("type") == "lokr" and to_whole_number(value) >= _FULL_FACTOR_RANK:
        return take_changed(1, "so large a rank means a full second factor", network__full_matrix=True)
    return convert_whole_number(value, beside)


def _convert_conditioner_rate(value: Any, beside: Mapping[str, Any]) -> ConvertedValue:
    if not float(value):
        return ConvertedValue(False, place="network.train_llm_adapter", note="the conditioner is not trained")
    return take_value(float(value), network__train_llm_adapter=True)


def _convert_sample_method(value: Any, beside: Mapping[str, Any]) -> ConvertedValue:
    """logit_normal or uniform, then one of two shifts."""
    uniform, shift = value == "uniform", beside.get("shift")
    if value not in ("logit_normal", "uniform"):
        return mark_unsupported(f"{value!r}: choose timestep_sampling")
    if shift:
        return take_value("sigma", objective__weighting_scheme="none") if uniform else take_value("shift")
    if beside.get("flux_shift"):
        return take_changed("flux_shift", "draws are by sigmoid here") if uniform else take_value("flux_shift")
    return take_value("uniform" if uniform else "sigmoid")


def _convert_caption_variants(value: Any, beside: Mapping[str, Any]) -> ConvertedValue:
    if not value:
        return mark_no_effect("captions are not shuffled")
    return take_value(int(value), subset__shuffle_caption=True)


def _convert_repeats(value: Any, beside: Mapping[str, Any]) -> ConvertedValue:
    answer = convert_whole_number(value, beside)
    if isinstance(answer.value, float):
        return take_changed(max(1, round(answer.value)), "only whole repeats")
    return answer


_MAIN_KEYS: dict[str, KeyMapping] = {
    "output_dir": map_to("saving.output_dir"),
    "dataset": map_implicit("its directories are the [[datasets]]"),
    "epochs": map_to("training.max_train_epochs", _convert_epochs),
    "max_steps": map_to("training.max_train_steps", convert_whole_number),
    "micro_batch_size_per_gpu": map_to("training.train_batch_size", _convert_batch_size),
    "image_micro_batch_size_per_gpu": map_to("training.train_batch_size", _convert_batch_size),
    "gradient_accumulation_steps": map_to("training.gradient_accumulation_steps", convert_whole_number),
    "gradient_clipping": map_to("optimizer.max_grad_norm", convert_number),
    "warmup_steps": map_to("optimizer.lr_warmup_steps", convert_number),
    "lr_scheduler": map_to("optimizer.lr_scheduler", convert_schedule_name),
    "force_constant_lr": map_to("optimizer.learning_rate", convert_number, "constant, whatever else is said"),
    "blocks_to_swap": map_to("training.offload_blocks", convert_whole_number),
    "disable_block_swap_for_eval": map_implicit("blocks are held as in training"),
    "pseudo_huber_c": map_to("objective.huber_c", _convert_huber),
    "save_every_n_epochs": map_to("saving.save_every_n_epochs", convert_positive),
    "save_every_n_steps": map_to("saving.save_every_n_steps", convert_positive),
    "save_every_n_examples": map_unsupported("set save_every_n_steps"),
    "checkpoint_every_n_epochs": _STATES_WITH_FILES,
    "checkpoint_every_n_minutes": _STATES_WITH_FILES,
    "resume_from_checkpoint": map_to(
        "saving.resume", lambda v, b: take_value("auto") if v is True else mark_unsupported("`auto`")
    ),
    "save_dtype": map_to("saving.save_precision", convert_saved_dtype),
    "activation_checkpointing": map_to("training.gradient_checkpointing", _convert_checkpointing),
    "reentrant_activation_checkpointing": map_implicit("PyTorch's checkpointing, not re-entrant"),
    "caching_batch_size": map_to("training.vae_batch_size", convert_whole_number),
    "compile": map_to("training.torch_compile", convert_boolean),
    "pipeline_stages": map_constant(1, todo="several GPUs share batches here: accelerate launch"),
    "partition_method": _PIPELINE_ONLY,
    "partition_split": _PIPELINE_ONLY,
    "eval_datasets": map_unsupported("set validation_split"),
    "eval_datasets.*": map_unsupported("set validation_split"),
    "eval_every_n_epochs": map_to("validation.validate_every_n_epochs", convert_positive),
    "eval_every_n_steps": map_to("validation.validate_every_n_steps", convert_positive),
    "eval_every_n_examples": map_unsupported("set validate_every_n_steps"),
    **dict.fromkeys(
        (
            *("eval_before_first_step", "eval_micro_batch_size_per_gpu", "eval_gradient_accumulation_steps"),
            "image_eval_micro_batch_size_per_gpu",
        ),
        map_implicit("measured one picture at a time, at fixed sigmas"),
    ),
    **dict.fromkeys(("huggingface_repo", "upload_hf_from_epoch"), map_unsupported("upload the file yourself")),
    **dict.fromkeys(("steps_per_print", "logging_steps", "map_num_proc"), map_no_effect("changes no result")),
    "x_axis_examples": map_implicit("steps are counted"),
    "regenerate_cache": map_implicit("caches are addressed by content"),
    "video_clip_mode": map_no_effect("for videos"),
    "monitoring.enable_wandb": map_unsupported("set log_with to tensorboard", False),
    "monitoring.*": map_no_effect("only with enable_wandb"),
}
_MODEL_KEYS: dict[str, KeyMapping] = {
    "type": map_implicit("the family is read from the model itself"),
    "dtype": map_to("model.precision", convert_compute_dtype),
    "transformer_dtype": map_to("model.storage", convert_storage_dtype),
    "transformer_path": map_to("model.pretrained_model_name_or_path"),
    "diffusers_path": map_to("model.pretrained_model_name_or_path"),
    "vae_path": map_to("model.vae"),
    **dict.fromkeys(
        ("qwen_path", "llm_path"), map_to("model.qwen3", convert_as_is, "a folder there; name the file in it")
    ),
    "timestep_sample_method": map_to("objective.timestep_sampling", _convert_sample_method),
    "sigmoid_scale": map_to("objective.sigmoid_scale", convert_number),
    "shift": map_to("objective.discrete_flow_shift", convert_number),
    "flux_shift": map_implicit("by timestep_sampling"),
    "llm_adapter_lr": map_to("optimizer.llm_adapter_lr", _convert_conditioner_rate),
    "freeze_llm_adapter": map_implicit("for full training; train_llm_adapter for an adapter"),
    "cache_text_embeddings": map_implicit("texts are always cached"),
    **dict.fromkeys(
        ("qwen_nf4", "qwen_fp8"), map_implicit("texts are encoded once, before training, in full precision")
    ),
    **dict.fromkeys(("load_to_cuda", "guidance"), map_no_effect("changes no result of Anima")),
}
_ALGORITHM_BY_TYPE = {"lora": "lora", "lokr": "lokr"}
_ADAPTER_KEYS: dict[str, KeyMapping] = {
    "type": map_to("network.algorithm", make_choice_converter(_ALGORITHM_BY_TYPE, "choose an algorithm.")),
    "rank": map_to("network.network_dim", _convert_adapter_rank),
    "alpha": map_unsupported("it is the rank there, and the original refuses this key"),
    "dropout": map_to("network.network_dropout", convert_number),
    "decompose_factor": map_to("network.factor", convert_whole_number),
    "dtype": map_implicit("the adapter's masters are fp32"),
    "init_from_existing": map_to("network.network_weights", convert_as_is, "name the file in that folder"),
    "fuse_adapters.*": map_unsupported("merge them into the base model first: finitune merge"),
}
_OPTIMIZER_KEYS: dict[str, KeyMapping] = {
    "type": map_to("optimizer.optimizer_type", convert_optimizer_name),
    "lr": map_to("optimizer.learning_rate", convert_number),
    "gradient_release": map_unsupported("leave it out", False),
    "*": map_to("optimizer.optimizer_args.*", convert_number),
}
_FOLDER_KEYS: dict[str, KeyMapping] = {
    "resolutions": map_to(
        "dataset.resolution",
        lambda v, b: take_changed(v, f"a [[datasets]] for each of {len(v)}") if len(v) > 1 else take_value(v),
    ),
    "enable_ar_bucket": map_to("dataset.enable_bucket", convert_boolean),
    **dict.fromkeys(("min_ar", "max_ar", "num_ar_buckets"), map_implicit(_BUCKET_REMEDY)),
    **dict.fromkeys(("ar_buckets", "size_buckets"), map_unsupported(_BUCKET_REMEDY)),
    "frame_buckets": map_no_effect("for videos"),
    "num_repeats": map_to("subset.num_repeats", _convert_repeats),
    "caption_prefix": map_to("subset.caption_prefix"),
    "shuffle_tags": map_to("subset.shuffle_caption", convert_boolean),
    "cache_shuffle_num": map_to("subset.caption_variants", _convert_caption_variants),
    "cache_shuffle_delimiter": map_to("subset.caption_separator", lambda v, b: take_value(v.strip() or v)),
    "skip_empty_caption": map_implicit("pictures without a caption are reported, and trained with an empty one"),
}
_DATASET_KEYS: dict[str, KeyMapping] = {
    **_FOLDER_KEYS,
    **prefix_keys(
        "directory[]",
        {
            **_FOLDER_KEYS,
            "path": map_to("subset.image_dir"),
            "mask_path": map_to(
                "subset.conditioning_data_dir", lambda v, b: take_value(v, objective__masked_loss=True)
            ),
        },
    ),
}
DIFFUSION_PIPE_KEYS: dict[str, KeyMapping] = {
    **_MAIN_KEYS,
    **prefix_keys("model", _MODEL_KEYS),
    **prefix_keys("adapter", _ADAPTER_KEYS),
    **prefix_keys("optimizer", _OPTIMIZER_KEYS),
    **prefix_keys("dataset", _DATASET_KEYS),
}


def import_diffusion_pipe(
    document: Mapping[str, Any], source: Path | str, read: ConfigFileReader | None = None
) -> ImportedConfig:
    """diffusion-pipe's run in our terms; `read` gives the dataset that it names."""
    account = ImportAccount(_PROGRAM_NAME, str(source))
    account.walk(document, DIFFUSION_PIPE_KEYS)
    folders = account.read_second_file("dataset", document.get("dataset"), read) or {}
    account.walk(folders, DIFFUSION_PIPE_KEYS, ("dataset",))
    model = get_nested_mapping(document, "model")
    if (family := model.get("type")) != _TRAINED_FAMILY:
        account.report_other_family("model.type", family)
    if "adapter" not in document:
        account.findings.append(make_whole_model_warning(str(source)))
    sampling = apply_converter(_convert_sample_method, model.get("timestep_sample_method", "logit_normal"), model)
    account.fill(
        {
            "objective.timestep_sampling": sampling.value or "sigmoid",
            **sampling.also,
            "network.network_alpha": account.get("network.network_dim") or 16,
            "network.train_llm_adapter": True,
            "network.include_patterns": [_MODULATION_PATTERN],
        }
    )
    if rate := document.get("force_constant_lr"):
        account.set("optimizer.learning_rate", rate)
        account.set("optimizer.lr_scheduler", "constant")
        account.set("optimizer.lr_warmup_steps", 0)
    return account.imported(build_diffusion_pipe_datasets(account, document.get("micro_batch_size_per_gpu")))


def import_diffusion_pipe_dataset(document: Mapping[str, Any], source: Path | str) -> ImportedConfig:
    """A dataset TOML alone: the datasets."""
    account = ImportAccount(_PROGRAM_NAME, str(source))
    account.walk(document, _DATASET_KEYS)
    return account.imported(build_diffusion_pipe_datasets(account, None))


def make_whole_model_warning(source: str) -> Finding:
    """The warning for a run without an [adapter]."""
    message = "there is no [adapter]: the original trains the whole model, here an adapter is trained"
    return Finding(Level.WARNING, "CONFIG-WHOLE-MODEL", source, message, {}, "Set the network section as you like.")


def build_diffusion_pipe_datasets(account: ImportAccount, batches: object) -> list[dict[str, object]]:
    """One [[datasets]] for each directory at each of its resolutions, with the batch size of each."""
    pairs = [entry for entry in wrap_in_list(batches) if isinstance(entry, list) and len(entry) == 2]
    by_size = {str(size): batch for size, batch in pairs}
    dataset, subset = account.scoped["dataset"], account.scoped["subset"]
    made: list[dict[str, object]] = []
    for place in sorted(place for place in subset if place):
        options = {"enable_bucket": False, **dataset.get((), {}), **dataset.get(place, {})}
        folder = {"caption_extension": ".txt", **subset.get((), {}), **subset[place]}
        made += build_datasets_by_resolution(options, [folder], wrap_in_list(options.pop("resolution", 512)))
    for options in made:
        if (size := str(options["resolution"])) in by_size:
            options["batch_size"] = by_size[size]
    return made
