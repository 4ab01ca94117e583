"""OneTrainer's JSON, with its concepts and samples, inside it or in files of their own.

Only differences from the defaults need to be written there (its presets are partial), so that defaults matter; keys of
older versions are read as its migrations do. It iterates the names that it knows: an unknown one is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from finitune.config.imported import Imported
from finitune.config.importers import onetrainer_rows as rows
from finitune.config.importers.mapping import (
    Account,
    Reader,
    Row,
    always,
    changed,
    no_effect,
    not_here,
    number,
    one_of,
    otherwise,
    switch,
    taken,
    to,
    under,
    whole,
    without_effect,
)
from finitune.config.importers.onetrainer_rows import OTHER_MODELS, UI, every, only_for, unit_of
from finitune.config.importers.terms import as_list, compute_dtype, prompt_line, saved_dtype, scale_one, spread

PROGRAM = "OneTrainer"
FAMILY = "ANIMA"
KINDS = {"lora": "lora", "loha": "loha", "lokr": "lokr", "oft_2": "oft"}
FORMATS = {
    "kohya_lora": taken(["kohya"]),
    "comfy_lora": taken(["comfy"]),
    "diffusers_lora": taken(["diffusers"]),
    "peft_lora": taken(["peft"]),
    **dict.fromkeys(("safetensors", "legacy_lora"), changed(["kohya"], "kohya's spelling")),
}
OTHER_PARTS = (
    *("unet", "prior", "unconditional_transformer", "text_encoder_2", "text_encoder_3", "text_encoder_4"),
    *("effnet_encoder", "decoder", "decoder_text_encoder", "decoder_vqgan"),
)
DEFAULTS: Mapping[str, object] = {
    "network.network_alpha": 1.0,
    "optimizer.learning_rate": 3e-6,
    "optimizer.lr_warmup_steps": 200,
    "objective.timestep_sampling": "uniform",
    "training.max_train_epochs": 100,
    "training.gradient_checkpointing": True,
    "logging.log_with": "tensorboard",
    "saving.output_dir": "workspace/run",
}
CONCEPT_DEFAULTS: Mapping[str, object] = {"flip_aug": True, "keep_tokens": 1}

MODEL: dict[str, Row] = {
    "model_type": otherwise("the family is read from the model itself"),
    "training_method": always("LORA", todo="only adapters are trained here; the network section says which"),
    "base_model_name": to("model.pretrained_model_name_or_path"),
    "transformer.*": OTHER_MODELS,
    "train_dtype": to("model.precision", compute_dtype),
    "fallback_train_dtype": otherwise("what needs fp32 has it"),
    "weight_dtype": otherwise("the parts say how they are held"),
    "train_device": to("model.device"),
    "temp_device": otherwise("main memory"),
    "compile": to("training.torch_compile", switch),
    "attention_mechanism": otherwise("PyTorch's attention"),
    "quantization.*": not_here("set storage to fp8", "", "full", "NONE", False, 0, 16),
    "async_offloading": without_effect("nothing is offloaded unless offload_blocks is set"),
    "layer_offload_fraction": not_here("set offload_blocks to a number of blocks", 0, 0.0),
    "enable_activation_offloading": without_effect("only with CPU_OFFLOADED"),
    "enable_async_offloading": without_effect("only with CPU_OFFLOADED"),
    "enable_autocast_cache": without_effect("there is no autocast here"),
    "force_circular_padding": not_here("leave it out", False),
    "gradient_checkpointing": to(
        "training.gradient_checkpointing",
        lambda v, b: (
            changed(True, "without the offload; set offload_blocks")
            if v == "CPU_OFFLOADED"
            else taken(v in ("ON", True))
        ),
    ),
}
NETWORK: dict[str, Row] = {
    "peft_type": to("network.algorithm", one_of(KINDS, "choose an algorithm.")),
    "lora_rank": to("network.network_dim", rows.lora_rank),
    "lora_alpha": to("network.network_alpha", number),
    "lora_decompose": to("network.dora", switch),
    "lora_decompose_norm_epsilon": otherwise("the norm has an epsilon where it must"),
    "lora_decompose_output_axis": not_here("the norm is that of LyCORIS and PEFT", False),
    "lora_weight_dtype": always("FLOAT_32", todo="the adapter's masters are fp32"),
    "lora_model_name": to("network.network_weights"),
    "lokr_dim": to("network.network_dim", only_for("LOKR", whole)),
    "lokr_decompose_both": to("network.decompose_both", only_for("LOKR", switch)),
    "lokr_decompose_factor": to("network.factor", only_for("LOKR", whole)),
    "lokr_use_tucker": to("network.use_tucker", only_for("LOKR", switch)),
    "lokr_weight_decompose": to("network.dora", only_for("LOKR", switch)),
    "lokr_full_matrix": to("network.full_matrix", only_for("LOKR", switch)),
    "lokr_dora_on_output": otherwise("the norm is that of LyCORIS and PEFT"),
    "lokr_vec_trick": otherwise("the Kronecker product is never built"),
    "oft_block_size": to("network.network_dim", only_for("OFT_2", whole), "the size of a block"),
    "oft_block_share": not_here("leave it out", False),
    "oft_scaled": not_here("leave it out", False),
    "oft_clipped_norm": not_here("set constraint", 0.95),
    "oft_cans": not_here("leave it out", False),
    "dora_oft": not_here("leave it out", False),
    "layer_filter": to("network.only_patterns", rows.layers),
    "layer_filter_preset": otherwise("by layer_filter"),
    "layer_filter_regex": otherwise("by layer_filter"),
    "lora_layers": to("network.only_patterns", rows.layers),
    "lora_layer_preset": otherwise("by lora_layers"),
    "dropout_probability": to("network.network_dropout", number),
    **dict.fromkeys(
        (
            "embedding.*",
            "additional_embeddings.*",
            "embedding_learning_rate",
            "preserve_embedding_norm",
            "embedding_weight_dtype",
            "bundle_additional_embeddings",
        ),
        without_effect("no embedding is trained"),
    ),
}
COURSE: dict[str, Row] = {
    "learning_rate": to("optimizer.learning_rate", number),
    "learning_rate_scheduler": to("optimizer.lr_scheduler", rows.scheduler),
    "learning_rate_warmup_steps": to("optimizer.lr_warmup_steps", number),
    "learning_rate_cycles": to("optimizer.lr_scheduler_num_cycles", number),
    "learning_rate_min_factor": to("optimizer.lr_scheduler_min_lr_ratio", rows.min_factor),
    "learning_rate_scaler": not_here("multiply the learning rate yourself", "NONE"),
    "custom_learning_rate_scheduler": not_here("choose an lr_scheduler"),
    "scheduler_params.*": not_here("choose an lr_scheduler"),
    "optimizer_defaults.*": UI,
    "clip_grad_norm": Row("optimizer", "max_grad_norm", lambda v, b: taken(v or 0.0), empty=True),
    "ema": to("optimizer.ema_decay", rows.ema),
    "ema_decay": to("optimizer.ema_decay", rows.ema_decay),
    "ema_update_step_interval": otherwise("by ema_decay"),
    "non_ema_sampling": otherwise("previews are drawn with what is saved"),
    "epochs": to("training.max_train_epochs", rows.epochs),
    "batch_size": to("training.train_batch_size", whole),
    "gradient_accumulation_steps": to("training.gradient_accumulation_steps", whole),
}
OBJECTIVE: dict[str, Row] = {
    "timestep_distribution": to("objective.timestep_sampling", rows.distribution),
    "noising_weight": otherwise("by timestep_distribution"),
    "noising_bias": otherwise("by timestep_distribution"),
    "timestep_shift": to("objective.discrete_flow_shift", number),
    "dynamic_timestep_shifting": otherwise("by timestep_distribution"),
    "min_noising_strength": to("objective.min_sigma", number),
    "max_noising_strength": to("objective.max_sigma", number),
    **{key: to("objective.loss_type", rows.strength(key)) for key in rows.STRENGTHS},
    "log_cosh_strength": not_here("choose loss_type; smooth_l1 is near", 0, 0.0),
    "huber_delta": to("objective.huber_c", lambda v, b: number(v, b) if b.get("huber_strength") else no_effect()),
    "loss_weight_fn": not_here("set weighting_scheme", "CONSTANT"),
    "loss_weight_strength": otherwise("by loss_weight_fn"),
    "loss_scaler": not_here("choose the learning rate", "NONE"),
    "masked_training": to(
        "objective.masked_loss",
        lambda v, b: (
            changed(
                True, "masks lie beside the pictures there (-masklabel.png); name their folder as conditioning_data_dir"
            )
            if v
            else taken(False)
        ),
    ),
    "unmasked_probability": not_here("every step is masked", 0, 0.0),
    "unmasked_weight": not_here("paint the mask's black as grey", 0, 0.0),
    "normalize_masked_area_loss": to("objective.mask_normalised", switch),
    "masked_prior_preservation_weight": not_here("leave it out", 0, 0.0),
    "custom_conditioning_image": not_here("leave it out", False),
    "perturbation_noise_weight": not_here("set ip_noise_gamma, which the target does not have", 0, 0.0),
    "offset_noise_weight": not_here("the noise is N(0, 1)", 0, 0.0),
    "generalized_offset_noise": without_effect("no offset noise"),
    **dict.fromkeys(
        (
            "force_v_prediction",
            "force_epsilon_prediction",
            "rescale_noise_scheduler_to_zero_terminal_snr",
            "vb_loss_strength",
            "cep_gamma",
        ),
        without_effect("not for flow matching"),
    ),
}
DATA: dict[str, Row] = {
    "concept_file_name": otherwise("its concepts are the [[datasets]]"),
    "resolution": to("general.resolution", rows.resolution),
    "frames": without_effect("for videos"),
    "aspect_ratio_bucketing": to("general.enable_bucket", switch),
    "text_encoder_sequence_length": to("training.qwen3_max_token_length", whole),
    **dict.fromkeys(
        ("image_caching", "text_caching", "latent_caching", "clear_cache_before_training", "cache_dir"),
        otherwise("latents and texts are always cached on disk, by content"),
    ),
    **dict.fromkeys(
        ("caching_threads", "dataloader_threads", "prefetch_next_batch"), without_effect("no result depends on it")
    ),
    "only_cache": not_here("leave it out", False),
}
SAVING: dict[str, Row] = {
    "workspace_dir": to("saving.output_dir"),
    "output_model_destination": to("saving.output_name", rows.destination),
    "output_dtype": to("saving.save_precision", saved_dtype),
    "output_model_format": to("saving.save_as", one_of(FORMATS, "choose save_as.")),
    "save_every": to("saving.save_every_n_steps", every("save_every_unit", "saving.save")),
    "save_after": to("saving.save_every_n_steps", every("save_after_unit", "saving.save")),
    "save_every_unit": unit_of("save_every"),
    "save_after_unit": unit_of("save_after"),
    "save_skip_first": not_here("leave it out", 0),
    "save_filename_prefix": not_here("set output_name"),
    "backup_after": otherwise("a state is written with each file, to resume from"),
    "backup_after_unit": unit_of("backup_after"),
    "rolling_backup": otherwise("save_last_n"),
    "rolling_backup_count": to(
        "saving.save_last_n", lambda v, b: whole(v, b) if b.get("rolling_backup") else no_effect()
    ),
    "backup_before_save": otherwise("a state is written with each file"),
    "continue_last_backup": to("saving.resume", lambda v, b: taken("auto" if v else "never")),
    "prevent_overwrites": otherwise("a run never writes over another's files"),
    "include_train_config": otherwise("the configuration is saved with the run"),
}
WATCHING: dict[str, Row] = {
    "sample_definition_file_name": otherwise("its samples are the prompts"),
    "sample_after": to("preview.sample_every_n_steps", every("sample_after_unit", "preview.sample")),
    "sample_after_unit": unit_of("sample_after"),
    "sample_skip_first": not_here("leave it out", 0),
    "samples_to_tensorboard": otherwise("previews are files of the run"),
    "validation": otherwise("as soon as there are pictures to measure on: validation_split"),
    "validate_after": to("validation.validate_every_n_epochs", every("validate_after_unit", "validation.validate")),
    "validate_after_unit": unit_of("validate_after"),
    "tensorboard": to("logging.log_with", lambda v, b: taken("tensorboard" if v else "none")),
    **dict.fromkeys(("sample_image_format", "sample_video_format", "sample_audio_format"), otherwise("PNG files")),
}
MACHINE: dict[str, Row] = {
    "multi_gpu": not_here("start with accelerate launch or torchrun", False),
    "device_indexes": without_effect("only with multi_gpu"),
    **dict.fromkeys(
        ("gradient_reduce_precision", "fused_gradient_reduce", "async_gradient_reduce", "async_gradient_reduce_buffer"),
        without_effect("only with multi_gpu"),
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
        UI,
    ),
    **{f"{part}.*": OTHER_MODELS for part in OTHER_PARTS},
    **dict.fromkeys(
        (
            "text_encoder_layer_skip",
            "text_encoder_2_layer_skip",
            "text_encoder_3_layer_skip",
            "text_encoder_4_layer_skip",
            "text_encoder_2_sequence_length",
        ),
        OTHER_MODELS,
    ),
}
ROWS: dict[str, Row] = {
    **MODEL,
    **NETWORK,
    **COURSE,
    **OBJECTIVE,
    **DATA,
    **SAVING,
    **WATCHING,
    **MACHINE,
    **under("transformer", rows.PART),
    **under("text_encoder", rows.TEXT_ENCODER),
    **under("vae", rows.VAE),
    **under("optimizer", rows.OPTIMIZER),
    **under("concepts[]", rows.CONCEPT),
    **under("samples[]", rows.SAMPLE),
}


def import_onetrainer(document: Mapping[str, Any], source: Path | str, read: Reader | None = None) -> Imported:
    """OneTrainer's configuration in our terms; `read` gives the files of concepts and samples that it names."""
    account = Account(PROGRAM, str(source))
    account.walk(document, ROWS)
    if not document.get("concepts"):
        name = document.get("concept_file_name", "training_concepts/concepts.json")
        follow(account, account.second_file("concept_file_name", name, read), "concepts")
    if not document.get("samples") and read and (name := document.get("sample_definition_file_name")):
        follow(account, read(str(name)), "samples")
    family = str(document.get("model_type", "STABLE_DIFFUSION_15"))
    if family != FAMILY:
        account.other_family("model_type", family)
    precision = {} if document.get("train_dtype") else {"model.precision": "auto"}
    account.fill({**DEFAULTS, **precision})
    scale_one(account)
    previews(account)
    return account.imported(datasets(account))


def import_onetrainer_concepts(document: Sequence[Any], source: Path | str) -> Imported:
    """A file of concepts alone: the datasets."""
    account = Account(PROGRAM, str(source))
    follow(account, document, "concepts")
    return account.imported(datasets(account))


def follow(account: Account, elements: Any, name: str) -> None:
    """The elements of a list in a file of its own."""
    for place, element in enumerate(elements or ()):
        if isinstance(element, Mapping):
            account.walk(element, ROWS, (name, place))


def previews(account: Account) -> None:
    """The prompts of the samples that are on, each with what it sets itself."""
    lines = []
    for sample in map(dict, account.scoped["sample"].values()):
        if sample.pop("enabled", True):
            lines.append(prompt_line(str(sample.pop("prompt", "")), sample))
    if lines:
        account.set("preview.sample_prompts", lines)


def datasets(account: Account) -> list[dict[str, object]]:
    """One [[datasets]] for each concept that is on and for training, at each of the resolutions."""
    general = account.sections.get("general", {})
    usual = as_list(general.pop("resolution", 512))
    made: list[dict[str, object]] = []
    for place, options in account.scoped["subset"].items():
        subset = {**CONCEPT_DEFAULTS, **options}
        if account.scoped["listed"].get(place, {}).get("enabled", True):
            own = account.scoped["dataset"].get(place, {}).get("resolution")
            made += spread({}, [subset], usual if own is None else as_list(own))
    return made
