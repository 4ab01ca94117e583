"""What becomes of each option of SimpleTuner's config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from finitune.importers.conversions import (
    IMPORTED_LOSS_TYPES,
    convert_compute_dtype,
    convert_optimizer_name,
    convert_schedule_name,
    convert_storage_dtype,
    make_betas_converter,
    to_whole_number,
)
from finitune.importers.mapping import (
    ConvertedValue,
    KeyMapping,
    convert_boolean,
    convert_number,
    convert_positive,
    convert_whole_number,
    make_choice_converter,
    map_constant,
    map_implicit,
    map_no_effect,
    map_to,
    map_unsupported,
    mark_no_effect,
    mark_unsupported,
    take_changed,
    take_value,
)

SimpleTunerSiblings = Mapping[str, Any]
_DEFAULT_FLOW_SHIFT = 3.0
"""SimpleTuner's own flow_schedule_shift."""
SIMPLETUNER_ALWAYS_CACHED = map_implicit("latents and texts are always cached on disk, by content")
_OTHER_MODELS = map_no_effect("for other models")


def find_timestep_sampling(options: SimpleTunerSiblings) -> ConvertedValue:
    """How sigmas are drawn: sigmoid or uniform draws, then a shift, its own one or by the picture's size."""
    uniform, shift = bool(options.get("flow_use_uniform_schedule")), options.get("flow_schedule_shift")
    shift = float(_DEFAULT_FLOW_SHIFT if shift is None else shift)
    if options.get("flow_schedule_auto_shift"):
        return take_changed("flux_shift", "draws are by sigmoid here") if uniform else take_value("flux_shift")
    if shift in (0, 1):
        return take_value("uniform" if uniform else "sigmoid")
    also: dict[str, object] = {"objective.discrete_flow_shift": shift}
    if uniform:
        also["objective.weighting_scheme"] = "none"
    return ConvertedValue("sigma" if uniform else "shift", also=also)


def convert_sampling_switch(value: Any, beside: SimpleTunerSiblings) -> ConvertedValue:
    """A switch of the sampling."""
    return find_timestep_sampling(beside) if value else mark_no_effect()


def convert_flow_shift(value: Any, beside: SimpleTunerSiblings) -> ConvertedValue:
    """The shift; 0 is none."""
    return convert_number(value, beside) if float(value) else mark_no_effect("0: no shift")


def map_training_length(other: str) -> KeyMapping:
    """A number of steps or epochs, where 0 leaves it to the other."""
    key = "max_train_steps" if other == "num_train_epochs" else "max_train_epochs"
    return map_to(
        f"training.{key}",
        lambda v, b: convert_whole_number(v, b) if to_whole_number(v) else mark_no_effect(f"0: {other} counts"),
    )


def convert_simpletuner_alpha(value: Any, beside: SimpleTunerSiblings) -> ConvertedValue:
    """alpha; the LyCORIS file has its own."""
    return (
        mark_no_effect("the LyCORIS file's linear_alpha counts")
        if beside.get("lora_type") == "lycoris"
        else convert_number(value, beside)
    )


def convert_simpletuner_rank(value: Any, beside: SimpleTunerSiblings) -> ConvertedValue:
    """The rank; the LyCORIS file has its own."""
    return (
        mark_no_effect("the LyCORIS file's linear_dim counts")
        if beside.get("lora_type") == "lycoris"
        else convert_whole_number(value, beside)
    )


def convert_simpletuner_ema(value: Any, beside: SimpleTunerSiblings) -> ConvertedValue:
    """The moving average's decay, if it is on."""
    if not beside.get("use_ema"):
        return mark_no_effect("use_ema is not set")
    decay, every = float(beside.get("ema_decay") or 0.995), to_whole_number(beside.get("ema_update_interval") or 1)
    return (
        take_value(decay)
        if every == 1
        else take_changed(decay ** (1 / every), f"updated in each step instead of every {every}")
    )


def convert_optimizer_config(value: Any, beside: SimpleTunerSiblings) -> ConvertedValue:
    """key=value, separated by commas."""
    pairs = [part.partition("=") for part in str(value).split(",") if part.strip()]
    return take_value({key.strip(): _parse_typed_value(text.strip()) for key, _, text in pairs})


def _parse_typed_value(text: str) -> object:
    if text.lower() in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[text.lower()]
    try:
        return to_whole_number(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        return text


def convert_simpletuner_resume(value: Any, beside: SimpleTunerSiblings) -> ConvertedValue:
    """The last state of the run, if there is one."""
    return (
        take_value("auto")
        if value == "latest"
        else mark_unsupported("a state of another program cannot be resumed; use network_weights")
    )


def convert_validation_size(value: Any, beside: SimpleTunerSiblings) -> ConvertedValue:
    """The first of the sizes of previews, as WIDTHxHEIGHT."""
    first, *more = (part.strip() for part in str(value).split(","))
    told = first if "x" in first else f"{first}x{first}"
    return take_changed(told, "one size: the first") if more else take_value(told)


def compute_square_side(value: Any, beside: SimpleTunerSiblings) -> int:
    """The side of the square that a resolution means, in pixels."""
    if beside.get("resolution_type") == "area":
        return max(64, round(math.sqrt(float(value) * 1e6) / 64) * 64)
    return to_whole_number(value)


def convert_min_image_size(value: Any, beside: SimpleTunerSiblings) -> ConvertedValue:
    """The area below which pictures are left out."""
    return (
        take_changed(compute_square_side(value, beside), "an area; pictures of just this size are left out, too")
        if float(value)
        else mark_no_effect()
    )


_ADAM_BETAS = map_to("optimizer.optimizer_args.betas", make_betas_converter("adam_beta1", "adam_beta2"))
_OPTIMIZER_BETAS = map_to("optimizer.optimizer_args.betas", make_betas_converter("optimizer_beta1", "optimizer_beta2"))

SIMPLETUNER_MAIN_KEYS: dict[str, KeyMapping] = {
    "model_type": map_constant("lora", todo="only adapters are trained here; the network section says which"),
    "model_family": map_implicit("the family is read from the model itself"),
    "model_flavour": map_unsupported("name the model in pretrained_model_name_or_path"),
    "pretrained_model_name_or_path": map_to("model.pretrained_model_name_or_path"),
    "pretrained_transformer_model_name_or_path": map_to("model.pretrained_model_name_or_path"),
    "pretrained_vae_model_name_or_path": map_to("model.vae"),
    "output_dir": map_to("saving.output_dir"),
    "hub_model_id": map_implicit("output_name"),
    "seed": map_to(
        "training.seed",
        lambda v, b: mark_no_effect("-1: any") if to_whole_number(v) == -1 else convert_whole_number(v, b),
    ),
    "lora_type": map_to(
        "network.algorithm",
        make_choice_converter({"standard": "lora", "lycoris": ConvertedValue()}, "choose an algorithm."),
    ),
    "lora_rank": map_to("network.network_dim", convert_simpletuner_rank),
    "lora_alpha": map_to("network.network_alpha", convert_simpletuner_alpha),
    "lora_dropout": map_to("network.network_dropout", convert_number),
    "lora_init_type": map_constant("default", todo="adapters begin at zero"),
    "peft_lora_mode": map_constant("standard", todo="choose an algorithm"),
    "singlora_ramp_up_steps": map_no_effect("only for SingLoRA"),
    "init_lora": map_to("network.network_weights"),
    "init_lokr_norm": map_unsupported("LoKr begins at zero"),
    "use_dora": map_to("network.dora", convert_boolean),
    "lycoris_config": map_implicit("its options are the network section"),
    "mixed_precision": map_to("model.precision", convert_compute_dtype),
    "base_model_precision": map_to(
        "model.storage",
        lambda v, b: ConvertedValue() if v == "no_change" else convert_storage_dtype(str(v).split("-")[0], b),
    ),
    "base_model_default_dtype": map_implicit("by precision"),
    "quantize_via": map_implicit("weights are stored as they are read"),
    "quantize_activations": map_unsupported("products are never in 8 bits", False),
    "train_text_encoder": map_to("network.train_text_encoder", convert_boolean),
    "text_encoder_lr": map_to("optimizer.text_encoder_lr", convert_number),
    "num_train_epochs": map_training_length("max_train_steps"),
    "max_train_steps": map_training_length("num_train_epochs"),
    "ignore_final_epochs": map_implicit("steps count"),
    "train_batch_size": map_to("training.train_batch_size", convert_whole_number),
    "gradient_accumulation_steps": map_to("training.gradient_accumulation_steps", convert_whole_number),
    "gradient_checkpointing": map_to("training.gradient_checkpointing", convert_boolean),
    "gradient_checkpointing_interval": map_unsupported("each block is checkpointed", 0, 1),
    "gradient_checkpointing_backend": map_constant("torch", todo="set offload_blocks"),
    "gradient_precision": map_implicit("gradients are fp32"),
    "musubi_blocks_to_swap": map_to("training.offload_blocks", convert_whole_number),
    "enable_group_offload": map_unsupported("set offload_blocks to a number of blocks", False),
    "group_offload_type": map_no_effect("only with enable_group_offload"),
    "ramtorch": map_unsupported("set offload_blocks to a number of blocks", False),
    "optimizer": map_to("optimizer.optimizer_type", convert_optimizer_name),
    "optimizer_config": map_to("optimizer.optimizer_args", convert_optimizer_config),
    "optimizer_beta1": _OPTIMIZER_BETAS,
    "optimizer_beta2": _OPTIMIZER_BETAS,
    "adam_beta1": _ADAM_BETAS,
    "adam_beta2": _ADAM_BETAS,
    "adam_weight_decay": map_to("optimizer.optimizer_args.weight_decay", convert_number),
    "adam_epsilon": map_to("optimizer.optimizer_args.eps", convert_number),
    "learning_rate": map_to("optimizer.learning_rate", convert_number),
    "lr_scheduler": map_to("optimizer.lr_scheduler", convert_schedule_name),
    "lr_warmup_steps": map_to("optimizer.lr_warmup_steps", convert_number),
    "lr_num_cycles": map_to("optimizer.lr_scheduler_num_cycles", convert_number),
    "lr_power": map_to("optimizer.lr_scheduler_power", convert_number),
    "lr_end": map_unsupported("choose cosine_with_min_lr, with lr_scheduler_min_lr_ratio", 0, 0.0, "0"),
    "lr_scale": map_unsupported("multiply the learning rate yourself", False),
    "lr_scale_sqrt": map_no_effect("only with lr_scale"),
    "max_grad_norm": map_to("optimizer.max_grad_norm", convert_number),
    "grad_clip_method": map_constant("norm", todo="gradients are cut by their norm"),
    "use_ema": map_to("optimizer.ema_decay", lambda v, b: convert_simpletuner_ema(v, b) if v else mark_no_effect()),
    "ema_decay": map_to("optimizer.ema_decay", convert_simpletuner_ema),
    "ema_update_interval": map_implicit("by ema_decay"),
    "ema_validation": map_implicit("previews are drawn with what is saved"),
    **dict.fromkeys(("ema_device", "ema_cpu_only", "ema_foreach_disable"), map_no_effect("changes no result")),
    "flow_schedule_shift": map_to("objective.discrete_flow_shift", convert_flow_shift),
    "flow_schedule_auto_shift": map_to("objective.timestep_sampling", convert_sampling_switch),
    "flow_sigmoid_scale": map_to("objective.sigmoid_scale", convert_number),
    "flow_use_uniform_schedule": map_to("objective.timestep_sampling", convert_sampling_switch),
    "flow_use_beta_schedule": map_unsupported("choose timestep_sampling; sigmoid is near", False),
    "flow_beta_schedule_alpha": map_no_effect("only with flow_use_beta_schedule"),
    "flow_beta_schedule_beta": map_no_effect("only with flow_use_beta_schedule"),
    "loss_type": map_to(
        "objective.loss_type",
        make_choice_converter({**IMPORTED_LOSS_TYPES, "smooth_l1": "smooth_l1"}, "choose loss_type."),
    ),
    "huber_c": map_to("objective.huber_c", convert_number),
    "huber_schedule": map_implicit("huber_c is constant, which is what snr amounts to for flow matching"),
    "masked_loss_probability": map_constant(1, 1.0, todo="every step is masked"),
    "input_perturbation": map_to("objective.ip_noise_gamma", convert_number),
    "noise_offset": map_unsupported("the noise is N(0, 1)", 0, 0.0),
    "offset_noise": map_unsupported("the noise is N(0, 1)", False),
    **dict.fromkeys(
        (
            "snr_gamma",
            "snr_weight",
            "use_soft_min_snr",
            "soft_min_snr_sigma_data",
            "prediction_type",
            "rescale_betas_zero_snr",
            "training_scheduler_timestep_spacing",
            "inference_scheduler_timestep_spacing",
        ),
        map_no_effect("not for flow matching"),
    ),
    "timestep_bias_strategy": map_unsupported("set min_sigma and max_sigma", "none"),
    "caption_dropout_probability": map_to("general.caption_dropout_rate", convert_number),
    "tokenizer_max_length": map_to("training.qwen3_max_token_length", convert_whole_number),
    "data_backend_config": map_implicit("its backends are the [[datasets]]"),
    "data_backend_sampling": map_constant("auto-weighting", todo="pictures count as often as they are repeated"),
    "resolution": map_implicit("of the backends that have none of their own"),
    "resolution_type": map_implicit("of the backends that have none of their own"),
    "aspect_bucket_alignment": map_to("general.bucket_reso_steps", convert_whole_number),
    "aspect_bucket_rounding": map_implicit("buckets are kohya's"),
    "minimum_image_size": map_to("general.skip_image_resolution", convert_min_image_size),
    **dict.fromkeys(
        ("maximum_image_size", "target_downsample_size"), map_implicit("pictures are resized to their bucket first")
    ),
    "caption_strategy": map_constant("textfile", todo="write a .txt file beside each picture"),
    "vae_batch_size": map_to("training.vae_batch_size", convert_whole_number),
    **dict.fromkeys(
        (
            "cache_dir_vae",
            "cache_dir_text",
            "cache_dir",
            "vae_cache_ondemand",
            "vae_cache_scan_behaviour",
            "compress_disk_cache",
            "preserve_data_backend_cache",
            "override_dataset_config",
            "skip_file_discovery",
            "keep_vae_loaded",
            "offload_during_startup",
        ),
        SIMPLETUNER_ALWAYS_CACHED,
    ),
    "checkpoint_step_interval": map_to("saving.save_every_n_steps", convert_positive),
    "checkpointing_steps": map_to("saving.save_every_n_steps", convert_positive),
    "checkpoint_epoch_interval": map_to("saving.save_every_n_epochs", convert_positive),
    "checkpoints_total_limit": map_to("saving.save_last_n", convert_positive),
    "resume_from_checkpoint": map_to("saving.resume", convert_simpletuner_resume),
    "validation_prompt": map_to("preview.sample_prompts"),
    "validation_negative_prompt": map_to(
        "preview.sample_prompts", lambda v, b: take_changed(None, "--n behind the prompt")
    ),
    "validation_step_interval": map_to("preview.sample_every_n_steps", convert_positive),
    "validation_steps": map_to("preview.sample_every_n_steps", convert_positive),
    "validation_epoch_interval": map_to("preview.sample_every_n_epochs", convert_positive),
    "validation_seed": map_to("preview.sample_seed", convert_whole_number),
    "validation_guidance": map_to("preview.sample_cfg", convert_number),
    "validation_num_inference_steps": map_to("preview.sample_steps", convert_whole_number),
    "validation_resolution": map_to("preview.sample_size", convert_validation_size),
    "validation_disable": map_implicit("no prompts, no previews"),
    "validation_prompt_library": map_unsupported("write the prompts into sample_prompts", False),
    "user_prompt_library": map_unsupported("write the prompts into sample_prompts"),
    "num_validation_images": map_unsupported("one picture for each prompt", 1),
    "validation_on_startup": map_to("preview.sample_at_first", convert_boolean),
    "disable_benchmark": map_to("preview.sample_at_first", lambda v, b: take_value(not v)),
    "validation_torch_compile": map_implicit("torch_compile"),
    "validation_guidance_rescale": map_unsupported("leave it out", 0, 0.0),
    "eval_steps_interval": map_to("validation.validate_every_n_steps", convert_positive),
    "num_eval_images": map_to("validation.max_validation_steps", convert_positive),
    "eval_timesteps": map_unsupported("set validation_sigmas"),
    "evaluation_type": map_unsupported("the loss on pictures kept out: validation_split", "none"),
    "report_to": map_to(
        "logging.log_with", make_choice_converter({"tensorboard": "tensorboard", "none": "none"}, "choose tensorboard.")
    ),
    "logging_dir": map_to("logging.logging_dir"),
    "attention_mechanism": map_implicit("PyTorch's attention"),
    "push_to_hub": map_unsupported("upload the file yourself", False),
    "push_checkpoints_to_hub": map_unsupported("upload the files yourself", False),
    **dict.fromkeys(
        (
            "tracker_run_name",
            "tracker_project_name",
            "webhook_config",
            "model_card_private",
            "model_card_note",
            "model_card_safe_for_work",
            "disable_tf32",
            "set_grads_to_none",
            "max_workers",
            "dataloader_prefetch",
            "dataloader_prefetch_qlen",
            "aspect_bucket_worker_count",
            "image_processing_batch_size",
            "write_batch_size",
            "read_batch_size",
            "torch_num_threads",
            "vae_enable_tiling",
            "vae_enable_slicing",
            "print_filenames",
            "disable_bucket_pruning",
            "i_know_what_i_am_doing",
            "vae_dtype",
            "metadata_update_interval",
        ),
        map_implicit("changes no result, or has no equal"),
    ),
    **dict.fromkeys(
        ("flux_lora_target", "flux_guidance_mode", "flux_guidance_value", "t5_padding", "framerate"), _OTHER_MODELS
    ),
    **{f"text_encoder_{n}_precision": map_implicit("texts are encoded once, in full precision") for n in range(1, 5)},
}
