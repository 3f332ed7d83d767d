# SPDX-License-Identifier: Apache-2.0
"""vLLM is imported: what is switched on, what is said, and what children inherit."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
import zipapp
import zipfile
from pathlib import Path

import pytest

from profilemate import config
from tests.bootstrap.conftest import ROOT, User

IMPORT = """\
import importlib, os, sys
import vllm.envs, vllm.platforms.interface
attached = [
    getattr(importlib.import_module(name), "attached", 0)
    for name in (
        "vllm.v1.core.sched.scheduler", "vllm.v1.engine.core", "vllm.v1.worker.worker_base"
    )
]
from profilemate import hooks
print(attached, [status.name for status in hooks.status() if status.attached], flush=True)
"""
ALL_ATTACHED = "[1, 1, 1] ['environment', 'environment-platform', 'scheduler', 'engine', 'worker']"
NONE_ATTACHED = "[0, 0, 0] ['environment', 'environment-platform']"

WITH_CHILDREN = (
    IMPORT
    + """\
import multiprocessing, subprocess

def child(text):
    print(text, os.environ.get("VLLM_PROFILING_SESSION"), flush=True)
    from profilemate import hooks
    print([status.name for status in hooks.status() if status.attached], flush=True)

if __name__ == "__main__":
    child("own")
    for method in ("fork", "spawn"):
        process = multiprocessing.get_context(method).Process(target=child, args=(method,))
        process.start()
        process.join()
    code = "import script; script.child('subprocess')"
    subprocess.run([sys.executable, "-c", code], check=True)
"""
)


def test_normal_operation_says_nothing_and_leaves_nothing(vllm_user: User) -> None:
    assert vllm_user.output(IMPORT) == [ALL_ATTACHED]
    assert not [*vllm_user.work.iterdir(), *vllm_user.temporary.iterdir()]


def test_verbose_says_more(vllm_user: User) -> None:
    ended = vllm_user.run(IMPORT, VLLM_PROFILING_VERBOSE="1")
    assert ended.stdout.strip() == ALL_ATTACHED
    lines = ended.stderr.splitlines()
    assert len(lines) == 5
    assert all(line.startswith("profilemate: hook ") for line in lines)


@pytest.mark.parametrize("name", ["VLLM_PROFILING", "VLLM_ENABLE_PROFILING"])
def test_switched_off(vllm_user: User, name: str) -> None:
    code = IMPORT + "print(os.environ.get('VLLM_PROFILING_SESSION'))\n"
    lines = vllm_user.output(code, **{name: "0", "VLLM_PROFILING_VERBOSE": "0"})
    assert lines == [NONE_ATTACHED, "None"]


def test_switched_off_after_the_import_as_ray_does(vllm_user: User) -> None:
    code = "import os, vllm; os.environ['VLLM_PROFILING'] = '0'\n" + IMPORT
    assert vllm_user.output(code) == [NONE_ATTACHED]


def test_names_that_kubernetes_invents_change_nothing(vllm_user: User) -> None:
    code = IMPORT + "print(os.environ['VLLM_PROFILING_PORT'])\n"
    lines = vllm_user.output(
        code,
        VLLM_PROFILING_PORT="tcp://10.0.0.1:80",
        VLLM_PROFILING_SERVICE_HOST="10.0.0.1",
        VLLM_PROFILING_DIR_PORT="0",
    )
    assert lines == [ALL_ATTACHED, "tcp://10.0.0.1:80"]


def run_with_children(user: User, **changes: str) -> tuple[list[str], str]:
    """Lines of stdout, and stderr, of a process with one child each by fork, spawn and exec."""
    path = user.write("script", WITH_CHILDREN)
    code = f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')"
    ended = user.run(code, **changes)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines(), ended.stderr


def test_children_join_the_session_and_have_their_hooks(vllm_user: User) -> None:
    lines, stderr = run_with_children(vllm_user)
    assert stderr == ""
    reported = [line for line in lines if " session_" in line]
    assert [line.split()[0] for line in reported] == ["own", "fork", "spawn", "subprocess"]
    assert len({line.split()[1] for line in reported}) == 1
    assert lines.count(ALL_ATTACHED.partition("] ")[2]) == 4


def test_two_servers_get_two_sessions(vllm_user: User) -> None:
    code = "import os, vllm; print(os.environ['VLLM_PROFILING_SESSION'])"
    running = [
        subprocess.Popen(
            vllm_user.command(code),
            env=vllm_user.environment({}),
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    assert len({process.communicate()[0] for process in running}) == 2


def test_wrong_value_is_one_line_in_all_processes(vllm_user: User) -> None:
    lines, stderr = run_with_children(vllm_user, VLLM_PROFILING="maybe")
    assert lines.count(ALL_ATTACHED.partition("] ")[2]) == 4
    assert stderr.startswith("profilemate: VLLM_PROFILING=maybe is not understood")
    assert stderr.count("\n") == 1


def test_absurd_values_are_a_line_each(vllm_user: User) -> None:
    """However many are wrong, and whatever they hold, vLLM starts."""
    names = set(config.NAMES) - {config.SESSION, config.FAILED}
    absurd = dict.fromkeys(names, "\x1b[31m\u202e" + "9" * 100_000)
    lines, stderr = run_with_children(vllm_user, **absurd)
    assert lines.count(ALL_ATTACHED.partition("] ")[2]) == 4
    # Any folder's name is one.
    assert len(stderr.splitlines()) == len(names - {config.DIRECTORY})
    assert all(line.isprintable() and len(line) < 300 for line in stderr.splitlines())


@pytest.mark.parametrize(
    ("failing", "others"),
    [
        ("vllm.v1.core.sched.scheduler", "'engine', 'worker'"),
        ("vllm.v1.engine.core", "'scheduler', 'worker'"),
        ("vllm.v1.worker.worker_base", "'scheduler', 'engine'"),
    ],
)
def test_hook_that_raises_is_off_alone_and_not_tried_in_children(
    vllm_user: User, failing: str, others: str
) -> None:
    lines, stderr = run_with_children(vllm_user, PROBE_RAISES=failing)
    (name,) = {"scheduler", "engine", "worker"} - set(others.replace("'", "").split(", "))
    assert lines.count(f"['environment', 'environment-platform', {others}]") == 4
    assert stderr.startswith(f"profilemate: hook {name} is off, it does not fit vLLM 9.9.9 ")
    assert "AttributeError: no such class in this release" in stderr
    assert stderr.count("\n") == 1


def test_hook_that_raises_verbosely_shows_where(vllm_user: User) -> None:
    ended = vllm_user.run(
        IMPORT,
        PROBE_RAISES="vllm.v1.engine.core",
        VLLM_PROFILING_VERBOSE="1",
    )
    assert "probe.py" in ended.stderr
    assert all(line.startswith("profilemate: ") for line in ended.stderr.splitlines())


def test_status_says_why(vllm_user: User) -> None:
    code = """
        import importlib
        from profilemate import hooks
        print({status.reason for status in hooks.status()})
        import vllm.v1.core.sched.scheduler
        print([tuple(status) for status in hooks.status()[2:]])
        """
    ended = vllm_user.run(code, PROBE_RAISES="vllm.v1.core.sched.scheduler")
    assert ended.stdout.splitlines() == [
        "{'vLLM has not been imported'}",
        str(
            [
                ("scheduler", False, "AttributeError: no such class in this release"),
                ("engine", False, "vllm.v1.engine.core has not been imported"),
                ("worker", False, "vllm.v1.worker.worker_base has not been imported"),
            ]
        ),
    ]


@pytest.mark.parametrize("gone", [("v1/engine/core",), ("v1/engine/core", "v1/core")])
def test_vllm_that_lacks_a_module(vllm_user: User, gone: tuple[str, ...]) -> None:
    for name in gone:
        path = vllm_user.site / "vllm" / name
        path = path if path.is_dir() else path.with_suffix(".py")
        path.rename(vllm_user.site / f"gone{len(name)}")
    code = """
        import subprocess, sys
        import vllm
        from profilemate import hooks
        print([status.reason for status in hooks.status()[2:]], flush=True)
        subprocess.run([sys.executable, "-c", "import vllm"])
        """
    ended = vllm_user.run(code)
    assert ended.returncode == 0
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("profilemate: this vLLM has no vllm.v1.")
    assert ended.stderr.count("vllm.v1.") == len(gone)
    assert ended.stdout.count("this vLLM has no such module") == len(gone)


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """This Python with nothing installed."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    return str(folder / "bin" / "python")


def test_requirements_that_are_missing(vllm_user: User, bare_python: str) -> None:
    code = f"{IMPORT}import subprocess; subprocess.run([sys.executable, '-c', {IMPORT!r}])"
    ended = vllm_user.run(code, python=bare_python)
    assert ended.stdout.splitlines() == [NONE_ATTACHED] * 2
    assert ended.stderr == (
        f"profilemate: off, orjson and wrapt are not installed for {bare_python}: "
        f"{bare_python} -m pip install orjson wrapt; vLLM runs without it\n"
    )


def test_one_requirement_that_is_missing(vllm_user: User, bare_python: str) -> None:
    vllm_user.write("orjson", "")
    ended = vllm_user.run(IMPORT, python=bare_python)
    assert ended.stdout.splitlines() == [NONE_ATTACHED]
    assert ended.stderr.startswith("profilemate: off, wrapt is not installed for ")
    assert ended.stderr.endswith("pip install wrapt; vLLM runs without it\n")


def test_switched_off_asks_for_nothing(vllm_user: User, bare_python: str) -> None:
    ended = vllm_user.run(IMPORT, python=bare_python, VLLM_PROFILING="0")
    assert (ended.stdout.splitlines(), ended.stderr) == ([NONE_ATTACHED], "")


@pytest.mark.parametrize(
    "broken",
    [
        "sys.stderr = None",
        "sys.stderr.close()",
        "sys.stderr = object()",
        "os.close(2)",
        "del sys.argv",
        "sys.stderr = None; del sys.argv",
    ],
)
def test_broken_process(vllm_user: User, bare_python: str, broken: str) -> None:
    """With something to say (bare_python) and a hook that raises (the other)."""
    code = f"import os, sys; {broken}\n{IMPORT}"
    # Python itself may end with an error code over such a stderr.
    switched_off = vllm_user.run(code, python=bare_python, VLLM_PROFILING="0")
    ended = vllm_user.run(code, python=bare_python)
    assert ended.stdout.strip() == switched_off.stdout.strip() == NONE_ATTACHED
    assert ended.returncode == switched_off.returncode
    ended = vllm_user.run(code, PROBE_RAISES="vllm.v1.engine.core", VLLM_PROFILING_VERBOSE="1")
    assert ended.stdout.startswith("[1, 0, 1]")
    assert ended.returncode == switched_off.returncode


def test_process_started_without_stderr(vllm_user: User, bare_python: str) -> None:
    for python in (bare_python, sys.executable):
        ended = subprocess.run(
            ["sh", "-c", 'exec "$@" 2>&-', "sh", *vllm_user.command(IMPORT, python=python)],
            env=vllm_user.environment({}),
            cwd=vllm_user.work,
            check=False,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert ended.returncode == 0
        assert ended.stdout.strip() in (ALL_ATTACHED, NONE_ATTACHED)


def test_copy_that_is_not_whole(vllm_user: User) -> None:
    copy = vllm_user.work / "copy"
    (copy / "profilemate").mkdir(parents=True)
    for name in ("sitecustomize.py", "profilemate/__init__.py", "profilemate/bootstrap.py"):
        (copy / name).write_bytes((ROOT / name).read_bytes())
    (vllm_user.site / "sitecustomize.py").unlink()
    ended = vllm_user.run(
        "import vllm.v1.engine.core; print('imported')",
        PYTHONPATH=f"{copy}{os.pathsep}{vllm_user.site}",
    )
    assert (ended.returncode, ended.stdout) == (0, "imported\n")
    assert ended.stderr.startswith("profilemate: off, it cannot start: ")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("entry", ["", ".", "../{name}", "{root}"])
def test_children_elsewhere_find_the_repository(vllm_user: User, entry: str) -> None:
    elsewhere = vllm_user.work / "elsewhere"
    elsewhere.mkdir()
    relative = entry.format(name=ROOT.name, root=ROOT)
    path = os.pathsep.join((relative, "no/such/folder", str(vllm_user.site) + "/"))
    code = f"""
        import os, subprocess, sys
        os.chdir({str(elsewhere)!r})
        import vllm
        print(os.environ["PYTHONPATH"], flush=True)
        subprocess.run(
            [sys.executable, "-c", "import vllm.v1.engine.core as core; print(core.attached)"],
            check=True,
        )
        """
    ended = vllm_user.run(code, cwd=ROOT, PYTHONPATH=path)
    assert ended.stderr == ""
    expected = os.pathsep.join((str(ROOT), "no/such/folder", str(vllm_user.site) + "/"))
    assert ended.stdout.splitlines() == [expected, "1"]


def test_pythonpath_is_left_alone_without_vllm(user: User) -> None:
    ended = user.run("import os; print(os.environ['PYTHONPATH'])", cwd=ROOT, PYTHONPATH=".")
    assert ended.stdout == ".\n"


def test_fork_while_other_threads_search(vllm_user: User) -> None:
    """The child can go on importing, hooks included."""
    code = """
        import faulthandler, importlib.util, os, threading
        import vllm
        faulthandler.dump_traceback_later(60, exit=True)
        stop = threading.Event()

        def search():
            while not stop.wait(0.0002):
                importlib.util.find_spec("vllm.envs")

        threads = [threading.Thread(target=search) for _ in range(4)]
        for thread in threads:
            thread.start()
        codes = set()
        for _ in range(20):
            pid = os.fork()
            if pid == 0:
                import vllm.v1.engine.core as core
                os._exit(core.attached)
            codes.add(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        stop.set()
        print(codes)
        """
    assert vllm_user.run(code).stdout == "{1}\n"


def test_unwritable_repository(vllm_user: User, tmp_path: Path) -> None:
    """No bytecode can be kept, and none is missed."""
    ended = vllm_user.run(IMPORT, "-B", PYTHONPYCACHEPREFIX=str(tmp_path / "none"))
    assert (ended.stdout.strip(), ended.stderr) == (ALL_ATTACHED, "")


@pytest.mark.parametrize(
    ("flags", "changes"),
    [
        (["-P"], {}),
        (["-O"], {}),
        (["-OO"], {}),
        (["-W", "error"], {}),
        (["-X", "dev", "-W", "error", "-bb"], {}),
        (["-s", "-B", "-u"], {}),
        ([], {"PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONNOUSERSITE": "1"}),
        ([], {"PYTHONSTARTUP": "/no/such/file", "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}),
        ([], {"HOME": "", "USER": "", "LOGNAME": "", "TMPDIR": "/no/such/folder"}),
    ],
)
def test_started_in_many_ways(vllm_user: User, flags: list[str], changes: dict[str, str]) -> None:
    if "-P" in flags and sys.version_info < (3, 11):
        pytest.skip("this Python has no such option")
    assert vllm_user.output(IMPORT, *flags, **changes) == [ALL_ATTACHED]


def test_import_time_of_python_itself(vllm_user: User) -> None:
    ended = vllm_user.run(IMPORT, "-X", "importtime")
    assert ended.stdout.strip() == ALL_ATTACHED
    lines = ended.stderr.splitlines()
    assert all(line.startswith("import time:") for line in lines)


def test_profilemate_in_a_zip_file(vllm_user: User) -> None:
    """It records from there, and its children and its collector find it."""
    archive = vllm_user.work / "profilemate.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.write(ROOT / "sitecustomize.py", "sitecustomize.py")
        for path in sorted((ROOT / "profilemate").rglob("*.py")):
            file.write(path, path.relative_to(ROOT))
    code = f"""
{IMPORT}
import subprocess
from profilemate.format.collecting import command
print(subprocess.run(command(), cwd="/", capture_output=True).stderr.decode()[:5])
child = "import vllm.v1.engine.core as core; print(core.attached)"
print(subprocess.check_output([sys.executable, "-c", child], cwd="/", text=True).strip())
"""
    path = os.pathsep.join(map(str, (archive, vllm_user.site)))
    assert vllm_user.output(code, PYTHONPATH=path) == [ALL_ATTACHED, "usage", "1"]


def test_an_application_in_a_zip_file(vllm_user: User) -> None:
    folder = vllm_user.work / "application"
    folder.mkdir()
    (folder / "__main__.py").write_text(IMPORT)
    archive = vllm_user.work / "application.pyz"
    zipapp.create_archive(folder, archive)
    ended = subprocess.run(
        [sys.executable, str(archive)],
        env=vllm_user.environment({}),
        cwd="/",
        capture_output=True,
        check=False,
        text=True,
    )
    assert (ended.stdout.strip(), ended.stderr) == (ALL_ATTACHED, "")


PROCESSES = """
import multiprocessing, os, subprocess, sys

def child(way):
    import vllm.v1.engine.core as core
    print(way, core.attached, os.environ["VLLM_PROFILING_SESSION"], flush=True)

RUN = [sys.executable, "-c", "import sys, script; script.child(sys.argv[1])"]

if __name__ == "__main__":
    child("own")
    for method in ("fork", "spawn", "forkserver"):
        process = multiprocessing.get_context(method).Process(target=child, args=(method,))
        process.start()
        process.join()
    os.waitpid(os.posix_spawn(RUN[0], [*RUN, "posix_spawn"], os.environ), 0)
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.closerange(3, 256)
        child("daemon")
        os._exit(0)
    os.wait()
    clean = {"PATH": os.environ["PATH"]}
    seen = "import sys; print('cleaned', 'profilemate' in str(sys.meta_path), flush=True)"
    subprocess.run([sys.executable, "-c", seen], env=clean)
    os.execv(RUN[0], [*RUN, "execv"])
"""


def test_processes_of_many_kinds(vllm_user: User) -> None:
    script = vllm_user.write("script", PROCESSES)
    # The forkserver's socket lies there, whose path must be short.
    with tempfile.TemporaryDirectory(prefix="pm") as short:
        ended = subprocess.run(
            [sys.executable, str(script)],
            env=vllm_user.environment({"TMPDIR": short}),
            cwd=vllm_user.work,
            capture_output=True,
            check=False,
            text=True,
            timeout=120,
        )
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert ["cleaned", "False"] in lines
    recorded = {way: (attached, session) for way, attached, *session in lines if session}
    ways = {"own", "fork", "spawn", "forkserver", "posix_spawn", "daemon", "execv"}
    assert recorded.keys() == ways
    assert len({str(each) for each in recorded.values()}) == 1
    assert recorded["own"][0] == "1"


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("pass", 0),
        ("sys.exit(3)", 3),
        ("raise SystemExit('no more')", 1),
        ("raise KeyboardInterrupt", -2),
        ("1 / 0", 1),
        ("os._exit(7)", 7),
        ("os.abort()", -6),
        ("os.kill(os.getpid(), 15)", -15),
        ("atexit.register(sys.exit, 4)", 0),
        ("atexit.register(os._exit, 5)", 5),
        ("threading.Thread(target=sys.exit, args=(6,)).start()", 0),
        ("sys.excepthook = lambda *_: os._exit(8); 1 / 0", 8),
        ("sys.meta_path.clear()", 0),
        ("sys.modules.clear()", 0),
    ],
)
def test_ends_as_without_us(vllm_user: User, ending: str, code: int) -> None:
    """The exit code, and every byte of stdout and stderr."""
    script = f"""
        import atexit, os, sys, threading
        import vllm.v1.engine.core
        {ending}
        """
    ended = vllm_user.run(script)
    (vllm_user.site / "sitecustomize.py").unlink()
    without = vllm_user.run(script, PYTHONPATH=str(vllm_user.site))
    assert ended.returncode == without.returncode == code
    assert (ended.stdout, ended.stderr) == (without.stdout, without.stderr)
