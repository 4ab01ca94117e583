"""The verdict, the bundle, and what is taken out of it."""

from __future__ import annotations

import json
import re
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finitune.errors import UsageError
from finitune.machine.environment import Environment, UnreadFact
from finitune.report import Level, Report
from finitune.verbs import doctor
from finitune.verbs.doctor import bundle, distributed
from finitune.verbs.doctor.redaction import Redactor, build_redactor
from tests import environments as made

HOME = Path("/export/annelise")
PROJECT = HOME / "art" / "cats"
REDACT = Redactor(((PROJECT / "out", "run"), (PROJECT, ".")), frozenset({"annelise"}), frozenset({"ANNES-PC"}))
TOKENS = tuple(
    text.replace(" ", "")  # whole, they would wake the scanners that look for secrets in repositories
    for text in (
        *(
            "hf _AbCdEfGhIjKlMnOpQrStUvWx",
            "sk -proj-abcDEF123456_xyz",
            "sk -ant-api00-abcdefgh",
            "gh p_0123456789abcdefAB",
        ),
        *("github _pat_11AAAA_abcdefghij", "01234567 89abcdef0123456789abcdef01234567", "AKIA IOSFODNN7EXAMPLE"),
        *("eyJh bGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-def", "wandb _v1_abcdefgh12345678"),
        "AIza SyA1234567890abcdefghijklmnopqrstuv",
    )
)
PARTS = (*TOKENS, "/export/annelise/x y/z.png", "annelise", "token", "C:\\a", "../b", "x.y", "Bearer", "password")


class Fake:
    """Measurements in which some dtypes come out wrong."""

    def __init__(self, *wrong: str):
        self.wrong = wrong

    def right(self, dtype: str) -> bool:
        return dtype not in self.wrong


@pytest.mark.parametrize(
    ("card", "wrong", "compute", "level"),
    [
        (made.T4, (), "planned-half", Level.NOTE),
        (made.T4, ("fp16",), "fp32", Level.WARNING),
        (made.GTX_1660, (), "fp32", Level.NOTE),
        (made.RTX_3060, (), "bf16", Level.NOTE),
        (made.RTX_3060, ("bf16",), "planned-half", Level.WARNING),
        (made.RTX_3060, ("bf16", "fp16", "fp32"), "nothing", Level.ERROR),
    ],
)
def test_the_verdict_believes_what_was_measured(card: tuple, wrong: tuple[str, ...], compute: str, level: Level):
    finding = doctor.judge_machine(made.machine(card), Fake(*wrong))  # type: ignore[arg-type]
    assert (finding.code, finding.level, finding.evidence["compute"]) == ("VERDICT", level, compute)
    assert finding.evidence["measured"] is True and card[0] in finding.message


def test_the_verdict_on_a_card_without_kernels_or_torch():
    assert doctor.judge_machine(made.machine(made.GTX_1080), None).level is Level.ERROR
    broken = made.machine(made.T4, seen=False, error="OSError: libcudart")
    assert doctor.judge_machine(broken, None).evidence["compute"] == "nothing"
    assert doctor.judge_machine(made.machine(torch="2.14.1+cpu"), None).evidence["compute"] == "fp32"


def test_doctor_on_this_machine():
    begin, cores = time.process_time(), torch.get_num_threads()
    report = doctor.run(doctor.Request())
    assert time.process_time() - begin < 15 * cores  # of this process alone, whatever else is running
    assert report.findings[0].code == "VERDICT" and report.ok
    titles = [table.title for table in report.tables]
    assert titles[0] == "facts" and any(title.startswith("measured") for title in titles)
    facts = report.as_json()["figures"]["facts"]  # type: ignore[index]
    assert Environment.from_json(json.loads(json.dumps(facts))).torch.version == torch.__version__


def test_quick_measures_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "measure_main_device", lambda *_: pytest.fail("measured"))
    report = doctor.run(doctor.Request(quick=True))
    assert report.findings[0].evidence["measured"] is False and "measured_on" not in report.figures


def test_each_machine_has_a_page_of_facts():
    for _, _, environment in made.ROWS:
        (facts, *_) = doctor.build_facts_tables(environment)
        assert all(len(row) == 3 for row in facts.rows)
        assert {row[0] for row in facts.rows} >= {"Python", "torch", "driver", "memory"}


@pytest.mark.parametrize("count", [2, 3])
def test_more_processes_than_gpus_are_not_started(count: int, monkeypatch: pytest.MonkeyPatch):
    started: list[int] = []
    monkeypatch.setattr(doctor, "read_environment", lambda: made.machine(made.RTX_3060, made.RTX_3060))
    monkeypatch.setattr(distributed, "run", lambda n, report, progress: started.append(n))
    report = doctor.run(doctor.Request(quick=True, distributed=count))
    codes = [finding.code for finding in report.findings]
    assert started == ([2] if count == 2 else []) and ("GPUS-TOO-FEW" in codes) is (count == 3)


def test_a_run_without_a_bundle_is_refused(tmp_path: Path):
    report = doctor.run(doctor.Request(quick=True, run=tmp_path))
    assert (report.exit_code, report.findings[0].code) == (2, "RUN-WITHOUT-BUNDLE")
    report = doctor.run(doctor.Request(quick=True, run=tmp_path, bundle=tmp_path / "b.zip"))
    assert (report.exit_code, report.findings[0].code) == (2, "RUN-NOT-FOUND") and not list(tmp_path.iterdir())


@pytest.mark.parametrize("token", TOKENS)
@pytest.mark.parametrize("around", ["{}", "token={}", "see ({}), please", '"{}"', "https://x.y/z?token={}&a=1"])
def test_tokens_are_taken_out(token: str, around: str):
    left = REDACT.text(f"{around.format(token)} git clone https://a:{token}@h/r")
    assert token not in left and token[4:] not in left and "<secret>" in left


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("/export/annelise/art/cats/data/1.png is black", "./data/1.png is black"),
        ("/export/annelise/art/cats/out/config.toml", "run/config.toml"),
        ("/export/annelise/art/cats2/x.png", "<outside>.png"),
        ("/vol/models/Client X/anima v2.safetensors: NaN", "<outside>.safetensors: NaN"),
        ('pretrained = "/vol/a b/c d (final).safetensors"', 'pretrained = "<outside>.safetensors"'),
        (r"C:\Users\Anne Lise\models\x.safetensors", "<outside>.safetensors"),
        (r'vae = "D:\\models\\my vae.pt"', 'vae = "<outside>.pt"'),
        (r"\\nas\anne\x.png", "<outside>.png"),
        ("//nas/anne/x.png and file:///srv/x.png", "<outside>.png and <outside>.png"),
        ("~/secret/x.png, ../../other/y.png", "<outside>.png, <outside>.png"),
        ("/opt/a:/srv/b:relative/c", "<outside>:<outside>:relative/c"),
        ("--out=/srv/x.png", "--out=<outside>.png"),
        ("https://github.com/pytorch/pytorch/issues/1", "https://github.com/pytorch/pytorch/issues/1"),
        ("1.9 s/it, 3/4 done, loss 0.1 / 0.2, </div>", "1.9 s/it, 3/4 done, loss 0.1 / 0.2, </div>"),
        ("blocks.0.attn/x and and/or text/html", "blocks.0.attn/x and and/or text/html"),
        ("Annelise on annes-pc, anne.lise@example.org", "<user> on <host>, <e-mail>"),
        ("password: 'hunter 2'; api_key=abc", "password: <secret>; api_key=<secret>"),
        ("Authorization: Bearer abcdef123456", "Authorization: <secret> <secret>"),
        ("max_token_length = 225, tokenizer: t5", "max_token_length = 225, tokenizer: t5"),
        ("sha256 " + "ab" * 32, "sha256 " + "ab" * 32),
        ("GPU-11111111-2222-3333-4444-555555555555", "GPU-<id 1>"),
    ],
)  # fmt: skip
def test_what_is_left_of_a_text(text: str, left: str):
    assert replace(REDACT, _numbers={}).text(text) == left


def test_devices_stay_apart():
    first, second = "11111111-2222-3333-4444-555555555555", "21111111-2222-3333-4444-555555555555"
    assert REDACT.value([first, second, first])[0] != REDACT.value([second])[0]  # type: ignore[index]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(PARTS), st.sampled_from([" ", "\n", "=", ", ", '"', ":", "/"]))))
def test_redacting_twice_changes_nothing(parts: list[tuple[str, str]]):
    once = REDACT.text("".join(map("".join, parts)))
    assert REDACT.text(once) == once and not any(token in once for token in TOKENS)


def test_a_home_folder_is_no_project(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home" / "annelise")
    assert build_redactor(tmp_path).roots == () and build_redactor(tmp_path / "home" / "annelise").roots == ()
    assert build_redactor(tmp_path / "home" / "annelise" / "p").roots


def plant(folder: Path) -> tuple[Path, Report, list[str]]:
    """A run, a report and a machine with secrets in every place; and what may not be found again."""
    run = folder / "out"
    run.mkdir()
    private = [*TOKENS, "annelise", "annes-pc", "/vol/clients", "acme", "hunter2", "C:\\Users"]
    text = " ".join(TOKENS) + " annelise@annes-pc /vol/clients/acme/x.png password=hunter2 C:\\Users\\annelise\\y.png"
    lines = [f'a{n} = "{word}"' for n, word in enumerate(TOKENS)] + ['dir = "/vol/clients/acme folder/x"', f"# {text}"]
    (run / "config.toml").write_text("\n".join([*lines, f'inside = "{folder}/data"']))
    told = json.dumps({"step": 1, "loss": 0.5, "samples": [text], "wandb_api_key": "hunter2"})
    (run / "steps.jsonl").write_text(told + "\n{")
    (run / "report.html").write_text(f"<p>{text}</p><img src='data:image/png;base64,{'QUJD' * 999}'>")
    report = Report("doctor", figures={text: text}, artifacts={"x": "/vol/clients/acme/z"})
    report.add(Level.NOTE, "A-CODE", text, text, remedy=text, hf_token="hunter2", path=Path("/vol/clients/acme"))
    return run, report, private


def test_nothing_private_is_in_a_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Path, "home", lambda: HOME)
    monkeypatch.setattr("getpass.getuser", lambda: "annelise")
    monkeypatch.setattr("platform.node", lambda: "ANNES-PC.local")
    monkeypatch.chdir(tmp_path)
    run, report, private = plant(tmp_path)
    variables = {
        "PYTHONPATH": "/vol/clients/acme:/export/annelise/lib",
        "HF_HOME": "/export/annelise/.cache/huggingface",
    }
    environment = replace(
        made.machine(made.T4, variables=variables), unread=(UnreadFact("disks", "OSError: /vol/clients/acme"),)
    )
    inside = bundle.write_bundle(tmp_path / "b.zip", environment, report, run)
    assert inside[:3] == ("README.txt", "environment.json", "report.json")
    assert inside[3:] == ("run/config.toml", "run/report.html", "run/steps.jsonl")
    with zipfile.ZipFile(tmp_path / "b.zip") as opened:
        texts = {name: opened.read(name).decode() for name in opened.namelist()}
    for name, text in texts.items():
        for word in private:
            assert word.lower() not in text.lower(), f"{name}: {word}"
        assert str(tmp_path) not in text
    assert 'inside = "./data"' in texts["run/config.toml"] and "QUJD" not in texts["run/report.html"]
    assert json.loads(texts["environment.json"])["devices"][0]["facts"]["name"] == "Tesla T4"
    assert json.loads(texts["run/steps.jsonl"].splitlines()[0])["loss"] == 0.5
    assert not list(tmp_path.glob(".partial-*"))


def test_doctor_writes_its_bundle(tmp_path: Path):
    report = doctor.run(doctor.Request(quick=True, bundle=tmp_path / "b.zip"))
    assert report.artifacts == {"bundle": str(tmp_path / "b.zip")}
    with zipfile.ZipFile(tmp_path / "b.zip") as opened:
        told = json.loads(opened.read("report.json"))
    assert told["verb"] == "doctor" and told["findings"][0]["code"] == "VERDICT"


def test_of_long_files_the_end_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bundle, "MAX_BUNDLED_TEXT_BYTES", 20)
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(f'{{"step": {n}}}\n' for n in range(9)))
    assert bundle.read_text_tail(path) == '{"step": 8}\n'
    with pytest.raises(UsageError, match="no run"):
        bundle.require_run_files(tmp_path / "none")
    assert re.fullmatch(r"\{.*\}\n", bundle.redact_json_lines(bundle.read_text_tail(path), REDACT))
