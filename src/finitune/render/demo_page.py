"""The page of `finitune demo`: the whole story on one model, to be read by a person who has a black picture."""

from __future__ import annotations

from collections.abc import Iterator

from finitune.generation.picture import encode_png
from finitune.generation.picture_quality import judge_picture
from finitune.render.html import HtmlImage, HtmlPage
from finitune.render.range_chart import RangeBar, render_range_chart
from finitune.render.training_page import render_loss_chart
from finitune.report import Report
from finitune.verbs import plan
from finitune.verbs.demo import DemoResults, DemoTraining

_CAPTION_BY_PRECISION = {
    "raw-half": "plain fp16",
    "planned-half": "fp16 by the plan",
    "fp32": "fp32, the reference",
    "bf16": "bf16",
}
_NEXT_COMMANDS = """finitune diagnose MODEL --prompt "..."           why is my picture black?
finitune plan MODEL --out my.plan.toml          the smallest plan that holds, with its proof
finitune generate MODEL --plan my.plan.toml     draw by it
finitune train --init                           a training of your own, every option explained

MODEL is a diffusers folder, or dit.safetensors --qwen3 qwen3.safetensors --vae vae.safetensors"""


def render_demo_page(story: DemoResults, report: Report) -> str:
    page = HtmlPage("pico-anima in fp16: from a black picture to the right one")
    page.prose(
        f"Prompt: {story.settings.prompt}. Seed {story.settings.seed}, {story.settings.steps} steps, guidance"
        f" {story.settings.cfg:g}. The same noise, the same weights, four precisions."
    )
    page.picture_row(_iter_pictures(story))
    page.heading("Why plain fp16 fails")
    page.findings(f for f in report.findings if f.code.startswith("ORIGIN"))
    page.prose(
        "fp16 ends at 65504. The bars are the largest magnitudes that leave each block over a whole run in fp32."
    )
    page.chart(render_range_chart([RangeBar(site, amax) for site, amax in story.ranges.items()]))
    page.heading("The plan, and its proof")
    for table in plan.build_proof_tables(story.proof):
        page.table(table)
    page.figures("certificate of the denoiser", story.proof.figures())
    _add_training(page, story.lesson)
    page.heading("Your own model")
    page.code(_NEXT_COMMANDS)
    return page.render()


def _add_training(page: HtmlPage, lesson: DemoTraining) -> None:
    """The training: what it did to a prompt whose picture it has not seen, its curve, and who loads the file."""
    figures = lesson.figures()
    page.heading("A style, learned in the same fp16")
    page.prose(
        f"{figures['training_steps']} steps on emoji in blue ink, {figures['training_non_finite_steps']} of them"
        f" not finite, no loss scale. The prompt is {lesson.prompt!r}, of which there was no picture;"
        " both are drawn in current half."
    )
    captions = ((lesson.without, "without the adapter"), (lesson.worn, "with the adapter"))
    page.picture_row(HtmlImage(caption, path.read_bytes(), "") for path, caption in captions)
    page.chart(render_loss_chart(lesson.history))
    page.figures("the adapter's file, and who loads it", {"file": lesson.adapter.name, **lesson.loads})


def _iter_pictures(story: DemoResults) -> Iterator[HtmlImage]:
    """Each drawing's first picture, with the verdict that any command would give on it."""
    measured = story.distances()
    distances = {
        "planned-half": f", {measured['psnr_vs_fp32']:.1f} dB from fp32",
        "bf16": f", {measured['bf16_psnr_vs_fp32']:.1f} dB from fp32",
    }
    for name, caption in _CAPTION_BY_PRECISION.items():
        drawing = story.drawings[name]
        verdict = judge_picture(drawing.latents[:1], drawing.pixels[:1], remedy="")
        picture = encode_png(drawing.pixels[0])
        yield HtmlImage(caption + distances.get(name, ""), picture, verdict.look, verdict.good)
