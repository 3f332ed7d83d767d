# SPDX-License-Identifier: Apache-2.0
"""Which browser the tests use, and what becomes of one that is fetched. None is fetched here."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from scripts import browser
from tests.report.conftest import ROOT

SAID = "chromium: error while loading shared libraries: libnss3.so"
BROKEN = f"#!/bin/sh\necho '{SAID}' >&2\nexit 127\n"
PACKED = f"sparticuz-chromium-{browser.VERSION}.tgz"
NPM_ALONE = """
def from_playwright(*_):
    raise browser.SetupError("not here")
browser.from_playwright = from_playwright
browser.platform.machine = lambda: "x86_64"
"""
PACK_BROTLI = """
const [from, to] = process.argv.slice(1), fs = require("fs");
fs.writeFileSync(to, require("zlib").brotliCompressSync(fs.readFileSync(from)));
"""


TEST_PAGES = """
import pytest
browser.programs = lambda *_: []
file = "tests/report/test_page.py"
tests = [f"{file}::test_every_chart_is_drawn", f"{file}::test_the_axes_have_titles"]
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *tests]))
"""


def program(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    path.chmod(0o755)
    return path


class Machine:
    """One without a browser and without a network."""

    def __init__(self, folder: Path) -> None:
        self.commands = folder / "commands"
        self.environment = folder / "environment"
        self.folder = self.environment / "browser"
        self.playwrights = folder / "playwrights"
        for made in (self.commands, self.environment):
            made.mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        self.variables = {
            **kept,
            "HOME": str(folder),
            "PATH": str(self.commands),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_FIND_LINKS": "",
            "PIP_NO_INDEX": "1",
            "PLAYWRIGHT_BROWSERS_PATH": str(self.playwrights),
            "PLAYWRIGHT_DOWNLOAD_HOST": "http://127.0.0.1:9",
            "PROFILEMATE_BROWSER": "",
        }

    def add(self, command: str, content: str) -> Path:
        return program(self.commands / command, content)

    def add_npm(self, code: str) -> None:
        """A command npm that runs this code; `packed` is the file that npm would make."""
        self.add("npm", f"#!{sys.executable}\nimport sys, time\npacked = {PACKED!r}\n{code}\n")

    def command(self, code: str = "") -> list[str]:
        """What `make browser` runs, with another environment."""
        lines = "import sys; from pathlib import Path; from scripts import browser"
        end = "sys.exit(browser.main(Path(sys.argv[1])))"
        return [sys.executable, "-c", f"{lines}\n{code}\n{end}", str(self.folder)]

    def run(self, code: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(code),
            check=False,
            capture_output=True,
            cwd=ROOT,
            env={**self.variables, **variables},
            text=True,
        )

    def run_with_npm(self, packed: Path) -> subprocess.CompletedProcess[str]:
        """Where npm fetches this file."""
        self.add_npm(f"import shutil; shutil.copy({str(packed)!r}, packed)")
        digest = hashlib.sha512(packed.read_bytes()).hexdigest()
        return self.run(f"browser.SHA512 = '{digest}'\n{NPM_ALONE}")

    def log(self) -> str:
        return (self.environment / "browser.log").read_text()

    def left(self) -> set[str]:
        return {path.name for path in self.environment.iterdir()}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def working(found: browser.Found) -> str:
    """A program that is the tests' own browser."""
    needs = browser.variables(found.program).items()
    exports = [f"export {name}='{value}'" for name, value in needs]
    return "\n".join(["#!/bin/sh", *exports, f"exec '{found.program}' \"$@\"", ""])


def pack(folder: Path, chromium: str) -> Path:
    """A package as npm would fetch it, with this program for a browser."""
    folder.mkdir()
    contents = {"chromium": chromium.encode()}
    for name, inside in (("al2023.tar", "lib/libown.so"), ("fonts.tar", "fonts/Sans.ttf")):
        contents[name] = _tar({inside: b"of the package"}, "w")
    packed = {}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
        command = [browser.NODE, "-e", PACK_BROTLI, folder / name, folder / f"{name}.br"]
        subprocess.run(command, check=True)
        packed[f"package/bin/{name}.br"] = (folder / f"{name}.br").read_bytes()
    (folder / PACKED).write_bytes(_tar(packed, "w:gz"))
    return folder / PACKED


def _tar(files: dict[str, bytes], mode: str) -> bytes:
    with io.BytesIO() as made:
        with tarfile.open(fileobj=made, mode=mode) as archive:
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        return made.getvalue()


def test_where_it_looks(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(machine.commands))
    own = machine.playwrights / "chromium-9" / "chrome-linux64" / "chrome"
    assert browser.programs(machine.folder, own) == []
    chrome = machine.add("google-chrome", BROKEN)
    (machine.commands / "google-chrome-stable").symlink_to(chrome)
    chromium = machine.add("chromium", BROKEN)
    fetched = program(machine.folder / "chromium", BROKEN)
    shells = [
        program(machine.playwrights / f"chromium_headless_shell-{revision}" / path, BROKEN)
        for revision, path in (
            (9, "chrome-headless-shell-linux64/chrome-headless-shell"),
            (8, "chrome-linux/headless_shell"),
        )
    ]
    looked_at = browser.programs(machine.folder, own)
    assert [path.resolve() for path in looked_at] == [chromium, chrome, fetched, *shells]
    program(own, BROKEN)
    assert browser.programs(machine.folder, own)[3:] == [own, *shells]


def test_one_that_does_not_start_is_passed_over(machine: Machine, working: str) -> None:
    broken = machine.add("chromium", BROKEN)
    good = machine.add("google-chrome", working)
    result = machine.run()
    first, second = result.stdout.splitlines()
    assert first == f"Browser: {broken} does not work: {SAID}"
    assert second.startswith(f"Browser {good}: Chromium ")
    assert (result.returncode, result.stderr, machine.left()) == (0, "", set())


def test_nothing_to_be_had(machine: Machine) -> None:
    result = machine.run()
    assert (result.returncode, result.stderr) == (0, "")
    last = result.stdout.splitlines()[-1]
    assert last == f"Browser: none, so the tests of the HTML pages are skipped; {browser.HOW}"
    assert machine.left() == {"browser.log"}


def test_nothing_to_be_had_where_one_is_required(machine: Machine) -> None:
    result = machine.run("browser.fetch = lambda _: False", PROFILEMATE_BROWSER="required")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f"browser: none, and PROFILEMATE_BROWSER=required: {browser.HOW}\n"


def test_a_wrong_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PROFILEMATE_BROWSER", "require")
    assert browser.main() == 2
    assert capsys.readouterr() == (
        "",
        "browser: PROFILEMATE_BROWSER can only be 'required', or not set\n",
    )


@pytest.mark.parametrize(
    ("then", "why"),
    [
        ("", "its SHA-512 differs"),
        ("sys.exit(7)", "exit status 7"),
        ("time.sleep(600)", "stopped after 2 s"),
    ],
)
def test_a_download_that_is_cut_off(machine: Machine, then: str, why: str) -> None:
    machine.add_npm(f"open(packed, 'wb').write(b'half')\n{then}")
    result = machine.run(f"browser.SECONDS_TO_FETCH = 2\n{NPM_ALONE}")
    assert (result.returncode, result.stderr) == (0, "")
    assert "npm … not done" in result.stdout
    assert why in machine.log()
    assert machine.left() == {"browser.log"}


def test_a_download_that_is_interrupted(machine: Machine) -> None:
    fetching = machine.environment / "fetching"
    os.mkfifo(fetching)
    machine.add_npm(f"open(packed, 'wb').write(b'half'); open({str(fetching)!r}, 'w').close()")
    with (machine.commands / "npm").open("a") as npm:
        npm.write("time.sleep(600)\n")
    process = subprocess.Popen(
        # A shell's background ignores Ctrl-C, and so would what starts there.
        machine.command("import signal; signal.signal(2, signal.default_int_handler)" + NPM_ALONE),
        cwd=ROOT,
        env=machine.variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    fetching.read_text()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert out.endswith("npm … not done\n")
    assert (process.returncode, err) == (130, "browser: interrupted; nothing is left of it\n")
    assert machine.left() == {"browser.log", "fetching"}


def test_one_that_is_fetched_replaces_one_that_does_not_start(
    machine: Machine, working: str, tmp_path: Path
) -> None:
    old = program(machine.folder / "chromium", BROKEN)
    packed = pack(tmp_path / "packed", working)
    result = machine.run_with_npm(packed)
    assert (result.returncode, result.stderr) == (0, "")
    passed_over, _, fetched, there = result.stdout.splitlines()
    assert passed_over == f"Browser: {old} does not work: {SAID}"
    assert f"{browser.VERSION}, from npm … " in fetched
    assert there.startswith(f"Browser {old}: Chromium ")
    assert machine.left() == {"browser", "browser.log"}
    for name in ("lib/libown.so", "fonts/Sans.ttf"):
        assert (machine.folder / name).read_bytes() == b"of the package"
    assert machine.run().stdout == f"{there}\n"


def test_one_that_is_fetched_and_does_not_work(machine: Machine, tmp_path: Path) -> None:
    result = machine.run_with_npm(pack(tmp_path / "packed", BROKEN))
    assert (result.returncode, result.stderr) == (0, "")
    assert "npm … not done" in result.stdout
    assert f"it does not work: {SAID}" in machine.log()
    assert machine.left() == {"browser.log"}


def test_the_pages_without_a_browser(machine: Machine) -> None:
    skipped = machine.run(TEST_PAGES)
    assert skipped.returncode == 0, skipped.stdout
    (line,) = [line for line in skipped.stdout.splitlines() if browser.HOW in line]
    assert line == f"SKIPPED [2] tests/support/browser.py: no browser: {browser.HOW}"
    failed = machine.run(TEST_PAGES, PROFILEMATE_BROWSER="required")
    assert failed.returncode == 1
    assert f"\nno browser: {browser.HOW}\n" in failed.stdout
    assert "2 errors in" in failed.stdout
