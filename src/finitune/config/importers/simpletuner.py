"""SimpleTuner's config.json, with the data backends and the LyCORIS file that it names.

Source of names, defaults and meanings (facts only, it is AGPL): bghira/SimpleTuner documentation/OPTIONS.md and
DATALOADER.md, and its field registry. Keys may begin with two dashes; unknown ones are errors there, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from finitune.config.imported import Imported
from finitune.config.importers import simpletuner_data as data
from finitune.config.importers import simpletuner_rows as rows
from finitune.config.importers.mapping import Account, Reader, asked, under
from finitune.config.importers.terms import RANK, prompt_line, scale_one, spread

PROGRAM = "SimpleTuner"
FAMILY = "anima"
BACKENDS = "data_backend_config"
DEFAULTS: Mapping[str, object] = {
    "optimizer.learning_rate": 4e-7,
    "optimizer.lr_scheduler": "constant_with_warmup",
    "optimizer.max_grad_norm": 2.0,
    "training.train_batch_size": 4,
    "training.gradient_checkpointing": True,
    "saving.save_last_n": 5,
    "model.precision": "bf16",
}
ROWS = {
    **rows.MAIN,
    **under("lycoris_config", data.LYCORIS),
    **under(f"{BACKENDS}[]", data.BACKEND),
}
CACHES = {f"{BACKENDS}[].*": data.CACHE}


def import_simpletuner(document: Mapping[str, Any], source: Path | str, read: Reader | None = None) -> Imported:
    """SimpleTuner's run in our terms; `read` gives the files of backends and of LyCORIS that it names."""
    account = Account(PROGRAM, str(source))
    names = {plain(key): key for key in document}
    options = {plain(key): truth(value) for key, value in document.items()}
    account.walk(options, ROWS)
    account.lines = [replace(line, key=names.get(line.key, line.key)) for line in account.lines]
    if options.get("lora_type") == "lycoris":
        lycoris = account.second_file(
            "lycoris_config", options.get("lycoris_config", "config/lycoris_config.json"), read
        )
        account.walk(lycoris or {}, ROWS, ("lycoris_config",))
    backends(account, account.second_file(BACKENDS, options.get(BACKENDS), read) or (), options)
    if (family := options.get("model_family")) != FAMILY:
        account.other_family("model_family", family)
    finish(account, options)
    return account.imported(datasets(account))


def import_simpletuner_backends(document: Sequence[Mapping[str, Any]], source: Path | str) -> Imported:
    """A file of data backends alone: the datasets."""
    account = Account(PROGRAM, str(source))
    backends(account, document, {})
    return account.imported(datasets(account))


def plain(key: str) -> str:
    """An option's name without its dashes."""
    return key.lstrip("-")


def truth(value: Any) -> Any:
    """Its parser takes "true" and "false" as text, too."""
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value


def backends(account: Account, elements: Any, options: Mapping[str, Any]) -> None:
    """The backends: those of pictures are datasets, those of embeddings are caches, those of masks belong to others."""
    usual = {key: options[key] for key in ("resolution", "resolution_type") if key in options}
    listed = [(place, backend) for place, backend in enumerate(elements) if isinstance(backend, Mapping)]
    folders = {str(backend.get("id")): backend.get("instance_data_dir") for _, backend in listed}
    for place, backend in listed:
        path = (BACKENDS, place)
        if backend.get("dataset_type", "image") in ("text_embeds", "image_embeds", "conditioning"):
            account.walk(backend, CACHES, path)
            continue
        if masks := folders.get(str(backend.get("conditioning_data"))):
            account.set("subset.conditioning_data_dir", masks, (place,))
            account.set("objective.masked_loss", True)
        if "resolution" not in backend:
            size = asked(data.resolution, usual.get("resolution", 1024), {**backend, **usual})
            account.set("dataset.resolution", size.value or 1024, (place,))
        if not backend.get("crop_aspect"):
            account.set("dataset.enable_bucket", not backend.get("crop"), (place,))
        account.walk(backend, ROWS, path)


def finish(account: Account, options: Mapping[str, Any]) -> None:
    """What is absent, what follows from several options, and the prompts."""
    saves = {} if account.get("saving.save_every_n_epochs") else {"saving.save_every_n_steps": 500}
    rank = account.get("network.network_dim") or RANK
    lycoris = options.get("lora_type") == "lycoris"
    sampling = asked(rows.drawn, True, options)
    ends = {} if options.get("max_train_steps") or options.get("num_train_epochs") else {"training.max_train_epochs": 1}
    account.fill(
        {
            **DEFAULTS,
            **saves,
            **ends,
            "network.network_alpha": 1.0 if lycoris else rank,
            **({} if lycoris else {"network.network_dropout": 0.1}),
            "objective.timestep_sampling": sampling.value or "sigmoid",
            **sampling.also,
        }
    )
    scale_one(account)
    prompt = options.get("validation_prompt")
    if options.get("validation_disable") or not prompt:
        account.sections.pop("preview", None)
    else:
        account.set(
            "preview.sample_prompts", [prompt_line(str(prompt), {"n": options.get("validation_negative_prompt")})]
        )


def datasets(account: Account) -> list[dict[str, object]]:
    """One [[datasets]] for each backend of pictures that is not disabled."""
    made: list[dict[str, object]] = []
    for place, subset in account.scoped["subset"].items():
        if account.scoped["listed"].get(place, {}).get("enabled", True):
            options = dict(account.scoped["dataset"].get(place, {}))
            made += spread(options, [subset], [options.pop("resolution", 1024)])
    return made
