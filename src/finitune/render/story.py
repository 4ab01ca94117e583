"""The page of `finitune demo`: the whole story on one model, to be read by a person who has a black picture."""

from __future__ import annotations

from finitune.generation.draw import Drawing
from finitune.generation.picture import png_bytes
from finitune.generation.verdict import judge
from finitune.journeys import plan
from finitune.journeys.demo import Story
from finitune.journeys.demo_training import Lesson
from finitune.render.html import Page, Picture
from finitune.render.svg import RangeBar, range_chart
from finitune.render.training import loss_chart
from finitune.report import Report

CAPTIONS = {"raw-half": "plain fp16", "planned-half": "fp16 by the plan", "fp32": "fp32, the reference", "bf16": "bf16"}
NEXT = """finitune diagnose MODEL --prompt "..."           why is my picture black?
finitune plan MODEL --out my.plan.toml          the smallest plan that holds, with its proof
finitune generate MODEL --plan my.plan.toml     draw by it
finitune train --init                           a training of your own, every option explained

MODEL is a diffusers folder, or dit.safetensors --qwen3 qwen3.safetensors --vae vae.safetensors"""


def story_page(story: Story, report: Report) -> str:
    """The self-contained HTML page of a demo."""
    page = Page("pico-anima in fp16: from a black picture to the right one")
    page.prose(
        f"Prompt: {story.settings.prompt}. Seed {story.settings.seed}, {story.settings.steps} steps, guidance"
        f" {story.settings.cfg:g}. The same noise, the same weights, four precisions."
    )
    page.picture_row(_pictures(story))
    page.heading("Why plain fp16 fails")
    page.findings(f for f in report.findings if f.code.startswith("ORIGIN"))
    page.prose(
        "fp16 ends at 65504. The bars are the largest magnitudes that leave each block over a whole run in fp32."
    )
    page.chart(range_chart([RangeBar(site, amax) for site, amax in story.ranges.items()]))
    page.heading("The plan, and its proof")
    for table in plan.tables(story.proof):
        page.table(table)
    page.figures("certificate of the denoiser", story.proof.figures())
    _lesson(page, story.lesson)
    page.heading("Your own model")
    page.code(NEXT)
    return page.render()


def _lesson(page: Page, lesson: Lesson) -> None:
    """The training: what it did to a prompt whose picture it has not seen, its curve, and who loads the file."""
    figures = lesson.figures()
    page.heading("A style, learned in the same fp16")
    page.prose(
        f"{figures['training_steps']} steps on emoji in blue ink, {figures['training_non_finite_steps']} of them"
        f" not finite, no loss scale. The prompt is {lesson.prompt!r}, of which there was no picture;"
        " both are drawn in current half."
    )
    captions = ((lesson.without, "without the adapter"), (lesson.worn, "with the adapter"))
    page.picture_row(Picture(caption, path.read_bytes(), "") for path, caption in captions)
    page.chart(loss_chart(lesson.history))
    page.figures("the adapter's file, and who loads it", {"file": lesson.adapter.name, **lesson.loads})


def _pictures(story: Story) -> list[Picture]:
    measured = story.distances()
    distances = {
        "planned-half": f", {measured['psnr_vs_fp32']:.1f} dB from fp32",
        "bf16": f", {measured['bf16_psnr_vs_fp32']:.1f} dB from fp32",
    }
    return [_picture(story.drawings[name], caption + distances.get(name, "")) for name, caption in CAPTIONS.items()]


def _picture(drawing: Drawing, caption: str) -> Picture:
    """A drawing's first picture, with the verdict that any command would give on it."""
    verdict = judge(drawing.latents[:1], drawing.pixels[:1], remedy="")
    word = "a picture" if verdict.good else verdict.findings[0].message.rpartition(": ")[2]
    return Picture(caption, png_bytes(drawing.pixels[0]), word, verdict.good)
