"""What becomes of each option of SimpleTuner's config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from finitune.config.importers.mapping import (
    Answer,
    Row,
    always,
    changed,
    no_effect,
    not_here,
    number,
    one_of,
    otherwise,
    positive,
    switch,
    taken,
    to,
    unsupported,
    whole,
    without_effect,
)
from finitune.config.importers.terms import (
    LOSSES,
    betas,
    compute_dtype,
    optimizer_name,
    schedule,
    stored_dtype,
    whole_number,
)

Beside = Mapping[str, Any]
SHIFT = 3.0
"""SimpleTuner's own flow_schedule_shift."""
CACHED = otherwise("latents and texts are always cached on disk, by content")
OTHER_MODELS = without_effect("for other models")


def sampling(options: Beside) -> Answer:
    """How sigmas are drawn: sigmoid or uniform draws, then a shift, its own one or by the picture's size."""
    uniform, shift = bool(options.get("flow_use_uniform_schedule")), options.get("flow_schedule_shift")
    shift = float(SHIFT if shift is None else shift)
    if options.get("flow_schedule_auto_shift"):
        return changed("flux_shift", "draws are by sigmoid here") if uniform else taken("flux_shift")
    if shift in (0, 1):
        return taken("uniform" if uniform else "sigmoid")
    also: dict[str, object] = {"objective.discrete_flow_shift": shift}
    if uniform:
        also["objective.weighting_scheme"] = "none"
    return Answer("sigma" if uniform else "shift", also=also)


def drawn(value: Any, beside: Beside) -> Answer:
    """A switch of the sampling."""
    return sampling(beside) if value else no_effect()


def shift(value: Any, beside: Beside) -> Answer:
    """The shift; 0 is none."""
    return number(value, beside) if float(value) else no_effect("0: no shift")


def steps(other: str) -> Row:
    """A number of steps or epochs, where 0 leaves it to the other."""
    key = "max_train_steps" if other == "num_train_epochs" else "max_train_epochs"
    return to(f"training.{key}", lambda v, b: whole(v, b) if whole_number(v) else no_effect(f"0: {other} counts"))


def alpha(value: Any, beside: Beside) -> Answer:
    """alpha; the LyCORIS file has its own."""
    return (
        no_effect("the LyCORIS file's linear_alpha counts")
        if beside.get("lora_type") == "lycoris"
        else number(value, beside)
    )


def rank(value: Any, beside: Beside) -> Answer:
    """The rank; the LyCORIS file has its own."""
    return (
        no_effect("the LyCORIS file's linear_dim counts")
        if beside.get("lora_type") == "lycoris"
        else whole(value, beside)
    )


def ema(value: Any, beside: Beside) -> Answer:
    """The moving average's decay, if it is on."""
    if not beside.get("use_ema"):
        return no_effect("use_ema is not set")
    decay, every = float(beside.get("ema_decay") or 0.995), whole_number(beside.get("ema_update_interval") or 1)
    return (
        taken(decay) if every == 1 else changed(decay ** (1 / every), f"updated in each step instead of every {every}")
    )


def arguments(value: Any, beside: Beside) -> Answer:
    """key=value, separated by commas."""
    pairs = [part.partition("=") for part in str(value).split(",") if part.strip()]
    return taken({key.strip(): _typed(text.strip()) for key, _, text in pairs})


def _typed(text: str) -> object:
    if text.lower() in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[text.lower()]
    try:
        return whole_number(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        return text


def resume(value: Any, beside: Beside) -> Answer:
    """The last state of the run, if there is one."""
    return (
        taken("auto")
        if value == "latest"
        else unsupported("a state of another program cannot be resumed; use network_weights")
    )


def size(value: Any, beside: Beside) -> Answer:
    """The first of the sizes of previews, as WIDTHxHEIGHT."""
    first, *more = (part.strip() for part in str(value).split(","))
    told = first if "x" in first else f"{first}x{first}"
    return changed(told, "one size: the first") if more else taken(told)


def side(value: Any, beside: Beside) -> int:
    """The side of the square that a resolution means, in pixels."""
    if beside.get("resolution_type") == "area":
        return max(64, round(math.sqrt(float(value) * 1e6) / 64) * 64)
    return whole_number(value)


def smallest(value: Any, beside: Beside) -> Answer:
    """The area below which pictures are left out."""
    return (
        changed(side(value, beside), "an area; pictures of just this size are left out, too")
        if float(value)
        else no_effect()
    )


ADAM_BETAS = to("optimizer.optimizer_args.betas", betas("adam_beta1", "adam_beta2"))
BETAS = to("optimizer.optimizer_args.betas", betas("optimizer_beta1", "optimizer_beta2"))

MAIN: dict[str, Row] = {
    "model_type": always("lora", todo="only adapters are trained here; the network section says which"),
    "model_family": otherwise("the family is read from the model itself"),
    "model_flavour": not_here("name the model in pretrained_model_name_or_path"),
    "pretrained_model_name_or_path": to("model.pretrained_model_name_or_path"),
    "pretrained_transformer_model_name_or_path": to("model.pretrained_model_name_or_path"),
    "pretrained_vae_model_name_or_path": to("model.vae"),
    "output_dir": to("saving.output_dir"),
    "hub_model_id": otherwise("output_name"),
    "seed": to("training.seed", lambda v, b: no_effect("-1: any") if whole_number(v) == -1 else whole(v, b)),
    "lora_type": to("network.algorithm", one_of({"standard": "lora", "lycoris": Answer()}, "choose an algorithm.")),
    "lora_rank": to("network.network_dim", rank),
    "lora_alpha": to("network.network_alpha", alpha),
    "lora_dropout": to("network.network_dropout", number),
    "lora_init_type": always("default", todo="adapters begin at zero"),
    "peft_lora_mode": always("standard", todo="choose an algorithm"),
    "singlora_ramp_up_steps": without_effect("only for SingLoRA"),
    "init_lora": to("network.network_weights"),
    "init_lokr_norm": not_here("LoKr begins at zero"),
    "use_dora": to("network.dora", switch),
    "lycoris_config": otherwise("its options are the network section"),
    "mixed_precision": to("model.precision", compute_dtype),
    "base_model_precision": to(
        "model.storage", lambda v, b: Answer() if v == "no_change" else stored_dtype(str(v).split("-")[0], b)
    ),
    "base_model_default_dtype": otherwise("by precision"),
    "quantize_via": otherwise("weights are stored as they are read"),
    "quantize_activations": not_here("products are never in 8 bits", False),
    "train_text_encoder": to("network.train_text_encoder", switch),
    "text_encoder_lr": to("optimizer.text_encoder_lr", number),
    "num_train_epochs": steps("max_train_steps"),
    "max_train_steps": steps("num_train_epochs"),
    "ignore_final_epochs": otherwise("steps count"),
    "train_batch_size": to("training.train_batch_size", whole),
    "gradient_accumulation_steps": to("training.gradient_accumulation_steps", whole),
    "gradient_checkpointing": to("training.gradient_checkpointing", switch),
    "gradient_checkpointing_interval": not_here("each block is checkpointed", 0, 1),
    "gradient_checkpointing_backend": always("torch", todo="set offload_blocks"),
    "gradient_precision": otherwise("gradients are fp32"),
    "musubi_blocks_to_swap": to("training.offload_blocks", whole),
    "enable_group_offload": not_here("set offload_blocks to a number of blocks", False),
    "group_offload_type": without_effect("only with enable_group_offload"),
    "ramtorch": not_here("set offload_blocks to a number of blocks", False),
    "optimizer": to("optimizer.optimizer_type", optimizer_name),
    "optimizer_config": to("optimizer.optimizer_args", arguments),
    "optimizer_beta1": BETAS,
    "optimizer_beta2": BETAS,
    "adam_beta1": ADAM_BETAS,
    "adam_beta2": ADAM_BETAS,
    "adam_weight_decay": to("optimizer.optimizer_args.weight_decay", number),
    "adam_epsilon": to("optimizer.optimizer_args.eps", number),
    "learning_rate": to("optimizer.learning_rate", number),
    "lr_scheduler": to("optimizer.lr_scheduler", schedule),
    "lr_warmup_steps": to("optimizer.lr_warmup_steps", number),
    "lr_num_cycles": to("optimizer.lr_scheduler_num_cycles", number),
    "lr_power": to("optimizer.lr_scheduler_power", number),
    "lr_end": not_here("choose cosine_with_min_lr, with lr_scheduler_min_lr_ratio", 0, 0.0, "0"),
    "lr_scale": not_here("multiply the learning rate yourself", False),
    "lr_scale_sqrt": without_effect("only with lr_scale"),
    "max_grad_norm": to("optimizer.max_grad_norm", number),
    "grad_clip_method": always("norm", todo="gradients are cut by their norm"),
    "use_ema": to("optimizer.ema_decay", lambda v, b: ema(v, b) if v else no_effect()),
    "ema_decay": to("optimizer.ema_decay", ema),
    "ema_update_interval": otherwise("by ema_decay"),
    "ema_validation": otherwise("previews are drawn with what is saved"),
    **dict.fromkeys(("ema_device", "ema_cpu_only", "ema_foreach_disable"), without_effect("changes no result")),
    "flow_schedule_shift": to("objective.discrete_flow_shift", shift),
    "flow_schedule_auto_shift": to("objective.timestep_sampling", drawn),
    "flow_sigmoid_scale": to("objective.sigmoid_scale", number),
    "flow_use_uniform_schedule": to("objective.timestep_sampling", drawn),
    "flow_use_beta_schedule": not_here("choose timestep_sampling; sigmoid is near", False),
    "flow_beta_schedule_alpha": without_effect("only with flow_use_beta_schedule"),
    "flow_beta_schedule_beta": without_effect("only with flow_use_beta_schedule"),
    "loss_type": to("objective.loss_type", one_of({**LOSSES, "smooth_l1": "smooth_l1"}, "choose loss_type.")),
    "huber_c": to("objective.huber_c", number),
    "huber_schedule": otherwise("huber_c is constant, which is what snr amounts to for flow matching"),
    "masked_loss_probability": always(1, 1.0, todo="every step is masked"),
    "input_perturbation": to("objective.ip_noise_gamma", number),
    "noise_offset": not_here("the noise is N(0, 1)", 0, 0.0),
    "offset_noise": not_here("the noise is N(0, 1)", False),
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
        without_effect("not for flow matching"),
    ),
    "timestep_bias_strategy": not_here("set min_sigma and max_sigma", "none"),
    "caption_dropout_probability": to("general.caption_dropout_rate", number),
    "tokenizer_max_length": to("training.qwen3_max_token_length", whole),
    "data_backend_config": otherwise("its backends are the [[datasets]]"),
    "data_backend_sampling": always("auto-weighting", todo="pictures count as often as they are repeated"),
    "resolution": otherwise("of the backends that have none of their own"),
    "resolution_type": otherwise("of the backends that have none of their own"),
    "aspect_bucket_alignment": to("general.bucket_reso_steps", whole),
    "aspect_bucket_rounding": otherwise("buckets are kohya's"),
    "minimum_image_size": to("general.skip_image_resolution", smallest),
    **dict.fromkeys(
        ("maximum_image_size", "target_downsample_size"), otherwise("pictures are resized to their bucket first")
    ),
    "caption_strategy": always("textfile", todo="write a .txt file beside each picture"),
    "vae_batch_size": to("training.vae_batch_size", whole),
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
        CACHED,
    ),
    "checkpoint_step_interval": to("saving.save_every_n_steps", positive),
    "checkpointing_steps": to("saving.save_every_n_steps", positive),
    "checkpoint_epoch_interval": to("saving.save_every_n_epochs", positive),
    "checkpoints_total_limit": to("saving.save_last_n", positive),
    "resume_from_checkpoint": to("saving.resume", resume),
    "validation_prompt": to("preview.sample_prompts"),
    "validation_negative_prompt": to("preview.sample_prompts", lambda v, b: changed(None, "--n behind the prompt")),
    "validation_step_interval": to("preview.sample_every_n_steps", positive),
    "validation_steps": to("preview.sample_every_n_steps", positive),
    "validation_epoch_interval": to("preview.sample_every_n_epochs", positive),
    "validation_seed": to("preview.sample_seed", whole),
    "validation_guidance": to("preview.sample_cfg", number),
    "validation_num_inference_steps": to("preview.sample_steps", whole),
    "validation_resolution": to("preview.sample_size", size),
    "validation_disable": otherwise("no prompts, no previews"),
    "validation_prompt_library": not_here("write the prompts into sample_prompts", False),
    "user_prompt_library": not_here("write the prompts into sample_prompts"),
    "num_validation_images": not_here("one picture for each prompt", 1),
    "validation_on_startup": to("preview.sample_at_first", switch),
    "disable_benchmark": to("preview.sample_at_first", lambda v, b: taken(not v)),
    "validation_torch_compile": otherwise("torch_compile"),
    "validation_guidance_rescale": not_here("leave it out", 0, 0.0),
    "eval_steps_interval": to("validation.validate_every_n_steps", positive),
    "num_eval_images": to("validation.max_validation_steps", positive),
    "eval_timesteps": not_here("set validation_sigmas"),
    "evaluation_type": not_here("the loss on pictures kept out: validation_split", "none"),
    "report_to": to("logging.log_with", one_of({"tensorboard": "tensorboard", "none": "none"}, "choose tensorboard.")),
    "logging_dir": to("logging.logging_dir"),
    "attention_mechanism": otherwise("PyTorch's attention"),
    "push_to_hub": not_here("upload the file yourself", False),
    "push_checkpoints_to_hub": not_here("upload the files yourself", False),
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
        otherwise("changes no result, or has no equal"),
    ),
    **dict.fromkeys(
        ("flux_lora_target", "flux_guidance_mode", "flux_guidance_value", "t5_padding", "framerate"), OTHER_MODELS
    ),
    **{f"text_encoder_{n}_precision": otherwise("texts are encoded once, in full precision") for n in range(1, 5)},
}
