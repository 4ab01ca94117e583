"""The command line: options reach the request, reports reach the streams, failures reach the exit code."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from cyclopts.argument import Argument

from finitune import __version__
from finitune.cli import CLI_VERBS, CliVerb, build_app, main
from finitune.errors import FileError, UsageError
from finitune.report import Level, Report

MODEL = {"model", "qwen3", "vae", "tokenizers", "device"}
PICTURE = {"prompt", "negative", "steps", "cfg", "seed", "size"}
DOUBTS = {"dora_side", "glora_order", "zero_alpha", "scale"}
OPTIONS = {
    "generate": MODEL | PICTURE | DOUBTS | {"precision", "plan", "out", "adapter", "merge_first"},
    "diagnose": MODEL | PICTURE | {"precision", "out"},
    "plan": MODEL | {"out", "headroom_bits", "prompts", "steps", "seed", "size"},
    "train": {"config", "source", "init", "explain", "dry_run", "resume", "out"},
    "verify_resume": {"config", "steps", "out"},
    "doctor": {"quick", "distributed", "bundle", "run"},
    "check": DOUBTS | {"paths", "model", "gpu", "fix", "yes", "html"},
    "bench": {"what", "model", "size", "device", "out"},
    "explain": {"code"},
    "convert": DOUBTS
    | {"file", "to", "out", "as_algorithm", "rank", "dtype", "blocks", "portable", "model"}
    | {"allow_lossy", "allow_unmatched", "fix_split_scale"},
    "merge": DOUBTS
    | {"model", "adapters", "out", "dtype", "rounding", "allow_unmatched", "dry_run", "keep_precise", "seed"}
    | {"shard_size", "map", "rank", "energy", "min_survival"},
    "extract": {"base", "tuned", "rank", "energy", "out", "to", "dtype", "include", "min_change", "full"},
    "resize": DOUBTS | {"file", "rank", "energy", "out", "dtype", "allow_unmatched"},
    "demo": {"out", "steps"},
}
LINES = {
    "generate": ["generate", "pico-anima"],
    "diagnose": ["diagnose", "m"],
    "plan": ["plan", "m"],
    "train": ["train", "c"],
    "verify_resume": ["verify-resume", "c"],
    "doctor": ["doctor", "--quick"],
    "check": ["check", "f", "g"],
    "bench": ["bench", "attention"],
    "explain": ["explain", "DRIVER-OLD"],
    "convert": ["convert", "f", "--to", "kohya"],
    "merge": ["merge", "m", "a:0.5", "b", "-o", "o"],
    "extract": ["extract", "b", "t", "--rank", "4"],
    "resize": ["resize", "f", "--rank", "4"],
    "demo": ["demo"],
}

Journey = Callable[..., Report]


@pytest.fixture
def journey(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Journey], list[Any]]:
    """Puts a short run in the place of a verb's long one; the requests that reach it are returned."""

    def replace(verb: str, run: Journey) -> list[Any]:
        requests: list[Any] = []

        def watched(request: Any, *, progress: Any, **page: Any) -> Report:
            requests.append(request)
            progress.start("stage", 1)  # every journey is handed a progress
            return run()

        monkeypatch.setattr(importlib.import_module(f"finitune.verbs.{verb}"), "run", watched)
        return requests

    return replace


def options(verb: CliVerb) -> dict[str, Argument]:
    """What a verb can be given, by the field of its Request."""
    arguments = build_app(verb)[verb.name].assemble_argument_collection()
    return {argument.field_info.name: argument for argument in arguments}


@pytest.mark.parametrize("verb", CLI_VERBS, ids=lambda verb: verb.name)
def test_options_are_those_and_no_others(verb: CliVerb):
    assert set(options(verb)) == OPTIONS[verb.name.replace("-", "_")]


@pytest.mark.parametrize("verb", CLI_VERBS, ids=lambda verb: verb.name)
def test_defaults_are_the_requests_own(verb: CliVerb):
    own = {field.name: field.default for field in fields(verb.load().Request)}
    for name, argument in options(verb).items():
        default = argument.field_info.default
        assert own[name] == (MISSING if default is inspect.Parameter.empty else default), name


@pytest.mark.parametrize("verb", CLI_VERBS, ids=lambda verb: verb.name)
def test_every_option_has_its_help_and_name(verb: CliVerb):
    for name, argument in options(verb).items():
        assert argument.parameter.help and argument.parameter.help.endswith("."), name
        spelled = {"source": "--from", "as_algorithm": "--as", "adapters": "ADAPTER", "paths": "PATH"}
        assert argument.names[0] == spelled.get(name, "--" + name.replace("_", "-"))
        assert ("-o" in argument.names) == (name == "out")


def test_options_reach_the_request(journey: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str]):
    requests = journey("generate", lambda: Report("generate"))
    line = (
        "generate dit.safetensors --qwen3 q --vae v --tokenizers t --device cpu --prompt=fox --negative bad --steps 4 "
        "--cfg 1.5 --seed 7 --size 64x32 --precision bf16 --plan p "
        "--adapter a:0.5 --adapter b --merge-first --scale 1 -o o"
    )
    assert main(line.split()) == 0
    (request,) = requests
    assert {name: getattr(request, name) for name in OPTIONS["generate"]} == {
        "model": "dit.safetensors",
        "qwen3": Path("q"),
        "vae": Path("v"),
        "tokenizers": Path("t"),
        "device": "cpu",
        "prompt": "fox",
        "negative": "bad",
        "steps": 4,
        "cfg": 1.5,
        "seed": 7,
        "size": "64x32",
        "precision": "bf16",
        "plan": Path("p"),
        "adapter": ("a:0.5", "b"),
        "merge_first": True,
        "dora_side": None,
        "glora_order": None,
        "zero_alpha": None,
        "scale": 1.0,
        "out": Path("o"),
    }
    assert capsys.readouterr().out.startswith("OK  generate: nothing to report")


def test_preflight_options_reach_the_requests(journey: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str]):
    doctored, checked = (journey(verb, lambda verb=verb: Report(verb)) for verb in ("doctor", "check"))
    assert main(["doctor", "--distributed", "2", "--bundle", "b.zip", "--run", "out"]) == 0
    assert (
        main(["check", "a", "b", "--model", "sdxl", "--gpu", "T4", "--fix", "--yes", "--html", "p", "--scale", "1"])
        == 0
    )
    (machine,), (paths,) = doctored, checked
    assert (machine.quick, machine.distributed, machine.bundle, machine.run) == (False, 2, Path("b.zip"), Path("out"))
    assert (paths.paths, paths.model, paths.gpu, paths.html) == ((Path("a"), Path("b")), "sdxl", "T4", Path("p"))
    assert (paths.fix, paths.yes, paths.scale) == (True, True, 1.0)
    assert main(["check"]) == 2
    assert "PATH is missing" in capsys.readouterr().err


@pytest.mark.parametrize("verb", LINES)
def test_json_is_all_that_reaches_the_output(verb: str, journey: Callable[..., list[Any]], capsys: Any):
    def run() -> Report:
        print("a library chatters")
        report = Report(verb, figures={"amax": float("inf"), "path": Path("x")})
        report.add(Level.WARNING, "W", "place", "message")
        return report

    journey(verb, run)
    assert main([*LINES[verb], "--json"]) == 0
    out, err = capsys.readouterr()
    said = json.loads(out)
    assert list(said) == ["verb", "ok", "findings", "figures", "artifacts"]
    assert (said["verb"], said["ok"], said["figures"]) == (verb, True, {"amax": "inf", "path": "x"})
    assert "chatters" in err


def failing(error: BaseException) -> Journey:
    def run() -> Report:
        raise error

    return run


def with_error() -> Report:
    report = Report("demo")
    report.add(Level.ERROR, "FP16-OVERFLOW", "blocks.3", "too large")
    return report


@pytest.mark.parametrize(
    ("run", "code", "told"),
    [
        (with_error, 1, "FP16-OVERFLOW"),
        (failing(FileError("it ends early", code="FILE-TRUNCATED", subject="a", remedy="Fetch it again.")), 1, "Fetch"),
        (failing(UsageError("no", code="BOTH-GIVEN")), 2, "BOTH-GIVEN"),
        (failing(ZeroDivisionError("division by zero")), 1, "ZeroDivisionError: division by zero. This is a bug."),
        (failing(KeyboardInterrupt()), 130, "Stopped."),
    ],
)
def test_exit_codes(run: Journey, code: int, told: str, journey: Callable[..., list[Any]], capsys: Any):
    journey("demo", run)
    assert main(["demo"]) == code
    assert told in "".join(capsys.readouterr())


def test_an_error_of_ours_ends_the_block_of_a_report_and_a_bug_escapes():
    with Report("merge") as report:
        raise UsageError("no", code="BOTH-GIVEN")
    assert (report.findings[-1].code, report.exit_code) == ("BOTH-GIVEN", 2)
    with pytest.raises(ZeroDivisionError), Report("merge"):
        raise ZeroDivisionError


def test_a_bug_is_one_line_in_text_and_a_finding_in_json(journey: Callable[..., list[Any]], capsys: Any):
    journey("demo", failing(ZeroDivisionError("x\ny")))
    assert main(["demo"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "--debug" in err
    assert main(["demo", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["code"] == "UNEXPECTED"
    with pytest.raises(ZeroDivisionError):
        main(["demo", "--debug"])


@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        ("generat pico-anima", "VERB-UNKNOWN", "Did you mean 'generate'?"),
        ("generate pico-anima --promt x", "OPTION-UNKNOWN", "Did you mean --prompt?"),
        ("--hlp", "OPTION-UNKNOWN", "Did you mean '--help'?"),
        ("generate", "OPTION-MISSING", "MODEL is missing."),
        ("plan m --steps many", "OPTION-UNREADABLE", "--steps"),
        ("generate m --precision bf17", "OPTION-UNREADABLE", 'Did you mean "bf16"?'),
        ("demo x", "ARGUMENT-LEFT-OVER", "'x'"),
    ],
)
def test_wrong_usage_is_explained(line: str, code: str, told: str, capsys: pytest.CaptureFixture[str]):
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and code in err and told in err and "--help" in err
    assert main([*line.split(), "--json"]) == 2
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["code"] == code and told in finding["message"]


def test_help_and_version(capsys: pytest.CaptureFixture[str]):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__
    assert main(["--help"]) == 0 and main([]) == 0
    text = capsys.readouterr().out
    assert all(verb.name in text for verb in CLI_VERBS)
    assert main(["generate", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"--{name.replace('_', '-')}" in text for name in OPTIONS["generate"] - {"model"} | {"json", "debug"})


def test_help_imports_nothing_heavy():
    program = (
        "import sys\n"
        "from finitune.cli import main\n"
        "assert main(['explain', '--help']) == 0 and main(['--help']) == 0\n"
        "heavy = {'torch', 'diffusers', 'transformers', 'numpy', 'PIL', 'safetensors'}\n"
        "sys.exit(' '.join(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stderr.strip(), "Usage: finitune" in done.stdout) == ("", True)


def test_the_module_runs():
    done = subprocess.run([sys.executable, "-m", "finitune", "nothing"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "There is no verb 'nothing'" in done.stderr
