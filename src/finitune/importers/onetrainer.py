"""OneTrainer's JSON, with its concepts and samples, inside it or in files of their own.

Only differences from the defaults need to be written there (its presets are partial), so that defaults matter; keys of
older versions are read as its migrations do. It iterates the names that it knows: an unknown one is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from finitune.config.imported_config import ImportedConfig
from finitune.importers import onetrainer_keys as rows
from finitune.importers.conversions import (
    build_datasets_by_resolution,
    convert_compute_dtype,
    convert_saved_dtype,
    format_prompt_line,
    set_lokr_unit_scale,
    wrap_in_list,
)
from finitune.importers.mapping import (
    ConfigFileReader,
    ImportAccount,
    KeyMapping,
    convert_boolean,
    convert_number,
    convert_whole_number,
    make_choice_converter,
    map_constant,
    map_implicit,
    map_no_effect,
    map_to,
    map_unsupported,
    mark_no_effect,
    prefix_keys,
    take_changed,
    take_value,
)
from finitune.importers.onetrainer_keys import (
    ONETRAINER_OTHER_MODELS,
    ONETRAINER_UI_ONLY,
    make_interval_converter,
    map_interval_unit,
    restrict_to_peft_type,
)

_PROGRAM_NAME = "OneTrainer"
_TRAINED_FAMILY = "ANIMA"
_ALGORITHM_BY_PEFT_TYPE = {"lora": "lora", "loha": "loha", "lokr": "lokr", "oft_2": "oft"}
_SAVE_AS_BY_FORMAT = {
    "kohya_lora": take_value(["kohya"]),
    "comfy_lora": take_value(["comfy"]),
    "diffusers_lora": take_value(["diffusers"]),
    "peft_lora": take_value(["peft"]),
    **dict.fromkeys(("safetensors", "legacy_lora"), take_changed(["kohya"], "kohya's spelling")),
}
_OTHER_MODEL_PARTS = (
    *("unet", "prior", "unconditional_transformer", "text_encoder_2", "text_encoder_3", "text_encoder_4"),
    *("effnet_encoder", "decoder", "decoder_text_encoder", "decoder_vqgan"),
)
_DEFAULTS: Mapping[str, object] = {
    "network.network_alpha": 1.0,
    "optimizer.learning_rate": 3e-6,
    "optimizer.lr_warmup_steps": 200,
    "objective.timestep_sampling": "uniform",
    "training.max_train_epochs": 100,
    "training.gradient_checkpointing": True,
    "logging.log_with": "tensorboard",
    "saving.output_dir": "workspace/run",
}
_CONCEPT_DEFAULTS: Mapping[str, object] = {"flip_aug": True, "keep_tokens": 1}

_MODEL_KEYS: dict[str, KeyMapping] = {
    "model_type": map_implicit("the family is read from the model itself"),
    "training_method": map_constant("LORA", todo="only adapters are trained here; the network section says which"),
    "base_model_name": map_to("model.pretrained_model_name_or_path"),
    "transformer.*": ONETRAINER_OTHER_MODELS,
    "train_dtype": map_to("model.precision", convert_compute_dtype),
    "fallback_train_dtype": map_implicit("what needs fp32 has it"),
    "weight_dtype": map_implicit("the parts say how they are held"),
    "train_device": map_to("model.device"),
    "temp_device": map_implicit("main memory"),
    "compile": map_to("training.torch_compile", convert_boolean),
    "attention_mechanism": map_implicit("PyTorch's attention"),
    "quantization.*": map_unsupported("set storage to fp8", "", "full", "NONE", False, 0, 16),
    "async_offloading": map_no_effect("nothing is offloaded unless offload_blocks is set"),
    "layer_offload_fraction": map_unsupported("set offload_blocks to a number of blocks", 0, 0.0),
    "enable_activation_offloading": map_no_effect("only with CPU_OFFLOADED"),
    "enable_async_offloading": map_no_effect("only with CPU_OFFLOADED"),
    "enable_autocast_cache": map_no_effect("there is no autocast here"),
    "force_circular_padding": map_unsupported("leave it out", False),
    "gradient_checkpointing": map_to(
        "training.gradient_checkpointing",
        lambda v, b: (
            take_changed(True, "without the offload; set offload_blocks")
            if v == "CPU_OFFLOADED"
            else take_value(v in ("ON", True))
        ),
    ),
}
_NETWORK_KEYS: dict[str, KeyMapping] = {
    "peft_type": map_to("network.algorithm", make_choice_converter(_ALGORITHM_BY_PEFT_TYPE, "choose an algorithm.")),
    "lora_rank": map_to("network.network_dim", rows.convert_onetrainer_rank),
    "lora_alpha": map_to("network.network_alpha", convert_number),
    "lora_decompose": map_to("network.dora", convert_boolean),
    "lora_decompose_norm_epsilon": map_implicit("the norm has an epsilon where it must"),
    "lora_decompose_output_axis": map_unsupported("the norm is that of LyCORIS and PEFT", False),
    "lora_weight_dtype": map_constant("FLOAT_32", todo="the adapter's masters are fp32"),
    "lora_model_name": map_to("network.network_weights"),
    "lokr_dim": map_to("network.network_dim", restrict_to_peft_type("LOKR", convert_whole_number)),
    "lokr_decompose_both": map_to("network.decompose_both", restrict_to_peft_type("LOKR", convert_boolean)),
    "lokr_decompose_factor": map_to("network.factor", restrict_to_peft_type("LOKR", convert_whole_number)),
    "lokr_use_tucker": map_to("network.use_tucker", restrict_to_peft_type("LOKR", convert_boolean)),
    "lokr_weight_decompose": map_to("network.dora", restrict_to_peft_type("LOKR", convert_boolean)),
    "lokr_full_matrix": map_to("network.full_matrix", restrict_to_peft_type("LOKR", convert_boolean)),
    "lokr_dora_on_output": map_implicit("the norm is that of LyCORIS and PEFT"),
    "lokr_vec_trick": map_implicit("the Kronecker product is never built"),
    "oft_block_size": map_to(
        "network.network_dim", restrict_to_peft_type("OFT_2", convert_whole_number), "the size of a block"
    ),
    "oft_block_share": map_unsupported("leave it out", False),
    "oft_scaled": map_unsupported("leave it out", False),
    "oft_clipped_norm": map_unsupported("set constraint", 0.95),
    "oft_cans": map_unsupported("leave it out", False),
    "dora_oft": map_unsupported("leave it out", False),
    "layer_filter": map_to("network.only_patterns", rows.convert_layer_filter),
    "layer_filter_preset": map_implicit("by layer_filter"),
    "layer_filter_regex": map_implicit("by layer_filter"),
    "lora_layers": map_to("network.only_patterns", rows.convert_layer_filter),
    "lora_layer_preset": map_implicit("by lora_layers"),
    "dropout_probability": map_to("network.network_dropout", convert_number),
    **dict.fromkeys(
        (
            "embedding.*",
            "additional_embeddings.*",
            "embedding_learning_rate",
            "preserve_embedding_norm",
            "embedding_weight_dtype",
            "bundle_additional_embeddings",
        ),
        map_no_effect("no embedding is trained"),
    ),
}
_SCHEDULE_KEYS: dict[str, KeyMapping] = {
    "learning_rate": map_to("optimizer.learning_rate", convert_number),
    "learning_rate_scheduler": map_to("optimizer.lr_scheduler", rows.convert_onetrainer_scheduler),
    "learning_rate_warmup_steps": map_to("optimizer.lr_warmup_steps", convert_number),
    "learning_rate_cycles": map_to("optimizer.lr_scheduler_num_cycles", convert_number),
    "learning_rate_min_factor": map_to("optimizer.lr_scheduler_min_lr_ratio", rows.convert_min_rate_factor),
    "learning_rate_scaler": map_unsupported("multiply the learning rate yourself", "NONE"),
    "custom_learning_rate_scheduler": map_unsupported("choose an lr_scheduler"),
    "scheduler_params.*": map_unsupported("choose an lr_scheduler"),
    "optimizer_defaults.*": ONETRAINER_UI_ONLY,
    "clip_grad_norm": KeyMapping("optimizer", "max_grad_norm", lambda v, b: take_value(v or 0.0), empty=True),
    "ema": map_to("optimizer.ema_decay", rows.convert_onetrainer_ema),
    "ema_decay": map_to("optimizer.ema_decay", rows.convert_onetrainer_ema_decay),
    "ema_update_step_interval": map_implicit("by ema_decay"),
    "non_ema_sampling": map_implicit("previews are drawn with what is saved"),
    "epochs": map_to("training.max_train_epochs", rows.convert_onetrainer_epochs),
    "batch_size": map_to("training.train_batch_size", convert_whole_number),
    "gradient_accumulation_steps": map_to("training.gradient_accumulation_steps", convert_whole_number),
}
_OBJECTIVE_KEYS: dict[str, KeyMapping] = {
    "timestep_distribution": map_to("objective.timestep_sampling", rows.convert_timestep_distribution),
    "noising_weight": map_implicit("by timestep_distribution"),
    "noising_bias": map_implicit("by timestep_distribution"),
    "timestep_shift": map_to("objective.discrete_flow_shift", convert_number),
    "dynamic_timestep_shifting": map_implicit("by timestep_distribution"),
    "min_noising_strength": map_to("objective.min_sigma", convert_number),
    "max_noising_strength": map_to("objective.max_sigma", convert_number),
    **{
        key: map_to("objective.loss_type", rows.make_loss_strength_converter(key))
        for key in rows.ONETRAINER_LOSS_STRENGTHS
    },
    "log_cosh_strength": map_unsupported("choose loss_type; smooth_l1 is near", 0, 0.0),
    "huber_delta": map_to(
        "objective.huber_c", lambda v, b: convert_number(v, b) if b.get("huber_strength") else mark_no_effect()
    ),
    "loss_weight_fn": map_unsupported("set weighting_scheme", "CONSTANT"),
    "loss_weight_strength": map_implicit("by loss_weight_fn"),
    "loss_scaler": map_unsupported("choose the learning rate", "NONE"),
    "masked_training": map_to(
        "objective.masked_loss",
        lambda v, b: (
            take_changed(
                True, "masks lie beside the pictures there (-masklabel.png); name their folder as conditioning_data_dir"
            )
            if v
            else take_value(False)
        ),
    ),
    "unmasked_probability": map_unsupported("every step is masked", 0, 0.0),
    "unmasked_weight": map_unsupported("paint the mask's black as grey", 0, 0.0),
    "normalize_masked_area_loss": map_to("objective.mask_normalised", convert_boolean),
    "masked_prior_preservation_weight": map_unsupported("leave it out", 0, 0.0),
    "custom_conditioning_image": map_unsupported("leave it out", False),
    "perturbation_noise_weight": map_unsupported("set ip_noise_gamma, which the target does not have", 0, 0.0),
    "offset_noise_weight": map_unsupported("the noise is N(0, 1)", 0, 0.0),
    "generalized_offset_noise": map_no_effect("no offset noise"),
    **dict.fromkeys(
        (
            "force_v_prediction",
            "force_epsilon_prediction",
            "rescale_noise_scheduler_to_zero_terminal_snr",
            "vb_loss_strength",
            "cep_gamma",
        ),
        map_no_effect("not for flow matching"),
    ),
}
_DATA_KEYS: dict[str, KeyMapping] = {
    "concept_file_name": map_implicit("its concepts are the [[datasets]]"),
    "resolution": map_to("general.resolution", rows.convert_onetrainer_resolution),
    "frames": map_no_effect("for videos"),
    "aspect_ratio_bucketing": map_to("general.enable_bucket", convert_boolean),
    "text_encoder_sequence_length": map_to("training.qwen3_max_token_length", convert_whole_number),
    **dict.fromkeys(
        ("image_caching", "text_caching", "latent_caching", "clear_cache_before_training", "cache_dir"),
        map_implicit("latents and texts are always cached on disk, by content"),
    ),
    **dict.fromkeys(
        ("caching_threads", "dataloader_threads", "prefetch_next_batch"), map_no_effect("no result depends on it")
    ),
    "only_cache": map_unsupported("leave it out", False),
}
_SAVING_KEYS: dict[str, KeyMapping] = {
    "workspace_dir": map_to("saving.output_dir"),
    "output_model_destination": map_to("saving.output_name", rows.convert_model_destination),
    "output_dtype": map_to("saving.save_precision", convert_saved_dtype),
    "output_model_format": map_to("saving.save_as", make_choice_converter(_SAVE_AS_BY_FORMAT, "choose save_as.")),
    "save_every": map_to("saving.save_every_n_steps", make_interval_converter("save_every_unit", "saving.save")),
    "save_after": map_to("saving.save_every_n_steps", make_interval_converter("save_after_unit", "saving.save")),
    "save_every_unit": map_interval_unit("save_every"),
    "save_after_unit": map_interval_unit("save_after"),
    "save_skip_first": map_unsupported("leave it out", 0),
    "save_filename_prefix": map_unsupported("set output_name"),
    "backup_after": map_implicit("a state is written with each file, to resume from"),
    "backup_after_unit": map_interval_unit("backup_after"),
    "rolling_backup": map_implicit("save_last_n"),
    "rolling_backup_count": map_to(
        "saving.save_last_n", lambda v, b: convert_whole_number(v, b) if b.get("rolling_backup") else mark_no_effect()
    ),
    "backup_before_save": map_implicit("a state is written with each file"),
    "continue_last_backup": map_to("saving.resume", lambda v, b: take_value("auto" if v else "never")),
    "prevent_overwrites": map_implicit("a run never writes over another's files"),
    "include_train_config": map_implicit("the configuration is saved with the run"),
}
_MONITORING_KEYS: dict[str, KeyMapping] = {
    "sample_definition_file_name": map_implicit("its samples are the prompts"),
    "sample_after": map_to(
        "preview.sample_every_n_steps", make_interval_converter("sample_after_unit", "preview.sample")
    ),
    "sample_after_unit": map_interval_unit("sample_after"),
    "sample_skip_first": map_unsupported("leave it out", 0),
    "samples_to_tensorboard": map_implicit("previews are files of the run"),
    "validation": map_implicit("as soon as there are pictures to measure on: validation_split"),
    "validate_after": map_to(
        "validation.validate_every_n_epochs", make_interval_converter("validate_after_unit", "validation.validate")
    ),
    "validate_after_unit": map_interval_unit("validate_after"),
    "tensorboard": map_to("logging.log_with", lambda v, b: take_value("tensorboard" if v else "none")),
    **dict.fromkeys(("sample_image_format", "sample_video_format", "sample_audio_format"), map_implicit("PNG files")),
}
_MACHINE_KEYS: dict[str, KeyMapping] = {
    "multi_gpu": map_unsupported("start with accelerate launch or torchrun", False),
    "device_indexes": map_no_effect("only with multi_gpu"),
    **dict.fromkeys(
        ("gradient_reduce_precision", "fused_gradient_reduce", "async_gradient_reduce", "async_gradient_reduce_buffer"),
        map_no_effect("only with multi_gpu"),
    ),
    **dict.fromkeys(
        (
            "debug_mode",
            "debug_dir",
            "tensorboard_expose",
            "tensorboard_always_on",
            "tensorboard_port",
            "cloud.*",
            "secrets.*",
            "__version",
        ),
        ONETRAINER_UI_ONLY,
    ),
    **{f"{part}.*": ONETRAINER_OTHER_MODELS for part in _OTHER_MODEL_PARTS},
    **dict.fromkeys(
        (
            "text_encoder_layer_skip",
            "text_encoder_2_layer_skip",
            "text_encoder_3_layer_skip",
            "text_encoder_4_layer_skip",
            "text_encoder_2_sequence_length",
        ),
        ONETRAINER_OTHER_MODELS,
    ),
}
ONETRAINER_KEYS: dict[str, KeyMapping] = {
    **_MODEL_KEYS,
    **_NETWORK_KEYS,
    **_SCHEDULE_KEYS,
    **_OBJECTIVE_KEYS,
    **_DATA_KEYS,
    **_SAVING_KEYS,
    **_MONITORING_KEYS,
    **_MACHINE_KEYS,
    **prefix_keys("transformer", rows.ONETRAINER_PART_KEYS),
    **prefix_keys("text_encoder", rows.ONETRAINER_TEXT_ENCODER_KEYS),
    **prefix_keys("vae", rows.ONETRAINER_VAE_KEYS),
    **prefix_keys("optimizer", rows.ONETRAINER_OPTIMIZER_KEYS),
    **prefix_keys("concepts[]", rows.ONETRAINER_CONCEPT_KEYS),
    **prefix_keys("samples[]", rows.ONETRAINER_SAMPLE_KEYS),
}


def import_onetrainer(
    document: Mapping[str, Any], source: Path | str, read: ConfigFileReader | None = None
) -> ImportedConfig:
    """OneTrainer's configuration in our terms; `read` gives the files of concepts and samples that it names."""
    account = ImportAccount(_PROGRAM_NAME, str(source))
    account.walk(document, ONETRAINER_KEYS)
    if not document.get("concepts"):
        name = document.get("concept_file_name", "training_concepts/concepts.json")
        map_listed_elements(account, account.read_second_file("concept_file_name", name, read), "concepts")
    if not document.get("samples") and read and (name := document.get("sample_definition_file_name")):
        map_listed_elements(account, read(str(name)), "samples")
    family = str(document.get("model_type", "STABLE_DIFFUSION_15"))
    if family != _TRAINED_FAMILY:
        account.report_other_family("model_type", family)
    precision = {} if document.get("train_dtype") else {"model.precision": "auto"}
    account.fill({**_DEFAULTS, **precision})
    set_lokr_unit_scale(account)
    collect_onetrainer_prompts(account)
    return account.imported(build_onetrainer_datasets(account))


def import_onetrainer_concepts(document: Sequence[Any], source: Path | str) -> ImportedConfig:
    """A file of concepts alone: the datasets."""
    account = ImportAccount(_PROGRAM_NAME, str(source))
    map_listed_elements(account, document, "concepts")
    return account.imported(build_onetrainer_datasets(account))


def map_listed_elements(account: ImportAccount, elements: Any, name: str) -> None:
    """The elements of a list in a file of its own."""
    for place, element in enumerate(elements or ()):
        if isinstance(element, Mapping):
            account.walk(element, ONETRAINER_KEYS, (name, place))


def collect_onetrainer_prompts(account: ImportAccount) -> None:
    """The prompts of the samples that are on, each with what it sets itself."""
    lines = []
    for sample in map(dict, account.scoped["sample"].values()):
        if sample.pop("enabled", True):
            lines.append(format_prompt_line(str(sample.pop("prompt", "")), sample))
    if lines:
        account.set("preview.sample_prompts", lines)


def build_onetrainer_datasets(account: ImportAccount) -> list[dict[str, object]]:
    """One [[datasets]] for each concept that is on and for training, at each of the resolutions."""
    general = account.sections.get("general", {})
    usual = wrap_in_list(general.pop("resolution", 512))
    made: list[dict[str, object]] = []
    for place, options in account.scoped["subset"].items():
        subset = {**_CONCEPT_DEFAULTS, **options}
        if account.scoped["listed"].get(place, {}).get("enabled", True):
            own = account.scoped["dataset"].get(place, {}).get("resolution")
            made += build_datasets_by_resolution({}, [subset], usual if own is None else wrap_in_list(own))
    return made
