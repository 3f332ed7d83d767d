# SPDX-License-Identifier: Apache-2.0
"""Hooks run when their module has loaded, and the import is otherwise as without us."""

from __future__ import annotations

import os
import zipfile

import pytest

from tests.bootstrap.conftest import ROOT, User

SCHEDULER = "vllm.v1.core.sched.scheduler"


def test_hooks_attach_once_and_in_any_order(vllm_user: User) -> None:
    code = """
        import importlib, sys
        first, second = sys.argv[1:] if len(sys.argv) > 1 else ORDER
        for name in (first, second, first):
            print(importlib.import_module(name).attached)
        from profilemate import hooks
        print([tuple(status) for status in hooks.status()[2:4]])
        """
    for order in ((SCHEDULER, "vllm.v1.engine.core"), ("vllm.v1.engine.core", SCHEDULER)):
        assert vllm_user.output(code.replace("ORDER", repr(order))) == [
            "1",
            "1",
            "1",
            "[('scheduler', True, ''), ('engine', True, '')]",
        ]


def test_module_is_as_python_made_it(vllm_user: User) -> None:
    """Its loader and spec, seen by its own code and afterwards."""
    looks = """
        import importlib.resources
        spec, loader = __spec__, __loader__
        print(type(loader), spec.loader is loader, type(spec), vars(loader), spec.origin)
        print(sorted(globals()), importlib.resources.files(__package__))
        """
    vllm_user.write("vllm/__init__", looks)
    vllm_user.write("vllm/v1/core/sched/scheduler", looks)
    code = f"""
        import importlib, importlib.resources, inspect
        for name in ("vllm", {SCHEDULER!r}):
            module = importlib.import_module(name)
            loader = module.__loader__
            spec = module.__spec__
            print(type(loader), spec.loader is loader, vars(loader), spec.origin, spec.cached)
            print(importlib.resources.files(module.__package__), len(inspect.getsource(module)))
        """
    # In the other order, the user's sitecustomize is the one that runs.
    without = os.pathsep.join(map(str, (vllm_user.site, ROOT)))
    assert vllm_user.output(code) == vllm_user.output(code, PYTHONPATH=without)


def test_looking_vllm_up_activates_nothing(vllm_user: User) -> None:
    code = """
        import importlib.util, os, sys
        active = lambda: "VLLM_PROFILING_SESSION" in os.environ
        spec = importlib.util.find_spec("vllm")
        print(spec.loader.get_filename("vllm") == spec.origin, active())
        sys.modules["vllm"] = importlib.util.module_from_spec(spec)
        print(active())
        spec.loader.exec_module(sys.modules["vllm"])
        print(active())
        import vllm.v1.engine.core
        print(vllm.v1.engine.core.attached)
        """
    assert vllm_user.output(code) == ["True False", "False", "True", "1"]


def test_vllm_that_is_not_installed(user: User, python: str) -> None:
    code = """
        import importlib.util, sys
        sys.path[:] = [entry for entry in sys.path if "site-packages" not in entry]
        print(importlib.util.find_spec("vllm"))
        try:
            import vllm
        except ModuleNotFoundError as error:
            print(error, error.name)
        print("profilemate.hooks" in sys.modules)
        """
    lines = user.output(code, python=python)
    assert lines == ["None", "No module named 'vllm' vllm", "False"]


def test_module_that_fails_and_is_tried_again(vllm_user: User) -> None:
    source = """
        import os
        if os.environ.pop("FAIL", ""):
            raise ImportError("not yet")
        """
    vllm_user.write("vllm/v1/core/sched/scheduler", source)
    vllm_user.write("vllm/__init__", source.replace("FAIL", "FAIL_FIRST"))
    code = f"""
        import importlib
        for _ in range(3):
            try:
                print(importlib.import_module({SCHEDULER!r}).attached)
            except ImportError as error:
                print(error)
        """
    assert vllm_user.output(code, FAIL="1", FAIL_FIRST="1") == ["not yet", "not yet", "1"]


def test_reload_does_not_attach_again(vllm_user: User) -> None:
    code = f"""
        import importlib
        module = importlib.import_module({SCHEDULER!r})
        print(importlib.reload(module) is module, module.attached, type(module.__loader__).__name__)
        """
    assert vllm_user.output(code) == ["True 1 SourceFileLoader"]


def test_modules_that_were_loaded_before(vllm_user: User) -> None:
    code = f"""
        import importlib, sys
        import vllm.v1.engine.core as core
        sys.path.append({str(ROOT)!r})
        import probes
        from profilemate import bootstrap
        bootstrap.install()
        print(core.attached, sys.modules[{SCHEDULER!r}].attached)
        """
    (vllm_user.site / "sitecustomize.py").rename(vllm_user.site / "probes.py")
    assert vllm_user.output(code, PYTHONPATH=str(vllm_user.site)) == ["1 1"]


def test_vllm_in_a_zip_file(vllm_user: User) -> None:
    """One loader serves every module there."""
    archive = vllm_user.work / "vllm.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted((vllm_user.site / "vllm").rglob("*.py")):
            file.write(path, path.relative_to(vllm_user.site))
    (vllm_user.site / "vllm").rename(vllm_user.site / "elsewhere")
    code = f"""
        import importlib
        import vllm.v1.engine.core as core
        scheduler = importlib.import_module({SCHEDULER!r})
        print(core.attached, scheduler.attached, {{type(core.__loader__).__name__}})
        """
    folders = os.pathsep.join(map(str, (ROOT, vllm_user.site, archive)))
    assert vllm_user.output(code, PYTHONPATH=folders) == ["1 1 {'zipimporter'}"]


@pytest.mark.parametrize("loader", ["Loader", "Loader()"], ids=["class", "slots"])
def test_loader_that_cannot_be_changed_and_serves_several(vllm_user: User, loader: str) -> None:
    code = f"""
        import importlib, sys
        from importlib.machinery import ModuleSpec

        class Loader:
            __slots__ = ()
            @staticmethod
            def create_module(spec):
                return None
            @staticmethod
            def exec_module(module):
                print(module.__loader__ is loader, module.__spec__.loader is loader)

        class Finder:
            @staticmethod
            def find_spec(name, path=None, target=None):
                if name in ({SCHEDULER!r}, "vllm.v1.engine.core"):
                    return ModuleSpec(name, loader)

        loader = {loader}
        sys.meta_path.insert(1, Finder)
        for name in ("vllm.v1.engine.core", {SCHEDULER!r}):
            print(importlib.import_module(name).attached)
        """
    assert vllm_user.output(code) == ["True True", "1"] * 2


@pytest.mark.parametrize("place", [0, 1], ids=["before ours", "after ours"])
def test_beside_wrapts_finder(vllm_user: User, place: int) -> None:
    code = f"""
        import importlib, sys
        import wrapt
        wrapt.register_post_import_hook(lambda module: print("wrapt"), {SCHEDULER!r})
        sys.meta_path.insert({place}, sys.meta_path.pop(0))
        module = importlib.import_module({SCHEDULER!r})
        print(module.attached, type(module.__loader__).__name__, module.__spec__.origin)
        """
    origin = vllm_user.site.joinpath(*SCHEDULER.split(".")).with_suffix(".py")
    hooked, module = vllm_user.output(code)
    assert hooked == "wrapt"
    assert module == f"1 SourceFileLoader {origin}"


@pytest.mark.parametrize("place", [0, 1], ids=["before ours", "after ours"])
def test_beside_finders_of_other_kinds(vllm_user: User, place: int) -> None:
    """One that asks all the others, and one from before there was ``find_spec``."""
    code = f"""
        import importlib, importlib.util, sys, warnings
        warnings.simplefilter("ignore")

        class Asking:
            busy = False
            def find_spec(self, name, path=None, target=None):
                if self.busy or not name.startswith("vllm.v1"):
                    return None
                self.busy = True
                try:
                    return importlib.util.find_spec(name)
                finally:
                    self.busy = False

        class Old:
            def find_module(self, name, path=None):
                return None

        sys.meta_path[{place}:{place}] = [Old(), Asking()]
        module = importlib.import_module({SCHEDULER!r})
        print(module.attached, type(module.__loader__).__name__)
        """
    assert vllm_user.output(code) == ["1 SourceFileLoader"]


@pytest.mark.parametrize("place", [0, 1], ids=["before ours", "after ours"])
def test_other_finders_are_asked_as_often_as_without_us(vllm_user: User, place: int) -> None:
    code = f"""
        import importlib, sys

        class Counting:
            asked = []
            def find_spec(self, name, path=None, target=None):
                self.asked.append(name)

        sys.meta_path.insert({place}, Counting())
        importlib.import_module({SCHEDULER!r})
        print([Counting.asked.count(name) for name in ("vllm", "vllm.v1", {SCHEDULER!r})])
        """
    assert vllm_user.output(code) == ["[1, 1, 1]"]


def test_hooks_run_outside_pythons_global_import_lock(vllm_user: User) -> None:
    """Otherwise a thread that imports anything could never go on, and neither could we."""
    vllm_user.write(
        "probe",
        """
        import importlib, threading
        def attach(module):
            other = threading.Thread(target=importlib.import_module, args=("colorsys",))
            other.start()
            other.join(20)
            module.attached = not other.is_alive()
        """,
    )
    code = f"import importlib; print(importlib.import_module({SCHEDULER!r}).attached)"
    assert vllm_user.output(code) == ["True"]


def test_hooks_are_there_before_vllms_own_code(vllm_user: User) -> None:
    """Older releases import all of themselves while their package loads."""
    vllm_user.write("vllm/__init__", f"from {SCHEDULER} import attached")
    assert vllm_user.output("import vllm; print(vllm.attached)") == ["1"]


def test_hook_that_comes_while_another_thread_ends_the_import(vllm_user: User) -> None:
    """At the worst moment: the thread has looked for a hook, and the module is still loading."""
    vllm_user.write("vllm/part", "")
    code = """
        import sys
        import vllm
        finder = next(f for f in sys.meta_path if type(f).__name__ == "Finder")
        finder.active = False  # as while vllm's package is loading

        class Waiting(dict):
            def pop(self, name, default=None):
                found = super().pop(name, default)
                if name == "vllm.part" and found is None:
                    print(sys.modules[name].__spec__._initializing)
                    finder.wait_for(name, lambda module: print("ran for", module.__name__))
                return found

        finder.waiting = Waiting(finder.waiting)
        import vllm.part
        """
    assert vllm_user.output(code) == ["True", "ran for vllm.part"]


def test_many_threads_import_at_once(vllm_user: User) -> None:
    """50 rounds of 8 threads that import what hooks wait for, each in another order.

    In the first, the package itself is among it: then a module can be in use a moment before
    its hook is there, since Python makes no thread wait for a package that another one loads.
    """
    for number in range(50):
        for name in ("scheduler", "core"):
            other = "core" if name == "scheduler" else "scheduler"
            vllm_user.write(
                f"vllm/round{number}/{name}",
                f"""
                import time
                import colorsys
                time.sleep(0.0005)
                if {name!r} == "core":
                    import vllm.round{number}.{other}
                """,
            )
        vllm_user.write(f"vllm/round{number}/__init__", "")
    vllm_user.write(
        "probe",
        """
        import importlib
        def attach(module):
            importlib.import_module("shared_by_hooks")
            module.attached = getattr(module, "attached", 0) + 1
        """,
    )
    vllm_user.write("shared_by_hooks", "import time; time.sleep(0.001)")
    vllm_user.write(
        "sitecustomize",
        """
        from profilemate import hooks
        hooks.HOOKS = tuple(
            hooks.Hook(f"{name}{number}", f"vllm.round{number}.{name}", "probe:attach")
            for number in range(50) for name in ("scheduler", "core")
        )
        """,
    )
    code = """
        import faulthandler, importlib, random, sys, threading
        faulthandler.dump_traceback_later(90, exit=True)
        sys.setswitchinterval(1e-5)
        failures = []

        def work(number, seed, barrier):
            names = [f"vllm.round{number}.{name}" for name in ("scheduler", "core")]
            names += ["vllm", "shared_by_hooks", "vllm.envs"]
            random.Random(seed).shuffle(names)
            barrier.wait()
            for name in names:
                try:
                    module = importlib.import_module(name)
                    if number and "round" in name and module.attached != 1:
                        failures.append((name, module.attached))
                except BaseException as error:
                    failures.append((name, repr(error)))

        for number in range(50):
            sys.modules.pop("shared_by_hooks", None)
            barrier = threading.Barrier(8)
            threads = [
                threading.Thread(target=work, args=(number, seed, barrier)) for seed in range(8)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        print(failures)
        loaded = [module for name, module in sys.modules.items() if "round" in name]
        print({module.attached for module in loaded if not hasattr(module, "__path__")})
        from profilemate import hooks
        print(sum(status.attached for status in hooks.status()))
        """
    assert vllm_user.output(code) == ["[]", "{1}", "100"]
