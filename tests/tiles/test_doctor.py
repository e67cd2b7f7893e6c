"""`python -m tiles doctor` speaks wherever Python starts, and tells what is wrong."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tiles import __main__ as commands
from tiles import doctor

ROOT = Path(__file__).parents[2]


def run(*command, cwd=ROOT, path="", **variables):
    """The command in a process of its own, with `path` put before PYTHONPATH."""
    paths = [str(path), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **variables}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=env, cwd=cwd, timeout=200)


def examined(**options):
    return run("-m", "tiles", "doctor", **options)


def test_a_sound_machine():
    done = examined()
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"numba-tiles        {doctor.VERSION}, {ROOT}" in done.stdout and str(ROOT / "docs") in done.stdout
    for word in ("numba-cuda", "numpy", "driver", "interpreter", "package ops", "cache", "tiles works here"):
        assert word in done.stdout
    assert "!" not in done.stdout and not done.stderr


def shadow(tmp_path, name, text):
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(text)
    return str(tmp_path)


RELEASE = pytest.mark.release  # what these two need stops at numpy's error, too


@pytest.mark.parametrize("name", ["numpy", pytest.param("numba", marks=RELEASE), pytest.param("cuda/bindings", marks=RELEASE)])
def test_a_package_that_does_not_import(name, tmp_path):
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / name / "__init__.py").write_text("raise ImportError('it is broken')")
    if "/" in name:
        (tmp_path / name.split("/")[0] / "__init__.py").write_text("")
    done = examined(path=tmp_path)
    assert done.returncode == 1 and str(ROOT) not in done.stderr, done.stderr
    assert "`import tiles, ops` fails" in done.stdout and "!" in done.stdout


def test_another_ops_before_ours(tmp_path):
    place = shadow(tmp_path, "ops", "")
    # `python -m` puts the current folder first, as a user's own folder would be
    done = run("-m", "tiles", "doctor", cwd=place, path=ROOT)
    assert done.returncode == 1
    assert f"{tmp_path / 'ops' / '__init__.py'} shadows ours" in done.stdout


def test_an_attention_py_of_the_user_s_and_another_tiles_after_ours(tmp_path):
    """Advice, no fault: tiles and ops work beside them."""
    (tmp_path / "attention.py").write_text("from attention import forward\n")
    (tmp_path / "site").mkdir()
    others = shadow(tmp_path / "site", "tiles", "")
    done = run("-m", "tiles", "doctor", cwd=tmp_path, path=os.pathsep.join([str(ROOT), others]))
    assert done.returncode == 0, done.stdout
    assert f"{tmp_path / 'attention.py'} shadows ours" in done.stdout and "rename it" in done.stdout
    assert f"{tmp_path / 'site' / 'tiles' / '__init__.py'} is shadowed by ours" in done.stdout


def test_numba_s_simulator():
    done = run("-c", "import tiles", NUMBA_ENABLE_CUDASIM="1")
    assert done.returncode == 1 and "TILES_INTERPRET=1" in done.stderr.splitlines()[-1]
    done = examined(NUMBA_ENABLE_CUDASIM="1")
    assert done.returncode == 1 and "unset NUMBA_ENABLE_CUDASIM" in done.stdout


def test_an_import_that_fails_points_to_the_doctor(tmp_path):
    done = run("-c", "import tiles", path=shadow(tmp_path, "greenlet", "raise ImportError('it is broken')"))
    assert "it is broken; `python -m tiles doctor` says what to do" in done.stderr


@pytest.mark.parametrize("name", ["nvidia-nvjitlink", "nvidia-nvvm"])
def test_the_compilers_that_pip_may_install_are_those_that_were_tested(name):
    (first, _), (last, minor) = doctor.TESTED
    said = re.search(f'"{name}>=(.*),<(.*)"', (doctor.ROOT / "pyproject.toml").read_text())
    assert said and said[1].startswith(f"{first}.0.") and said[2] == f"{last}.{minor + 1}"


class Driver:
    """It stands in for cuda.bindings.driver, with a GPU for each compute capability."""

    class CUdevice_attribute:
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 0, 1

    def __init__(self, *capabilities, cuda=13000):
        answer = lambda value: lambda *_: (0, value)
        self.cuInit, self.cuDriverGetVersion = lambda _: (0,), answer(cuda)
        self.cuDeviceGetCount, self.cuDeviceGet = answer(len(capabilities)), lambda n: (0, n)
        self.cuDeviceGetName, self.cuDeviceTotalMem = answer(b"Card\0\0"), answer(80 * 2**30)
        self.cuDeviceGetAttribute = lambda which, handle: (0, capabilities[handle][which])


@pytest.fixture
def with_driver(monkeypatch):
    def put(driver):
        import cuda.bindings

        monkeypatch.setattr(cuda.bindings, "driver", driver)
        return list(doctor.gpus())

    return put


def test_what_runs_on_which_gpu(with_driver):
    _, hopper, ada, blackwell, old = with_driver(Driver((9, 0), (8, 9), (12, 0), (7, 5)))
    assert "every kernel" in hopper.text and not hopper.advice and "Card, compute capability 9.0, 80 GiB" in hopper.text
    assert "neither wgmma nor TMA" in ada.text and "no wgmma" in blackwell.text and "too old" in old.text
    assert not any(f.broken for f in (hopper, ada, blackwell, old)) and "TILES_INTERPRET=1" in ada.advice


def test_a_driver_older_than_the_compiler(with_driver, monkeypatch):
    monkeypatch.setattr(doctor, "version", lambda name: "13.5.37")
    driver, complaint, _ = with_driver(Driver((9, 0), cuda=12080))
    assert "CUDA 12.8" in driver.text and complaint.broken and "numba-cuda[cu12]" in complaint.advice


def test_no_gpu(with_driver):
    _, none = with_driver(Driver())
    assert none.text == "none" and not none.broken


def test_a_probe_that_fails_is_reported(monkeypatch):
    def surprising():
        raise KeyError("something")
        yield

    monkeypatch.setattr(doctor, "PROBES", (surprising,))
    assert [f.subject for f in doctor.examine()] == ["surprising"]


def test_missing_packages_say_what_to_install(monkeypatch):
    monkeypatch.setattr(doctor, "version", lambda name: None)
    found = {f.subject: f for f in doctor.packages()}
    assert found["numba-cuda"].broken and "numba-cuda[cu13]" in found["numba-cuda"].advice
    assert found["greenlet"].advice == "pip install greenlet" and not found["nvidia-nvjitlink"].broken


@pytest.mark.parametrize("found", [(12, 0), (12, 9), (13, 0), (13, 4), (13, 5), (13, 6), (14, 0)])
def test_a_compiler_that_was_not_tested_for_spills(found, monkeypatch):
    nvjitlink = pytest.importorskip("cuda.bindings.nvjitlink")
    monkeypatch.setattr(nvjitlink, "version", lambda: found)
    (finding,) = doctor.compiler()
    assert finding.text.startswith(f"{found[0]}.{found[1]}; ") and "with 13.0 to 13.5" in finding.text and not finding.broken
    assert bool(finding.advice) == (found[0] != 13 or found[1] > 5) == ("inspect --check" in finding.advice)


def test_no_compiler(monkeypatch):
    def missing():
        raise RuntimeError("libnvJitLink was not found\nwhere it was looked for")

    monkeypatch.setattr(pytest.importorskip("cuda.bindings.nvjitlink"), "version", missing)
    (finding,) = doctor.compiler()
    assert finding.text == "none that works: libnvJitLink was not found" and "numba-cuda[cu13]" in finding.advice


def test_usage(capsys):
    assert commands.main([]) == 2 and "doctor" in capsys.readouterr().err


@pytest.mark.parametrize("arguments, code", [(["--help"], 0), (["-h"], 0), (["extra"], 2), (["--unknown"], 2)])
@pytest.mark.parametrize("command", [[], ["doctor"]])
def test_help_is_on_stdout_and_a_mistake_on_stderr(command, arguments, code, capsys):
    try:
        done = commands.main([*command, *arguments])
    except SystemExit as ended:
        done = ended.code
    said = capsys.readouterr()
    assert done == code and "usage: python -m tiles" in (said.err if code else said.out)
    assert not (said.out if code else said.err) and "doctor" in said.out + said.err
