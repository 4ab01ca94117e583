"""What `finitune check` says of a picture or a workflow: whether it is a picture, what made it, with which settings and
files, and which of them a model of its family cannot have been given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from finitune.datasets.picture_files import DecodedPicture, open_picture, read_picture, read_picture_header
from finitune.errors import FileError
from finitune.generation.picture_quality import judge_picture
from finitune.generation.provenance import PictureProvenance, parse_comfyui_graph, read_picture_provenance
from finitune.importers.foreign_text import read_foreign_text
from finitune.models import MODEL_FAMILIES
from finitune.models.spec import ModelSpec
from finitune.progress import Progress
from finitune.report import Finding, Level, Report, Table
from finitune.verbs.check.request import Request

_MAX_JUDGED_PIXELS = 1 << 22
"""Of a larger picture every so many-th row and column is judged."""
EXIF_USER_COMMENT_TAG, EXIF_IFD_TAG = 0x9286, 0x8769
"""Where EXIF keeps the text that A1111 writes into JPEG and WebP."""
_EXIF_UNICODE_PREFIX = b"UNICODE\0"
_COMFYUI_MODEL_FOLDERS = ("models", "unet", "diffusion_models", "checkpoints", "loras", "vae", "text_encoders", "clip")
_MAX_PARENT_FOLDERS = 4


def check_picture(path: Path, request: Request, report: Report, progress: Progress) -> None:
    """Everything about a picture; raises FileError where it cannot be decoded."""
    kind = read_picture_header(path).kind
    picture = read_picture(path)
    made = read_picture_provenance(read_picture_texts(path, kind))
    report.figures.update(kind="picture", format=kind, width=picture.size[0], height=picture.size[1])
    report_picture_verdict(picture, made, path, report)
    if picture.notes:
        report.figures["notes"] = [str(note) for note in picture.notes]
    if made is None:
        report.add(
            Level.NOTE,
            "PICTURE-SAYS-NOTHING",
            str(path),
            "no text in it says how it was made: neither finitune's, A1111's nor ComfyUI's",
            remedy="Sites and messengers take such texts out. The original file has them.",
        )
    else:
        report_picture_origin(made, path, request, report, picture.size)


def check_workflow(path: Path, request: Request, report: Report, progress: Progress) -> None:
    """Everything about a workflow's JSON; raises FileError where it is none."""
    made = parse_comfyui_graph(read_foreign_text(path).document)
    if made is None:
        raise FileError(f"{path} holds no nodes", code="WORKFLOW-EMPTY", subject=str(path), remedy="Save it again.")
    report.figures["kind"] = "ComfyUI workflow"
    report_picture_origin(made, path, request, report, None)


def read_picture_texts(path: Path, kind: str) -> dict[str, str]:
    """The texts in a picture that programs write their settings to, by name."""
    with open_picture(path, kind) as (image, _):
        image.load()
        texts = {str(key): value for key, value in image.info.items() if isinstance(value, str)}
        comment = image.getexif().get_ifd(EXIF_IFD_TAG).get(EXIF_USER_COMMENT_TAG) if kind in ("JPEG", "WEBP") else None
    if isinstance(comment, bytes) and len(comment) > len(_EXIF_UNICODE_PREFIX):
        wide = comment.startswith(_EXIF_UNICODE_PREFIX)
        texts.setdefault(
            "parameters",
            comment[len(_EXIF_UNICODE_PREFIX) :].decode("utf-16-be" if wide else "utf-8", errors="replace"),
        )
    return texts


def report_picture_verdict(picture: DecodedPicture, made: PictureProvenance | None, path: Path, report: Report) -> None:
    """The verdict that every drawn picture gets: black, flat, saturated."""

    height, width = picture.pixels.shape[:2]
    step = 1
    while (height // step) * (width // step) > _MAX_JUDGED_PIXELS:
        step += 1
    remedy = "Find the operation that made it: finitune diagnose MODEL, with the same prompt, seed and precision."
    if made and made.settings.get("precision") in ("planned-half", "fp32"):
        remedy = "Its precision is acquitted. Check the settings below, and the model: finitune check MODEL"
    verdict = judge_picture(torch.zeros(2), torch.from_numpy(picture.pixels[::step, ::step].copy()), remedy)
    report.figures.update(pixels_std=verdict.pixels_std, saturated_share=verdict.saturated_share)
    for found in verdict.findings:
        black = float(picture.pixels.max()) == 0
        message = "the picture is black, as NaN in the latents leaves it" if black else found.message
        report.findings.append(Finding(found.level, found.code, str(path), message, found.evidence, found.remedy))


def report_picture_origin(
    made: PictureProvenance, path: Path, request: Request, report: Report, size: tuple[int, int] | None
) -> None:
    """What made it, and what of that cannot have been meant."""
    family = find_picture_family(made, request.model)
    here = {name: find_file_near_picture(name, path, request) for name in made.files}
    report.figures.update(
        made_by=made.program,
        settings=dict(made.settings),
        family=family.name if family else None,
        files=dict(here),
    )
    rows = [("program", made.program), *((name, str(value)) for name, value in made.settings.items())]
    rows += [("file", f"{name}{'' if here[name] else ' (not here)'}") for name in made.files]
    report.tables.append(Table("what made it", ("what", "value"), tuple(rows)))
    if family:
        report.findings += find_broken_invariants(family, made.settings, str(path))
    drawn = tuple(made.settings.get(side) for side in ("width", "height"))
    if size and None not in drawn and size != drawn:
        report.add(
            Level.NOTE,
            "PICTURE-RESIZED",
            str(path),
            f"it is {size[0]} x {size[1]}, and says that it was drawn as {drawn[0]} x {drawn[1]}",
            remedy="It was scaled, or upscaled by the workflow.",
        )
    missing = [name for name, place in here.items() if place is None]
    if missing:
        report.add(
            Level.NOTE,
            "PICTURE-FILES-ELSEWHERE",
            str(path),
            f"{len(missing)} of the {len(here)} files that it names are not near: {', '.join(missing[:3])}",
            missing=missing,
        )


def find_picture_family(made: PictureProvenance, named: str | None) -> ModelSpec | None:
    """The family of what made a picture: of the model that the user names, or the one whose name its files bear."""
    families = {family.name: family for family in MODEL_FAMILIES}
    if named in families:
        return families[named]
    names = [name.lower().replace("_", "-") for name in made.files if "vae" not in name.lower()]  # families share VAEs
    bearing = [family for name, family in families.items() if any(name in file for file in names)]
    return bearing[0] if len(bearing) == 1 else None


def find_broken_invariants(family: ModelSpec, settings: Mapping[str, Any], subject: str) -> Iterator[Finding]:
    """Warnings for settings that a family's invariants forbid, each with its sentence."""
    sentences = dict(family.invariants)
    for rule in family.setting_rules:
        given = {name: settings[name] for name in rule.settings if settings.get(name) is not None}
        wrong = [f"{name} {value:g}" for name, value in given.items() if not rule.holds(value)]
        if wrong:
            sentence = rule.sentence or sentences[rule.name]
            message = f"it was made with {', '.join(wrong)}. {sentence}"
            evidence = {"invariant": rule.name, "settings": dict(settings)}
            yield Finding(Level.WARNING, "SETTINGS-BREAK-MODEL", subject, message, evidence)


def find_file_near_picture(name: str, path: Path, request: Request) -> Path | None:
    """Where a file that a picture names lies: beside it, here, by the model, or in the folders of ComfyUI above it."""
    relative = Path(name.replace("\\", "/"))
    if relative.is_absolute() or ".." in relative.parts:
        relative = Path(relative.name)
    folders = [path.parent, Path.cwd()]
    if request.model:
        folders.append(Path(request.model).parent)
    for above in list(path.resolve().parents)[:_MAX_PARENT_FOLDERS]:
        if (above / "models").is_dir():
            folders += [above / "models", *((above / "models" / kind) for kind in _COMFYUI_MODEL_FOLDERS)]
    return next((folder / relative for folder in folders if (folder / relative).is_file()), None)
