"""diffusion-pipe's two TOMLs: the run, and the dataset that it names.

Source of names, defaults and meanings (facts only, it is GPL): tdrussell/diffusion-pipe examples, train.py,
models/anima.py, models/base.py. It reads with `dict.get`: an unknown key is ignored there. Its adapter has alpha =
rank, and covers every linear layer of a block, the modulation's included, and the text conditioner.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finitune.config.imported import Imported
from finitune.config.importers.mapping import (
    Account,
    Answer,
    Reader,
    Row,
    always,
    asked,
    changed,
    no_effect,
    not_here,
    number,
    one_of,
    otherwise,
    part,
    plainly,
    positive,
    switch,
    taken,
    to,
    under,
    unsupported,
    whole,
    without_effect,
)
from finitune.config.importers.terms import (
    as_list,
    compute_dtype,
    optimizer_name,
    saved_dtype,
    schedule,
    spread,
    stored_dtype,
    whole_number,
)
from finitune.report import Finding, Level

PROGRAM = "diffusion-pipe"
FAMILY = "anima"
FULL_RANK = 100_000
MODULATION = r".*\.adaln_modulation_(self_attn|cross_attn|mlp)\..*"
SIZES = "set bucket_reso_steps, min_bucket_reso and max_bucket_reso: buckets are kohya's here"
STATES = otherwise("a state is written with each file, to resume from")
PIPELINE = without_effect("only with several pipeline_stages")


def _epochs(value: Any, beside: Mapping[str, Any]) -> Answer:
    if "max_steps" in beside:
        return unsupported("max_steps counts; there whichever is reached first")
    return whole(value, beside)


def _batch(value: Any, beside: Mapping[str, Any]) -> Answer:
    if isinstance(value, list):
        return changed(int(value[0][1]), "each size's own stands in its [[datasets]]")
    return whole(value, beside)


def _huber(value: Any, beside: Mapping[str, Any]) -> Answer:
    return changed(float(value), "kohya's form, 2c times theirs", objective__loss_type="huber")


def _checkpointing(value: Any, beside: Mapping[str, Any]) -> Answer:
    return changed(True, "without unsloth's offload") if value == "unsloth" else switch(value, beside)


def _adapter_rank(value: Any, beside: Mapping[str, Any]) -> Answer:
    if beside.get("type") == "lokr" and whole_number(value) >= FULL_RANK:
        return changed(1, "so large a rank means a full second factor", network__full_matrix=True)
    return whole(value, beside)


def _conditioner_rate(value: Any, beside: Mapping[str, Any]) -> Answer:
    if not float(value):
        return Answer(False, place="network.train_llm_adapter", note="the conditioner is not trained")
    return taken(float(value), network__train_llm_adapter=True)


def _method(value: Any, beside: Mapping[str, Any]) -> Answer:
    """logit_normal or uniform, then one of two shifts."""
    uniform, shift = value == "uniform", beside.get("shift")
    if value not in ("logit_normal", "uniform"):
        return unsupported(f"{value!r}: choose timestep_sampling")
    if shift:
        return taken("sigma", objective__weighting_scheme="none") if uniform else taken("shift")
    if beside.get("flux_shift"):
        return changed("flux_shift", "draws are by sigmoid here") if uniform else taken("flux_shift")
    return taken("uniform" if uniform else "sigmoid")


def _variants(value: Any, beside: Mapping[str, Any]) -> Answer:
    if not value:
        return no_effect("captions are not shuffled")
    return taken(int(value), subset__shuffle_caption=True)


def _repeats(value: Any, beside: Mapping[str, Any]) -> Answer:
    answer = whole(value, beside)
    if isinstance(answer.value, float):
        return changed(max(1, round(answer.value)), "only whole repeats")
    return answer


MAIN: dict[str, Row] = {
    "output_dir": to("saving.output_dir"),
    "dataset": otherwise("its directories are the [[datasets]]"),
    "epochs": to("training.max_train_epochs", _epochs),
    "max_steps": to("training.max_train_steps", whole),
    "micro_batch_size_per_gpu": to("training.train_batch_size", _batch),
    "image_micro_batch_size_per_gpu": to("training.train_batch_size", _batch),
    "gradient_accumulation_steps": to("training.gradient_accumulation_steps", whole),
    "gradient_clipping": to("optimizer.max_grad_norm", number),
    "warmup_steps": to("optimizer.lr_warmup_steps", number),
    "lr_scheduler": to("optimizer.lr_scheduler", schedule),
    "force_constant_lr": to("optimizer.learning_rate", number, "constant, whatever else is said"),
    "blocks_to_swap": to("training.offload_blocks", whole),
    "disable_block_swap_for_eval": otherwise("blocks are held as in training"),
    "pseudo_huber_c": to("objective.huber_c", _huber),
    "save_every_n_epochs": to("saving.save_every_n_epochs", positive),
    "save_every_n_steps": to("saving.save_every_n_steps", positive),
    "save_every_n_examples": not_here("set save_every_n_steps"),
    "checkpoint_every_n_epochs": STATES,
    "checkpoint_every_n_minutes": STATES,
    "resume_from_checkpoint": to("saving.resume", lambda v, b: taken("auto") if v is True else unsupported("`auto`")),
    "save_dtype": to("saving.save_precision", saved_dtype),
    "activation_checkpointing": to("training.gradient_checkpointing", _checkpointing),
    "reentrant_activation_checkpointing": otherwise("PyTorch's checkpointing, not re-entrant"),
    "caching_batch_size": to("training.vae_batch_size", whole),
    "compile": to("training.torch_compile", switch),
    "pipeline_stages": always(1, todo="several GPUs share batches here: accelerate launch"),
    "partition_method": PIPELINE,
    "partition_split": PIPELINE,
    "eval_datasets": not_here("set validation_split"),
    "eval_datasets.*": not_here("set validation_split"),
    "eval_every_n_epochs": to("validation.validate_every_n_epochs", positive),
    "eval_every_n_steps": to("validation.validate_every_n_steps", positive),
    "eval_every_n_examples": not_here("set validate_every_n_steps"),
    **dict.fromkeys(
        (
            *("eval_before_first_step", "eval_micro_batch_size_per_gpu", "eval_gradient_accumulation_steps"),
            "image_eval_micro_batch_size_per_gpu",
        ),
        otherwise("measured one picture at a time, at fixed sigmas"),
    ),
    **dict.fromkeys(("huggingface_repo", "upload_hf_from_epoch"), not_here("upload the file yourself")),
    **dict.fromkeys(("steps_per_print", "logging_steps", "map_num_proc"), without_effect("changes no result")),
    "x_axis_examples": otherwise("steps are counted"),
    "regenerate_cache": otherwise("caches are addressed by content"),
    "video_clip_mode": without_effect("for videos"),
    "monitoring.enable_wandb": not_here("set log_with to tensorboard", False),
    "monitoring.*": without_effect("only with enable_wandb"),
}
MODEL: dict[str, Row] = {
    "type": otherwise("the family is read from the model itself"),
    "dtype": to("model.precision", compute_dtype),
    "transformer_dtype": to("model.storage", stored_dtype),
    "transformer_path": to("model.pretrained_model_name_or_path"),
    "diffusers_path": to("model.pretrained_model_name_or_path"),
    "vae_path": to("model.vae"),
    **dict.fromkeys(("qwen_path", "llm_path"), to("model.qwen3", plainly, "a folder there; name the file in it")),
    "timestep_sample_method": to("objective.timestep_sampling", _method),
    "sigmoid_scale": to("objective.sigmoid_scale", number),
    "shift": to("objective.discrete_flow_shift", number),
    "flux_shift": otherwise("by timestep_sampling"),
    "llm_adapter_lr": to("optimizer.llm_adapter_lr", _conditioner_rate),
    "freeze_llm_adapter": otherwise("for full training; train_llm_adapter for an adapter"),
    "cache_text_embeddings": otherwise("texts are always cached"),
    **dict.fromkeys(("qwen_nf4", "qwen_fp8"), otherwise("texts are encoded once, before training, in full precision")),
    **dict.fromkeys(("load_to_cuda", "guidance"), without_effect("changes no result of Anima")),
}
TYPES = {"lora": "lora", "lokr": "lokr"}
ADAPTER: dict[str, Row] = {
    "type": to("network.algorithm", one_of(TYPES, "choose an algorithm.")),
    "rank": to("network.network_dim", _adapter_rank),
    "alpha": not_here("it is the rank there, and the original refuses this key"),
    "dropout": to("network.network_dropout", number),
    "decompose_factor": to("network.factor", whole),
    "dtype": otherwise("the adapter's masters are fp32"),
    "init_from_existing": to("network.network_weights", plainly, "name the file in that folder"),
    "fuse_adapters.*": not_here("merge them into the base model first: finitune merge"),
}
OPTIMIZER: dict[str, Row] = {
    "type": to("optimizer.optimizer_type", optimizer_name),
    "lr": to("optimizer.learning_rate", number),
    "gradient_release": not_here("leave it out", False),
    "*": to("optimizer.optimizer_args.*", number),
}
FOLDERS: dict[str, Row] = {
    "resolutions": to(
        "dataset.resolution",
        lambda v, b: changed(v, f"a [[datasets]] for each of {len(v)}") if len(v) > 1 else taken(v),
    ),
    "enable_ar_bucket": to("dataset.enable_bucket", switch),
    **dict.fromkeys(("min_ar", "max_ar", "num_ar_buckets"), otherwise(SIZES)),
    **dict.fromkeys(("ar_buckets", "size_buckets"), not_here(SIZES)),
    "frame_buckets": without_effect("for videos"),
    "num_repeats": to("subset.num_repeats", _repeats),
    "caption_prefix": to("subset.caption_prefix"),
    "shuffle_tags": to("subset.shuffle_caption", switch),
    "cache_shuffle_num": to("subset.caption_variants", _variants),
    "cache_shuffle_delimiter": to("subset.caption_separator", lambda v, b: taken(v.strip() or v)),
    "skip_empty_caption": otherwise("pictures without a caption are reported, and trained with an empty one"),
}
DATASET: dict[str, Row] = {
    **FOLDERS,
    **under(
        "directory[]",
        {
            **FOLDERS,
            "path": to("subset.image_dir"),
            "mask_path": to("subset.conditioning_data_dir", lambda v, b: taken(v, objective__masked_loss=True)),
        },
    ),
}
ROWS: dict[str, Row] = {
    **MAIN,
    **under("model", MODEL),
    **under("adapter", ADAPTER),
    **under("optimizer", OPTIMIZER),
    **under("dataset", DATASET),
}


def import_diffusion_pipe(document: Mapping[str, Any], source: Path | str, read: Reader | None = None) -> Imported:
    """diffusion-pipe's run in our terms; `read` gives the dataset that it names."""
    account = Account(PROGRAM, str(source))
    account.walk(document, ROWS)
    folders = account.second_file("dataset", document.get("dataset"), read) or {}
    account.walk(folders, ROWS, ("dataset",))
    model = part(document, "model")
    if (family := model.get("type")) != FAMILY:
        account.other_family("model.type", family)
    if "adapter" not in document:
        account.findings.append(full_training(str(source)))
    sampling = asked(_method, model.get("timestep_sample_method", "logit_normal"), model)
    account.fill(
        {
            "objective.timestep_sampling": sampling.value or "sigmoid",
            **sampling.also,
            "network.network_alpha": account.get("network.network_dim") or 16,
            "network.train_llm_adapter": True,
            "network.include_patterns": [MODULATION],
        }
    )
    if rate := document.get("force_constant_lr"):
        account.set("optimizer.learning_rate", rate)
        account.set("optimizer.lr_scheduler", "constant")
        account.set("optimizer.lr_warmup_steps", 0)
    return account.imported(datasets(account, document.get("micro_batch_size_per_gpu")))


def import_diffusion_pipe_dataset(document: Mapping[str, Any], source: Path | str) -> Imported:
    """A dataset TOML alone: the datasets."""
    account = Account(PROGRAM, str(source))
    account.walk(document, DATASET)
    return account.imported(datasets(account, None))


def full_training(source: str) -> Finding:
    """The warning for a run without an [adapter]."""
    message = "there is no [adapter]: the original trains the whole model, here an adapter is trained"
    return Finding(Level.WARNING, "CONFIG-WHOLE-MODEL", source, message, {}, "Set the network section as you like.")


def datasets(account: Account, batches: object) -> list[dict[str, object]]:
    """One [[datasets]] for each directory at each of its resolutions, with the batch size of each."""
    pairs = [entry for entry in as_list(batches) if isinstance(entry, list) and len(entry) == 2]
    by_size = {str(size): batch for size, batch in pairs}
    dataset, subset = account.scoped["dataset"], account.scoped["subset"]
    made: list[dict[str, object]] = []
    for place in sorted(place for place in subset if place):
        options = {"enable_bucket": False, **dataset.get((), {}), **dataset.get(place, {})}
        folder = {"caption_extension": ".txt", **subset.get((), {}), **subset[place]}
        made += spread(options, [folder], as_list(options.pop("resolution", 512)))
    for options in made:
        if (size := str(options["resolution"])) in by_size:
            options["batch_size"] = by_size[size]
    return made
